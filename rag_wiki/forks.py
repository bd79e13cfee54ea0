"""What a forked process has to make anew: a lock that a thread of its parent held would never be free there."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from rag_wiki.by_identity import ByIdentity

__all__ = ["in_each_process"]

_makers: ByIdentity[object, list[Callable[[Any], None]]] = ByIdentity()


def in_each_process(make: Callable[[], None]) -> None:
    """Call a method of an object that sets its locks: now, and again in each process that is forked from this one.

    So locks stay plain ones, as fast as they are. The object is not kept alive.
    """
    make()
    method: Any = make
    _makers.get_or_make(method.__self__, list).append(method.__func__)


def _make_all() -> None:
    for owner, makers in _makers.items():
        for make in makers:
            make(owner)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_make_all)
