"""Our retriever over a place, and fast ways to give it saved documents."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import islice
from typing import Any

from langchain_text_splitters import TextSplitter

from benchmarks.stores import Place, open_store
from benchmarks.work import (
    CHUNKS,
    NEVER,
    THRESHOLD,
    USER,
    Question,
    TableEmbeddings,
    TableRetriever,
    Work,
    chunk_text,
    content,
    doc_id,
    wrapped_retriever,
)
from rag_wiki import (
    DecayConfig,
    DocumentState,
    FetchCounter,
    RagWikiRetriever,
    RagWikiRetrieverConfig,
    StateStore,
    UserDocRecord,
)
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkStore, new_copy_id
from rag_wiki.storage.records import UserChange, UserView

MODEL = "table"
"""The name of the embedding model, for the fingerprint of its vectors."""
_BATCH = 500


class ParagraphSplitter(TextSplitter):
    """A chunk per paragraph."""

    def split_text(self, text: str) -> list[str]:
        """The paragraphs."""
        return text.split("\n\n")


@contextmanager
def retriever_at(
    place: Place, embeddings: TableEmbeddings, wrapped: TableRetriever, **settings: Any
) -> Iterator[RagWikiRetriever]:
    """Our retriever over a place; nothing is suggested or let go by itself."""
    with open_store(place) as store:
        yield make_retriever(store, place, embeddings, wrapped, **settings)


def make_retriever(
    store: StateStore, place: Place, embeddings: TableEmbeddings, wrapped: TableRetriever, **settings: Any
) -> RagWikiRetriever:
    """Our retriever over an open store."""
    defaults: dict[str, Any] = {
        "fetch_threshold": NEVER,
        "similarity_threshold": THRESHOLD,
        "wiki_save_dir": place.save_folder,
        "decay": DecayConfig(max_cache_miss_streak=NEVER),
        "embedding_name": MODEL,
        "text_splitter": ParagraphSplitter(),
    }
    config = RagWikiRetrieverConfig(**{**defaults, **settings})
    return RagWikiRetriever(wrapped, user_id=USER, state_store=store, config=config, embedding_model=embeddings)


@contextmanager
def with_saved(
    place: Place, work: Work, questions: Sequence[Question], *, delay: float = 0.0, **settings: Any
) -> Iterator[tuple[RagWikiRetriever, TableRetriever]]:
    """Our retriever with all documents of the work saved, and the retriever that it wraps."""
    wrapped = wrapped_retriever(questions, delay)
    with retriever_at(place, TableEmbeddings(work, questions, delay), wrapped, **settings) as retriever:
        write_documents(retriever.state_store, retriever.chunk_store, work)
        yield retriever, wrapped


def accept(retriever: RagWikiRetriever, document: int, chunks: int = CHUNKS) -> None:
    """Save a document as a user does: it was retrieved, then the suggestion is accepted."""
    surface(retriever.state_store, document)
    retriever.accept_suggestion(doc_id(document), full_content=content(document, chunks))


def surface(store: StateStore, document: int) -> None:
    """Let the user meet a document."""
    title, path = f"Document {document}", f"/documents/{document:06d}.txt"
    FetchCounter(store, None, fetch_threshold=NEVER).record_fetch(USER, doc_id(document), title, path)


def write_documents(store: StateStore, chunks: ChunkStore, work: Work, user: str = USER) -> None:
    """Save all documents of the work, by the stores' public methods and in few transactions.

    What lies in the stores then is what accepting each suggestion leaves there, but for the events.
    """
    now = datetime.now(timezone.utc)
    for first in range(0, work.documents, _BATCH):
        records = []
        for document in range(first, min(first + _BATCH, work.documents)):
            copy = _copy(work, document)
            chunks.save_copy(user, doc_id(document), copy)
            records.append(saved_record(document, now, copy.copy_id, user))
        _write_records(store, user, records)


def _copy(work: Work, document: int) -> ChunkCopy:
    return ChunkCopy(
        copy_id=new_copy_id(),
        indices=tuple(range(CHUNKS)),
        texts=tuple(chunk_text(document, chunk) for chunk in range(CHUNKS)),
        vectors=work.vectors(document),
        sections=(None,) * CHUNKS,
        embedding=MODEL,
    )


def saved_record(
    document: int, now: datetime, copy_id: str, user: str = USER, *, fetches: int = 3, full_content: bool = True
) -> UserDocRecord:
    """The record of a saved document."""
    return UserDocRecord(
        user_id=user,
        doc_id=doc_id(document),
        doc_title=f"Document {document}",
        doc_path=f"/documents/{document:06d}.txt",
        user_state=DocumentState.CLAIMED,
        fetch_count=fetches,
        last_fetched_at=now,
        cached_at=now,
        copy_id=copy_id,
        chunk_count=CHUNKS,
        content_source="argument",
        full_content=content(document) if full_content else None,
    )


def _write_records(store: StateStore, user: str, records: Sequence[UserDocRecord]) -> None:
    contents = {record.doc_id: record.full_content for record in records if record.full_content is not None}

    def decide(_: UserView) -> UserChange:
        return UserChange(records=records, contents=contents)

    store.change(user, [record.doc_id for record in records], decide)


def write_records(store: StateStore, user: str, records: Iterable[UserDocRecord]) -> None:
    """Write records, some hundred at a time."""
    iterator = iter(records)
    while batch := list(islice(iterator, _BATCH)):
        _write_records(store, user, batch)
