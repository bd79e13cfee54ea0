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


class Brought:
    """A set of documents of users, kept in a note of the new place.

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
        self._salt, self._known = _read(kept) or (salt, np.empty(0, _TYPE))
        self._new = set[int]()

    def __contains__(self, ids: tuple[str, str]) -> bool:
        number = np.uint64(self._number(*ids))
        at = int(np.searchsorted(self._known, number))
        return at < len(self._known) and bool(self._known[at] == number)

    def add(self, user_id: str, doc_id: str) -> None:
        """Note that a document is in the new place."""
        if (user_id, doc_id) not in self:
            self._new.add(self._number(user_id, doc_id))

    def keep(self) -> None:
        """Write it down, where there is anything new."""
        if self._store is None or not self._new:
            return
        # Another run may have written meanwhile.
        salt, known = _read(self._store.note(_NOTE)) or (self._salt, self._known)
        known = known if salt == self._salt else self._known
        self._known = np.union1d(known, np.array(sorted(self._new), _TYPE)).astype(_TYPE)
        self._new.clear()
        self._store.replace_note(_NOTE, _written(self._salt, self._known))

    def _number(self, user_id: str, doc_id: str) -> int:
        user = user_id.encode("utf-8", "surrogatepass")
        told = len(user).to_bytes(8, "little") + user + doc_id.encode("utf-8", "surrogatepass")
        return int.from_bytes(hashlib.blake2b(told, digest_size=8, key=self._salt).digest(), "little")


def _written(salt: bytes, numbers: NDArray[np.uint64]) -> str:
    return json.dumps({"key": salt.hex(), "documents": base64.b64encode(numbers.tobytes()).decode()})


def _read(text: str | None) -> tuple[bytes, NDArray[np.uint64]] | None:
    try:
        value = json.loads(text or "")
        return bytes.fromhex(value["key"]), np.frombuffer(base64.b64decode(value["documents"]), _TYPE)
    except UNREADABLE:
        return None
