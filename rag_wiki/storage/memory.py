"""State in this process's memory: the default, for development, tests and single runs."""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

from rag_wiki.forks import in_each_process
from rag_wiki.storage.base import ForgottenUser, StateStore
from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.storage.codec import StoredChange, StoredDocument, StoredUser

__all__ = ["MemoryStateStore"]


class _ByReading:
    """Keys in the order of a clock reading, so that the idle ones are found without looking at the others."""

    def __init__(self) -> None:
        self._ordered: list[tuple[int, str]] = []
        self._readings: dict[str, int] = {}

    def put(self, key: str, reading: int | None) -> None:
        """Note the reading of a key; `None` takes it out."""
        before = self._readings.get(key)
        if before == reading:
            return
        if before is not None:
            del self._readings[key], self._ordered[bisect_left(self._ordered, (before, key))]
        if reading is not None:
            self._readings[key] = reading
            insort(self._ordered, (reading, key))

    def beyond(self, reading: int) -> list[str]:
        """The keys with a later reading."""
        return [key for _, key in self._ordered[bisect_left(self._ordered, (reading + 1, "")) :]]

    def up_to(self, reading: int) -> list[str]:
        """The keys with this reading or an earlier one, earliest first."""
        return [key for _, key in self._ordered[: bisect_left(self._ordered, (reading + 1, ""))]]


@dataclass
class _User:
    counters: StoredUser = field(default_factory=StoredUser)
    documents: dict[str, StoredDocument] = field(default_factory=dict)
    seen: _ByReading = field(default_factory=_ByReading)
    hit: _ByReading = field(default_factory=_ByReading)
    revised: _ByReading = field(default_factory=_ByReading)
    contents: dict[str, str] = field(default_factory=dict)
    events: dict[str, deque[str]] = field(default_factory=dict)
    texts: dict[str, dict[str, str]] = field(default_factory=lambda: defaultdict(dict))
    ordered: list[str] | None = None
    """The keys of the documents in order; made when a scan needs it."""

    def write(self, item: StoredDocument) -> None:
        """Put a document in its place."""
        before = self.documents.get(item.key)
        if before is None:
            self.ordered = None
        if item.idle_seen != (before and before.idle_seen):
            self.seen.put(item.key, item.idle_seen)
        if item.idle_hit != (before and before.idle_hit):
            self.hit.put(item.key, item.idle_hit)
        if item.revised is not None:
            self.revised.put(item.key, item.revised)
        self.documents[item.key] = item

    def remove(self, key: str) -> None:
        """Take every trace of a document out."""
        for part in (self.documents, self.contents, self.events, self.texts):
            part.pop(key, None)
        for readings in (self.seen, self.hit, self.revised):
            readings.put(key, None)
        self.ordered = None

    def keys_after(self, key: str | None) -> list[str]:
        """The keys beyond one, in order."""
        if self.ordered is None:
            self.ordered = sorted(self.documents)
        return self.ordered if key is None else self.ordered[bisect_right(self.ordered, key) :]


class MemoryStateStore(StateStore):
    """Keeps state in memory; gone when the process ends. Safe for any number of threads.

    Records go through the same codec as everywhere else, so nobody gets a live object out of it and is
    surprised by another store later.
    """

    def __init__(self) -> None:
        in_each_process(self._make_lock)
        self._users: dict[str, _User] = {}
        self._notes: dict[str, str] = {}
        self._chunks = ChunkStore()

    def _make_lock(self) -> None:
        self._lock = threading.RLock()

    @property
    def waits(self) -> bool:  # type: ignore[override]  # a fact of the class that a subclass may change
        """It waits for nobody; what a subclass adds may."""
        return type(self) is not MemoryStateStore

    @property
    def chunk_store(self) -> ChunkStore:
        """Chunks in the same memory."""
        return self._chunks

    def _user(self, user_key: str) -> _User:
        return self._users.get(user_key) or _User()

    def _read_user(self, user_key: str) -> StoredUser:
        return self._user(user_key).counters

    def _read_document(self, user_key: str, doc_key: str) -> tuple[StoredUser, StoredDocument | None]:
        with self._lock:
            user = self._user(user_key)
            document = user.documents.get(doc_key)
            return user.counters, document and document._replace(content=user.contents.get(doc_key))

    def _scan(
        self,
        user_key: str,
        states: Sequence[str] | None,
        *,
        after: str | None = None,
        limit: int | None = None,
        content: bool = False,
    ) -> tuple[StoredUser, list[StoredDocument]]:
        with self._lock:
            user = self._user(user_key)
            items = (user.documents[key] for key in user.keys_after(after))
            found = list(islice((item for item in items if states is None or item.state in states), limit))
            if content:
                found = [item._replace(content=user.contents.get(item.key)) for item in found]
            return user.counters, found

    def _read_start(self, user_key: str, lapse_after: int, demote_after: int) -> tuple[StoredUser, Sequence[str]]:
        with self._lock:
            user = self._user(user_key)
            seen, hit = (
                user.counters.queries + 1 - lapse_after,
                user.counters.searches + 1 - demote_after * user.counters.saved,
            )
            idle = [*user.seen.up_to(seen), *user.hit.up_to(hit)]
            return user.counters, idle

    def _read_revised(self, user_key: str, after: int) -> tuple[StoredUser, list[StoredDocument] | None]:
        with self._lock:
            user = self._user(user_key)
            return user.counters, [user.documents[key] for key in user.revised.beyond(after)]

    def _change(
        self,
        user_key: str,
        doc_keys: Sequence[str],
        step: Callable[[StoredUser, Mapping[str, StoredDocument]], StoredChange],
    ) -> None:
        with self._lock:
            user = self._user(user_key)
            present = {key: user.documents[key] for key in doc_keys if key in user.documents}
            change = step(user.counters, present)
            self._users[user_key] = user
            user.counters = change.user
            for key in change.deleted:
                user.remove(key)
            for key, score in change.scores:
                user.documents[key] = user.documents[key]._replace(score=score)
            for item in change.documents:
                user.write(item)
            for key, content in change.contents.items():
                if content is None:
                    user.contents.pop(key, None)
                else:
                    user.contents[key] = content
            for key, payload in change.events:
                user.events.setdefault(key, deque(maxlen=self.history_limit)).append(payload)
            for key in change.clear_texts:
                user.texts.pop(key, None)
            for key, digest, payload in change.texts:
                user.texts[key][digest] = payload
            for doc_id, copy_id, indices in change.chunk_hits:
                if change.hit_at is not None:
                    self._chunks.place.add_hits(change.user.user_id, doc_id, copy_id, indices, change.hit_at)

    def _read_events(self, user_key: str, doc_key: str) -> Sequence[str]:
        with self._lock:
            return list(self._user(user_key).events.get(doc_key, ()))

    def _read_texts(self, user_key: str, doc_key: str) -> Sequence[str]:
        with self._lock:
            return list(self._user(user_key).texts.get(doc_key, {}).values())

    def _active_users(self) -> Iterable[str]:
        with self._lock:
            return [user.counters.user_id for user in self._users.values() if user.counters.saved > 0]

    def _all_users(self) -> Iterable[str]:
        with self._lock:
            return [user.counters.user_id for user in self._users.values()]

    def _users_with(self, doc_key: str) -> Iterable[str]:
        with self._lock:
            return [user.counters.user_id for user in self._users.values() if doc_key in user.documents]

    def _forget(self, user_key: str) -> ForgottenUser:
        with self._lock:
            user = self._users.pop(user_key, None) or _User()
        return ForgottenUser(
            documents=len(user.documents),
            events=sum(map(len, user.events.values())),
            retrieved_texts=sum(map(len, user.texts.values())),
        )

    def _read_note(self, name: str) -> str | None:
        return self._notes.get(name)

    def _swap_note(self, name: str, expected: str | None, text: str) -> bool:
        with self._lock:
            if self._notes.get(name) != expected:
                return False
            self._notes[name] = text
            return True
