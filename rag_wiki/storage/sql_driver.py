"""The short way to the database, for what every query runs.

SQLAlchemy carries out a prepared statement in some 80 µs where the driver takes 5, and a query runs a handful. So
SQLAlchemy writes their texts, once for each dialect, and looks after the connections; the driver runs them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlalchemy.engine import Dialect

from rag_wiki.forks import in_each_process

__all__ = ["DriverCursor", "StatementTexts"]


@dataclass(frozen=True)
class _Text:
    """A statement in the language of a driver."""

    text: str
    names: tuple[str, ...] | None
    """The parameters in their order; `None` where the driver takes them by name."""
    constants: Mapping[str, Any]
    """Values that are part of the statement."""

    def bind(self, values: Mapping[str, Any]) -> Any:
        """The values as the driver takes them."""
        bound = {**self.constants, **values} if self.constants else values
        return bound if self.names is None else tuple([bound[name] for name in self.names])


class StatementTexts:
    """The texts of statements for one dialect, each written once."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect
        in_each_process(self._make_lock)
        self._texts: dict[Any, _Text] = {}

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def of(self, statement: sa.Executable) -> _Text:
        """The text of a statement that is made once, at the top of its module or in a cache there."""
        found = self._texts.get(statement)
        if found is None:
            compiled: Any = statement.compile(dialect=self._dialect)  # type: ignore[attr-defined]  # all of ours can
            names = None if compiled.positiontup is None else tuple(compiled.positiontup)
            constants = {name: value for name, value in compiled.params.items() if value is not None}
            with self._lock:
                found = self._texts.setdefault(statement, _Text(str(compiled), names, constants))
        return found


class DriverCursor:
    """A cursor of the driver's in a transaction, given statements of SQLAlchemy's with their parameters by name."""

    def __init__(self, cursor: Any, texts: StatementTexts) -> None:
        self._cursor = cursor
        self._texts = texts

    def rows(self, statement: sa.Executable, **values: Any) -> list[Any]:
        """The rows of a query, as tuples in the order of its columns."""
        text = self._texts.of(statement)
        self._cursor.execute(text.text, text.bind(values))
        found: list[Any] = self._cursor.fetchall()
        return found

    def run(self, statement: sa.Executable, rows: Sequence[Mapping[str, Any]]) -> int:
        """Carry a statement out for each of these sets of values; returns how many rows it touched."""
        if not rows:
            return 0
        text = self._texts.of(statement)
        if len(rows) == 1:
            self._cursor.execute(text.text, text.bind(rows[0]))
        else:
            self._cursor.executemany(text.text, [text.bind(row) for row in rows])
        return int(self._cursor.rowcount)
