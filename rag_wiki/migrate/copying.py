"""Taking users from one store of this release to another: from SQLite to PostgreSQL, say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from rag_wiki.errors import ConfigurationError, CorruptDataError
from rag_wiki.migrate.brought import Brought
from rag_wiki.migrate.carry import MismatchError, Progress
from rag_wiki.migrate.places import (
    StorePlace,
    chunk_store_of,
    holds_store,
    is_same_place,
    look_at,
    open_new,
    shown,
    telling,
)
from rag_wiki.migrate.report import DocumentNote, MigrationReport
from rag_wiki.migrate.write import are_equal
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkHits, ChunkStore
from rag_wiki.storage.records import (
    SAME_LIFE,
    Clocks,
    DocumentEvent,
    QueryStart,
    RetrievedText,
    UserChange,
    UserDocRecord,
    UserView,
    check_user_id,
)

__all__ = ["copy_users"]

_PAGE = 100
"""Documents that are read, written and read back together, with their contents and chunks."""
_NEVER = 2**31
"""Queries after which an idle document is told: here nobody asks for those."""


def copy_users(
    old: StorePlace,
    new: StorePlace,
    *,
    old_chunks: str | Path | ChunkStore | None = None,
    new_chunks: str | Path | ChunkStore | None = None,
    users: Iterable[str] | None = None,
    dry_run: bool = False,
    bring_back: bool = False,
    on_progress: Progress | None = None,
) -> MigrationReport:
    """Copy users from one store of this release to another as they are, and read all of it back.

    Records, contents, history, the texts kept for saving, copies with vectors and hits, and the counters by which
    misses are told. The old store is only read; a document comes over wholly or not at all. Running it again adds what
    is missing. A user who was active in the new store has counters of their own there, and is left alone.

    Stop the application first: what is changed in the old store meanwhile may be missing in the new one.

    Args:
        old: `sqlite:///old.db` or the path of the file, `postgresql://…`, `redis://…`, a Redis client, or a store.
        new: The same, for another place.
        old_chunks: The `wiki_save_dir` of the settings, or the `chunk_store` that the retriever had; by default chunks
            are beside the state.
        new_chunks: The same for the new store.
        users: Whom; everybody by default.
        dry_run: Only say what would be done. Nothing is made of a URL; a store that is handed in may set itself up.
        bring_back: Copy what was removed from the new store (`forget_user`, `purge`, `delete`) since an earlier run.
        on_progress: Told after each user how many are done, and of how many.

    Returns:
        What was done, counted.

    Raises:
        ConfigurationError: There is no store in a place, or both are one.
        StorageError: A place can't be read or written. What was done until then stays, and the next run goes on.
        MismatchError: A `StorageError`: what was read back is not what was written. It names documents, and has the
            report.
    """
    if is_same_place(old, new):
        msg = f"{shown(old)} is the old and the new place: to copy it, give another one"
        raise ConfigurationError(msg)
    with ExitStack() as stack:
        with telling(shown(old)):
            if not holds_store(old):
                msg = (
                    f"there is no store of this release in {shown(old)}; what 0.2 kept is brought over by migrate(...)"
                )
                raise ConfigurationError(msg)
            source = open_new(old)
        stack.callback(source.close)
        with telling(shown(new)):
            there = look_at(new) or not dry_run
            target = open_new(new)
        stack.callback(target.close)
        from_chunks, _ = chunk_store_of(old_chunks, source.store)
        to_chunks, where = chunk_store_of(new_chunks, target.store)
        report = MigrationReport(old=source.shown, new=target.shown, chunks_in=where, dry_run=dry_run)
        report.old_chunks = None if old_chunks is None else str(old_chunks)
        with telling(target.shown):
            brought = Brought(target.store if there else None, dry_run=dry_run)
        stack.callback(brought.keep)
        copying = _Copying(
            _Side(source.store, from_chunks),
            _Side(target.store, to_chunks),
            report,
            brought,
            is_there=there,
            bring_back=bring_back,
        )
        names, unreadable = _names(source.store, users)
        report.skipped += unreadable
        for done, user_id in enumerate(names):
            (on_progress or _tell_nobody)(done, len(names))
            copying.copy(user_id)
        (on_progress or _tell_nobody)(len(names), len(names))
    if report.mismatches:
        raise MismatchError(report)
    return report


def _tell_nobody(_done: int, _total: int) -> None:
    """Nobody wants to know."""


def _names(store: StateStore, users: Iterable[str] | None) -> tuple[list[str], list[DocumentNote]]:
    """Who is to be copied, and whose ids can't be read back."""
    if users is not None:
        return sorted({check_user_id(user_id) for user_id in users}), []
    found, unreadable = store.all_users()
    return found, [DocumentNote(user_id, "*", str(error)) for user_id, error in unreadable.items()]


class _Side(NamedTuple):
    """Where users come from, or go to."""

    store: StateStore
    chunks: ChunkStore

    def begin(self, user_id: str) -> QueryStart:
        """The user's counters."""
        return self.store.begin_query(user_id, _NEVER, _NEVER)


class _Document(NamedTuple):
    """All that is kept of a document."""

    record: UserDocRecord
    """With its content."""
    history: Sequence[DocumentEvent]
    texts: Sequence[RetrievedText]
    copy: ChunkCopy | None
    hits: dict[int, ChunkHits]

    def note(self, text: str) -> DocumentNote:
        """Something to know about it."""
        return DocumentNote(self.record.user_id, self.record.doc_id, text)


def _read(side: _Side, user_id: str, doc_id: str) -> _Document | None:
    """A document with all that belongs to it; `None` where there is none.

    Raises:
        CorruptDataError: Something of it can't be read back.
    """
    record = side.store.get(user_id, doc_id)
    if record is None:
        return None
    copy, hits = None, dict[int, ChunkHits]()
    if record.saved and record.copy_id is not None:
        copy = side.chunks.load_copy(user_id, doc_id, record.copy_id)
        hits = side.chunks.place.hits(user_id, doc_id, record.copy_id) if copy is not None else {}
    history, texts = side.store.history(user_id, doc_id), side.store.retrieved_texts(user_id, doc_id)
    return _Document(record, history, texts, copy, hits)


def _differences(one: _Document, other: _Document) -> list[str]:
    """What of a document is not the same, in words."""
    names = [name for name in UserDocRecord.__dataclass_fields__ if name not in ("life", "why")]
    wrong = [name for name in names if getattr(one.record, name) != getattr(other.record, name)]
    if [*one.history] != [*other.history]:
        wrong.append("history")
    if [*one.texts] != [*other.texts]:
        wrong.append("retrieved texts")
    if (one.copy is None) != (other.copy is None):
        wrong.append("chunks")
    elif one.copy is not None and other.copy is not None:
        parts = ("indices", "texts", "sections", "embedding", "metadata", "without_vector", "chunk_metadata")
        wrong += [f"chunks: {name}" for name in parts if getattr(one.copy, name) != getattr(other.copy, name)]
        wrong += [] if are_equal(one.copy, other.copy) else ["chunks: vectors"]
    return wrong + ([] if one.hits == other.hits else ["chunks: hits"])


class _Copying:
    """Copies users, one after the other."""

    def __init__(
        self,
        source: _Side,
        target: _Side,
        report: MigrationReport,
        brought: Brought,
        *,
        is_there: bool,
        bring_back: bool,
    ) -> None:
        self._source = source
        self._target = target
        self._report = report
        self._brought = brought
        self._is_there = is_there
        self._bring_back = bring_back

    def copy(self, user_id: str) -> None:
        """Copy a user, page by page."""
        report, clocks = self._report, self._source.begin(user_id).clocks
        there = self._target.begin(user_id) if self._is_there else QueryStart(Clocks(), 0, 0)
        if there.revision and there.clocks != clocks:
            report.kept.append(
                DocumentNote(user_id, "*", "the user was active in the new place; forget_user there to copy them anew")
            )
            return
        report.users += 1
        pages = self._source.store.pages(user_id, size=_PAGE)
        while True:
            try:
                page = next(pages, None)
            except CorruptDataError as error:
                report.skipped.append(DocumentNote(user_id, "*", str(error)))
                return
            if page is None:
                return
            report.found += len(page)
            found = [document for record in page if (document := self._read(record)) is not None]
            wanted = [document for document in found if self._may_come(document, is_known=there.revision != 0)]
            if report.dry_run:
                for document in wanted:
                    self._count(document)
            elif wanted:
                self._write(user_id, wanted, clocks)

    def _read(self, record: UserDocRecord) -> _Document | None:
        """A document of the old place, as far as it can be read; what can't be is noted."""
        user_id, doc_id = record.user_id, record.doc_id
        try:
            document = _read(self._source, user_id, doc_id)
        except CorruptDataError as error:
            self._report.skipped.append(DocumentNote(user_id, doc_id, str(error)))
            return None
        if document is None:
            self._report.skipped.append(DocumentNote(user_id, doc_id, "its record went while it was to be read"))
        elif document.record.saved and document.copy is None:
            self._report.lost.append(document.note(f"it is {document.record.user_state}, and its copy is not there"))
        return document

    def _may_come(self, document: _Document, *, is_known: bool) -> bool:
        """Whether it is to be written: it is neither there nor was it removed since."""
        user_id, doc_id = document.record.user_id, document.record.doc_id
        try:
            there = _read(self._target, user_id, doc_id) if is_known else None
        except CorruptDataError as error:
            self._report.kept.append(document.note(str(error)))
            return False
        if there is not None:
            self._brought.add(user_id, doc_id)
            other = _differences(there, document)
            if other:
                self._report.kept.append(document.note(f"it has another {', '.join(other)}"))
            self._report.there += not other
            return False
        if self._bring_back or (user_id, doc_id) not in self._brought:
            return True
        self._report.removed.append(document.note("it was removed from the new place since an earlier run"))
        return False

    def _write(self, user_id: str, documents: Sequence[_Document], clocks: Clocks) -> None:
        """The copies first, then the records that name them, all in one step; then read it back."""
        for document in documents:
            self._write_copy(document)

        def decide(view: UserView) -> UserChange:
            # With the first page the clocks are set. Where they are neither there nor here, somebody was faster.
            mine = view.clocks in (Clocks(), clocks)
            going = [item for item in documents if mine and item.record.doc_id not in view.records]
            return UserChange(
                records=[item.record.changed(full_content=None, life=SAME_LIFE) for item in going],
                contents={item.record.doc_id: item.record.full_content for item in going},
                events=[event for item in going for event in item.history],
                texts=[text for item in going for text in item.texts],
                queries=clocks.queries - view.clocks.queries if going else 0,
                searches=clocks.searches - view.clocks.searches if going else 0,
                outcome={item.record.doc_id for item in going},
            )

        change = self._target.store.change(user_id, [item.record.doc_id for item in documents], decide)
        for document in documents:
            if document.record.doc_id not in change.outcome:
                self._drop_copy(document)
                self._report.kept.append(document.note("it was changed in the new place meanwhile"))
                continue
            self._brought.add(user_id, document.record.doc_id)
            self._count(document)
            self._settle(document)
            self._read_back(document)

    def _write_copy(self, document: _Document) -> None:
        if document.copy is None:
            return
        user_id, doc_id, copy_id = document.record.user_id, document.record.doc_id, document.copy.copy_id
        self._target.chunks.save_copy(user_id, doc_id, document.copy)
        alike: dict[ChunkHits, list[int]] = {}
        for index, hits in document.hits.items():
            alike.setdefault(hits, []).append(index)
        for hits, indices in alike.items():
            self._target.chunks.place.add_hits(user_id, doc_id, copy_id, indices, hits.last, hits.count)

    def _drop_copy(self, document: _Document) -> None:
        record = document.record
        named = self._target.store.get(record.user_id, record.doc_id)
        if document.copy is not None and (named is None or named.copy_id != document.copy.copy_id):
            self._target.chunks.place.delete(record.user_id, record.doc_id, [document.copy.copy_id])

    def _settle(self, document: _Document) -> None:
        """Bring the readable copy in line, where there is a folder for it."""
        record = document.record
        if record.saved:
            self._target.chunks.settle(
                record.user_id, record.doc_id, lambda: self._target.store.get(record.user_id, record.doc_id)
            )

    def _count(self, document: _Document) -> None:
        report, record = self._report, document.record
        report.brought[record.user_state.value] += 1
        report.contents += record.full_content is not None
        report.kept_texts += len(document.texts)
        if document.copy is not None:
            report.chunks += len(document.copy.indices)

    def _read_back(self, document: _Document) -> None:
        record = document.record
        try:
            there = _read(self._target, record.user_id, record.doc_id)
            wrong = ["its record is not there"] if there is None else _differences(there, document)
        except CorruptDataError as error:
            wrong = [str(error)]
        if wrong:
            self._report.mismatches.append(document.note(", ".join(wrong)))
        else:
            self._report.verified += 1
