"""The one translation between records and their stored form, shared by all backends.

A record's payload is one JSON object of the fields that differ from their defaults. Two fields are not
stored as they are: `queries_missed` and `cache_miss_streak` grow with every query that touches *other*
documents, so the payload holds the reading of the user's clock at which they were zero.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, fields
from datetime import date, datetime
from functools import lru_cache
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import numpy as np

from rag_wiki.clock import as_utc, parse_utc
from rag_wiki.errors import CorruptDataError
from rag_wiki.forks import in_each_process
from rag_wiki.storage.records import (
    NEW_LIFE,
    NOTHING,
    TIME_FIELDS,
    Clocks,
    DocumentEvent,
    DocumentState,
    RetrievedText,
    UserChange,
    UserDocRecord,
    UserView,
    check_doc_id,
    check_user_id,
    join_halves,
)

__all__ = [
    "FreshRecords",
    "StoredChange",
    "StoredDocument",
    "StoredUser",
    "decode_event",
    "decode_id",
    "decode_moment",
    "decode_note",
    "decode_record",
    "decode_text",
    "decode_user",
    "dump_json",
    "encode_change",
    "encode_record",
    "forget_keys",
    "is_same_record",
    "key_of_document",
    "key_of_user",
    "plain",
    "settle",
    "storage_key",
]

T = TypeVar("T")

UNREADABLE = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
"""What reading bytes that nobody wrote like that may raise: a store's own columns hold values of any type."""

_MOST_FLOORS = 32
_MOST_VALUES = 2**14
_LONGEST_NUMBER_BITS = 4096
LONGEST_KEY = 200
"""Longer encoded ids become a hash: databases limit the length of what they index."""
_PLAIN_KEY = re.compile(rf"[A-Za-z0-9_.-]{{1,{LONGEST_KEY}}}")
"""Ids that encoding would leave as they are: most, and a query asks for many keys."""
_to_json = json.JSONEncoder(ensure_ascii=True, separators=(",", ":"), allow_nan=False).encode


class StoredUser(NamedTuple):
    """A user's counters as stored."""

    user_id: str = ""
    queries: int = 0
    searches: int = 0
    revision: int = 0
    saved: int = 0
    floor: int = 0
    """The revision since which every change to a saved document is marked on it: see `StoredDocument.revised`."""

    @property
    def clocks(self) -> Clocks:
        """The two clocks."""
        return Clocks(self.queries, self.searches)


class StoredDocument(NamedTuple):
    """A record as stored. `content` is `None` when absent or not read.

    A tuple, because a decay run makes millions of them, and the garbage collector looks into anything else.
    """

    key: str
    state: str
    payload: str | RecordPayload
    idle_seen: int | None = None
    """Query clock at the last fetch, while a count or suggestion can lapse; else `None`."""
    idle_hit: int | None = None
    """Search clock at the last hit, while a miss streak can demote; else `None`."""
    score: float = 1.0
    content: str | None = None
    revised: int | None = None
    """Written only: the user's revision that this change to a saved document makes; `None` leaves the one before."""

    @property
    def text(self) -> str:
        """The payload as stores keep it: one line of ASCII."""
        return self.payload if isinstance(self.payload, str) else self.payload.text


class StoredChange(NamedTuple):
    """A `UserChange` as a backend carries it out, in this order: deletions first."""

    user: StoredUser
    deleted: Sequence[str] = ()
    scores: Sequence[tuple[str, float]] = ()
    """(document key, score) of documents that are not among `documents`."""
    documents: Sequence[StoredDocument] = ()
    """Written without `content`; in the order of the records that they are the form of."""
    only_payload: AbstractSet[str] = frozenset()
    """The keys of those that differ from what is stored in nothing but their payload."""
    contents: Mapping[str, str | None] = NOTHING
    events: Sequence[tuple[str, str]] = ()
    """(document key, payload)."""
    clear_texts: Sequence[str] = ()
    texts: Sequence[tuple[str, str, str]] = ()
    """(document key, digest, payload)."""
    chunk_hits: Sequence[tuple[str, str, tuple[int, ...]]] = ()
    """(document id, copy id, chunk indices)."""
    hit_at: datetime | None = None

    def followed_by(self, later: StoredChange) -> StoredChange:
        """Both changes as one.

        Raises:
            ValueError: They can't be, because one of them deletes documents, or sets scores alone.
        """
        if self.deleted or later.deleted or self.scores or later.scores:
            msg = "a deletion, or a page of scores, is carried out by itself"
            raise ValueError(msg)
        earlier = {item.key: item for item in self.documents}
        written = dict(earlier)
        for item in later.documents:
            marked = item.revised is None and item.key in earlier
            written[item.key] = item._replace(revised=earlier[item.key].revised) if marked else item
        return StoredChange(
            user=later.user,
            documents=list(written.values()),
            # As before the first of them: in nothing but the payload, if each that wrote it changed no more.
            only_payload={
                key
                for key in written
                if key in later.only_payload | (earlier.keys() - {item.key for item in later.documents})
                and (key not in earlier or key in self.only_payload)
            },
            contents={**self.contents, **later.contents},
            events=[*self.events, *later.events],
            clear_texts=[*self.clear_texts, *later.clear_texts],
            texts=[*(text for text in self.texts if text[0] not in later.clear_texts), *later.texts],
            chunk_hits=[*self.chunk_hits, *later.chunk_hits],
            hit_at=later.hit_at or self.hit_at,
        )


@lru_cache(maxsize=4096)
def storage_key(text: str) -> str:
    """Encode an id so that different ids never share a key: ASCII, no separator, of bounded length."""
    if _PLAIN_KEY.fullmatch(text):
        return text
    text = join_halves(text)
    encoded = quote(text.encode("utf-8", "surrogatepass"), safe="")
    # quote() leaves `~` and `_` alone; `~` marks a hash here, so it must not begin an encoded id.
    encoded = encoded.replace("~", "%7E")
    if len(encoded) <= LONGEST_KEY:
        return encoded
    return "~" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def key_of_user(user_id: str) -> str:
    """The key of a user's id. Each question asks for it several times.

    Raises:
        InvalidUserError: The id names nobody.
    """
    return _known_key_of_user(user_id) if type(user_id) is str else storage_key(check_user_id(user_id))


def key_of_document(doc_id: str) -> str:
    """The key of a document's id.

    Raises:
        InvalidDocumentError: The id names nothing.
    """
    return _known_key_of_document(doc_id) if type(doc_id) is str else storage_key(check_doc_id(doc_id))


@lru_cache(maxsize=1024)
def _known_key_of_user(user_id: str) -> str:
    return storage_key(check_user_id(user_id))


@lru_cache(maxsize=4096)
def _known_key_of_document(doc_id: str) -> str:
    return storage_key(check_doc_id(doc_id))


def forget_keys() -> None:
    """Remember no id whose key was asked for."""
    for remembering in (storage_key, _known_key_of_user, _known_key_of_document):
        remembering.cache_clear()


def dump_json(value: object) -> str:
    """Compact ASCII JSON: any Python string survives it, NUL and lone surrogates too."""
    return _to_json(value)


def plain(value: Any) -> Any:
    """A value of any type in JSON types: what JSON has no type for, nests too deep or holds too much becomes text."""
    return _plain(value, _MOST_FLOORS, [_MOST_VALUES])


def _plain(value: Any, floors: int, left: list[int]) -> Any:
    """`plain`, with the floors and, in a list of one, the values that may still be written: parts may be shared."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    # Of a class that derives from these (an enumeration, say), the value alone: that is what is read back.
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        value = int(value)
        # Python refuses to write out the decimal digits of numbers that are longer than that.
        return value if value.bit_length() <= _LONGEST_NUMBER_BITS else hex(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, (datetime, date)):
        return value.isoformat()
    if floors > 0 and isinstance(value, (Mapping, list, tuple, set, frozenset)) and len(value) <= left[0]:
        left[0] -= len(value)
        if isinstance(value, Mapping):
            return {_as_text(name): _plain(item, floors - 1, left) for name, item in value.items()}
        items = [_plain(item, floors - 1, left) for item in value]
        # Equal sets are written alike, in whatever order they were made.
        return sorted(items, key=dump_json) if isinstance(value, (set, frozenset)) else items
    return _as_text(value)


def _as_text(value: object) -> str:
    nested = isinstance(value, (Mapping, list, tuple, set, frozenset))
    try:
        return f"({type(value).__name__})" if nested else str(value)
    except Exception:  # what str() raises is up to the value's class
        return f"({type(value).__name__})"


def load_json(payload: str | bytes, what: str) -> dict[str, Any]:
    """Parse a stored JSON object, or raise `CorruptDataError` that names `what`."""
    return _parse(payload, what, dict)


def _parse(payload: str | bytes, what: str, kind: type[T]) -> T:
    try:
        value = json.loads(payload)
    except UNREADABLE as error:
        msg = f"stored {what} can't be read back: {error}. Delete it, or restore it from a backup."
        raise CorruptDataError(msg) from error
    if not isinstance(value, kind):
        msg = f"stored {what} is a {type(value).__name__}, not a {kind.__name__}. Delete it, or restore a backup."
        raise CorruptDataError(msg)
    return value


def decode_id(payload: str | bytes) -> str:
    """The id that was stored with `dump_json`."""
    return _parse(payload, "id", str)


def decode_note(payload: str, name: str) -> str:
    """The text of a note that was stored with `dump_json`."""
    return _parse(payload, f"note {name!r}", str)


def decode_moment(payload: str, what: str) -> datetime:
    """The moment of its ISO form, aware, in UTC."""
    try:
        return parse_utc(payload)
    except UNREADABLE as error:
        msg = f"stored {what} can't be read back: {error}. Delete it, or restore it from a backup."
        raise CorruptDataError(msg) from error


def decode_user(user_id: str | bytes, *counters: str | int | None) -> StoredUser:
    """The user of an id's payload and its counters, in the order of `StoredUser`."""
    name = decode_id(user_id)
    try:
        return StoredUser(name, *(int(counter or 0) for counter in counters))
    except UNREADABLE as error:
        msg = f"stored counters of user {name!r} can't be read back: {error}. Delete them, or restore a backup."
        raise CorruptDataError(msg) from error


_DEFAULTS = {item.name: None if item.default is MISSING else item.default for item in fields(UserDocRecord)}
_ELSEWHERE = ("user_state", "full_content", "decay_score", "queries_missed", "cache_miss_streak")
"""Fields with a place of their own in `StoredDocument`, or kept as clock readings."""
_TIMES = frozenset(TIME_FIELDS)
_TUPLES = frozenset({"retrieved", "retrieved_seen"})
_STORED = tuple((name, default) for name, default in _DEFAULTS.items() if name not in _ELSEWHERE)


@lru_cache(maxsize=64)
def _moment_text(moment: datetime) -> str:
    """The ISO form of a moment; one operation writes the same one into every record that it touches."""
    return as_utc(moment).isoformat()


class RecordPayload:
    """The JSON of a record at a reading of the user's clocks, put together when somebody asks for it.

    While a record is fresh it is at hand itself: a store in memory hardly ever needs the text, and nobody needs to
    decode what was encoded a moment ago.
    """

    __slots__ = ("_fresh", "_text")

    def __init__(self, record: UserDocRecord, seen_at: int, hit_at: int, *, own: bool) -> None:
        if not own:
            texts, seen = tuple(record.retrieved), tuple(record.retrieved_seen)
            record = record.changed(full_content=None, retrieved=texts, retrieved_seen=seen)
            record.normalize_times()
        self._fresh: tuple[UserDocRecord, int, int] | None = record, seen_at, hit_at
        self._text: str | None = None

    @property
    def text(self) -> str:
        """The JSON."""
        fresh = self._fresh
        if self._text is None and fresh is not None:
            self._text = _encode(*fresh)
        return self._text or ""

    @property
    def fresh(self) -> tuple[UserDocRecord, int, int] | None:
        """The record with the two readings, while it is at hand; not to be changed."""
        return self._fresh

    def settle(self) -> None:
        """Keep the text alone: it takes a third of the room."""
        # In this order: who reads it at the same time finds one or the other.
        self._text, self._fresh = self.text, None


def _encode(record: UserDocRecord, seen_at: int, hit_at: int) -> str:
    held = record.__dict__
    payload: dict[str, Any] = {name: value for name, default in _STORED if (value := held[name]) != default}
    for name in payload.keys() & _TIMES:
        payload[name] = _moment_text(payload[name])
    payload["seen_at"], payload["hit_at"] = seen_at, hit_at
    return dump_json(payload)


def encode_record(
    record: UserDocRecord, clocks: Clocks, content: str | None = None, *, own: bool = False
) -> StoredDocument:
    """The stored form of a record at the given readings of the user's clocks; see `UserChange.own`."""
    seen, hit = clocks.queries - record.queries_missed, clocks.searches - record.cache_miss_streak
    return StoredDocument(
        storage_key(record.doc_id),
        record.user_state.value,
        RecordPayload(record, seen, hit, own=own),
        seen if record.counting else None,
        hit if record.streak_counts else None,
        float(record.decay_score),
        content,
    )


def _is_found_as_before(item: StoredDocument, before: UserDocRecord | None, clocks: Clocks) -> bool:
    """Whether what a store searches by (all but the payload) is what it was for the record before."""
    return (
        before is not None
        # What was fetched counts from now on: nearly always that tells.
        and item.idle_seen == (clocks.queries - before.queries_missed if before.counting else None)
        and item.idle_hit == (clocks.searches - before.cache_miss_streak if before.streak_counts else None)
        and item.state == before.user_state.value
    )


def encode_content(user_key: str, doc_key: str, text: str) -> str:
    """The stored form of a document's text; it says whose it is."""
    return dump_json([user_key, doc_key, text])


def decode_record(stored: StoredDocument, clocks: Clocks, user_key: str) -> UserDocRecord:
    """The record of a stored form at the given readings of the user's clocks.

    Raises:
        CorruptDataError: It can't be read back, or is of another user or document than the ones asked for.
    """
    fresh = None if isinstance(stored.payload, str) else stored.payload.fresh
    if fresh is not None and stored.content is None:
        known, seen, hit = fresh
        missed, streak = clocks.queries - seen, clocks.searches - hit
        record = object.__new__(UserDocRecord)
        # As `changed` does it, without a call: a query reads every document that it touches.
        record.__dict__ = held = known.__dict__.copy()
        held["decay_score"] = stored.score
        held["queries_missed"], held["cache_miss_streak"] = max(missed, 0), max(streak, 0)
        return record
    try:
        payload = _loads(stored.text)
        seen, hit = payload.pop("seen_at"), payload.pop("hit_at")
        for name in payload.keys() & _TIMES:
            payload[name] = parse_utc(payload[name])
        for name in payload.keys() & _TUPLES:
            payload[name] = tuple(payload[name])
        # Filled in by hand: the constructor's checks take longer than all the rest, and were made when it was written.
        record = object.__new__(UserDocRecord)
        record.__dict__ = held = _DEFAULTS | payload
        held["user_state"], held["decay_score"] = _STATES[stored.state], float(stored.score)
        held["queries_missed"] = max(clocks.queries - seen, 0)
        held["cache_miss_streak"] = max(clocks.searches - hit, 0)
        if stored.content is not None:
            *owner, held["full_content"] = _parse(stored.content, f"content of {_record_at(stored)}", list)
            if owner != [user_key, stored.key] or not isinstance(held["full_content"], str):
                raise _unreadable(stored, "its content is not its own")
        texts = held["user_id"], held["doc_id"], held["doc_title"], held["doc_path"], held["why"]
        if len(held) != len(_DEFAULTS) or {*map(type, texts)} != {str}:
            raise _unreadable(stored, f"its fields are {', '.join(sorted(payload))}")
        if (storage_key(held["user_id"]), storage_key(held["doc_id"])) != (user_key, stored.key):
            raise _unreadable(stored, "it is another one, in a foreign place")
        return record
    except UNREADABLE as error:
        raise _unreadable(stored, repr(error)) from error


def _loads(text: str) -> Any:
    """`json.loads` of what `dump_json` wrote, which has no white space around it to look for."""
    value, end = _read_json(text)
    if end != len(text):
        msg = f"there is more behind its end: {text[end : end + 20]!r}"
        raise ValueError(msg)
    return value


_read_json = json.JSONDecoder().raw_decode
_STATES = {state.value: state for state in DocumentState}


def is_same_record(one: StoredDocument, other: StoredDocument) -> bool:
    """Whether two stored forms are of the same record, but for its content."""
    same = one is other or (one.state == other.state and one.score == other.score)
    return same and (one.payload is other.payload or one.text == other.text)


class FreshRecords:
    """The records that were written last, so that the query that comes next need not decode what this one encoded.

    What is in the store decides: one of these counts only while its stored form is the one that was written.
    """

    most = 512

    def __init__(self) -> None:
        in_each_process(self._make_lock)
        self._written: dict[tuple[str, str], StoredDocument] = {}

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def decode(self, user_key: str, stored: StoredDocument, clocks: Clocks) -> UserDocRecord:
        """`decode_record`, of the fresh one where possible."""
        if isinstance(stored.payload, str):
            written = self._written.get((user_key, stored.key))
            stored = stored if written is None or not is_same_record(written, stored) else written
        return decode_record(stored, clocks, user_key)

    def keep(self, user_key: str, documents: Sequence[StoredDocument]) -> None:
        """Note what was written; what it takes the place of is fresh no more."""
        with self._lock:
            for item in documents:
                self._written.pop((user_key, item.key), None)
                self._written[user_key, item.key] = item
            while len(self._written) > self.most:
                settle([self._written.pop(next(iter(self._written)))])

    def forget(self, user_key: str) -> None:
        """Keep nothing of a user."""
        with self._lock:
            for key in [key for key in self._written if key[0] == user_key]:
                del self._written[key]


def settle(documents: Iterable[StoredDocument]) -> None:
    """Keep no more than the texts of stored documents."""
    for item in documents:
        if isinstance(item.payload, RecordPayload):
            item.payload.settle()


def _record_at(stored: StoredDocument) -> str:
    return f"record under the key {stored.key!r}"


def _unreadable(stored: StoredDocument, why: str) -> CorruptDataError:
    msg = f"stored {_record_at(stored)} can't be read back: {why}. Delete it, or restore it from a backup."
    return CorruptDataError(msg)


def encode_event(event: DocumentEvent) -> str:
    """The payload of an event."""
    return dump_json({**event.__dict__, "at": _moment_text(event.at)})


def decode_event(payload: str) -> DocumentEvent:
    """The event of a payload."""
    values = load_json(payload, "event")
    try:
        at = parse_utc(values.pop("at"))
        came_from, went_to = DocumentState(values.pop("from_state")), DocumentState(values.pop("to_state"))
        return DocumentEvent(at=at, from_state=came_from, to_state=went_to, **values)
    except UNREADABLE as error:
        msg = f"stored event can't be read back: {error!r}"
        raise CorruptDataError(msg) from error


def encode_text(user_key: str, text: RetrievedText) -> str:
    """The payload of a retrieved text; it says whose it is."""
    return dump_json({"user": user_key, **{item.name: getattr(text, item.name) for item in fields(text)}})


def decode_text(payload: str, user_key: str, doc_key: str) -> RetrievedText:
    """The retrieved text of a payload.

    Raises:
        CorruptDataError: It can't be read back, or is of another user or document than the ones asked for.
    """
    what = f"retrieved text of document {doc_key!r} of user {user_key!r}"
    values = load_json(payload, what)
    try:
        owner, text = values.pop("user"), RetrievedText(**values)
        kinds = [type(value) for value in (text.text, text.digest, text.first_seen, text.metadata, text.chunk_index)]
        if kinds not in ([str, str, int, dict, int], [str, str, int, dict, type(None)]):
            msg = f"stored {what} can't be read back: a field is of a wrong type. Remove the document to meet it anew."
            raise CorruptDataError(msg)
        if (owner, storage_key(text.doc_id)) != (user_key, doc_key):
            msg = f"stored {what} is another one, in a foreign place. Remove the document to meet it anew."
            raise CorruptDataError(msg)
        return text
    except UNREADABLE as error:
        msg = f"stored {what} can't be read back: {error!r}. Remove the document to meet it anew."
        raise CorruptDataError(msg) from error


def encode_change(view: UserView, user: StoredUser, change: UserChange) -> StoredChange:
    """The stored form of a change, with the counters that follow from it.

    The revision moves exactly when a fact that an index of the saved copies holds has changed, so no
    rule has to remember to say so.
    """
    user_key = storage_key(view.user_id)
    clocks = Clocks(view.clocks.queries + change.queries, view.clocks.searches + change.searches)
    saved, moved = _moved(view, user.saved, change)
    revision, floor = user.revision + 1 if moved else user.revision, user.floor
    if (moved and not user.floor) or any(doc_id in view.records for doc_id in change.deleted):
        # The first one; or a record goes, and with it the mark of what happened to it.
        floor = revision
    documents, only_payload = list[StoredDocument](), set[str]()
    for record in change.records:
        if record.life < 0:
            record = record.changed(life=_life_of(record, view, revision))
        item = encode_record(record, clocks, own=change.own)
        if record.doc_id in moved:
            item = item._replace(revised=revision)
        elif _is_found_as_before(item, view.records.get(record.doc_id), view.clocks) and (
            record.doc_id not in change.deleted
        ):
            only_payload.add(item.key)
        documents.append(item)
    return StoredChange(
        user=StoredUser(view.user_id, clocks.queries, clocks.searches, revision, saved, floor),
        deleted=[storage_key(doc_id) for doc_id in change.deleted],
        scores=[
            (storage_key(doc_id), float(score)) for doc_id, score in change.scores.items() if doc_id in view.records
        ],
        documents=documents,
        only_payload=only_payload,
        contents={
            (key := storage_key(doc_id)): None if content is None else encode_content(user_key, key, content)
            for doc_id, content in change.contents.items()
        },
        events=[(storage_key(event.doc_id), encode_event(event)) for event in change.events],
        clear_texts=[storage_key(doc_id) for doc_id in change.clear_texts],
        texts=[(storage_key(text.doc_id), text.digest, encode_text(user_key, text)) for text in change.texts],
        chunk_hits=[(doc_id, copy_id, indices) for doc_id, (copy_id, indices) in change.chunk_hits.items()],
        hit_at=change.hit_at,
    )


def _moved(view: UserView, saved: int, change: UserChange) -> tuple[int, set[str]]:
    """How many documents are saved after a change, of those before it; and which of them an index is to notice."""
    moved = set[str]()
    after: dict[str, UserDocRecord | None] = dict.fromkeys(change.deleted)
    after.update([(record.doc_id, record) for record in change.records])
    for doc_id, record in after.items():
        before = view.records.get(doc_id)
        if before is not None and (record is None or record.life == NEW_LIFE):
            # A life ended: what began in it must be able to tell.
            moved.add(doc_id)
        is_saved, was_saved = record is not None and record.saved, before is not None and before.saved
        if not (is_saved or was_saved):
            continue
        saved += is_saved - was_saved
        if record is None or before is None or record.index_facts != before.index_facts:
            moved.add(doc_id)
    return saved, moved


def _life_of(record: UserDocRecord, view: UserView, revision: int) -> int:
    before = view.records.get(record.doc_id)
    return revision if before is None or before.life < 0 or record.life == NEW_LIFE else before.life


def first_revision() -> int:
    """The revision that a user begins with, drawn at random.

    A user who was forgotten and comes back would otherwise count through the same numbers again, and meet
    the index of before in another worker that still holds it under one of them.
    """
    return 1 + secrets.randbits(48)


_MOST_REVISIONS = 2**32


def is_same_user(before: int, now: int) -> bool:
    """Whether a user's revision `now` can have come of the one `before`; if not, the user was forgotten in between.

    Who had no revision before is nobody that could have been forgotten. That a user begins anew this near to where
    the last life was is one chance in 65,000.
    """
    return not before or before <= now < before + _MOST_REVISIONS
