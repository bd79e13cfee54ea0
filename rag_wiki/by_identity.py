"""What is known of live objects, each for itself: two that are equal are two, and not every one has a hash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar
from weakref import ref

__all__ = ["ByIdentity"]

K = TypeVar("K")
V = TypeVar("V")


class ByIdentity(Generic[K, V]):
    """Values of objects that are not kept alive. `WeakKeyDictionary` goes by equality instead.

    Callers hold a lock of their own where threads may make the same value.
    """

    def __init__(self) -> None:
        self._held: dict[int, tuple[ref[K], V]] = {}

    def get_or_make(self, owner: K, make: Callable[[], V]) -> V:
        """The value of an object; made where it has none."""
        key = id(owner)
        known = self._held.get(key)
        if known is not None and known[0]() is owner:
            return known[1]
        value = make()
        self._held[key] = ref(owner, lambda gone: self._let_go(key, gone)), value
        return value

    def items(self) -> list[tuple[K, V]]:
        """The objects that live, with their values."""
        found = [(held(), value) for held, value in list(self._held.values())]
        return [(owner, value) for owner, value in found if owner is not None]

    def _let_go(self, key: int, gone: ref[K]) -> None:
        # A collection may come at any moment, and another object may have the number by now.
        known = self._held.get(key)
        if known is not None and known[0] is gone:
            self._held.pop(key, None)
