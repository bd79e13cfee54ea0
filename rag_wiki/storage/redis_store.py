"""State and chunks in Redis or Valkey (6 or newer), single server or cluster: for many workers and hosts.

All keys of a user carry the same hash tag, so they lie in one slot, and a change of one user is one
script on one node. Nothing ever scans the key space.

========================================  =======================================================
key (`rag_wiki:{user}` before each)       value
========================================  =======================================================
`:user`                                   hash: id, counters, and the version that a change compares
`:docs`, `:content`                       hashes: document key → state, score and payload; document key → text
`:saved`                                  sorted set, by name: keys of CLAIMED and PINNED documents
`:seen`, `:hit`                           sorted sets: documents by their clock reading, for idleness
`:revised`                                sorted set: documents by the revision of their last change as a saved one
`:events:<doc>`, `:texts:<doc>`           lists of payloads
`:chunks:<doc>`, `:hits:<doc>:<copy>`     hashes: the copies' parts, the hits of each chunk
`:chunked`                                set: keys of documents with chunks
========================================  =======================================================

Four keys belong to no user: the hashes `rag_wiki:met` (everybody of whom there is a record), `rag_wiki:users` (who
ever saved something) and `rag_wiki:owners` (who ever had chunks), and `rag_wiki:notes`.
"""

from __future__ import annotations

import inspect
import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, islice
from typing import Any

from rag_wiki.clock import as_utc
from rag_wiki.errors import ConfigurationError, CorruptDataError, MissingExtraError, StorageError
from rag_wiki.forks import in_each_process
from rag_wiki.storage.base import SAVED_STATES, ForgottenUser, StateStore, UnreadableUser, read_user_id
from rag_wiki.storage.change_lanes import RuleError
from rag_wiki.storage.chunk_store import ChunkHits, ChunkPlace, ChunkStore, StoredCopy, count_chunks, read_or_raise
from rag_wiki.storage.codec import (
    StoredChange,
    StoredDocument,
    StoredUser,
    decode_moment,
    decode_user,
    dump_json,
    load_json,
    storage_key,
)
from rag_wiki.storage.redis_scripts import COMMIT, COUNT, HIT, READ, REMOVE, REVISED, START, SWAP, USER_FIELDS, WRITE

try:
    import redis
except ImportError as error:
    raise MissingExtraError("RedisStateStore", "redis") from error

__all__ = ["RedisPlace", "RedisStateStore"]

_SAVED = frozenset(state.value for state in SAVED_STATES)
_BATCH = 500
_ASCII = bytes(range(128)).decode()
_MOST_USERS, _MOST_DOCUMENTS = 128, 128
"""Users, and documents of each, whose last form is remembered."""


class _Commands:
    """Commands for `COMMIT`, with the keys they touch declared, as a cluster wants it."""

    def __init__(self, keys: _Keys) -> None:
        self._numbers = {keys.user: 1, keys.docs: 2, keys.saved: 3, keys.seen: 4, keys.hit: 5, keys.revised: 6}
        self.arguments: list[str] = []

    @property
    def keys(self) -> list[str]:
        return list(self._numbers)

    def number(self, key: str) -> int:
        """The number of a key in KEYS."""
        return self._numbers.setdefault(key, len(self._numbers) + 1)

    def add(self, name: str, key: str, *arguments: str | int) -> None:
        values = [name, str(self.number(key)), *map(str, arguments)]
        self.arguments += [str(len(values)), *values]


class _Keys:
    """The names of a user's keys."""

    def __init__(self, prefix: str, user_key: str) -> None:
        base = f"{prefix}:{{{user_key}}}"
        self.user, self.docs, self.content = f"{base}:user", f"{base}:docs", f"{base}:content"
        self.saved, self.seen, self.hit = f"{base}:saved", f"{base}:seen", f"{base}:hit"
        self.revised, self.chunked = f"{base}:revised", f"{base}:chunked"
        self._base = base

    def events(self, doc_key: str) -> str:
        return f"{self._base}:events:{doc_key}"

    def texts(self, doc_key: str) -> str:
        return f"{self._base}:texts:{doc_key}"

    def chunks(self, doc_key: str) -> str:
        return f"{self._base}:chunks:{doc_key}"

    def hits(self, doc_key: str, copy_id: str) -> str:
        return f"{self._base}:hits:{doc_key}:{copy_id}"


def _text(value: bytes | str) -> str:
    """What the client returned, whether or not it decodes responses."""
    if isinstance(value, str):
        return value
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        msg = f"stored bytes are not ours: {error}. Delete them, or restore them from a backup."
        raise CorruptDataError(msg) from error


def _optional_text(value: bytes | str | None) -> str | None:
    return None if value is None else _text(value)


def _stored_user(values: Sequence[Any]) -> tuple[StoredUser, str]:
    user_id, *counters, version = (_optional_text(value) for value in values)
    if user_id is None:
        return StoredUser(), version or ""
    return decode_user(user_id, *counters), version or ""


def _stored_document(key: str, value: str, content: str | None = None) -> StoredDocument:
    state, _, rest = value.partition(" ")
    score, _, payload = rest.partition(" ")
    try:
        return StoredDocument(key, state, payload, None, None, float(score), content)
    except ValueError:
        # Whoever decodes it says so, and not whoever reads it along with others.
        return StoredDocument(key, state, "", content=content)


def _document_line(item: StoredDocument, *, only_payload: bool) -> str:
    """A document for `COMMIT`: JSON and keys are ASCII without line ends, keys without spaces too."""
    if only_payload:
        return f"{item.key} = = = = {item.state} {item.score!r} {item.text}\n"
    readings = (0 if item.state in _SAVED else None, item.idle_seen, item.idle_hit, item.revised)
    saved, seen, hit, revised = ("-" if reading is None else reading for reading in readings)
    return f"{item.key} {saved} {seen} {hit} {revised} {item.state} {item.score!r} {item.text}\n"


def _by_key(documents: Iterable[StoredDocument]) -> dict[str, StoredDocument]:
    return {item.key: item for item in documents}


def _lines(values: bytes | str, count: int) -> list[str]:
    """The lines of `READ`, one for each document asked for."""
    lines = _text(values).split("\n") if count else []
    if len(lines) != count:
        msg = f"stored documents are not ours: {count} of them are {len(lines)} lines. Restore them from a backup."
        raise CorruptDataError(msg)
    return lines


def _run(script: Any, keys: Sequence[str], arguments: Sequence[str | bytes | int]) -> Any:
    try:
        return _ask(script, keys=keys, args=arguments)
    except redis.exceptions.NoScriptError:
        # It was loaded, and gone again before it ran: a flush, a restart, another node. The script itself always runs.
        return _ask(script.registered_client.eval, script.script, len(keys), *keys, *arguments)


def _ask(call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call the client; what the server can't do, or a decoding client can't decode, is told in our words."""
    try:
        return call(*arguments, **options)
    except redis.ResponseError as error:
        if "unknown command" not in str(error).lower():
            raise
        msg = (
            f"RedisStateStore needs a server that runs Lua scripts, and this one does not: {error}. "
            "With fakeredis, install it as fakeredis[lua]."
        )
        raise StorageError(msg) from error
    except UnicodeDecodeError as error:
        msg = f"stored bytes are not ours: {error}. Delete them, or restore them from a backup."
        raise CorruptDataError(msg) from error


def _batches(values: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(values)
    while batch := list(islice(iterator, _BATCH)):
        yield batch


@dataclass(frozen=True)
class _Snapshot:
    """A user as this process last saw it at one version, and some of the documents."""

    user: StoredUser
    version: str
    documents: Mapping[str, StoredDocument] = field(default_factory=dict)
    complete: bool = False
    """Every document asked for was read: one that is missing here does not exist."""

    def after(self, version: str, change: StoredChange, wanted: Mapping[str, StoredDocument | None]) -> _Snapshot:
        """What a change that was carried out leaves."""
        documents = {**self.documents, **{key: item for key, item in wanted.items() if item is not None}}
        for key in change.deleted:
            documents.pop(key, None)
        for key, score in change.scores:
            if key in documents:
                documents[key] = documents[key]._replace(score=score)
        for item in change.documents:
            # The newest at the end: the oldest are forgotten first.
            documents.pop(item.key, None)
            documents[item.key] = item
        newest = dict(islice(documents.items(), max(len(documents) - _MOST_DOCUMENTS, 0), None))
        return _Snapshot(change.user, version, newest)


def _corrected(guess: _Snapshot, doc_keys: Sequence[str], values: Sequence[Any], lines: bytes | str) -> _Snapshot:
    """What `COMMIT` says is so. Documents beyond those it was asked for stay known if the user is still the same."""
    user, version = _stored_user(values)
    read = {
        key: _stored_document(key, line[1:])
        for key, line in zip(doc_keys, _lines(lines, len(doc_keys)), strict=True)
        if line
    }
    others = guess.documents if guess.version == version else {}
    return _Snapshot(
        user, version, {**{key: others[key] for key in others if key not in doc_keys}, **read}, complete=True
    )


class _Snapshots:
    """The last snapshot of some users, so that a query need not read what it wrote the time before."""

    def __init__(self) -> None:
        in_each_process(self._make_lock)
        self._by_user: OrderedDict[str, _Snapshot] = OrderedDict()
        self._page: tuple[str, _Snapshot] | None = None
        """The page of documents that was read last."""

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def get(self, user_key: str) -> _Snapshot | None:
        with self._lock:
            return self._by_user.get(user_key)

    def keep(self, user_key: str, snapshot: _Snapshot) -> None:
        self._drop_page(user_key)
        with self._lock:
            self._by_user[user_key] = snapshot
            self._by_user.move_to_end(user_key)
            while len(self._by_user) > _MOST_USERS:
                self._by_user.popitem(last=False)

    def keep_page(self, user_key: str, page: _Snapshot) -> None:
        """Note a page of a user's documents; no other is known then."""
        self._page = user_key, page

    def take_page(self, user_key: str, doc_keys: Sequence[str]) -> _Snapshot | None:
        """The page that was read last, for the one who changes all of it; it is not known any more."""
        page = self._page
        if page is None or page[0] != user_key or page[1].documents.keys() != set(doc_keys):
            return None
        self._page = None
        return page[1]

    def confirm(self, user_key: str, user: StoredUser, version: str) -> None:
        """Note a reading of the user: documents of another version are not known any more."""
        known = self.get(user_key)
        if known is None or known.version != version:
            self.keep(user_key, _Snapshot(user, version))

    def drop(self, user_key: str) -> None:
        with self._lock:
            self._by_user.pop(user_key, None)
        self._drop_page(user_key)

    def _drop_page(self, user_key: str) -> None:
        page = self._page
        if page is not None and page[0] == user_key:
            self._page = None


class RedisStateStore(StateStore):
    """Keeps state, and the chunks beside it, in Redis or Valkey.

    Args:
        client: A `redis.Redis` or `redis.RedisCluster`; `decode_responses` may be on or off. It stays
            yours: its pool bounds the connections, and `close` leaves it open.
        prefix: What all keys begin with.

    Raises:
        ConfigurationError: Not a client, one that is awaited, or one whose encoding no script survives.
        MissingExtraError: redis-py is not installed.
    """

    def __init__(self, client: redis.Redis | redis.RedisCluster, *, prefix: str = "rag_wiki") -> None:
        if not hasattr(client, "register_script"):
            msg = f"RedisStateStore takes a redis client as its first argument, got {type(client).__name__}"
            raise ConfigurationError(msg)
        if inspect.iscoroutinefunction(getattr(client, "execute_command", None)):
            msg = "RedisStateStore takes a blocking client, redis.Redis; async calls of the retriever run it in threads"
            raise ConfigurationError(msg)
        self._client: Any = client
        if self._client.get_encoder().encode(_ASCII) != _ASCII.encode():
            msg = (
                "RedisStateStore takes a client whose encoding leaves ASCII as it is, such as UTF-8, the default: "
                "the server reads commands and scripts byte by byte"
            )
            raise ConfigurationError(msg)
        self._prefix = prefix
        self._read = self._client.register_script(READ)
        self._start = self._client.register_script(START)
        self._commit = self._client.register_script(COMMIT)
        self._revised = self._client.register_script(REVISED)
        self._swap = self._client.register_script(SWAP)
        self._snapshots = _Snapshots()
        self._chunks = ChunkStore(place=RedisPlace(client, prefix=prefix))

    @property
    def chunk_store(self) -> ChunkStore:
        """Chunks in the same Redis."""
        return self._chunks

    def _keys(self, user_key: str) -> _Keys:
        return _Keys(self._prefix, user_key)

    def _read_many(
        self, user_key: str, doc_keys: Sequence[str], *, content: bool = False
    ) -> tuple[StoredUser, str, list[StoredDocument]]:
        keys = self._keys(user_key)
        documents: list[StoredDocument] = []
        first: tuple[StoredUser, str] | None = None
        for batch in _batches(doc_keys) if doc_keys else iter([[]]):
            values, docs, contents = _run(
                self._read, [keys.user, keys.docs, keys.content], ["1" if content else "0", *batch]
            )
            # The first trip's version: a change between two trips must not pass for one that was seen.
            first = first or _stored_user(values)
            texts = _lines(contents, len(batch)) if content else [""] * len(batch)
            documents += [
                _stored_document(key, doc[1:], text[1:] if text else None)
                for key, doc, text in zip(batch, _lines(docs, len(batch)), texts, strict=True)
                if doc
            ]
        user, version = first or (StoredUser(), "")
        return user, version, documents

    def _read_user(self, user_key: str) -> StoredUser:
        return _stored_user(_ask(self._client.hmget, self._keys(user_key).user, USER_FIELDS))[0]

    def _read_document(self, user_key: str, doc_key: str) -> tuple[StoredUser, StoredDocument | None]:
        user, _, documents = self._read_many(user_key, [doc_key], content=True)
        return user, next(iter(documents), None)

    def _scan(
        self,
        user_key: str,
        states: Sequence[str] | None,
        *,
        after: str | None = None,
        limit: int | None = None,
        content: bool = False,
    ) -> tuple[StoredUser, list[StoredDocument]]:
        only_saved = states is not None and set(states) <= _SAVED
        user, found = self._read_user(user_key), list[StoredDocument]()
        for batch in self._keys_after(self._keys(user_key), after, only_saved=only_saved):
            user, version, documents = self._read_many(user_key, batch, content=content)
            if limit is not None and not content:
                # Whoever reads page by page may change what he read: a decay run does.
                self._snapshots.keep_page(user_key, _Snapshot(user, version, _by_key(documents), complete=True))
            found += [item for item in documents if states is None or item.state in states]
            if limit is not None and len(found) >= limit:
                break
        return user, found[:limit]

    def _keys_after(self, keys: _Keys, after: str | None, *, only_saved: bool) -> Iterator[list[str]]:
        """The keys of documents beyond one, in order, some hundreds at a time."""
        if not only_saved:
            named = _ask(self._client.hkeys, keys.docs)
            yield from _batches(sorted(key for key in map(_text, named) if after is None or key > after))
            return
        page = [after or ""]
        while True:
            least = f"({page[-1]}"
            page = [_text(key) for key in _ask(self._client.zrangebylex, keys.saved, least, "+", 0, _BATCH)]
            if page:
                yield page
            if len(page) < _BATCH:
                break

    def _read_start(self, user_key: str, lapse_after: int, demote_after: int) -> tuple[StoredUser, Sequence[str]]:
        keys = self._keys(user_key)
        values, seen, hit = _run(self._start, [keys.user, keys.seen, keys.hit], [lapse_after, demote_after])
        user, version = _stored_user(values)
        self._snapshots.confirm(user_key, user, version)
        return user, [_text(key) for key in (*seen, *hit)]

    def _read_revised(self, user_key: str, after: int) -> tuple[StoredUser, list[StoredDocument] | None]:
        keys = self._keys(user_key)
        values, *found = _run(self._revised, [keys.user, keys.docs, keys.revised], [after, _BATCH])
        user, _ = _stored_user(values)
        if not found:
            return user, None
        named, payloads = found
        pairs = [(_text(key), _optional_text(payload)) for key, payload in zip(named, payloads, strict=True)]
        return user, [_stored_document(key, payload) for key, payload in pairs if payload is not None]

    def _change(
        self,
        user_key: str,
        doc_keys: Sequence[str],
        step: Callable[[StoredUser, Mapping[str, StoredDocument]], StoredChange],
    ) -> None:
        # What this process saw last is as good as a reading if nobody changed anything since: the commit checks it.
        seen = self._snapshots.take_page(user_key, doc_keys)
        if seen is None and len(doc_keys) <= _MOST_DOCUMENTS:
            seen = self._snapshots.get(user_key)
        is_read = False
        while True:
            if seen is None:
                user, version, documents = self._read_many(user_key, doc_keys)
                seen, is_read = _Snapshot(user, version, _by_key(documents), complete=True), True
            try:
                done, seen = self._try_change(user_key, seen, doc_keys, step)
            except RuleError:
                # A refusal counts only when it is about what is there now. What the server or the way to it raises
                # counts at once: the change may have been carried out.
                if is_read:
                    raise
                done, seen = False, None
            if done:
                return
            # Else it is what the server told a moment ago.
            is_read = seen is not None

    def _try_change(
        self,
        user_key: str,
        seen: _Snapshot,
        doc_keys: Sequence[str],
        step: Callable[[StoredUser, Mapping[str, StoredDocument]], StoredChange],
    ) -> tuple[bool, _Snapshot | None]:
        """Change what was seen, unless it is not so (any more); one trip. Tells what is so, where it is told."""
        keys = self._keys(user_key)
        wanted = {key: seen.documents.get(key) for key in doc_keys}
        change = step(seen.user, {key: item for key, item in wanted.items() if item is not None})
        if change.user.saved > seen.user.saved:
            if not seen.complete:
                # Most likely a saved document that is not remembered here.
                return False, None
            # Before the change, so that no crash leaves a user with saved documents unlisted.
            self._list_user(user_key, change.user)
        elif not seen.version:
            self._list_user(user_key, change.user)
        commands = self._commands(keys, change)
        # The ones that are taken for absent first.
        guessed = [] if seen.complete else sorted(wanted, key=lambda key: wanted[key] is not None)
        absent = 0 if seen.complete else sum(item is None for item in wanted.values())
        version = uuid.uuid4().hex
        arguments = [seen.version, version, str(absent), str(len(guessed)), *guessed, *commands.arguments]
        done, *told = _run(self._commit, commands.keys, arguments)
        if int(done):
            self._snapshots.keep(user_key, seen.after(version, change, wanted))
            if change.user.saved > seen.user.saved or not seen.version:
                # And after it: somebody may have forgotten the user in between.
                self._list_user(user_key, change.user)
            return True, None
        self._snapshots.drop(user_key)
        return False, None if seen.complete else _corrected(seen, guessed, *told)

    def _list_user(self, user_key: str, user: StoredUser) -> None:
        """Put a user on the lists that they belong on; each lies in a slot of its own."""
        # Who has saved something was met before, and is on that list.
        name = "users" if user.saved else "met"
        self._client.hset(f"{self._prefix}:{name}", user_key, dump_json(user.user_id))

    def _unlist_user(self, user_key: str) -> None:
        """Take a user who was forgotten off the lists, unless they are there again."""
        # After the commit: on a list without records is harmless, records without a place on the list are not.
        for name in ("users", "met"):
            self._client.hdel(f"{self._prefix}:{name}", user_key)
        user = self._read_user(user_key)
        if user.user_id:
            # Both: who has saved nothing is only looked at.
            for saved in (0, 1):
                self._list_user(user_key, user._replace(saved=saved))

    def _commands(self, keys: _Keys, change: StoredChange) -> _Commands:
        commands = _Commands(keys)
        # What makes room comes first: a full server refuses a script that begins with a write, and lets others end.
        for key in change.deleted:
            self._add_delete(commands, keys, key)
        for key in change.clear_texts:
            commands.add("DEL", keys.texts(key))
        for key, content in change.contents.items():
            if content is None:
                commands.add("HDEL", keys.content, key)
        if change.documents:
            lines = [_document_line(item, only_payload=item.key in change.only_payload) for item in change.documents]
            commands.add("DOCUMENTS", keys.docs, "".join(lines))
        if change.scores:
            commands.add("SCORES", keys.docs, "".join([f"{key} {score!r}\n" for key, score in change.scores]))
        for key, content in change.contents.items():
            if content is not None:
                commands.add("HSET", keys.content, key, content)
        for key, payload in change.events:
            commands.add("RPUSH", keys.events(key), payload)
            if self.history_limit > 0:
                commands.add("LTRIM", keys.events(key), -self.history_limit, -1)
            else:
                commands.add("DEL", keys.events(key))
        for key, _, payload in change.texts:
            commands.add("RPUSH", keys.texts(key), payload)
        if change.hit_at is not None:
            for doc_id, copy_id, indices in change.chunk_hits:
                doc_key = storage_key(doc_id)
                hits, chunks = keys.hits(doc_key, copy_id), commands.number(keys.chunks(doc_key))
                moment = as_utc(change.hit_at).isoformat()
                for batch in _batches(indices):
                    commands.add("HIT", hits, chunks, copy_id, moment, 1, *batch)
        user = change.user
        values: dict[str, str | int] = {
            "user_id": dump_json(user.user_id),
            "queries": user.queries,
            "searches": user.searches,
            "revision": user.revision,
            "saved": user.saved,
            "floor": user.floor,
        }
        commands.add("HSET", keys.user, *chain.from_iterable(values.items()))
        return commands

    @staticmethod
    def _add_delete(commands: _Commands, keys: _Keys, doc_key: str) -> None:
        for hash_key in (keys.docs, keys.content):
            commands.add("HDEL", hash_key, doc_key)
        for sorted_set in (keys.saved, keys.seen, keys.hit, keys.revised):
            commands.add("ZREM", sorted_set, doc_key)
        for name in (keys.events(doc_key), keys.texts(doc_key)):
            commands.add("DEL", name)

    def _read_events(self, user_key: str, doc_key: str) -> Sequence[str]:
        payloads = _ask(self._client.lrange, self._keys(user_key).events(doc_key), 0, -1)
        return [_text(payload) for payload in payloads]

    def _read_texts(self, user_key: str, doc_key: str) -> Sequence[str]:
        payloads = map(_text, _ask(self._client.lrange, self._keys(user_key).texts(doc_key), 0, -1))
        # The last writing of a digest counts, at the place of its first.
        return list({load_json(payload, "retrieved text").get("digest"): payload for payload in payloads}.values())

    def _active_users(self) -> Iterable[str | UnreadableUser]:
        named = _ask(self._client.hgetall, f"{self._prefix}:users")
        for batch in _batches(named.items()):
            pipeline = self._client.pipeline(transaction=False)
            for user_key, _ in batch:
                pipeline.hget(self._keys(_text(user_key)).user, "saved")
            for (user_key, user_id), saved in zip(batch, pipeline.execute(raise_on_error=False), strict=True):
                if isinstance(saved, redis.ResponseError):
                    # The key is none of ours, and this user's matter alone.
                    yield UnreadableUser(_text(user_key), CorruptDataError(f"stored counters are not ours: {saved}"))
                elif isinstance(saved, Exception):
                    raise saved
                elif saved is not None and _text(saved) != "0":
                    yield read_user_id(_text(user_key), user_id)

    def _users_with(self, doc_key: str) -> Iterable[str | UnreadableUser]:
        return self._users_where(lambda pipeline, keys: pipeline.hexists(keys.docs, doc_key))

    def _all_users(self) -> Iterable[str | UnreadableUser]:
        # A list is written before and after what it lists: who is on it may be nobody yet, or nobody any more.
        return self._users_where(lambda pipeline, keys: pipeline.exists(keys.user))

    def _users_where(self, ask: Callable[[Any, _Keys], object]) -> Iterator[str | UnreadableUser]:
        """Those on the lists of whom a question in a pipeline, about their keys, is answered with yes."""
        known = dict[Any, Any]()
        for name in ("met", "users"):
            known |= _ask(self._client.hgetall, f"{self._prefix}:{name}")
        for batch in _batches(known.items()):
            pipeline = self._client.pipeline(transaction=False)
            for user_key, _ in batch:
                ask(pipeline, self._keys(_text(user_key)))
            for (user_key, user_id), is_so in zip(batch, pipeline.execute(), strict=True):
                if is_so:
                    yield read_user_id(_text(user_key), user_id)

    def _forget(self, user_key: str) -> ForgottenUser:
        keys = self._keys(user_key)
        while True:
            version = _optional_text(self._client.hget(keys.user, "version")) or ""
            doc_keys = [_text(key) for key in self._client.hkeys(keys.docs)]
            pipeline = self._client.pipeline(transaction=False)
            for key in doc_keys:
                pipeline.llen(keys.events(key)).llen(keys.texts(key))
            lengths = pipeline.execute()
            commands = _Commands(keys)
            for key in doc_keys:
                self._add_delete(commands, keys, key)
            commands.add("DEL", keys.user)
            if int(_run(self._commit, commands.keys, [version, "", "0", "0", *commands.arguments])[0]):
                self._snapshots.drop(user_key)
                self._unlist_user(user_key)
                return ForgottenUser(len(doc_keys), events=sum(lengths[::2]), retrieved_texts=sum(lengths[1::2]))

    def _read_note(self, name: str) -> str | None:
        return _optional_text(_ask(self._client.hget, f"{self._prefix}:notes", storage_key(name)))

    def _swap_note(self, name: str, expected: str | None, text: str) -> bool:
        return bool(int(_run(self._swap, [f"{self._prefix}:notes"], [storage_key(name), expected or "", text])))


def _stored_copy(copy_id: str, parts: Mapping[str, bytes | None]) -> StoredCopy | CorruptDataError | None:
    header = parts["header"]
    if header is None or None in parts.values():
        return None
    try:
        return StoredCopy(copy_id, _text(header), _optional_text(parts.get("texts")), parts.get("vectors"))
    except CorruptDataError as error:
        return error


def _copy_ids(names: Iterable[bytes | str]) -> list[str]:
    """The copies that the parts of a hash belong to, oldest first."""
    return sorted({_text(name).partition(":")[0] for name in names})


class RedisPlace(ChunkPlace):
    """Chunks in Redis beside the state: one lifetime, seen by every worker."""

    def __init__(self, client: redis.Redis | redis.RedisCluster, *, prefix: str = "rag_wiki") -> None:
        self._client: Any = client
        self._prefix = prefix
        self._write = self._client.register_script(WRITE)
        self._hit = self._client.register_script(HIT)
        self._remove = self._client.register_script(REMOVE)
        self._count = self._client.register_script(COUNT)

    def _keys(self, user_id: str) -> _Keys:
        return _Keys(self._prefix, storage_key(user_id))

    def write(self, user_id: str, doc_id: str, copy: StoredCopy) -> None:
        """Keep a copy."""
        keys, doc_key = self._keys(user_id), storage_key(doc_id)
        parts: dict[str, str | bytes] = {
            "header": copy.header,
            "texts": copy.texts or "[]",
            "vectors": copy.vectors or b"",
        }
        arguments: list[str | bytes] = [doc_key]
        for part, value in parts.items():
            arguments += [f"{copy.copy_id}:{part}", value]
        # Before the copy, so that no crash leaves one whose owner is unlisted.
        self._client.hset(f"{self._prefix}:owners", storage_key(user_id), dump_json(user_id))
        _run(self._write, [keys.chunked, keys.chunks(doc_key)], arguments)

    def copies(self, user_id: str, doc_id: str) -> list[str]:
        """The ids of the document's copies."""
        return self._copies(self._keys(user_id), storage_key(doc_id))

    def read(self, user_id: str, doc_id: str, copy_id: str, *, texts: bool, vectors: bool) -> StoredCopy | None:
        """The copy, or `None`."""
        _, stored = next(iter(self.read_many(user_id, [(doc_id, copy_id)], texts=texts, vectors=vectors)))
        return read_or_raise(stored)

    def read_many(
        self, user_id: str, wanted: Iterable[tuple[str, str]], *, texts: bool, vectors: bool
    ) -> Iterator[tuple[str, StoredCopy | CorruptDataError | None]]:
        """Many copies, some hundreds a trip. Vectors are bytes, so a decoding client is told not to decode."""
        keys = self._keys(user_id)
        parts = ["header", *(["texts"] if texts else []), *(["vectors"] if vectors else [])]
        for batch in _batches(wanted):
            pipeline = self._client.pipeline(transaction=False)
            for doc_id, copy_id in batch:
                names = [f"{copy_id}:{part}" for part in parts]
                pipeline.execute_command("HMGET", keys.chunks(storage_key(doc_id)), *names, NEVER_DECODE=[])
            for (doc_id, copy_id), values in zip(batch, pipeline.execute(), strict=True):
                yield doc_id, _stored_copy(copy_id, dict(zip(parts, values, strict=True)))

    def delete(self, user_id: str, doc_id: str, copy_ids: Collection[str] | None = None) -> int:
        """Remove copies and their hits."""
        keys, doc_key = self._keys(user_id), storage_key(doc_id)
        present = self._copies(keys, doc_key)
        return self._delete(keys, doc_key, [each for each in present if copy_ids is None or each in copy_ids])

    def delete_user(self, user_id: str) -> int:
        """Remove all of the user's copies and hits."""
        keys, chunks = self._keys(user_id), 0
        self._client.hdel(f"{self._prefix}:owners", storage_key(user_id))
        for doc_key in map(_text, self._client.smembers(keys.chunked)):
            present = self._copies(keys, doc_key)
            if present:
                headers = [f"{copy_id}:header" for copy_id in present]
                values = self._client.execute_command("HMGET", keys.chunks(doc_key), *headers, NEVER_DECODE=[])
                chunks += sum(count_chunks(header) for header in values if header is not None)
            self._delete(keys, doc_key, present)
        return chunks

    def _copies(self, keys: _Keys, doc_key: str) -> list[str]:
        return _copy_ids(self._client.hkeys(keys.chunks(doc_key)))

    def list_copies(self, user_id: str, doc_ids: Iterable[str]) -> dict[str, list[str]]:
        """The ids of the copies of many documents, some hundreds of documents a trip."""
        keys, found = self._keys(user_id), dict[str, list[str]]()
        for batch in _batches(doc_ids):
            pipeline = self._client.pipeline(transaction=False)
            for doc_id in batch:
                pipeline.hkeys(keys.chunks(storage_key(doc_id)))
            for doc_id, names in zip(batch, pipeline.execute(), strict=True):
                if names:
                    found[doc_id] = _copy_ids(names)
        return found

    def owners(self) -> list[str]:
        """The users who ever had chunks, unless they were forgotten."""
        listed = _ask(self._client.hgetall, f"{self._prefix}:owners")
        found = [read_user_id(_text(user_key), user_id) for user_key, user_id in listed.items()]
        return [user_id for user_id in found if isinstance(user_id, str)]

    def _delete(self, keys: _Keys, doc_key: str, copy_ids: Sequence[str]) -> int:
        gone = 0
        for batch in _batches(copy_ids) if copy_ids else iter([[]]):
            hits = [keys.hits(doc_key, copy_id) for copy_id in batch]
            gone += int(_run(self._remove, [keys.chunked, keys.chunks(doc_key), *hits], [doc_key, *batch]))
        return gone

    def add_hits(
        self, user_id: str, doc_id: str, copy_id: str, indices: Sequence[int], now: datetime, count: int = 1
    ) -> None:
        """Count hits of each chunk."""
        keys, doc_key = self._keys(user_id), storage_key(doc_id)
        for batch in _batches(indices):
            arguments = [copy_id, as_utc(now).isoformat(), count, *batch]
            _run(self._hit, [keys.hits(doc_key, copy_id), keys.chunks(doc_key)], arguments)

    def hits(self, user_id: str, doc_id: str, copy_id: str) -> dict[int, ChunkHits]:
        """The hits of a copy."""
        values = _ask(self._client.hgetall, self._keys(user_id).hits(storage_key(doc_id), copy_id))
        found = {_text(name): _text(value) for name, value in values.items()}
        return {
            int(name): ChunkHits(int(value), decode_moment(found[f"{name}@"], "time of a hit"))
            for name, value in found.items()
            if not name.endswith("@")
        }

    def hit_counts(self, user_id: str, wanted: Iterable[tuple[str, str]]) -> dict[str, int]:
        """How many chunks of each copy ever answered, some hundreds of copies a trip."""
        keys, counts = self._keys(user_id), dict[str, int]()
        for batch in _batches(wanted):
            hits = [keys.hits(storage_key(doc_id), copy_id) for doc_id, copy_id in batch]
            lengths = _text(_run(self._count, hits, [])).split()
            counts |= {doc_id: int(fields) // 2 for (doc_id, _), fields in zip(batch, lengths, strict=True)}
        return counts
