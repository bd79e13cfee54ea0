"""The contract of every state store: what it promises, and the few hooks that a backend supplies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta
from functools import cached_property, partial
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import unquote

from typing_extensions import Self

from rag_wiki.clock import as_utc
from rag_wiki.errors import CorruptDataError, StorageError
from rag_wiki.storage.change_lanes import ChangeLanes, ChangeRequest, RuleError
from rag_wiki.storage.codec import (
    FreshRecords,
    StoredChange,
    StoredDocument,
    StoredUser,
    decode_event,
    decode_id,
    decode_moment,
    decode_note,
    decode_record,
    decode_text,
    dump_json,
    encode_change,
    first_revision,
    forget_keys,
    is_same_record,
    key_of_document,
    key_of_user,
    settle,
    storage_key,
)
from rag_wiki.storage.records import (
    COUNTING_STATES,
    SAVED_STATES,
    Clocks,
    DocumentEvent,
    DocumentState,
    ForgottenUser,
    PurgedDocument,
    QueryStart,
    RetrievedText,
    SavedChanges,
    UserChange,
    UserDocRecord,
    UserView,
    check_doc_id,
    check_user_id,
)

if TYPE_CHECKING:
    from typing_extensions import Self

    from rag_wiki.storage.chunk_store import ChunkStore

T = TypeVar("T")

_MOST_TOLD = 10
"""Records that can't be read back, in one message."""
_JOB = "job:"
_NOTE = "note:"
"""What the names of jobs and of other notes begin with where they are kept together."""

__all__ = [
    "COUNTING_STATES",
    "SAVED_STATES",
    "ChangeRequest",
    "Clocks",
    "DocumentEvent",
    "DocumentState",
    "ForgottenUser",
    "PurgedDocument",
    "QueryStart",
    "RetrievedText",
    "SavedChanges",
    "StateStore",
    "UserChange",
    "UserDocRecord",
    "UserView",
    "check_doc_id",
    "check_user_id",
]


class StateStore(ABC):
    """Keeps records, events and retrieved texts of users' documents.

    The public methods are written here, once. A backend supplies the hooks below the line; they move
    encoded values (see `rag_wiki.storage.codec`) and know no rules.

    Promises, the same for every backend:

    - `get` of an unknown document is `None`; deleting one is no error and tells `False`.
    - What comes back is a copy: changing it changes nothing in the store.
    - Lists are sorted by document id.
    - Times come back aware, in UTC, equal to what went in.
    - Any two different ids are different, whatever characters they hold.
    - `change` is atomic over threads, processes and hosts that share the store.
    - Bytes that can't be read back raise `CorruptDataError`; they are never taken for absent.
    """

    history_limit: int = 50
    """Events kept per document; the oldest go first."""

    waits: bool = True
    """Whether its calls may wait for a disk, a server or a lock; those that don't are made on the event loop."""

    # -- records ---------------------------------------------------------------------------------

    def get(self, user_id: str, doc_id: str) -> UserDocRecord | None:
        """The record with its content, or `None`."""
        user_key = self._user_key(user_id)
        user, stored = self._read_document(user_key, self._doc_key(doc_id))
        return None if stored is None else decode_record(stored, user.clocks, user_key)

    def upsert(self, record: UserDocRecord) -> None:
        """Write the record as it is, content included, in place of the one before."""
        record = replace(record)

        def decide(_: UserView) -> UserChange:
            return UserChange(records=[record], contents={record.doc_id: record.full_content})

        self.overwrite(record.user_id, record.doc_id, decide)

    def delete(self, user_id: str, doc_id: str) -> bool:
        """Remove the record with its history and retrieved texts; tells whether there was one."""
        doc_id = check_doc_id(doc_id)

        def decide(view: UserView) -> UserChange:
            return UserChange(deleted=[doc_id], outcome=doc_id in view.records)

        return bool(self.overwrite(user_id, doc_id, decide).outcome)

    def list_claimed(self, user_id: str) -> list[UserDocRecord]:
        """The user's CLAIMED records."""
        return self.list_by_state(user_id, [DocumentState.CLAIMED])

    def list_pinned(self, user_id: str) -> list[UserDocRecord]:
        """The user's PINNED records."""
        return self.list_by_state(user_id, [DocumentState.PINNED])

    def list_surfaced(self, user_id: str) -> list[UserDocRecord]:
        """The user's SURFACED and SUGGESTED records."""
        return self.list_by_state(user_id, COUNTING_STATES)

    def list_for_decay(self, user_id: str) -> list[UserDocRecord]:
        """The user's CLAIMED and PINNED records."""
        return self.list_by_state(user_id, SAVED_STATES)

    def list_by_state(
        self, user_id: str, states: Iterable[DocumentState] | None = None, *, content: bool = True
    ) -> list[UserDocRecord]:
        """The user's records in `states` (all when `None`), with or without their content."""
        wanted = None if states is None else sorted(DocumentState(state).value for state in states)
        user_key = self._user_key(user_id)
        user, stored = self._scan(user_key, wanted, content=content)
        records = [decode_record(item, user.clocks, user_key) for item in stored]
        return sorted(records, key=lambda record: record.doc_id)

    def list_saved(self, user_id: str) -> tuple[list[UserDocRecord], list[UserDocRecord]]:
        """The user's CLAIMED and PINNED records without content, and stand-ins for those that can't be read back.

        A stand-in has the state and the id of what is stored (the stored key, where that is a hash of the id) and
        nothing else: for those who go on without a record, and say which one.
        """
        user_key = self._user_key(user_id)
        user, stored = self._scan(user_key, sorted(state.value for state in SAVED_STATES))
        page = _Page.of(stored, user.clocks, user_key)
        records = sorted((record for _, record in page.read.values()), key=lambda record: record.doc_id)
        return records, [_stand_in(item, user_id, _id_of(item.key)) for item, _ in page.unreadable]

    def pages(
        self, user_id: str, states: Iterable[DocumentState] | None = None, size: int = 500
    ) -> Iterator[list[UserDocRecord]]:
        """The user's records in `states`, without content, `size` at a time; memory stays bounded.

        Raises:
            CorruptDataError: When all others were told: some can't be read back.
        """
        for page in self._pages(user_id, states, size):
            yield [record for _, record in page.read.values()]

    def _pages(self, user_id: str, states: Iterable[DocumentState] | None, size: int) -> Iterator[_Page]:
        """Pages with something in them that can be read; in the end, the error of what can't."""
        wanted = None if states is None else sorted(DocumentState(state).value for state in states)
        user_key, after = self._user_key(user_id), None
        unreadable: list[CorruptDataError] = []
        while True:
            user, stored = self._scan(user_key, wanted, after=after, limit=size)
            page = _Page.of(stored, user.clocks, user_key)
            unreadable += [error for _, error in page.unreadable]
            if page.read:
                yield page
            if len(stored) < size:
                break
            after = stored[-1].key
        if len(unreadable) > 1:
            told = " ".join(map(str, unreadable[:_MOST_TOLD]))
            msg = f"{len(unreadable)} records of user {user_id!r} can't be read back: {told}"
            raise CorruptDataError(msg) from unreadable[0]
        if unreadable:
            raise unreadable[0]

    def saved_since(self, user_id: str, revision: int) -> SavedChanges | None:
        """What happened to the user's saved documents since a revision; `None` when that can't be told.

        Then `list_saved` tells what there is.
        """
        user_key = self._user_key(user_id)
        user, stored = self._read_revised(user_key, revision)
        if stored is None or not user.floor or not user.floor <= revision <= user.revision:
            return None
        page = _Page.of(stored, user.clocks, user_key)
        if page.unreadable:
            return None
        records = [record for _, record in page.read.values()]
        return SavedChanges(
            [record for record in records if record.saved], [record.doc_id for record in records if not record.saved]
        )

    def list_active_users(self) -> list[str]:
        """The users with a CLAIMED or PINNED document, sorted.

        Raises:
            CorruptDataError: The id of one of them can't be read back; `active_users` tells the others.
        """
        users, unreadable = self.active_users()
        for error in unreadable.values():
            raise error
        return users

    def active_users(self) -> tuple[list[str], dict[str, CorruptDataError]]:
        """The users with a CLAIMED or PINNED document, sorted; and those whose id can't be read back, with the error.

        These bear the id that their stored key was made of (the key itself, where that is a hash).
        """
        return _told_apart(self._active_users())

    def all_users(self) -> tuple[list[str], dict[str, CorruptDataError]]:
        """Everybody of whom something is kept, as `active_users` names them."""
        return _told_apart(self._all_users())

    def revision(self, user_id: str) -> int:
        """Moves whenever what the user saved, or how it is served, changes; 0 for a user of whom nothing is kept."""
        return self._read_user(self._user_key(user_id)).revision

    def saved_count(self, user_id: str) -> int:
        """How many documents a local copy answers for."""
        return self._read_user(self._user_key(user_id)).saved

    # -- a query ---------------------------------------------------------------------------------

    def begin_query(self, user_id: str, lapse_after: int, demote_after: int) -> QueryStart:
        """Read what a query needs before it starts; one trip, whatever is saved.

        Args:
            user_id: Whose query.
            lapse_after: Missed queries in a row after which a count starts again.
            demote_after: Searches without a hit in a row, for each saved document, after which one is let go.
        """
        user, idle = self._read_start(self._user_key(user_id), lapse_after, demote_after)
        return QueryStart(user.clocks, user.revision, user.saved, tuple(idle))

    def change(
        self,
        user_id: str,
        doc_ids: Iterable[str],
        decide: Callable[[UserView], UserChange],
        *,
        idle_keys: Sequence[str] = (),
    ) -> UserChange:
        """Read the named records, let `decide` say what to do, and do it: one atomic step.

        Args:
            user_id: Whose records.
            doc_ids: The documents that `decide` looks at or changes.
            decide: A pure function; it runs again when somebody else was faster.
            idle_keys: Further documents by stored key, as `begin_query` named them. One of them that can't be read
                back is passed over.

        Returns:
            The change that was carried out.
        """
        request = self._request(doc_ids, decide, idle_keys)
        self._lanes.run(self._user_key(user_id), request, partial(self._carry_out_all, user_id))
        return request.result()

    def overwrite(self, user_id: str, doc_id: str, decide: Callable[[UserView], UserChange]) -> UserChange:
        """`change` of one document whose record gives way, and so need not be readable.

        What can't be read back is seen by `decide` as a record of its id and state alone.
        """
        try:
            return self.change(user_id, [doc_id], decide)
        except CorruptDataError:
            request = self._request([doc_id], decide, ())
        user_key, doc_id = self._user_key(user_id), check_doc_id(doc_id)

        def decode(stored: StoredDocument, clocks: Clocks) -> UserDocRecord:
            try:
                return decode_record(stored, clocks, user_key)
            except CorruptDataError:
                return _stand_in(stored, user_id, doc_id)

        return self._carry_out_alone(user_id, request, decode)

    def request_change(
        self, doc_ids: Iterable[str], decide: Callable[[UserView], UserChange], *, idle_keys: Sequence[str] = ()
    ) -> ChangeRequest:
        """A change for `change_together`, described as for `change`."""
        return self._request(doc_ids, decide, idle_keys)

    def _request(
        self, doc_ids: Iterable[str], decide: Callable[[UserView], UserChange], idle_keys: Sequence[str]
    ) -> ChangeRequest:
        named = [self._doc_key(doc_id) for doc_id in doc_ids]
        spare = frozenset(idle_keys).difference(named) if idle_keys else _NONE
        return _Request(list(dict.fromkeys([*named, *idle_keys])), decide, spare)

    def change_together(self, user_id: str, requests: Sequence[ChangeRequest]) -> None:
        """Carry out several changes of a user, one after the other, in one atomic step.

        What came of each, its `result` tells; one that a rule refuses does not stop the others.
        """
        self._lanes.run_all(self._user_key(user_id), requests, partial(self._carry_out_all, user_id))

    def _carry_out_all(self, user_id: str, requests: Sequence[ChangeRequest]) -> None:
        user_key = self._user_key(user_id)
        try:
            applied, written = self._carry_out(user_id, requests, partial(self._fresh.decode, user_key))
        except Exception as error:
            if len(requests) > 1 and isinstance(error, (RuleError, CorruptDataError)):
                # One of them was refused, or is about what can't be read: each for itself then, so that nobody
                # pays for another.
                for request in requests:
                    self._carry_out_all(user_id, [request])
                return
            for request in requests:
                request.settle(error.error if isinstance(error, RuleError) else error)
            return
        for request, change in zip(requests, applied, strict=True):
            request.settle(change)
        self._fresh.keep(user_key, written.documents)

    def change_pages(
        self,
        user_id: str,
        states: Iterable[DocumentState],
        gather: Callable[[Sequence[UserDocRecord]], T],
        decide: Callable[[UserView, T], UserChange],
        *,
        size: int = 500,
    ) -> Iterator[UserChange]:
        """Change the user's records in `states`, `size` at a time: each page is one atomic step, memory stays bounded.

        A record that can't be read back keeps no other from being changed.

        Args:
            user_id: Whose records.
            states: Which of them.
            gather: Given a page as it was read, finds what `decide` needs besides, before the step begins.
            decide: As for `change`; it sees the records as they are by then, in whatever state.
            size: Records in a page.

        Yields:
            The change of each page.

        Raises:
            CorruptDataError: When all others are done: some can't be read back.
        """
        for page in self._pages(user_id, states, size):
            yield self._change_page(user_id, page, gather, decide)

    def _change_page(
        self,
        user_id: str,
        page: _Page,
        gather: Callable[[Sequence[UserDocRecord]], T],
        decide: Callable[[UserView, T], UserChange],
    ) -> UserChange:
        user_key = self._user_key(user_id)
        found = gather([record for _, record in page.read.values()])

        def decode(stored: StoredDocument, now: Clocks) -> UserDocRecord:
            # Hardly ever has anybody changed it meanwhile: then it need not be decoded again.
            before, record = page.read[stored.key]
            same = now == page.clocks and is_same_record(before, stored)
            return record if same else decode_record(stored, now, user_key)

        return self._carry_out_alone(user_id, ChangeRequest(list(page.read), lambda view: decide(view, found)), decode)

    def _carry_out_alone(
        self, user_id: str, request: ChangeRequest, decode: Callable[[StoredDocument, Clocks], UserDocRecord]
    ) -> UserChange:
        """Carry out one change that nobody else's goes along with."""
        try:
            (applied,), written = self._carry_out(user_id, [request], decode)
        except RuleError as error:
            raise error.error from None
        settle(written.documents)
        return applied

    def _carry_out(
        self,
        user_id: str,
        requests: Sequence[ChangeRequest],
        decode: Callable[[StoredDocument, Clocks], UserDocRecord],
    ) -> tuple[list[UserChange], StoredChange]:
        applied: list[UserChange] = []
        written: StoredChange | None = None
        refusal: RuleError | None = None

        def step(user: StoredUser, documents: Mapping[str, StoredDocument]) -> StoredChange:
            nonlocal written, refusal
            # Again from the start, when somebody else was faster.
            applied.clear()
            if not user.revision:
                user = user._replace(revision=first_revision())
            together, present = StoredChange(user), documents
            for request in requests:
                user = together.user
                try:
                    view = _view(user_id, user, request, present, decode)
                    change = request.decide(view)
                    stored = encode_change(view, user, change)
                    together = stored if len(requests) == 1 else together.followed_by(stored)
                except Exception as error:
                    refusal = RuleError(error)
                    raise refusal from error
                applied.append(change)
                if len(requests) > 1:
                    present = {**present, **{item.key: item for item in stored.documents}}
            written = together
            return together

        keys = requests[0].keys if len(requests) == 1 else list(dict.fromkeys(chain(*(item.keys for item in requests))))
        self._change(self._user_key(user_id), keys, step)
        if written is None or len(applied) != len(requests):
            # A store that keeps the exception to itself must not make a refusal look like a change.
            raise refusal or RuleError(RuntimeError("the store did not ask"))
        return applied, written

    @cached_property
    def _lanes(self) -> ChangeLanes:
        return ChangeLanes()

    @cached_property
    def _fresh(self) -> FreshRecords:
        return FreshRecords()

    # -- history, texts, forgetting ------------------------------------------------------------------

    def history(self, user_id: str, doc_id: str) -> list[DocumentEvent]:
        """The document's events, oldest first; at most `history_limit`."""
        return [decode_event(payload) for payload in self._read_events(self._user_key(user_id), self._doc_key(doc_id))]

    def retrieved_texts(self, user_id: str, doc_id: str) -> list[RetrievedText]:
        """The texts kept for saving the document, in the order in which they were first seen."""
        user_key, doc_key = self._user_key(user_id), self._doc_key(doc_id)
        return [decode_text(payload, user_key, doc_key) for payload in self._read_texts(user_key, doc_key)]

    def forget_user(self, user_id: str) -> ForgottenUser:
        """Remove every trace of the user from this store, chunks beside the state included, and count it."""
        # The state first: who applies a query meanwhile then finds no record whose chunks it would hit.
        forgotten = self._forget(self._user_key(user_id))
        self._fresh.forget(self._user_key(user_id))
        forgotten = replace(forgotten, chunks=self.chunk_store.delete_user(user_id))
        forget_keys()
        return forgotten

    def purge(self, doc_id: str) -> PurgedDocument:
        """Remove a document for all users, chunks beside the state included: it was withdrawn. Twice is no error.

        Records, history, content and retrieved texts go; a save under way then finds no record and fails. Take the
        document out of its collection first: who retrieves it afterwards meets it as a new one.

        Raises:
            CorruptDataError: When all others are done: the id of somebody who has it can't be read back.
        """
        users, unreadable = 0, list[CorruptDataError]()
        for found in self._users_with(self._doc_key(doc_id)):
            if isinstance(found, UnreadableUser):
                unreadable.append(found.error)
            else:
                users += self.delete(found, doc_id)
        # The copies after the records, which is when nobody names one any more.
        purged = replace(self.chunk_store.purge(doc_id), users=users)
        if unreadable:
            msg = (
                f"document {doc_id!r} is purged but for {len(unreadable)} users whose id can't be read back; "
                f"delete their rows: {unreadable[0]}"
            )
            raise CorruptDataError(msg) from unreadable[0]
        return purged

    # -- jobs and notes, which belong to no user -----------------------------------------------------

    def job_time(self, name: str) -> datetime | None:
        """When the named job last began, or `None`."""
        payload = self._read_note(_JOB + name)
        return None if payload is None else decode_moment(payload, f"time of job {name!r}")

    def claim_job(self, name: str, now: datetime, interval: timedelta) -> bool:
        """Take the named job's turn: `True` for one caller only, when the last turn is `interval` or more ago."""
        now = as_utc(now)
        while True:
            last = self._read_note(_JOB + name)
            # A moment in the future is a clock that was wrong once; it must not hold the job back for years.
            if last is not None and -interval <= now - decode_moment(last, f"time of job {name!r}") < interval:
                return False
            if self._swap_note(_JOB + name, last, now.isoformat()):
                return True

    def note(self, name: str) -> str | None:
        """What is kept under a name for all users (the calibration of an embedding model, say), or `None`."""
        payload = self._read_note(_NOTE + name)
        return None if payload is None else decode_note(payload, name)

    def keep_note(self, name: str, text: str) -> str:
        """Keep a text under a name unless there is one: the first counts for all workers. Returns what is kept."""
        while True:
            kept = self.note(name)
            if kept is not None:
                return kept
            if self._swap_note(_NOTE + name, None, dump_json(text)):
                return text

    def replace_note(self, name: str, text: str) -> None:
        """Keep a text under a name in place of what is there."""
        while not self._swap_note(_NOTE + name, self._read_note(_NOTE + name), dump_json(text)):
            pass

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        # Two stores of one user's memory would be two memories: a copy of what holds a store shares it.
        return self

    def __copy__(self) -> Self:
        return self

    def __getstate__(self) -> object:
        # Not `__reduce__`: a store that can travel says how by either method.
        msg = (
            f"a {type(self).__name__} can't be pickled: what it holds lives in this process. Make a store in each, "
            "or give SQLiteStateStore or SQLStateStore a URL: such a store opens its database anew where it arrives."
        )
        raise StorageError(msg)

    # -- lifetime --------------------------------------------------------------------------------

    def close(self) -> None:  # noqa: B027 - a store without connections has nothing to close
        """Close what this store opened itself; a client or engine that was handed in stays open."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _user_key(self, user_id: str) -> str:
        return key_of_user(user_id)

    def _doc_key(self, doc_id: str) -> str:
        return key_of_document(doc_id)

    # -- hooks: what a backend supplies ----------------------------------------------------------

    @property
    @abstractmethod
    def chunk_store(self) -> ChunkStore:
        """The place for chunks beside this state: one lifetime, seen by every worker that sees the state."""

    @abstractmethod
    def _read_user(self, user_key: str) -> StoredUser:
        """The user's counters; zeros for a new one."""

    @abstractmethod
    def _read_document(self, user_key: str, doc_key: str) -> tuple[StoredUser, StoredDocument | None]:
        """One document with its content, and the counters that belong to it."""

    @abstractmethod
    def _scan(
        self,
        user_key: str,
        states: Sequence[str] | None,
        *,
        after: str | None = None,
        limit: int | None = None,
        content: bool = False,
    ) -> tuple[StoredUser, list[StoredDocument]]:
        """Documents in `states` with keys beyond `after`, in the order of their keys, at most `limit`."""

    @abstractmethod
    def _read_start(self, user_key: str, lapse_after: int, demote_after: int) -> tuple[StoredUser, Sequence[str]]:
        """The user's counters, and the keys of the documents that have been idle for long.

        Those are the ones with `idle_seen` <= queries + 1 − `lapse_after`, or `idle_hit` <= searches + 1 −
        `demote_after` × saved.
        """

    def _read_revised(
        self,
        user_key: str,
        after: int,  # noqa: ARG002 - for those that know
    ) -> tuple[StoredUser, list[StoredDocument] | None]:
        """The user's counters, and the documents that were last `revised` beyond `after`; `None` where nobody knows."""
        return self._read_user(user_key), None

    @abstractmethod
    def _change(
        self,
        user_key: str,
        doc_keys: Sequence[str],
        step: Callable[[StoredUser, Mapping[str, StoredDocument]], StoredChange],
    ) -> None:
        """Read (without content), call `step`, write what it returns, atomically. `step` may be called again."""

    @abstractmethod
    def _read_events(self, user_key: str, doc_key: str) -> Sequence[str]:
        """Event payloads, oldest first."""

    @abstractmethod
    def _read_texts(self, user_key: str, doc_key: str) -> Sequence[str]:
        """Payloads of retrieved texts, oldest first."""

    @abstractmethod
    def _active_users(self) -> Iterable[str | UnreadableUser]:
        """The ids (not keys) of users with a saved document, in any order; the key of one whose id can't be read."""

    def _all_users(self) -> Iterable[str | UnreadableUser]:
        """Everybody who has a record, or counters, as `_active_users` names them; they may be removed meanwhile."""
        msg = f"{type(self).__name__} does not tell who its users are: name them"
        raise StorageError(msg)

    @abstractmethod
    def _users_with(self, doc_key: str) -> Iterable[str | UnreadableUser]:
        """The users with a record of a document, as `_active_users` names them; they may be removed meanwhile."""

    @abstractmethod
    def _forget(self, user_key: str) -> ForgottenUser:
        """Remove the user's records, events, texts and counters."""

    @abstractmethod
    def _read_note(self, name: str) -> str | None:
        """The text kept under a name that belongs to no user."""

    @abstractmethod
    def _swap_note(self, name: str, expected: str | None, text: str) -> bool:
        """Store `text` if the stored one still is `expected` (`None`: there is none); tells whether it did."""


class UnreadableUser(NamedTuple):
    """A user whose id can't be read back."""

    key: str
    """The stored key."""
    error: CorruptDataError


_NONE: frozenset[str] = frozenset()


class _Request(ChangeRequest):
    """A change that may do without some of its documents: `spare` are their keys."""

    def __init__(self, keys: Sequence[str], decide: Callable[[UserView], UserChange], spare: frozenset[str]) -> None:
        super().__init__(keys, decide)
        self.spare = spare


class _Page(NamedTuple):
    """Documents that were read together, each decoded for itself."""

    clocks: Clocks
    read: dict[str, tuple[StoredDocument, UserDocRecord]]
    """By stored key."""
    unreadable: list[tuple[StoredDocument, CorruptDataError]]

    @classmethod
    def of(cls, stored: Iterable[StoredDocument], clocks: Clocks, user_key: str) -> _Page:
        page = cls(clocks, {}, [])
        for item in stored:
            try:
                page.read[item.key] = item, decode_record(item, clocks, user_key)
            except CorruptDataError as error:
                page.unreadable.append((item, error))
        return page


def _view(
    user_id: str,
    user: StoredUser,
    request: ChangeRequest,
    present: Mapping[str, StoredDocument],
    decode: Callable[[StoredDocument, Clocks], UserDocRecord],
) -> UserView:
    """What a request's rule sees, of the documents that there are."""
    clocks, found = user.clocks, dict[str, UserDocRecord]()
    for key in request.keys:
        stored = present.get(key)
        if stored is None:
            continue
        try:
            record = decode(stored, clocks)
        except CorruptDataError:
            if not (isinstance(request, _Request) and key in request.spare):
                raise
        else:
            found[record.doc_id] = record
    return UserView(user_id, clocks, user.revision, found, user.saved)


def _told_apart(found: Iterable[str | UnreadableUser]) -> tuple[list[str], dict[str, CorruptDataError]]:
    """The users, sorted; and those whose id can't be read back, with the error."""
    users, unreadable = list[str](), dict[str, CorruptDataError]()
    for user in found:
        if isinstance(user, UnreadableUser):
            unreadable[_id_of(user.key)] = user.error
        else:
            users.append(user)
    return sorted(users), unreadable


def _stand_in(stored: StoredDocument, user_id: str, doc_id: str) -> UserDocRecord:
    """What is known of a record that can't be read back: its state, which is what the user's counters count."""
    try:
        state = DocumentState(stored.state)
    except ValueError:
        state = DocumentState.DEMOTED
    record = UserDocRecord(user_id, doc_id, doc_id, "", user_state=state)
    # Readings that no record has: whatever takes its place differs from it in where a store finds it.
    return record.changed(queries_missed=-1, cache_miss_streak=-1)


def read_user_id(user_key: str, payload: str | bytes) -> str | UnreadableUser:
    """The user id of a payload, or what is known instead when it can't be read back."""
    try:
        return decode_id(payload)
    except CorruptDataError as error:
        return UnreadableUser(user_key, error)


def _id_of(key: str) -> str:
    """The id that a stored key was made of; the key itself where that is a hash."""
    made_of = unquote(key, errors="surrogatepass")
    return made_of if storage_key(made_of) == key else key
