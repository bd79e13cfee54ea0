"""Saving a document: find its content, split, embed, check, write the copy, then move the state.

Whatever fails on the way, the state is as before and nothing half-saved answers. Embedding happens
outside any lock or transaction; a removal that comes meanwhile stands.
"""

from __future__ import annotations

import contextlib
import logging
import re
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_text_splitters import RecursiveCharacterTextSplitter
from numpy.typing import NDArray

from rag_wiki.clock import Clock
from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import (
    ContentNotFoundError,
    DocumentRemovedError,
    InvalidDocumentError,
    InvalidTransitionError,
    RagWikiError,
    UnknownDocumentError,
)
from rag_wiki.lifecycle.decay_engine import pin
from rag_wiki.lifecycle.state_machine import describe, move
from rag_wiki.search.embedding import check_vectors, fingerprint
from rag_wiki.steps import Procedure, Step, blocking, call_user
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_places import PendingFile
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkStore, new_copy_id
from rag_wiki.storage.records import (
    DocumentEvent,
    DocumentState,
    RetrievedText,
    UserChange,
    UserDocRecord,
    UserView,
)
from rag_wiki.texts import join_texts

__all__ = ["DocumentLoader", "SaveOrder", "Saver", "split_sections"]

logger = logging.getLogger("rag_wiki")

LoadedContent: TypeAlias = str | Document | None
DocumentLoader: TypeAlias = Callable[[UserDocRecord], LoadedContent | Awaitable[LoadedContent]]
"""Gives the text of a document, or `None`; plain or async."""

_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t](.*)$", re.MULTILINE)
_OF_ONE_CHUNK = {
    "doc_id",
    "doc_title",
    "doc_path",
    "chunk_index",
    "total_chunks",
    "start_index",
    "score",
    "relevance_score",
    "from_cache",
    "_id",
}
"""Metadata that belongs to a chunk or is filled in by us; the rest is the source's own."""


@dataclass(frozen=True)
class SaveOrder:
    """What is to be saved, and why."""

    user_id: str
    doc_id: str
    why: str
    """The reason kept in the history."""
    full_content: str | None = None
    pin: bool = False
    """Pin it for the user in the same step."""
    revive: bool = False
    """Save it although it was let go before."""
    only_saved: bool = False
    """Replace a copy; a document that is not saved is an error."""


@dataclass(frozen=True)
class _Content:
    text: str
    source: str
    pieces: tuple[RetrievedText, ...] = ()
    """The retrieved texts that the text is made of, when it is made of them."""


@dataclass(frozen=True)
class _Draft:
    """Everything about the new copy but its vectors."""

    record: UserDocRecord
    """As it was when the save began."""
    content: _Content
    texts: tuple[str, ...]
    indices: tuple[int, ...]
    sections: tuple[str | None, ...]
    metadata: Mapping[str, Any]
    version: str | None


class Saver:
    """Saves documents for the retriever; its methods are procedures (see `rag_wiki.steps`)."""

    def __init__(
        self,
        store: StateStore,
        chunks: ChunkStore,
        config: RagWikiRetrieverConfig,
        document_loader: DocumentLoader | None,
        clock: Clock,
    ) -> None:
        self._store = store
        self._chunks = chunks
        self._config = config
        self._loader = document_loader
        self._clock = clock

    def save(self, order: SaveOrder, embeddings: Embeddings) -> Procedure[UserDocRecord]:
        """Save a document, or replace its copy.

        Raises:
            UnknownDocumentError: The user never met it.
            InvalidDocumentError: The content given is blank or not a string.
            InvalidTransitionError: It was let go (and the order does not revive).
            ContentNotFoundError: There is nothing to save.
            EmbeddingError: The model's answer can't be used.
            DocumentRemovedError: It was removed while it was being saved.
        """
        if order.full_content is not None:
            _check_content(order.full_content, order)
        record = yield blocking(self._savable_record, order)
        content = yield from self._find_content(order, record)
        draft = yield blocking(self._draft, record, content)
        vectors: list[NDArray[np.float32]] = []
        size = self._config.embedding_batch_size
        for at in range(0, len(draft.texts), size):
            batch = list(draft.texts[at : at + size])
            answer = yield _embed(embeddings, batch)
            # Batch by batch: a short answer and a long one would add up, and pair texts with others' vectors.
            vectors.append(check_vectors(answer, len(batch), f"document {order.doc_id!r} of user {order.user_id!r}"))
        saved: UserDocRecord = yield blocking(self._write, order, draft, vectors, embeddings)
        return saved

    def reindex(self, user_id: str, doc_id: str, embeddings: Embeddings, width: int) -> Procedure[bool]:
        """Embed a saved document anew unless its copy is of this model and width; tells whether it did."""
        record: UserDocRecord | None = yield blocking(self._store.get, user_id, doc_id)
        if record is None or not record.saved:
            return False
        if (yield blocking(self._is_of_model, record, embeddings, width)):
            return False
        content = record.full_content
        if content is None:
            logger.warning("document %r of user %r has no content to embed anew; refresh() can", doc_id, user_id)
            return False
        name = self.fingerprint(embeddings)
        order = SaveOrder(user_id, doc_id, f"embedded anew with {name}", full_content=content, only_saved=True)
        yield from self.save(order, embeddings)
        return True

    def fingerprint(self, embeddings: Embeddings) -> str:
        """What the vectors of this model are called."""
        return fingerprint(embeddings, self._config.embedding_name)

    def _is_of_model(self, record: UserDocRecord, embeddings: Embeddings, width: int) -> bool:
        if record.copy_id is None:
            return False
        try:
            copy = self._chunks.load_copy(record.user_id, record.doc_id, record.copy_id, texts=False)
        except RagWikiError:
            return False
        if copy is None or copy.vectors is None:
            return False
        return (copy.embedding, copy.vectors.shape[1]) == (self.fingerprint(embeddings), width)

    # -- finding the content ---------------------------------------------------------------------

    def _savable_record(self, order: SaveOrder) -> UserDocRecord:
        record = self._store.get(order.user_id, order.doc_id)
        if record is None:
            raise UnknownDocumentError(order.user_id, order.doc_id)
        _saved_as(record, order, self._clock())
        return record

    def _find_content(self, order: SaveOrder, record: UserDocRecord) -> Procedure[_Content]:
        if order.full_content is not None:
            return _Content(order.full_content, "argument")
        if self._loader is not None:
            loaded = yield call_user(self._loader, replace(record), name="document_loader")
            text = loaded.page_content if isinstance(loaded, Document) else loaded
            if text is not None:
                return _Content(_check_content(text, order), "loader")
        content: _Content = yield blocking(self._stored_content, record)
        return content

    def _stored_content(self, record: UserDocRecord) -> _Content:
        text = self._file_content(record)
        if text is not None:
            return _Content(text, "file")
        pieces = _latest(self._store.retrieved_texts(record.user_id, record.doc_id))
        kept = any(piece.text.strip() for piece in pieces)
        if not kept and record.full_content and record.stale_since is None:
            # A copy that was lost: what was saved is known still, and nothing says that it changed.
            return _Content(record.full_content, record.content_source or "argument")
        if not kept:
            msg = (
                f"nothing to save for document {record.doc_id!r} of user {record.user_id!r}: no full_content was "
                "given, and no document_loader, file below document_roots, or retrieved text has any. "
                "Pass full_content, or retrieve the document once more."
            )
            raise ContentNotFoundError(msg)
        return _Content(join_texts([piece.text for piece in pieces]), "retrieved", tuple(pieces))

    def _file_content(self, record: UserDocRecord) -> str | None:
        """The file at the record's path, only inside the roots that the configuration allows."""
        if not record.doc_path or "\0" in record.doc_path:
            return None
        for root in map(Path, self._config.document_roots):
            allowed = root.resolve()
            path = (allowed / record.doc_path).resolve()
            if not path.is_file():
                # A path relative to where the process runs may lead into the root just as well.
                path = Path(record.doc_path).resolve()
            if path.is_relative_to(allowed) and path.is_file():
                try:
                    text = path.read_text(encoding="utf-8-sig")
                except (OSError, UnicodeDecodeError) as error:
                    logger.warning("the file of document %r can't be read: %s", record.doc_id, error)
                    continue
                if text.strip():
                    return text
        return None

    # -- splitting -------------------------------------------------------------------------------

    def _draft(self, record: UserDocRecord, content: _Content) -> _Draft:
        pieces = content.pieces
        if pieces:
            # As they were retrieved: their numbers are the source's own.
            texts = tuple(piece.text for piece in pieces if piece.text.strip())
            numbers = [piece.chunk_index for piece in pieces if piece.text.strip()]
            own = [number for number in numbers if number is not None]
            indices = tuple(own) if len(set(own)) == len(numbers) else tuple(range(len(texts)))
        else:
            texts = tuple(text for text in self._splitter().split_text(content.text) if text.strip())
            indices = tuple(range(len(texts)))
        if not texts:
            msg = f"the content of document {record.doc_id!r} for user {record.user_id!r} gives no chunk with text"
            raise InvalidDocumentError(msg)
        seen = list(pieces) or self._store.retrieved_texts(record.user_id, record.doc_id)
        metadata = _common_metadata([piece.metadata for piece in seen])
        key = self._config.version_key
        versions = [piece.metadata[key] for piece in seen if key in piece.metadata] if key else []
        return _Draft(
            record=record,
            content=content,
            texts=texts,
            indices=indices,
            sections=split_sections(content.text, texts),
            metadata={name: value for name, value in metadata.items() if name not in _OF_ONE_CHUNK},
            version=str(versions[-1]) if versions else record.source_version,
        )

    def _splitter(self) -> Any:
        if self._config.text_splitter is not None:
            return self._config.text_splitter
        return RecursiveCharacterTextSplitter(
            chunk_size=self._config.chunk_size, chunk_overlap=self._config.chunk_overlap
        )

    # -- writing ---------------------------------------------------------------------------------

    def _write(
        self, order: SaveOrder, draft: _Draft, vectors: Sequence[NDArray[np.float32]], embeddings: Embeddings
    ) -> UserDocRecord:
        what = f"document {order.doc_id!r} of user {order.user_id!r}"
        matrix = check_vectors([row for batch in vectors for row in batch], len(draft.texts), what)
        copy = ChunkCopy(
            copy_id=new_copy_id(),
            indices=draft.indices,
            texts=draft.texts,
            vectors=matrix,
            sections=draft.sections,
            embedding=self.fingerprint(embeddings),
            metadata=draft.metadata,
        )
        readable: PendingFile | None = None
        try:
            self._chunks.save_copy(order.user_id, order.doc_id, copy)
            if self._chunks.documents is not None:
                # What can fail about the readable copy (a full disk, a missing permission) fails before the move.
                title = draft.record.doc_title or order.doc_id
                readable = self._chunks.documents.prepare(order.user_id, order.doc_id, title, draft.content.text)
            saved, replaced = self._move(order, draft, copy)
        except BaseException as error:
            landed = self._landed(order, copy)
            if not landed:
                self._discard(order, copy, landed, readable)
            if not landed or not isinstance(error, Exception):
                raise
            # The store did it and its answer was lost on the way.
            saved, replaced = landed, None
        if readable is not None:
            readable.finish()
            record = self._store.get(order.user_id, order.doc_id)
            if record is None or record.copy_id != copy.copy_id:
                self._chunks.settle(order.user_id, order.doc_id, record)
        self._chunks.retire(order.user_id, order.doc_id, replaced, keep=copy.copy_id)
        return saved

    def _landed(self, order: SaveOrder, copy: ChunkCopy) -> UserDocRecord | Literal[False] | None:
        """The record, if it names the copy after all; `False` if it does not; `None` if nobody can say."""
        try:
            record = self._store.get(order.user_id, order.doc_id)
        except Exception:
            return None
        return record if record is not None and record.copy_id == copy.copy_id else False

    def _discard(
        self,
        order: SaveOrder,
        copy: ChunkCopy,
        landed: UserDocRecord | Literal[False] | None,
        readable: PendingFile | None,
    ) -> None:
        """Leave nothing of a save that failed. A copy that may be named after all waits for `retire` instead."""
        if landed is False:
            with contextlib.suppress(Exception):  # the reason why the save failed is what the caller must see
                self._chunks.place.delete(order.user_id, order.doc_id, [copy.copy_id])
        if readable is not None:
            readable.abandon()

    def _move(self, order: SaveOrder, draft: _Draft, copy: ChunkCopy) -> tuple[UserDocRecord, str | None]:
        now = self._clock()

        def decide(view: UserView) -> UserChange:
            before = view.records.get(order.doc_id)
            if before is None or _removal(before) != _removal(draft.record):
                msg = (
                    f"document {order.doc_id!r} of user {order.user_id!r} was removed while it was being saved; "
                    "the removal stands. Save it again if that is wanted."
                )
                raise DocumentRemovedError(msg)
            events: list[DocumentEvent] = []
            after = replace(
                _saved_as(before, order, now),
                cached_at=now,
                copy_id=copy.copy_id,
                chunk_count=len(copy.indices),
                content_source=draft.content.source,
                source_version=draft.version,
                stale_since=None,
            )
            if draft.content.source == "argument" and before.saved and order.only_saved and order.full_content:
                # Embedding the same text anew does not change where it came from.
                after.content_source = before.content_source or "argument"
            source = {"argument": "the caller", "retrieved": "the retrieved chunks"}.get(
                draft.content.source, f"the {draft.content.source}"
            )
            what = "refreshed" if before.saved else "saved"
            events.append(describe(before, after, what, f"{order.why}; content from {source}", now))
            if order.pin:
                pinned = pin(after, now)
                after, events = pinned.record, [*events, *pinned.events]
            return UserChange(
                records=[after],
                contents={order.doc_id: draft.content.text},
                events=events,
                clear_texts=[] if draft.content.source == "retrieved" else [order.doc_id],
                outcome=before.copy_id,
            )

        change = self._store.change(order.user_id, [order.doc_id], decide)
        return replace(change.records[0], full_content=draft.content.text), change.outcome


def _embed(embeddings: Embeddings, texts: list[str]) -> Step[list[list[float]]]:
    return Step(lambda: embeddings.embed_documents(texts), lambda: embeddings.aembed_documents(texts))


def _saved_as(record: UserDocRecord, order: SaveOrder, now: datetime) -> UserDocRecord:
    """The record as a saved one, by the steps that the lifecycle allows.

    Raises:
        InvalidTransitionError: It allows none.
    """
    if record.saved:
        return replace(record)
    if order.only_saved:
        msg = (
            f"document {record.doc_id!r} of user {record.user_id!r} is {record.user_state}: there is no saved copy to "
            "replace. Save it with accept_suggestion or force_pin."
        )
        raise InvalidTransitionError(msg)
    if record.user_state is DocumentState.DEMOTED and order.revive:
        record = replace(move(record, DocumentState.SURFACED, now), retrieved=record.retrieved)
    if record.user_state is DocumentState.DEMOTED:
        msg = (
            f"document {record.doc_id!r} of user {record.user_id!r} is DEMOTED: it was let go. "
            "To save it, retrieve it again first, or use force_pin."
        )
        raise InvalidTransitionError(msg)
    return move(record, DocumentState.CLAIMED, now)


def _removal(record: UserDocRecord) -> tuple[object, object]:
    """What a removal changes, whatever else happened since."""
    return (record.demoted_at, record.no_resiluggest_until)


def _check_content(text: object, order: SaveOrder) -> str:
    if not isinstance(text, str):
        msg = (
            f"the content of document {order.doc_id!r} for user {order.user_id!r} must be a string, "
            f"got {type(text).__name__}"
        )
        raise InvalidDocumentError(msg)
    if not text.strip():
        msg = f"the content of document {order.doc_id!r} for user {order.user_id!r} is blank: there is nothing to save"
        raise InvalidDocumentError(msg)
    return text


def _latest(texts: Sequence[RetrievedText]) -> list[RetrievedText]:
    """The texts in document order; of two with one number, the one seen last."""
    if all(text.chunk_index is not None for text in texts):
        by_number = {text.chunk_index: text for text in texts}
        return [by_number[number] for number in sorted(by_number, key=lambda number: number or 0)]
    return list(texts)


def split_sections(content: str, texts: Sequence[str]) -> tuple[str | None, ...]:
    """The Markdown heading that each chunk of a content stands under; `None` where there is none."""
    titles = ((found.start(), found.group(1).rstrip(" \t#").strip()) for found in _HEADING.finditer(content))
    headings = [(start, title) for start, title in titles if title]
    starts = [start for start, _ in headings]
    sections: list[str | None] = []
    at = 0
    for text in texts:
        found = content.find(text, at)
        position = found if found >= 0 else at
        # Chunks overlap, so the next one is looked for from just after where this one begins.
        at = position + 1 if found >= 0 else at
        nearest = bisect_right(starts, position) - 1
        sections.append(headings[nearest][1] if nearest >= 0 else None)
    return tuple(sections)


def _common_metadata(all_metadata: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all retrieved chunks of a document say alike."""
    if not all_metadata:
        return {}
    first, *others = all_metadata
    return {
        name: value for name, value in first.items() if all(name in other and other[name] == value for other in others)
    }
