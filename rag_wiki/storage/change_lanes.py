"""Changes of one user that are asked for at the same time go together: one step of the store carries out many.

Whoever comes first carries out his own; those who come meanwhile wait, and the first of them takes all of theirs
along. So many threads that ask for one user cost one transaction after the other, and not a fight for them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from rag_wiki.forks import in_each_process
from rag_wiki.storage.records import UserChange, UserView

__all__ = ["ChangeLanes", "ChangeRequest", "RuleError"]

_LANES = 64
_MOST_TOGETHER = 64


class RuleError(Exception):
    """What a rule raised on its way through a store, to be told from what the store raised."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class ChangeRequest:
    """A change that somebody waits for.

    Args:
        keys: The stored keys of the documents that `decide` looks at or changes.
        decide: A pure function; it runs again when somebody else was faster.
    """

    def __init__(self, keys: Sequence[str], decide: Callable[[UserView], UserChange]) -> None:
        self.keys = keys
        self.decide = decide
        self._outcome: UserChange | Exception | None = None

    @property
    def done(self) -> bool:
        """Whether it was carried out, or failed."""
        return self._outcome is not None

    def settle(self, outcome: UserChange | Exception) -> None:
        """Say what came of it."""
        self._outcome = outcome

    def result(self) -> UserChange:
        """The change that was carried out; or what the rule, or the store, raised."""
        if not isinstance(self._outcome, UserChange):
            raise self._outcome or RuntimeError("the change was not carried out")
        return self._outcome


class _Lane:
    def __init__(self) -> None:
        self.guard = threading.Lock()
        self.turn = threading.Lock()
        self.waiting: list[tuple[str, ChangeRequest]] = []

    def take(self, user_key: str) -> list[ChangeRequest]:
        """The user's requests that wait, up to a number of them."""
        with self.guard:
            mine = [item for item in self.waiting if item[0] == user_key][:_MOST_TOGETHER]
            self.waiting = [item for item in self.waiting if item not in mine]
        return [request for _, request in mine]

    def remove(self, request: ChangeRequest) -> None:
        """Take back a request."""
        with self.guard:
            self.waiting = [item for item in self.waiting if item[1] is not request]


class ChangeLanes:
    """Lets changes of a user in one process follow each other, and takes along those that wait."""

    def __init__(self) -> None:
        in_each_process(self._make_lanes)

    def _make_lanes(self) -> None:
        self._lanes = [_Lane() for _ in range(_LANES)]

    def run(self, user_key: str, request: ChangeRequest, carry_out: Callable[[Sequence[ChangeRequest]], None]) -> None:
        """See that a request is carried out, by this thread or by another one."""
        lane = self._lane(user_key)
        if not lane.turn.locked():
            # `with`, and no `acquire` that may fail: an interrupt (Ctrl-C) right behind that would leave it locked.
            with lane.turn:
                carry_out([request])
            return
        with lane.guard:
            lane.waiting.append((user_key, request))
        try:
            with lane.turn:
                while not request.done:
                    # Not among those that wait: whoever took it along was ended in the middle.
                    carry_out(lane.take(user_key) or [request])
        finally:
            if not request.done:
                # Nobody waits for it any more, so nobody may carry it out later.
                lane.remove(request)

    def run_all(
        self, user_key: str, requests: Sequence[ChangeRequest], carry_out: Callable[[Sequence[ChangeRequest]], None]
    ) -> None:
        """Carry out requests that came together anyway."""
        with self._lane(user_key).turn:
            carry_out(requests)

    def _lane(self, user_key: str) -> _Lane:
        return self._lanes[hash(user_key) % _LANES]
