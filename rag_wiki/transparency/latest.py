"""Whose provenance is "the last one": local to the thread or task that asks.

A context variable alone is not enough. LangChain runs the steps of a chain in copies of the context, and
`asyncio.run` in a task of its own; what is set there is not seen where the chain was called. So the variable
holds a *cell*, which copies of the context share: a call by the same thread or task writes into it, a call by
another one opens a cell of its own and tells those that it came from.
"""

from __future__ import annotations

import asyncio
import threading
from asyncio import _get_running_loop  # one of the names that `asyncio.events` exports
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import count

from rag_wiki.transparency.provenance import ProvenanceBlock

__all__ = ["LatestProvenance"]

_MOST_RETRIEVERS = 8
"""Retrievers that one context remembers; a context may outlive them."""
_DEEPEST = 8
"""Threads and tasks in a row that tell where they came from; a chain of successors has no end."""
_tokens = count()


@dataclass
class _Cell:
    owner: object
    provenance: ProvenanceBlock | None
    parent: _Cell | None
    depth: int


_cells: ContextVar[tuple[tuple[int, _Cell], ...]] = ContextVar("rag_wiki_provenance_cells", default=())


class LatestProvenance:
    """The newest provenance of one retriever, as each thread and task sees it."""

    def __init__(self) -> None:
        # Not id(self): the next object may get the address of a dead one, and contexts outlive both.
        self._token = next(_tokens)
        self._newest: ProvenanceBlock | None = None
        self._of_thread = threading.local()

    def __deepcopy__(self, memo: dict[int, object]) -> LatestProvenance:
        # A copy of a retriever has made no call yet.
        return LatestProvenance()

    def begin(self) -> None:
        """A call begins: should it fail, what this thread or task did before is not what it did last."""
        self._write(None)

    def publish(self, provenance: ProvenanceBlock) -> None:
        """Note the provenance of a call that this thread or task made."""
        self._newest = provenance
        self._write(provenance)

    def _write(self, provenance: ProvenanceBlock | None) -> None:
        self._of_thread.provenance = provenance
        owner, inherited = _current_owner(), self._cell()
        ancestor = inherited
        while ancestor is not None:
            ancestor.provenance = provenance
            ancestor = ancestor.parent
        if inherited is None or inherited.owner != owner:
            others = tuple(item for item in _cells.get() if item[0] != self._token)
            parent = inherited if inherited is not None and inherited.depth < _DEEPEST else None
            own = (self._token, _Cell(owner, provenance, parent, 0 if parent is None else parent.depth + 1))
            _cells.set((*others, own)[-_MOST_RETRIEVERS:])

    def read(self, user_id: str | None) -> ProvenanceBlock | None:
        """The newest provenance of this thread or task or of those it started; else the newest of the user's calls.

        `None` where that call failed, or is under way. A task that awaited a chain can't be told from one that did
        nothing: the chain ran in tasks of its own. What it is shown then may be of a call beside it, but never of
        another user's.
        """
        cell, owner = self._cell(), _current_owner()
        if cell is not None and cell.owner == owner:
            return cell.provenance
        if isinstance(owner, int) and hasattr(self._of_thread, "provenance"):
            own: ProvenanceBlock | None = self._of_thread.provenance
            return own
        newest = self._newest
        return newest if newest is not None and newest.user_id == user_id else None

    def _cell(self) -> _Cell | None:
        for token, cell in _cells.get():
            if token == self._token:
                return cell
        return None


def _current_owner() -> object:
    # Not `current_task` at once: where no loop runs, as it mostly is, it raises.
    task = None if _get_running_loop() is None else asyncio.current_task()
    return threading.get_ident() if task is None else task
