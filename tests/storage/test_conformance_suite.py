"""The conformance suites themselves: they can be used as they say, and they notice a store that breaks a promise."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from rag_wiki import ChunkStore, ForgottenUser, MemoryStateStore, UserDocRecord
from rag_wiki.storage.chunk_places import MemoryPlace
from rag_wiki.storage.chunk_store import ChunkHits, ChunkPlace, StoredCopy
from rag_wiki.storage.codec import StoredChange, StoredDocument, StoredUser
from rag_wiki.testing import ChunkStoreConformance, StateStoreConformance

Step = Callable[[StoredUser, Mapping[str, StoredDocument]], StoredChange]


def test_the_examples_of_the_docstrings_work(tmp_path: Path) -> None:
    """The examples in the docstrings, as test files of somebody else's package, run the suites and pass."""
    (tmp_path / "my_package.py").write_text(
        textwrap.dedent(
            """
            from rag_wiki import MemoryStateStore
            from rag_wiki.storage.chunk_places import MemoryPlace


            class MyStateStore(MemoryStateStore):
                def __init__(self, place):
                    super().__init__()


            class MyPlace(MemoryPlace):
                def __init__(self, place):
                    super().__init__()
            """
        )
    )
    for suite in (StateStoreConformance, ChunkStoreConformance):
        code = re.search(r"::\n\n(    from .*?)\n\n(?=\S)", inspect.getdoc(suite) or "", re.DOTALL)
        assert code is not None
        (tmp_path / f"test_{suite.__name__.lower()}.py").write_text(textwrap.dedent(code[1]))

    command = [sys.executable, "-m", "pytest", "-q", "-W", "error", "-p", "no:cacheprovider", "-p", "no:asyncio"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run(
        [*command, "--rootdir", "."], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )

    assert run.returncode == 0, run.stdout + run.stderr
    tests = [name for suite in (StateStoreConformance, ChunkStoreConformance) for name in dir(suite)]
    ran = re.search(r"(\d+) passed", run.stdout)
    assert ran is not None
    assert int(ran[1]) >= sum(name.startswith("test_") for name in tests) > 100


@pytest.mark.parametrize("suite", [StateStoreConformance, ChunkStoreConformance])
def test_every_test_says_what_it_proves(suite: type) -> None:
    """Each test of the suites has a docstring, and none hides another one of the same name."""
    names = [name for part in suite.__mro__ for name in vars(part) if name.startswith("test_")]
    assert len(set(names)) == len(names)
    assert [name for name in names if not (getattr(suite, name).__doc__ or "").strip().endswith(".")] == []


# Stores that each break one promise


class _Twice(MemoryStateStore):
    """Carries each change out twice."""

    def _change(self, user_key: str, doc_keys: Sequence[str], step: Step) -> None:
        super()._change(user_key, doc_keys, step)
        super()._change(user_key, doc_keys, step)


class _HalfDone(MemoryStateStore):
    """Moves the clock before it asks the rule."""

    def _change(self, user_key: str, doc_keys: Sequence[str], step: Step) -> None:
        user = self._users[user_key] = self._user(user_key)
        user.counters = user.counters._replace(queries=user.counters.queries + 1)
        super()._change(user_key, doc_keys, step)


class _Unseen(MemoryStateStore):
    """Shows a rule no more than 500 records."""

    def _change(self, user_key: str, doc_keys: Sequence[str], step: Step) -> None:
        super()._change(user_key, doc_keys[:500], step)


class _Without(MemoryStateStore):
    """Leaves one part of each change out."""

    part = ""
    nothing: Any = ()

    def _change(self, user_key: str, doc_keys: Sequence[str], step: Step) -> None:
        super()._change(user_key, doc_keys, lambda *seen: step(*seen)._replace(**{self.part: self.nothing}))


class _WithoutEvents(_Without):
    """Keeps no history."""

    part = "events"


class _WithoutTexts(_Without):
    """Keeps no retrieved texts."""

    part = "texts"


class _WithoutClearing(_Without):
    """Never clears retrieved texts."""

    part = "clear_texts"


class _WithoutHits(_Without):
    """Counts no hits."""

    part = "chunk_hits"


class _WithoutDeleting(_Without):
    """Deletes nothing."""

    part = "deleted"


class _WithoutContents(_Without):
    """Changes no content."""

    part = "contents"
    nothing: Any = {}  # noqa: RUF012 - never changed


class _Living(MemoryStateStore):
    """Hands out the same object again."""

    def get(self, user_id: str, doc_id: str) -> UserDocRecord | None:
        found = super().get(user_id, doc_id)
        held: dict[str, UserDocRecord] = self.__dict__.setdefault("held", {})
        return None if found is None else held.setdefault(doc_id, found)


class _Folding(MemoryStateStore):
    """Takes ids that differ in case for one."""

    def _doc_key(self, doc_id: str) -> str:
        return super()._doc_key(doc_id).lower()


class _FoldingUsers(MemoryStateStore):
    """Takes users that differ in trailing blanks for one."""

    def _user_key(self, user_id: str) -> str:
        return super()._user_key(user_id.strip())


class _Normalising(MemoryStateStore):
    """Takes ids that look alike for one."""

    def _doc_key(self, doc_id: str) -> str:
        return super()._doc_key(unicodedata.normalize("NFC", doc_id))


class _Scanning(MemoryStateStore):
    """Can be told how to get a list wrong."""

    def _scan(
        self,
        user_key: str,
        states: Sequence[str] | None,
        *,
        after: str | None = None,
        limit: int | None = None,
        content: bool = False,
    ) -> tuple[StoredUser, list[StoredDocument]]:
        user, found = super()._scan(user_key, states, after=after, content=content)
        return user, self.wrongly(found, after)[:limit]

    def wrongly(self, found: list[StoredDocument], after: str | None) -> list[StoredDocument]:
        """What is told instead."""
        return found


class _SkippingPages(_Scanning):
    """Skips a record at the start of each further page."""

    def wrongly(self, found: list[StoredDocument], after: str | None) -> list[StoredDocument]:
        return found[1:] if after is not None else found


class _EmptyIsNone(_Scanning):
    """Takes empty content for none."""

    def wrongly(self, found: list[StoredDocument], after: str | None) -> list[StoredDocument]:
        return [item._replace(content=None) if item.content and '""' in item.content else item for item in found]


class _Overlooking(MemoryStateStore):
    """Does not tell of saved documents that were let go."""

    def _read_revised(self, user_key: str, after: int) -> tuple[StoredUser, list[StoredDocument] | None]:
        user, found = super()._read_revised(user_key, after)
        return user, [item for item in found or () if item.state != "DEMOTED"]


class _Renewed(_Scanning):
    """Begins each page with the record that ended the one before."""

    def wrongly(self, found: list[StoredDocument], after: str | None) -> list[StoredDocument]:
        return [self._user("alice").documents[after], *found] if after is not None and found else found


class _LateIdle(MemoryStateStore):
    """Names idle documents one query late."""

    def _read_start(self, user_key: str, lapse_after: int, demote_after: int) -> tuple[StoredUser, Sequence[str]]:
        return super()._read_start(user_key, lapse_after + 1, demote_after + 1)


class _EarlyIdle(MemoryStateStore):
    """Names idle documents one query early."""

    def _read_start(self, user_key: str, lapse_after: int, demote_after: int) -> tuple[StoredUser, Sequence[str]]:
        return super()._read_start(user_key, lapse_after - 1, demote_after - 1)


class _Backwards(MemoryStateStore):
    """Tells history and texts newest first."""

    def _read_events(self, user_key: str, doc_key: str) -> Sequence[str]:
        return super()._read_events(user_key, doc_key)[::-1]

    def _read_texts(self, user_key: str, doc_key: str) -> Sequence[str]:
        return super()._read_texts(user_key, doc_key)[::-1]


class _Crowded(MemoryStateStore):
    """Calls every user active."""

    def _active_users(self) -> Iterable[str]:
        return [user.counters.user_id for user in self._users.values()]


class _Snobbish(MemoryStateStore):
    """Knows those alone who saved something."""

    def _all_users(self) -> Iterable[str]:
        return self._active_users()


class _Forgetful(MemoryStateStore):
    """Forgets all users at once."""

    def _forget(self, user_key: str) -> ForgottenUser:
        counted = super()._forget(user_key)
        self._users.clear()
        return counted


class _Remembering(MemoryStateStore):
    """Forgets records, but not the history."""

    def _forget(self, user_key: str) -> ForgottenUser:
        events = self._user(user_key).events
        counted = super()._forget(user_key)
        self._users[user_key] = replace(self._user(user_key), events=events)
        return counted


class _Reusing(MemoryStateStore):
    """Starts the revision of a forgotten user at the same number again."""

    def _change(self, user_key: str, doc_keys: Sequence[str], step: Step) -> None:
        def plainly(user: StoredUser, documents: Mapping[str, StoredDocument]) -> StoredChange:
            change = step(user, documents)
            moved = change.user.revision != user.revision
            return change._replace(user=change.user._replace(revision=user.revision + moved))

        super()._change(user_key, doc_keys, plainly)


class _Generous(MemoryStateStore):
    """Gives a job's turn to everybody."""

    def _swap_note(self, name: str, expected: str | None, text: str) -> bool:
        super()._swap_note(name, expected, text)
        return True


STATE_FAULTS: dict[type[MemoryStateStore], str] = {
    _Twice: "test_counts_are_exact_under_contention",
    _HalfDone: "test_an_exception_of_a_rule_leaves_everything_as_it_was",
    _Unseen: "test_a_change_of_many_documents_is_one_step_too",
    _WithoutEvents: "test_history_is_in_order_and_complete",
    _WithoutTexts: "test_awkward_retrieved_texts_come_back",
    _WithoutClearing: "test_clearing_texts_keeps_those_of_the_same_change",
    _WithoutHits: "test_hits_of_a_change_reach_the_chunks_beside_the_state",
    _WithoutDeleting: "test_delete_removes_every_trace_and_tells",
    _WithoutContents: "test_contents_replace_and_remove",
    _Living: "test_a_returned_record_is_a_copy",
    _Folding: "test_awkward_document_ids_stay_apart",
    _FoldingUsers: "test_awkward_user_ids_stay_apart",
    _Normalising: "test_awkward_document_ids_stay_apart",
    _SkippingPages: "test_pages_cover_everything_once",
    _EmptyIsNone: "test_empty_content_is_not_absent_content",
    _Overlooking: "test_what_changed_since_a_revision_is_told",
    _Renewed: "test_pages_are_changed_one_by_one",
    _LateIdle: "test_what_lapses_is_exact_at_the_boundary",
    _EarlyIdle: "test_what_is_let_go_is_exact_at_the_boundary",
    _Backwards: "test_retrieved_texts_come_back_in_the_order_first_seen",
    _Crowded: "test_active_users_have_a_saved_document",
    _Snobbish: "test_all_users_are_those_of_whom_something_is_kept",
    _Forgetful: "test_forgetting_leaves_other_users_alone",
    _Remembering: "test_forgetting_leaves_nothing_of_the_user",
    _Reusing: "test_a_revision_never_comes_back",
    _Generous: "test_a_note_is_swapped_only_from_what_was_expected",
}
"""A store that breaks a promise, and the test that must notice."""


def ask(suite: type, promise: str, store: object) -> None:
    """Run one test of a suite on a store."""
    getattr(suite(), promise)(store)


@pytest.mark.parametrize(("fault", "promise"), STATE_FAULTS.items())
def test_the_state_suite_notices(fault: type[MemoryStateStore], promise: str) -> None:
    """The test passes on a sound store, and fails on the one that breaks its promise."""
    ask(StateStoreConformance, promise, MemoryStateStore())
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        ask(StateStoreConformance, promise, fault())


# Places that each break one promise


class _Inexact(MemoryPlace):
    """Counts a hit of many chunks for the first one only."""

    def add_hits(
        self, user_id: str, doc_id: str, copy_id: str, indices: Sequence[int], now: datetime, count: int = 1
    ) -> None:
        super().add_hits(user_id, doc_id, copy_id, indices[:1], now, count)


class _OneByOne(MemoryPlace):
    """Counts one hit, however many there were."""

    def add_hits(
        self, user_id: str, doc_id: str, copy_id: str, indices: Sequence[int], now: datetime, count: int = 1
    ) -> None:
        super().add_hits(user_id, doc_id, copy_id, indices, now)


class _Moving(MemoryPlace):
    """Writes the copy anew when a hit is counted."""

    def add_hits(
        self, user_id: str, doc_id: str, copy_id: str, indices: Sequence[int], now: datetime, count: int = 1
    ) -> None:
        copy = self.read(user_id, doc_id, copy_id, texts=True, vectors=True)
        assert copy is not None
        self.write(user_id, doc_id, copy)
        super().add_hits(user_id, doc_id, copy_id, indices, now, count)


class _Sticky(MemoryPlace):
    """Keeps the hits of a document that was deleted."""

    def add_hits(
        self, user_id: str, doc_id: str, copy_id: str, indices: Sequence[int], now: datetime, count: int = 1
    ) -> None:
        super().add_hits(user_id, doc_id, copy_id, indices, now, count)
        self.__dict__.setdefault("kept", {}).update(super().hits(user_id, doc_id, copy_id))

    def hits(self, user_id: str, doc_id: str, copy_id: str) -> dict[int, ChunkHits]:
        return dict(self.__dict__.get("kept", {}))


class _Mixing(MemoryPlace):
    """Finds a copy by its id alone."""

    def read(self, user_id: str, doc_id: str, copy_id: str, *, texts: bool, vectors: bool) -> StoredCopy | None:
        for user, documents in self._copies.items():
            for doc, copies in documents.items():
                if copy_id in copies:
                    return super().read(user, doc, copy_id, texts=texts, vectors=vectors)
        return None


class _Shortened(MemoryPlace):
    """Reads no more than 500 at a time."""

    def read_many(
        self, user_id: str, wanted: Iterable[tuple[str, str]], *, texts: bool, vectors: bool
    ) -> Iterator[Any]:
        return super().read_many(user_id, list(wanted)[:500], texts=texts, vectors=vectors)


class _Greedy(MemoryPlace):
    """Removes all copies of a document when one is named."""

    def delete(self, user_id: str, doc_id: str, copy_ids: Collection[str] | None = None) -> int:
        return super().delete(user_id, doc_id)


class _Timid(MemoryPlace):
    """Removes nothing that is named."""

    def delete(self, user_id: str, doc_id: str, copy_ids: Collection[str] | None = None) -> int:
        return super().delete(user_id, doc_id) if copy_ids is None else 0


class _Miscounting(MemoryPlace):
    """Counts documents instead of chunks."""

    def delete_user(self, user_id: str) -> int:
        documents = len(self._copies.get(user_id, {}))
        super().delete_user(user_id)
        return documents


class _Emptying(MemoryPlace):
    """Removes everybody's chunks with one user's."""

    def delete_user(self, user_id: str) -> int:
        chunks = super().delete_user(user_id)
        self._copies.clear()
        return chunks


class _Reversed(MemoryPlace):
    """Lists the newest copy first."""

    def copies(self, user_id: str, doc_id: str) -> list[str]:
        return super().copies(user_id, doc_id)[::-1]


class _SumsUp(MemoryPlace):
    """Tells how many hits there were instead of how many chunks were hit."""

    def hit_counts(self, user_id: str, wanted: Iterable[tuple[str, str]]) -> dict[str, int]:
        return {
            doc_id: sum(hits.count for hits in self.hits(user_id, doc_id, copy_id).values())
            for doc_id, copy_id in wanted
        }


class _Everything(MemoryPlace):
    """Reads texts and vectors although nobody asked."""

    def read(self, user_id: str, doc_id: str, copy_id: str, *, texts: bool, vectors: bool) -> StoredCopy | None:
        return super().read(user_id, doc_id, copy_id, texts=True, vectors=True)


CHUNK_FAULTS: dict[type[ChunkPlace], str] = {
    _Inexact: "test_hits_are_exact_under_contention",
    _OneByOne: "test_saving_takes_the_hits_of_the_chunks",
    _Moving: "test_hits_never_touch_the_copy",
    _Sticky: "test_delete_removes_chunks_and_hits_and_tells",
    _Mixing: "test_what_is_not_there_is_none",
    _Shortened: "test_many_copies_come_in_one_go",
    _Greedy: "test_retiring_leaves_copies_that_somebody_may_be_about_to_name",
    _Timid: "test_retiring_removes_the_copy_that_was_replaced",
    _Miscounting: "test_deleting_a_user_counts_chunks",
    _Emptying: "test_awkward_user_ids_stay_apart",
    _Reversed: "test_the_newest_copy_is_the_one_of_the_dictionaries",
    _SumsUp: "test_hit_rates_are_of_the_copies_asked_for",
    _Everything: "test_only_the_parts_asked_for_are_read",
}
"""A place that breaks a promise, and the test that must notice."""


@pytest.mark.parametrize(("fault", "promise"), CHUNK_FAULTS.items())
def test_the_chunk_suite_notices(fault: type[ChunkPlace], promise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test passes on a sound place, and fails on the one that breaks its promise."""
    test = getattr(ChunkStoreConformance(), promise)
    more = {"monkeypatch": monkeypatch} if "monkeypatch" in inspect.signature(test).parameters else {}
    test(ChunkStore(), **more)
    with pytest.raises((AssertionError, ValueError, RuntimeError, pytest.fail.Exception)):
        test(ChunkStore(place=fault()), **more)
