"""Saving a document: find its content, split, embed, check, write the copy, then move the state.

Whatever fails on the way, the state is as before and nothing half-saved answers. Embedding happens
outside any lock or transaction; a removal that comes meanwhile stands.
"""

from __future__ import annotations

import contextlib
import re
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from numpy.typing import NDArray

from rag_wiki import events as log_events
from rag_wiki.clock import Clock
from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import (
    ContentNotFoundError,
    CorruptDataError,
    DocumentRemovedError,
    InvalidDocumentError,
    InvalidTransitionError,
    RagWikiError,
    UnknownDocumentError,
)
from rag_wiki.lifecycle.decay_engine import pin
from rag_wiki.lifecycle.kept_texts import OF_ONE_CHUNK, current_texts, is_of_a_search, source_version
from rag_wiki.lifecycle.state_machine import describe, move
from rag_wiki.observing import Cause, observations_of
from rag_wiki.pieces import common_metadata
from rag_wiki.search.embedding import check_vectors, fingerprint
from rag_wiki.steps import Procedure, Step, blocking, call_user
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_places import PendingFile
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkStore, new_copy_id
from rag_wiki.storage.codec import dump_json
from rag_wiki.storage.records import (
    DocumentEvent,
    DocumentState,
    RetrievedText,
    UserChange,
    UserDocRecord,
    UserView,
)
from rag_wiki.texts import flat, holds, join_texts

__all__ = ["DocumentLoader", "SaveOrder", "Saver", "split_sections", "splitter_of"]

LoadedContent: TypeAlias = str | Document | None
DocumentLoader: TypeAlias = Callable[[UserDocRecord], LoadedContent | Awaitable[LoadedContent]]
"""Gives the text of a document, or `None`; plain or async."""

_CONTENT_FROM = "; content from "
_HEADING = re.compile(r"^ {0,3}#{1,6}[ \t](.*)$", re.MULTILINE)
_LONGEST_SECTION = 200
_LONGEST_VALUE = 500
"""Characters, as JSON, of what is kept of one chunk alone: its page, say, and not the vector that a filter left."""
_OF_A_PASSAGE = frozenset(
    {"page", "page_label", "page_number", "pages", "slide", "sheet", "row", "line", "lines", "loc", "seq_num"}
)
"""Metadata by which loaders tell where in a document a passage stands."""


class SaveOrder(NamedTuple):
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
    same_text: bool = False
    """The saved text is embedded anew: what is known of the copy stays."""
    unless_saved: bool = False
    """Leave a document that is saved already as it is."""
    cause: Cause = "user"
    """What brings it about."""


class _Overtaken(Exception):  # noqa: N818 - no error: another save has won
    """A save that began later was faster; its copy stays."""

    def __init__(self, record: UserDocRecord) -> None:
        super().__init__(record.doc_id)
        self.record = record


class _GoneError(Exception):
    """There is no record any more."""


class _Content(NamedTuple):
    text: str
    source: str
    pieces: tuple[RetrievedText, ...] = ()
    """The retrieved texts that the text is made of, when it is made of them."""
    is_old: bool = False
    """Nothing newer was to be had: it is the text that was saved before."""


class _Draft(NamedTuple):
    """Everything about the new copy but its vectors."""

    record: UserDocRecord
    """As it was when the save began."""
    content: _Content
    texts: tuple[str, ...]
    indices: tuple[int, ...]
    sections: tuple[str | None, ...]
    metadata: Mapping[str, Any]
    chunk_metadata: tuple[Mapping[str, Any], ...]
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
        self._observations = observations_of(store)

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
        with self._observations.working("save"):
            saved = yield from self._save(order, embeddings)
        return saved

    def _save(self, order: SaveOrder, embeddings: Embeddings) -> Procedure[UserDocRecord]:
        # Copy ids sort by time: of two saves that overlap, the one that began last counts.
        copy_id = new_copy_id()
        if order.full_content is not None:
            _check_content(order.full_content, order)
        record: UserDocRecord = yield blocking(self._savable_record, order)
        if record.saved and order.unless_saved:
            return record
        content = yield from self._find_content(order, record)
        draft = yield blocking(self._draft, record, content, order.same_text)
        vectors: list[NDArray[np.float32]] = []
        size = self._config.embedding_batch_size
        for at in range(0, len(draft.texts), size):
            batch = list(draft.texts[at : at + size])
            answer = yield _embed(embeddings, batch)
            # Batch by batch: a short answer and a long one would add up, and pair texts with others' vectors.
            vectors.append(check_vectors(answer, len(batch), f"document {order.doc_id!r} of user {order.user_id!r}"))
        saved: UserDocRecord = yield blocking(self._write, order, copy_id, draft, vectors, embeddings)
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
            log_events.CONTENT_MISSING.log(
                "document %r of user %r has no content to embed anew; refresh() can",
                doc_id,
                user_id,
                user_id=user_id,
                doc_id=doc_id,
            )
            return False
        name = self.fingerprint(embeddings)
        why = f"embedded anew with {name}"
        order = SaveOrder(user_id, doc_id, why, content, only_saved=True, same_text=True, cause="reindex")
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
        pieces = self._current_texts(record)
        kept = any(piece.text.strip() for piece in pieces)
        if not kept and record.full_content and record.stale_since is None:
            # A copy that was lost: what was saved is known still, and nothing says that it changed.
            return _Content(record.full_content, record.content_source or "argument", is_old=True)
        if not kept:
            msg = (
                f"nothing to save for document {record.doc_id!r} of user {record.user_id!r}: no full_content was "
                "given, and no document_loader, file below document_roots, or retrieved text has any. "
                "Pass full_content, or retrieve the document once more."
            )
            raise ContentNotFoundError(msg)
        return _Content(join_texts([piece.text for piece in pieces]), "retrieved", tuple(pieces))

    def _file_content(self, record: UserDocRecord) -> str | None:
        """The text of the file at the record's path, only inside the roots that the configuration allows.

        A relative path may count from each root, or from where the process runs. Where it leads to files that say
        different things, the document is the one that holds all that was retrieved of it.
        """
        texts = list[str]()
        for path in _files_at(record.doc_path, self._config.document_roots):
            try:
                texts.append(path.read_text(encoding="utf-8-sig"))
            except (OSError, UnicodeDecodeError) as error:
                log_events.FILE_UNREADABLE.log(
                    "the file of document %r can't be read: %s",
                    record.doc_id,
                    error,
                    user_id=record.user_id,
                    doc_id=record.doc_id,
                    error_type=type(error).__name__,
                )
        texts = list(dict.fromkeys(text for text in texts if text.strip()))
        if len(texts) > 1:
            retrieved = [flat(piece.text) for piece in self._current_texts(record)]
            texts = [text for text in texts if retrieved and all(holds(flat(text), piece) for piece in retrieved)]
            if len(texts) != 1:
                log_events.FILE_AMBIGUOUS.log(
                    "the path %r of document %r leads to several files, and what was retrieved does not tell which; "
                    "none was read. Give absolute paths, or a document_loader.",
                    record.doc_path,
                    record.doc_id,
                    user_id=record.user_id,
                    doc_id=record.doc_id,
                )
                return None
        return texts[0] if texts else None

    # -- splitting -------------------------------------------------------------------------------

    def _draft(self, record: UserDocRecord, content: _Content, same_text: bool) -> _Draft:
        pieces = content.pieces
        if pieces:
            # As they were retrieved: their numbers are the source's own.
            texts = tuple(piece.text for piece in pieces if piece.text.strip())
            numbers = [piece.chunk_index for piece in pieces if piece.text.strip()]
            own = [number for number in numbers if number is not None]
            indices = tuple(own) if len(set(own)) == len(numbers) else tuple(range(len(texts)))
        else:
            texts = tuple(text for text in splitter_of(self._config).split_text(content.text) if text.strip())
            indices = tuple(range(len(texts)))
        if not texts:
            msg = f"the content of document {record.doc_id!r} for user {record.user_id!r} gives no chunk with text"
            raise InvalidDocumentError(msg)
        seen = pieces or self._current_texts(record)
        metadata, chunk_metadata = self._metadata(record, content, texts, seen, same_text)
        return _Draft(
            record=record,
            content=content,
            texts=texts,
            indices=indices,
            sections=split_sections(content.text, texts),
            metadata=metadata,
            chunk_metadata=chunk_metadata,
            version=self._version(record, content, seen),
        )

    def _metadata(
        self,
        record: UserDocRecord,
        content: _Content,
        texts: Sequence[str],
        seen: Sequence[RetrievedText],
        same_text: bool,
    ) -> tuple[Mapping[str, Any], tuple[Mapping[str, Any], ...]]:
        """What the source says of the document, and of each chunk alone."""
        before = self._copy_before(record)
        known = [] if before is None else list(zip(before.texts or (), before.chunk_metadata, strict=False))
        if before is not None and (same_text or not seen):
            # What was retrieved since may be of another version than the text.
            return before.metadata, _own_metadata(texts, known)
        if content.pieces:
            common, own = _metadata_of(seen, frozenset())
            own = [values for values, piece in zip(own, seen, strict=True) if piece.text.strip()]
            return common, tuple(own) if any(own) else ()
        # Of a text that holds more than what was retrieved, not all is of the page that was.
        common, own = _metadata_of(seen, _OF_A_PASSAGE)
        passages = [(piece.text, values) for piece, values in zip(seen, own, strict=True)]
        return common, _own_metadata(texts, [*passages, *known])

    def _copy_before(self, record: UserDocRecord) -> ChunkCopy | None:
        """The copy that is about to be replaced, without its vectors; `None` where there is none that can be read."""
        if record.copy_id is None:
            return None
        try:
            return self._chunks.load_copy(record.user_id, record.doc_id, record.copy_id, vectors=False)
        except CorruptDataError:
            return None

    def _current_texts(self, record: UserDocRecord) -> Sequence[RetrievedText]:
        texts = self._store.retrieved_texts(record.user_id, record.doc_id)
        return current_texts(record, texts, self._config.version_key)

    def _version(self, record: UserDocRecord, content: _Content, seen: Sequence[RetrievedText]) -> str | None:
        """The source's version that a content is of; `None` where nothing shows it: then the text alone will tell."""
        versions = {text.digest: source_version(text.metadata, self._config.version_key) for text in seen}
        of_version = [text for text in seen if versions[text.digest] is not None]
        whole = flat(content.text)
        if of_version and (content.pieces or all(holds(whole, flat(text.text)) for text in of_version)):
            return versions[of_version[0].digest]
        return record.source_version if content.text == record.full_content else None

    # -- writing ---------------------------------------------------------------------------------

    def _write(
        self,
        order: SaveOrder,
        copy_id: str,
        draft: _Draft,
        vectors: Sequence[NDArray[np.float32]],
        embeddings: Embeddings,
    ) -> UserDocRecord:
        what = f"document {order.doc_id!r} of user {order.user_id!r}"
        matrix = check_vectors([row for batch in vectors for row in batch], len(draft.texts), what)
        copy = ChunkCopy(
            copy_id=copy_id,
            indices=draft.indices,
            texts=draft.texts,
            vectors=matrix,
            sections=draft.sections,
            embedding=self.fingerprint(embeddings),
            metadata=draft.metadata,
            chunk_metadata=draft.chunk_metadata,
        )
        readable: PendingFile | None = None
        try:
            self._chunks.save_copy(order.user_id, order.doc_id, copy)
            if self._chunks.documents is not None:
                # What can fail about the readable copy (a full disk, a missing permission) fails before the move.
                title = draft.record.doc_title or order.doc_id
                readable = self._chunks.documents.prepare(
                    order.user_id, order.doc_id, title, draft.content.text, copy.copy_id
                )
            saved, replaced = self._move(order, draft, copy)
        except _Overtaken as overtaken:
            self._discard(order, copy, False, readable)
            return overtaken.record
        except BaseException as error:
            landed = self._landed(order, copy)
            if not landed:
                self._discard(order, copy, landed, readable)
            if not landed or not isinstance(error, Exception):
                raise
            # The store did it and its answer was lost on the way.
            saved, replaced = landed, None
        try:
            self._tidy_up(order, copy, readable, replaced)
        except Exception as error:  # it is saved; what is left over, the next save or sweep takes away
            kind = type(error).__name__
            log_events.SAVE_NOT_TIDIED.log(
                "%s was saved; tidying up failed: %s: %s",
                what,
                kind,
                error,
                user_id=order.user_id,
                doc_id=order.doc_id,
                error_type=kind,
            )
        return saved

    def _tidy_up(self, order: SaveOrder, copy: ChunkCopy, readable: PendingFile | None, replaced: str | None) -> None:
        """Put the readable copy in its place, and remove the copy that was replaced."""
        self._chunks.settle(order.user_id, order.doc_id, lambda: self._store.get(order.user_id, order.doc_id), readable)
        self._chunks.retire(order.user_id, order.doc_id, replaced, keep=copy.copy_id)

    def _landed(self, order: SaveOrder, copy: ChunkCopy) -> UserDocRecord | Literal[False] | None:
        """The record, if it names the copy after all; `False` if it does not and never will; `None` if nobody can say.

        Asked by a change that changes nothing: it comes after a move that is still on its way to the server, or makes
        that one come too late. To read would not.
        """

        def look(view: UserView) -> UserChange:
            if order.doc_id not in view.records:
                # Nothing to be late for; and a user who was forgotten is not to be made known by this.
                raise _GoneError
            return UserChange(outcome=view.records[order.doc_id])

        try:
            record: UserDocRecord = self._store.change(order.user_id, [order.doc_id], look).outcome
        except _GoneError:
            return False
        except Exception:
            return None
        return record if record.copy_id == copy.copy_id else False

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
            if before is None or before.life != draft.record.life:
                msg = (
                    f"document {order.doc_id!r} of user {order.user_id!r} was removed while it was being saved; "
                    "the removal stands. Save it again if that is wanted."
                )
                raise DocumentRemovedError(msg)
            newer = before.copy_id not in (None, draft.record.copy_id) and (before.copy_id or "") > copy.copy_id
            if newer or (before.saved and order.unless_saved):
                return UserChange(outcome=_Overtaken(before))
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
            if order.same_text:
                after.content_source, after.source_version = before.content_source, before.source_version
                after.stale_since = before.stale_since
            source = {"argument": "the caller", "retrieved": "the retrieved chunks"}.get(
                draft.content.source, f"the {draft.content.source}"
            )
            if draft.content.is_old:
                source = "what was saved before: nothing newer was found"
            what = "refreshed" if before.saved else "saved"
            events.append(describe(before, after, what, f"{order.why}{_CONTENT_FROM}{source}", now))
            reason, told, _ = before.why.partition(_CONTENT_FROM)
            if before.saved and told and not order.same_text:
                # It stands where it stood for the same reason, and says another text.
                after.why = f"{reason}{_CONTENT_FROM}{source}"
            if order.pin:
                pinned = pin(after, now)
                after, events = pinned.record, [*events, *pinned.events]
            return UserChange(
                records=[after],
                contents={order.doc_id: draft.content.text},
                events=events,
                clear_texts=[] if order.same_text or draft.content.source == "retrieved" else [order.doc_id],
                outcome=before.copy_id,
            )

        change = self._store.change(order.user_id, [order.doc_id], decide)
        if isinstance(change.outcome, _Overtaken):
            raise change.outcome
        self._observations.tell(order.user_id, change.events, order.cause)
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
        kept = {name: getattr(record, name) for name in ("retrieved", "retrieved_seen", "retrieved_chars")}
        record = replace(move(record, DocumentState.SURFACED, now), **kept)
    if record.user_state is DocumentState.DEMOTED:
        msg = (
            f"document {record.doc_id!r} of user {record.user_id!r} is DEMOTED: it was let go. "
            "To save it, retrieve it again first, or use force_pin."
        )
        raise InvalidTransitionError(msg)
    return move(record, DocumentState.CLAIMED, now)


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


def _files_at(doc_path: str, roots: Sequence[str | Path]) -> list[Path]:
    """The different files inside the roots that a path, counted from each root and from here, leads to."""
    if not doc_path or not roots:
        return []
    allowed = [Path(root).resolve() for root in roots]
    found = list[Path]()
    for base in (*allowed, Path.cwd()):
        # A path that no file system takes (too long, a NUL, links in a circle) leads to no file.
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            path = (base / doc_path).resolve()
            if path.is_file() and any(path.is_relative_to(root) for root in allowed):
                found.append(path)
    return list(dict.fromkeys(found))


def splitter_of(config: RagWikiRetrieverConfig) -> Any:
    """What splits texts that are saved: the configured one, or the default of the configured sizes."""
    if config.text_splitter is not None:
        return config.text_splitter
    # The package takes milliseconds to load, which only a program that saves should pay.
    from langchain_text_splitters import RecursiveCharacterTextSplitter

    return RecursiveCharacterTextSplitter(chunk_size=config.chunk_size, chunk_overlap=config.chunk_overlap)


def split_sections(content: str, texts: Sequence[str]) -> tuple[str | None, ...]:
    """The Markdown heading that each chunk of a content stands under; `None` where there is none."""
    # Cut: each chunk has its own, and some texts have a line without end that looks like a heading.
    titles = (
        (found.start(), found.group(1).rstrip(" \t#").strip()[:_LONGEST_SECTION])
        for found in _HEADING.finditer(content)
    )
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


def _metadata_of(
    pieces: Sequence[RetrievedText], of_a_passage: frozenset[str]
) -> tuple[Mapping[str, Any], list[dict[str, Any]]]:
    """What all retrieved passages of a document say alike, and what each says besides.

    Args:
        pieces: The passages.
        of_a_passage: Names of what is a passage's own, however many say the same.
    """
    told = [{name: value for name, value in piece.metadata.items() if name not in OF_ONE_CHUNK} for piece in pieces]
    common = {name: value for name, value in common_metadata(told).items() if name not in of_a_passage}
    return common, [
        {name: value for name, value in own.items() if name not in common and _is_kept(name, value)} for own in told
    ]


def _is_kept(name: str, value: Any) -> bool:
    """Whether what is said of one passage is kept: it is short, and not of the search that found it."""
    return not is_of_a_search(name) and len(dump_json(value)) <= _LONGEST_VALUE


def _own_metadata(
    texts: Sequence[str], passages: Sequence[tuple[str, Mapping[str, Any]]]
) -> tuple[Mapping[str, Any], ...]:
    """What the passage that each chunk lies in says of itself; nothing where none of them says anything.

    Of several it is the shortest: a list of contents holds the headings of all pages.
    """
    telling = sorted([(flat(text), own) for text, own in passages if own], key=lambda passage: len(passage[0]))
    if not telling:
        return ()
    return tuple(next((own for passage, own in telling if holds(passage, shown)), {}) for shown in map(flat, texts))
