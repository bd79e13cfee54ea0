"""Taking users from one store of this release to another: from SQLite to PostgreSQL, say."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from rag_wiki.errors import ConfigurationError, CorruptDataError
from rag_wiki.migrate.brought import Brought
from rag_wiki.migrate.carry import MismatchError, Progress, kept
from rag_wiki.migrate.places import (
    StorePlace,
    chunk_store_of,
    holds_store,
    is_redis,
    is_same_place,
    look_at,
    open_new,
    shown,
    telling,
)
from rag_wiki.migrate.report import DocumentNote, MigrationReport
from rag_wiki.migrate.write import NEVER, compared_fields, differing_chunks
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkHits, ChunkStore, new_copy_id
from rag_wiki.storage.codec import is_same_user
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

_AT_ONCE = 100
"""Documents that are read, written and read back together, with their contents and chunks."""
_PROBE = "where copies are brought to"
_CHUNKS = "chunks"
"""What is said of a document whose copy is in one place alone."""


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
    one = f"{shown(old)} is the old and the new place: to copy it, give another one"
    if is_same_place(old, new):
        raise ConfigurationError(one)
    with ExitStack() as stack:
        with telling(shown(old)):
            if not holds_store(old):
                msg = (
                    f"there is no store of this release in {shown(old)}; what 0.2 kept is brought over by migrate(...)"
                )
                raise ConfigurationError(msg)
            source = open_new(old)
        stack.callback(source.close)
        with telling(source.shown):
            names, unreadable = _names(source.store, users)
        if not names and not unreadable and not isinstance(old, StateStore) and is_redis(old):
            msg = f"nobody is in {source.shown}: is it the right server, and the right number of its databases?"
            raise ConfigurationError(msg)
        with telling(shown(new)):
            there = look_at(new) or not dry_run
            target = open_new(new)
        stack.callback(target.close)
        with telling(target.shown):
            if not dry_run and _are_one(source.store, target.store):
                raise ConfigurationError(one)
        from_chunks, _ = chunk_store_of(old_chunks, source.store)
        to_chunks, where = chunk_store_of(new_chunks, target.store)
        report = MigrationReport(old=source.shown, new=target.shown, chunks_in=where, dry_run=dry_run)
        report.old_chunks = None if old_chunks is None else str(old_chunks)
        with telling(target.shown):
            brought = Brought(target.store if there else None, dry_run=dry_run)
        stack.callback(kept, brought)
        copying = _Copying(
            _Side(source.store, from_chunks),
            _Side(target.store, to_chunks),
            report,
            brought,
            is_there=there,
            bring_back=bring_back,
        )
        report.skipped += unreadable
        progress = on_progress or (lambda _done, _total: None)
        for done, user_id in enumerate(names):
            progress(done, len(names))
            with telling(f"user {user_id!r}", f"could not be copied from {source.shown} to {target.shown}"):
                copying.copy(user_id)
        progress(len(names), len(names))
        brought.keep()
    if report.mismatches:
        raise MismatchError(report)
    return report


def _are_one(source: StateStore, target: StateStore) -> bool:
    """Whether two stores are one that has two names: a server's, say. What is written into one is in the other then."""
    word = secrets.token_hex(16)
    target.replace_note(_PROBE, word)
    found = source.note(_PROBE) == word
    target.replace_note(_PROBE, "")
    return found


def _names(store: StateStore, users: Iterable[str] | None) -> tuple[list[str], list[DocumentNote]]:
    """Who is to be copied, and whose ids can't be read back.

    Raises:
        ConfigurationError: One text is given in place of several.
    """
    if isinstance(users, str):
        msg = f"users are several: give [{users!r}]"
        raise ConfigurationError(msg)
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
        return self.store.begin_query(user_id, NEVER, NEVER)


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


class _Order(NamedTuple):
    """A document that is to be written."""

    document: _Document
    before: UserDocRecord | None
    """Its record in the new place, which lacks the copy."""
    copy: ChunkCopy | None
    """Its copy under an id of its own: chunks may be in one folder, and what a broken run left is nobody's."""
    after: UserDocRecord
    """Its record, which names that copy."""

    @classmethod
    def of(cls, document: _Document, before: UserDocRecord | None) -> _Order:
        """The order to write a document."""
        if document.copy is None:
            return cls(document, before, None, document.record)
        copy = replace(document.copy, copy_id=new_copy_id())
        return cls(document, before, copy, document.record.changed(copy_id=copy.copy_id))

    def is_unchanged(self, view: UserView) -> bool:
        """Whether the new place has what it had when it was looked at."""
        before = None if self.before is None else self.before.changed(full_content=None)
        return view.records.get(self.after.doc_id) == before


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


def _differences(there: _Document, document: _Document, history_limit: int) -> list[str]:
    """What of a document in the new place is not as in the old one, in words.

    Its copy has another id there, and its life began there; of a long history the newest part is kept.
    """
    names = compared_fields("copy_id")
    wrong = [name for name in names if getattr(there.record, name) != getattr(document.record, name)]
    history = [*document.history][-history_limit:] if history_limit > 0 else []
    if [*there.history] != history:
        wrong.append("history")
    if [*there.texts] != [*document.texts]:
        wrong.append("retrieved texts")
    return wrong + _differing_chunks(there, document)


def _differing_chunks(there: _Document, document: _Document) -> list[str]:
    if there.copy is None or document.copy is None:
        return [] if there.copy is document.copy else [_CHUNKS]
    wrong = differing_chunks(there.copy, document.copy)
    return wrong + ([] if there.hits == document.hits else ["chunks: hits"])


class _OvertakenError(Exception):
    """Nothing of a page is to be written: somebody else has changed it, or the user, in the new place."""


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
        self._began = 0
        """The revision that the user had in the new place, since this run wrote there or before."""

    def copy(self, user_id: str) -> None:
        """Copy a user, page by page."""
        report = self._report
        try:
            start = self._source.begin(user_id)
            there = self._target.begin(user_id) if self._is_there else QueryStart(Clocks(), 0, 0)
        except CorruptDataError as error:
            report.skipped.append(DocumentNote(user_id, "*", str(error)))
            return
        clocks = start.clocks
        if not start.revision:
            report.skipped.append(DocumentNote(user_id, "*", "the old place knows nothing of this user"))
            return
        report.users += 1
        if there.revision and there.clocks != clocks:
            why = (
                "its counters in the two places differ: the user was active in one of them since. If the old one is "
                "right, forget_user in the new one, and copy again with bring_back (--bring-back)"
            )
            report.kept.append(DocumentNote(user_id, "*", why))
            with suppress(CorruptDataError):
                report.found += sum(map(len, self._source.store.pages(user_id)))
            return
        self._began = there.revision
        pages = self._source.store.pages(user_id)
        while True:
            try:
                page = next(pages, None)
            except CorruptDataError as error:
                report.skipped.append(DocumentNote(user_id, "*", str(error)))
                return
            if page is None:
                return
            report.found += len(page)
            for first in range(0, len(page), _AT_ONCE):
                self._copy_some(user_id, page[first : first + _AT_ONCE], clocks, is_known=there.revision != 0)

    def _copy_some(self, user_id: str, records: Sequence[UserDocRecord], clocks: Clocks, *, is_known: bool) -> None:
        found = [document for record in records if (document := self._read(record)) is not None]
        wanted = [order for document in found if (order := self._order(document, is_known=is_known)) is not None]
        if self._report.dry_run:
            for order in wanted:
                self._count(order)
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
            why = "its chunks are not there; if they are in a wiki_save_dir, name it (old_chunks, --chunks)"
            self._report.unread_chunks.append(document.note(why))
        return document

    def _order(self, document: _Document, *, is_known: bool) -> _Order | None:
        """What is to be written of a document; `None` where it is there, or was removed since."""
        user_id, doc_id = document.record.user_id, document.record.doc_id
        try:
            there = _read(self._target, user_id, doc_id) if is_known else None
        except CorruptDataError as error:
            self._report.kept.append(document.note(str(error)))
            return None
        if there is None:
            if self._bring_back or (user_id, doc_id) not in self._brought:
                return _Order.of(document, None)
            self._report.removed.append(document.note("it was removed from the new place since an earlier run"))
            return None
        self._brought.add(user_id, doc_id)
        other = _differences(there, document, self._target.store.history_limit)
        if other == [_CHUNKS] and there.copy is None:
            # An earlier run did not know where the chunks were.
            return _Order.of(document, there.record)
        if other:
            self._report.kept.append(document.note(f"it has another {', '.join(other)}"))
            return None
        self._report.there += 1
        if not self._report.dry_run:
            self._settle(there.record)
        return None

    def _write(self, user_id: str, orders: Sequence[_Order], clocks: Clocks) -> None:
        """The copies first, then the records that name them, all in one step; then read it back."""
        for order in orders:
            self._write_copy(order)

        def decide(view: UserView) -> UserChange:
            # With the first page the clocks are set. Where they are others, or the user is (who was forgotten meanwhile
            # must not come back with the next page), somebody was faster.
            mine = view.clocks == clocks if self._began else view.clocks in (Clocks(), clocks)
            mine = mine and is_same_user(self._began, view.revision)
            going = [order for order in orders if mine and order.is_unchanged(view)]
            if not going:
                # No change at all: of somebody who was forgotten it would leave the counters.
                raise _OvertakenError
            new = [order.document for order in going if order.before is None]
            return UserChange(
                records=[order.after.changed(full_content=None, life=SAME_LIFE) for order in going],
                contents={order.after.doc_id: order.after.full_content for order in going},
                events=[event for document in new for event in document.history],
                texts=[text for document in new for text in document.texts],
                queries=clocks.queries - view.clocks.queries,
                searches=clocks.searches - view.clocks.searches,
                outcome=({order.after.doc_id for order in going}, view.revision),
            )

        written = set[str]()
        with suppress(_OvertakenError):
            change = self._target.store.change(user_id, [order.after.doc_id for order in orders], decide)
            written, self._began = change.outcome
        for doc_id in written:
            self._brought.add(user_id, doc_id)
        # At once: nobody knows how this run ends, and what is removed after it must stay away.
        self._brought.keep()
        for order in orders:
            if order.after.doc_id not in written:
                if order.copy is not None:
                    self._target.chunks.place.delete(user_id, order.after.doc_id, [order.copy.copy_id])
                self._report.kept.append(order.document.note("it was changed in the new place meanwhile"))
                continue
            self._count(order)
            self._settle(order.after)
            self._read_back(order, clocks)

    def _write_copy(self, order: _Order) -> None:
        if order.copy is None:
            return
        user_id, doc_id, copy_id = order.after.user_id, order.after.doc_id, order.copy.copy_id
        self._target.chunks.save_copy(user_id, doc_id, order.copy)
        alike: dict[ChunkHits, list[int]] = {}
        for index, hits in order.document.hits.items():
            alike.setdefault(hits, []).append(index)
        for hits, indices in alike.items():
            self._target.chunks.place.add_hits(user_id, doc_id, copy_id, indices, hits.last, hits.count)

    def _settle(self, record: UserDocRecord) -> None:
        """Bring the readable copy in line, where there is a folder for it."""
        user_id, doc_id = record.user_id, record.doc_id
        if record.saved and self._target.chunks.documents is not None:
            self._target.chunks.settle(user_id, doc_id, lambda: self._target.store.get(user_id, doc_id))

    def _count(self, order: _Order) -> None:
        report, record = self._report, order.after
        if order.before is None:
            report.brought[record.user_state.value] += 1
            report.contents += record.full_content is not None
            report.kept_texts += len(order.document.texts)
        else:
            report.completed += 1
        if order.copy is not None:
            report.chunks += len(order.copy.indices)

    def _read_back(self, order: _Order, clocks: Clocks) -> None:
        record = order.after
        try:
            there = _read(self._target, record.user_id, record.doc_id)
            limit = self._target.store.history_limit
            wrong = ["its record is not there"] if there is None else _differences(there, order.document, limit)
        except CorruptDataError as error:
            wrong = [str(error)]
        if not wrong:
            self._report.verified += 1
            return
        now = self._target.begin(record.user_id)
        if now.clocks != clocks or not is_same_user(self._began, now.revision):
            note = order.document.note(f"its {', '.join(wrong)} can be somebody else's since")
            self._report.changed_meanwhile.append(note)
        else:
            self._report.mismatches.append(order.document.note(", ".join(wrong)))
