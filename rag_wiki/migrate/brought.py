"""What earlier runs brought into a place: what is not there any more was removed since, and must not come back."""

from __future__ import annotations

import base64
import hashlib
import json
import secrets

import numpy as np
from numpy.typing import NDArray

from rag_wiki.storage.base import StateStore
from rag_wiki.storage.codec import UNREADABLE

__all__ = ["Brought"]

_NOTE = "brought over from release 0.2"
_TYPE = np.dtype("<u8")
_MOST_IN_A_NOTE = 4096
"""Documents in one note: what is kept after each page is written anew as a whole."""


class Brought:
    """A set of documents of users, kept in notes of the new place.

    It holds a number of 64 bits for each, a keyed hash of the two ids: nobody who was forgotten can be read out of it,
    but whoever has the database can find out whether a document that he names was brought for a user that he names.

    Args:
        store: The new place; `None` where there is none yet.
        dry_run: Write nothing.
    """

    def __init__(self, store: StateStore | None, *, dry_run: bool) -> None:
        self._store = None if dry_run else store
        salt = secrets.token_bytes(16)
        kept = None if store is None else store.note(_NOTE)
        if self._store is not None:
            # Two runs at a time have one key.
            kept = self._store.keep_note(_NOTE, _written(salt, np.empty(0, _TYPE)))
        # As if nothing had been brought where it is no note of ours: what is missing comes over.
        self._salt, known = _read(kept) or (salt, np.empty(0, _TYPE))
        self._last = 0
        """The number of the last note."""
        while store is not None and (kept := store.note(_name(self._last + 1))) is not None:
            self._last += 1
            known = np.union1d(known, self._numbers_in(kept)).astype(_TYPE)
        self._known: NDArray[np.uint64] = known
        self._new = set[int]()

    def __contains__(self, ids: tuple[str, str]) -> bool:
        number = self._number(*ids)
        at = int(np.searchsorted(self._known, np.uint64(number)))
        return number in self._new or (at < len(self._known) and int(self._known[at]) == number)

    def add(self, user_id: str, doc_id: str) -> None:
        """Note that a document is in the new place."""
        if (user_id, doc_id) not in self:
            self._new.add(self._number(user_id, doc_id))

    def keep(self) -> None:
        """Write it down, where there is anything new."""
        if self._store is None or not self._new:
            return
        new = np.array(sorted(self._new), _TYPE)
        # Another run may have written meanwhile.
        last = np.union1d(self._numbers_in(self._store.note(_name(self._last))), new).astype(_TYPE)
        while len(last) > _MOST_IN_A_NOTE:
            self._store.replace_note(_name(self._last), _written(self._salt, last[:_MOST_IN_A_NOTE]))
            self._last, last = self._last + 1, last[_MOST_IN_A_NOTE:]
        self._store.replace_note(_name(self._last), _written(self._salt, last))
        self._known = np.union1d(self._known, new).astype(_TYPE)
        self._new.clear()

    def _numbers_in(self, note: str | None) -> NDArray[np.uint64]:
        """What a note holds; nothing where it is none of ours, or of another key."""
        salt, numbers = _read(note) or (b"", np.empty(0, _TYPE))
        return numbers if salt == self._salt else np.empty(0, _TYPE)

    def _number(self, user_id: str, doc_id: str) -> int:
        user = user_id.encode("utf-8", "surrogatepass")
        told = len(user).to_bytes(8, "little") + user + doc_id.encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(told, digest_size=8, key=self._salt).digest(), "little")


def _name(number: int) -> str:
    return f"{_NOTE}, {number}" if number else _NOTE


def _written(salt: bytes, numbers: NDArray[np.uint64]) -> str:
    return json.dumps({"key": salt.hex(), "documents": base64.b64encode(numbers.tobytes()).decode()})


def _read(text: str | None) -> tuple[bytes, NDArray[np.uint64]] | None:
    try:
        value = json.loads(text or "")
        return bytes.fromhex(value["key"]), np.frombuffer(base64.b64decode(value["documents"]), _TYPE)
    except UNREADABLE:
        return None
