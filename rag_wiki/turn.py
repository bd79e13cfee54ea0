"""Turns: one at a time, and those who waited share the failure of the one before them."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

__all__ = ["Turn"]


class Turn:
    """A lock for work that the next one need not do again, whether it succeeded or failed.

    Where a server hangs, each failure takes as long as its timeout. Ten threads that waited for the same thing would
    otherwise fail one after the other, each after a timeout of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._failure: tuple[Hashable, Exception] | None = None

    @contextmanager
    def take(self, what: Hashable = None) -> Iterator[None]:
        """Wait for the turn, and have it.

        Args:
            what: The work; who waits for other work does not share its failure.

        Raises:
            Exception: What the same work raised while this one waited for it.
        """
        before = self._failure
        with self._lock:
            if self._failure is not None and self._failure is not before and self._failure[0] == what:
                raise self._failure[1]
            try:
                yield
            except Exception as error:
                self._failure = what, error
                raise
            self._failure = None
