"""Writing into the new place, and reading back what was written."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import fields, replace
from datetime import datetime

import numpy as np

from rag_wiki.clock import Clock
from rag_wiki.errors import CorruptDataError
from rag_wiki.lifecycle.state_machine import describe
from rag_wiki.migrate.brought import Brought
from rag_wiki.migrate.item import Item
from rag_wiki.migrate.report import MigrationReport
from rag_wiki.migrate.vectors import Model
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkStore
from rag_wiki.storage.records import (
    Clocks,
    DocumentEvent,
    DocumentState,
    RetrievedText,
    UserChange,
    UserDocRecord,
    UserView,
)

__all__ = ["NEVER", "Writer", "compared_fields", "differing_chunks"]

_COPY_FIELDS = ("copy_id", "chunk_count", "content_source")
_TEXT_FIELDS = ("retrieved", "retrieved_seen", "retrieved_chars")
_WHY = "brought over from release 0.2"
NEVER = 2**31
"""Queries after which an idle document is told: here nobody asks for those."""
_WHAT = {
    DocumentState.SURFACED: "surfaced",
    DocumentState.SUGGESTED: "suggested",
    DocumentState.CLAIMED: "saved",
    DocumentState.PINNED: "pinned",
    DocumentState.DEMOTED: "demoted",
}


class Writer:
    """Writes documents, a page of one user at a time.

    Args:
        store: The new place.
        chunks: Where its chunks go.
        report: Told what was done.
        clock: Tells the time of the entry in each document's history.
        dry_run: Write nothing.
        overwrite: Replace what the new place has in another form.
        is_there: There is a new place to look into: a dry run makes none.
        brought: What earlier runs brought.
        bring_back: Bring what was removed from the new place since, too.
    """

    def __init__(
        self,
        store: StateStore,
        chunks: ChunkStore,
        report: MigrationReport,
        clock: Clock,
        *,
        dry_run: bool,
        overwrite: bool,
        is_there: bool,
        brought: Brought,
        bring_back: bool,
    ) -> None:
        self._store = store
        self._chunks = chunks
        self._report = report
        self._clock = clock
        self._dry_run = dry_run
        self._overwrite = overwrite
        self._is_there = is_there
        self._brought = brought
        self._bring_back = bring_back
        self._user: tuple[str, bool] = ("", False)
        self._after: tuple[Clocks, int] = (Clocks(), 0)
        """The user's clocks and revision as the last change left them."""

    # -- what is there already -------------------------------------------------------------------

    def compare(self, items: Sequence[Item], model: Model | None) -> list[Item]:
        """Those that are to be written, with the records that the new place has of them; the others are counted."""
        return [item for item in items if self._is_to_write(item, model)]

    def _is_to_write(self, item: Item, model: Model | None) -> bool:
        record = item.record
        if not self._knows(record.user_id):
            return self._may_come(item)
        try:
            item.existing = self._store.get(record.user_id, record.doc_id)
        except CorruptDataError as error:
            item.gives_way = self._overwrite
            if not self._overwrite:
                self._report.kept.append(item.note(str(error)))
            return self._overwrite
        if item.existing is None:
            return self._may_come(item)
        self._brought.add(record.user_id, record.doc_id)
        difference = _difference(item.existing, item)
        if difference:
            if not self._overwrite:
                self._report.kept.append(item.note(f"it has another {', '.join(difference)}"))
            return self._overwrite
        item.completes = not self._lacks_nothing(item, item.existing, model)
        if not item.completes:
            self._report.there += 1
            self._note_if_lost(item, item.existing)
        return item.completes

    def _may_come(self, item: Item) -> bool:
        """Whether a document that the new place does not have may come: what was removed there may not."""
        if self._bring_back or (item.record.user_id, item.record.doc_id) not in self._brought:
            return True
        self._report.removed.append(item.note("it was removed from the new place since an earlier run brought it"))
        return False

    def _knows(self, user_id: str) -> bool:
        """Whether the new place had anything of the user before this run."""
        if self._user[0] != user_id:
            self._user = (user_id, self._is_there and self._store.revision(user_id) != 0)
        return self._user[1]

    def _lacks_nothing(self, item: Item, existing: UserDocRecord, model: Model | None) -> bool:
        draft = item.draft
        if not draft.record.saved:
            return bool(existing.retrieved) or not draft.texts
        if draft.copy is None:
            return True
        if existing.copy_id is None:
            return False
        try:
            copy = self._chunks.load_copy(existing.user_id, existing.doc_id, existing.copy_id)
        except CorruptDataError:
            return False
        if copy is None:
            return False
        if model is not None:
            return copy.embedding == model.name and copy.vectors is not None and copy.vectors.shape[1] == model.width
        return copy.vectors is not None or draft.copy.vectors is None

    # -- writing ---------------------------------------------------------------------------------

    def write(self, user_id: str, items: Sequence[Item]) -> None:
        """Write documents: the copies first, then the records that name them, all in one step."""
        if self._dry_run:
            for item in items:
                self._count(item)
            return
        for item in items:
            if item.gives_way:
                # What can't be read back would keep the others from being changed along with it.
                self._write(user_id, [item])
        self._write(user_id, [item for item in items if not item.gives_way])

    def _write(self, user_id: str, items: Sequence[Item]) -> None:
        if not items:
            return
        try:
            for item in items:
                self._write_copy(item)
            written = self._write_records(user_id, items)
        except BaseException:
            # No record names these copies; and why it failed is what the caller must see.
            for item in items:
                with contextlib.suppress(Exception):
                    self._drop_copy(item)
            raise
        for doc_id in written:
            self._brought.add(user_id, doc_id)
        # At once: nobody knows how this run ends, and what is removed after it must stay away.
        self._brought.keep()
        for item in items:
            if item.record.doc_id not in written:
                self._drop_copy(item)
                self._report.kept.append(item.note("it was changed in the new place meanwhile"))
                continue
            self._tidy_up(item)
            self._count(item)
            self._read_back(item)
        self._check_user(user_id, [item for item in items if item.record.doc_id in written])

    def _write_copy(self, item: Item) -> None:
        if item.copy is None:
            return
        user_id, doc_id = item.record.user_id, item.record.doc_id
        self._chunks.save_copy(user_id, doc_id, item.copy)
        for index, hits in item.hits.items():
            self._chunks.place.add_hits(user_id, doc_id, item.copy.copy_id, [index], hits.last, hits.count)

    def _drop_copy(self, item: Item) -> None:
        if item.copy is not None:
            self._chunks.place.delete(item.record.user_id, item.record.doc_id, [item.copy.copy_id])

    def _write_records(self, user_id: str, items: Sequence[Item]) -> set[str]:
        """The ids of those that were written; somebody else may have changed one meanwhile."""
        now = self._clock()

        def decide(view: UserView) -> UserChange:
            going = [item for item in items if self._overwrite or _is_unchanged(item, view)]
            self._after = view.clocks, view.revision + any(_moves_revision(item, view) for item in going)
            ids = [item.record.doc_id for item in going]
            return UserChange(
                records=[replace(item.after, full_content=None) for item in going],
                contents={item.record.doc_id: item.after.full_content for item in going},
                events=[_event(item.record, now) for item in going if _has_event(item)],
                clear_texts=ids,
                texts=[text for item in going for text in item.draft.texts],
                outcome=set(ids),
            )

        if len(items) == 1 and items[0].gives_way:
            change = self._store.overwrite(user_id, items[0].record.doc_id, decide)
        else:
            change = self._store.change(user_id, [item.record.doc_id for item in items], decide)
        written: set[str] = change.outcome
        return written

    def _tidy_up(self, item: Item) -> None:
        user_id, doc_id = item.record.user_id, item.record.doc_id
        if item.record.saved:
            self._chunks.settle(user_id, doc_id, lambda: self._store.get(user_id, doc_id))
        replaced = None if item.existing is None else item.existing.copy_id
        if replaced is not None:
            self._chunks.retire(user_id, doc_id, replaced, keep=None if item.copy is None else item.copy.copy_id)

    def _count(self, item: Item) -> None:
        report, record = self._report, item.after
        if item.completes:
            report.completed += 1
        else:
            report.brought[record.user_state.value] += 1
        report.contents += record.full_content is not None
        report.kept_texts += len(item.draft.texts)
        report.user_pins += record.pinned_by_user
        report.notes += [item.note(text) for text in item.draft.notes]
        if item.copy is not None:
            chunks, without = len(item.copy.indices), len(item.copy.without_vector)
            report.chunks += chunks
            setattr(report, item.tally, getattr(report, item.tally) + chunks - without)
            report.vectors_missing += without
        self._note_if_lost(item, record)

    def _note_if_lost(self, item: Item, record: UserDocRecord) -> None:
        if record.saved and record.copy_id is None:
            why = f"it is {record.user_state}, and there is neither its text nor a chunk of it"
            self._report.lost.append(item.note(why))

    # -- reading back ----------------------------------------------------------------------------

    def _read_back(self, item: Item) -> None:
        try:
            wrong = [*self._differing_fields(item), *self._differing_chunks(item)]
        except CorruptDataError as error:
            wrong = [str(error)]
        if not wrong:
            self._report.verified += 1
        elif self._was_changed_since(item):
            self._report.changed_meanwhile.append(item.note(f"its {', '.join(wrong)} can be somebody else's since"))
        else:
            self._report.mismatches.append(item.note(", ".join(wrong)))

    def _was_changed_since(self, item: Item) -> bool:
        """Whether somebody else changed the user or the document since it was written: an application that runs."""
        user_id, doc_id = item.record.user_id, item.record.doc_id
        now = self._store.begin_query(user_id, NEVER, NEVER)
        if now.revision == 0:
            # Forgotten; but not if a record is left.
            return self._store.get(user_id, doc_id) is None
        events = self._store.history(user_id, doc_id)
        told = bool(events) and _has_event(item) and events[-1].why != _WHY
        return (now.clocks, now.revision) != self._after or told

    def _check_user(self, user_id: str, items: Sequence[Item]) -> None:
        """See that the counters of the user are there, too: without them no saved document answers."""
        saved = [item for item in items if item.after.saved]
        if saved and self._store.saved_count(user_id) == 0:
            found = self._store.get(user_id, saved[0].record.doc_id)
            if found is not None and found.saved:
                self._report.mismatches.append(saved[0].note("its user is said to have nothing saved"))

    def _differing_fields(self, item: Item) -> list[str]:
        expected = item.after
        found = self._store.get(expected.user_id, expected.doc_id)
        if found is None:
            return ["its record is not there"]
        wrong = [name for name in compared_fields() if getattr(found, name) != getattr(expected, name)]
        if item.draft.texts:
            texts = self._store.retrieved_texts(expected.user_id, expected.doc_id)
            wrong += ["retrieved texts"] if [*map(_told, texts)] != [*map(_told, item.draft.texts)] else []
        if _has_event(item) and _WHY not in {
            event.why for event in self._store.history(expected.user_id, expected.doc_id)
        }:
            wrong.append("history")
        return wrong

    def _differing_chunks(self, item: Item) -> list[str]:
        if item.copy is None:
            return []
        user_id, doc_id, copy_id = item.record.user_id, item.record.doc_id, item.copy.copy_id
        copy = self._chunks.load_copy(user_id, doc_id, copy_id)
        if copy is None:
            return ["its chunks are not there"]
        wrong = differing_chunks(copy, item.copy)
        wrong += [] if self._chunks.place.hits(user_id, doc_id, copy_id) == item.hits else ["chunks: hits"]
        return wrong


def compared_fields(*without: str) -> list[str]:
    """The fields of a record that are compared."""
    return [field.name for field in fields(UserDocRecord) if field.compare and field.name not in without]


_BROUGHT = compared_fields(*_COPY_FIELDS, *_TEXT_FIELDS, "full_content")


def _difference(existing: UserDocRecord, item: Item) -> list[str]:
    """The fields in which a record is not as an earlier run would have brought it; that may have had no chunks."""
    record = item.record
    other = [name for name in _BROUGHT if getattr(existing, name) != getattr(record, name)]
    known = (None, record.full_content, item.draft.own_content)
    if existing.full_content not in known and record.full_content is not None:
        other.append("full_content")
    return other


def _is_unchanged(item: Item, view: UserView) -> bool:
    """Whether the record in the new place is still as it was when it was compared."""
    existing = item.existing
    return view.records.get(item.record.doc_id) == (None if existing is None else replace(existing, full_content=None))


def _moves_revision(item: Item, view: UserView) -> bool:
    """Whether writing it moves the user's revision: what the index of the saved copies knows of it is another."""
    before = view.records.get(item.record.doc_id)
    return item.after.index_facts != (None if before is None else before.index_facts)


def _has_event(item: Item) -> bool:
    return not item.completes and item.record.user_state in _WHAT


def _event(record: UserDocRecord, now: datetime) -> DocumentEvent:
    return describe(record, record, _WHAT[record.user_state], _WHY, now)


def _told(text: RetrievedText) -> tuple[str, str, int | None]:
    return text.digest, text.text, text.chunk_index


def differing_chunks(one: ChunkCopy, other: ChunkCopy) -> list[str]:
    """What of two copies is not the same, in words; their ids are their own."""
    wrong = [f"chunks: {name}" for name in _COMPARED_CHUNKS if getattr(one, name) != getattr(other, name)]
    return wrong if _same_vectors(one, other) else [*wrong, "chunks: vectors"]


_COMPARED_CHUNKS = [field.name for field in fields(ChunkCopy) if field.name not in ("copy_id", "vectors")]


def _same_vectors(one: ChunkCopy, other: ChunkCopy) -> bool:
    """Whether two copies have the same vectors."""
    if one.vectors is None or other.vectors is None:
        return one.vectors is other.vectors
    return np.array_equal(one.vectors, other.vectors)
