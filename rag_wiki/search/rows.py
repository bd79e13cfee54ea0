"""Unit rows in memory, laid out so that a search reads no more of them than it must.

The rows are kept in parts of their columns. What the parts behind one can add to a product is at most the product of
the two lengths there (Cauchy–Schwarz), so most rows are known to stay below a threshold after a part or two, and the
rest of them is not read: reading is what a product costs, and what it reads drives out of the processor's cache what
the program needs next. The result is that of the whole product. Compare dimension pruning in Kuffo, Krippner and
Boncz, "PDX: A Data Layout for Vector Similarity Search", SIGMOD 2025 (arXiv:2503.04422).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rag_wiki.storage.chunk_store import unit_rows

__all__ = ["DIGITS", "FoundRows", "Matrix", "UnitRows"]

Matrix: TypeAlias = NDArray[np.float32]

_PART = 128
"""Columns of a part."""
_GATHERED = 8
"""Of so many rows one may be open for the rest to be read row by row: reading all of them in turn is quicker a row."""
_FEW = 256
"""Rows that are multiplied once more, in float64."""
DIGITS = 6
"""Decimal digits that cosines are served with: rows that are equal to these are equal."""
_MARGIN = 1e-5
"""More than rounding takes from a bound."""
_BLOCK = 256
"""Rows that are brought to length one together."""


class FoundRows(NamedTuple):
    """Rows, and the product of each."""

    rows: NDArray[np.intp]
    """Ascending."""
    products: NDArray[np.floating]
    """Of a few rows in float64, so that those of equal rows are equal, wherever these are."""

    @classmethod
    def of(cls, products: Matrix, least: float) -> FoundRows:
        """Those with this product or a greater one."""
        rows = (products >= least).nonzero()[0]
        return cls(rows, products[rows])

    def only(self, which: NDArray[np.bool_] | NDArray[np.intp]) -> FoundRows:
        """Some of them."""
        return FoundRows(self.rows[which], self.products[which])


class UnitRows:
    """Rows of length one, or zero, with room to grow; only the newest index on them may append.

    Args:
        capacity: Rows that there is room for.
        width: Columns.
    """

    def __init__(self, capacity: int, width: int) -> None:
        self.capacity = capacity
        self.width = width
        self.used = 0
        self._spans = [slice(first, min(first + _PART, width)) for first in range(0, width, _PART)]
        self._parts: list[Matrix] = [
            np.empty((capacity, span.stop - span.start), dtype=np.float32) for span in self._spans
        ]
        self._behind: list[Matrix] = [np.empty(capacity, dtype=np.float32) for _ in self._spans[1:]]
        """For each part but the last: the length of what each row has behind it."""

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        return sum(part.nbytes for part in (*self._parts, *self._behind))

    def write(self, at: int, vectors: Iterable[Matrix]) -> int:
        """Put vectors of any length, (n, width) each, from a row on as unit rows; tells the row after them."""
        waiting: list[Matrix] = []
        count = 0
        for some in vectors:
            waiting.append(some)
            count += len(some)
            if count >= _BLOCK:
                at = self._write(at, np.concatenate(waiting))
                waiting, count = [], 0
        return self._write(at, np.concatenate(waiting)) if waiting else at

    def _write(self, at: int, vectors: Matrix) -> int:
        # In blocks that stay in the processor's cache.
        for first in range(0, len(vectors), _BLOCK):
            units = unit_rows(vectors[first : first + _BLOCK])
            place = slice(at, at + len(units))
            squares = np.zeros(len(units), dtype=np.float32)
            for number in reversed(range(len(self._parts))):
                own = units[:, self._spans[number]]
                if number < len(self._behind):
                    np.sqrt(squares, out=self._behind[number][place])
                if number:
                    squares += np.einsum("ij,ij->i", own, own)
                self._parts[number][place] = own
            at = place.stop
        return at

    def take(self, at: int, other: UnitRows, start: int, stop: int) -> None:
        """Put rows of another one at a row."""
        for mine, theirs in zip((*self._parts, *self._behind), (*other._parts, *other._behind), strict=True):
            mine[at : at + stop - start] = theirs[start:stop]

    def whole(self, which: slice) -> Matrix:
        """Some rows, (n, width)."""
        return np.concatenate([part[which] for part in self._parts], axis=1)

    def products(self, query: Matrix, rows: Sequence[int] | NDArray[np.intp]) -> NDArray[np.float64]:
        """The products of some rows with a vector (width,), in float64."""
        places = np.asarray(rows, dtype=np.intp)
        whole = np.concatenate([part.take(places, axis=0) for part in self._parts], axis=1, dtype=np.float64)
        products: NDArray[np.float64] = whole @ query.astype(np.float64)
        return products

    def best(self, query: Matrix, start: int, stop: int) -> int:
        """Which of some rows has the greatest product with a vector (width,); the first of equal ones."""
        products = sum(part[start:stop] @ query[span] for part, span in zip(self._parts, self._spans, strict=True))
        near = (products >= np.max(products) - _MARGIN).nonzero()[0][:_FEW] + start
        return int(near[np.argmax(self.products(query, near).round(DIGITS))])

    def at_least(self, query: Matrix, size: int, least: float) -> FoundRows:
        """Those of the first rows whose product with a vector (width,) is so great."""
        products: Matrix = self._parts[0][:size] @ query[self._spans[0]]
        for number in range(1, len(self._parts)):
            found = self._narrowed(query, products, number, least)
            if found is not None:
                return found
            products += self._parts[number][:size] @ query[self._spans[number]]
        return self._exact(query, FoundRows.of(products, least))

    def at_least_of_all(self, queries: Matrix, size: int, least: float) -> list[FoundRows]:
        """`at_least` for each row of (n, width), by one product for those that are open still."""
        found: dict[int, FoundRows] = {}
        numbers = np.arange(len(queries))
        products: Matrix = queries[:, self._spans[0]] @ self._parts[0][:size].T
        for number in range(1, len(self._parts)):
            narrowed = [
                self._narrowed(queries[query], own, number, least)
                for query, own in zip(numbers.tolist(), products, strict=True)
            ]
            found |= {query: own for query, own in zip(numbers.tolist(), narrowed, strict=True) if own is not None}
            is_open = np.array([own is None for own in narrowed], dtype=np.bool_)
            if not is_open.all():
                numbers, products = numbers[is_open], products[is_open]
            if numbers.size:
                products += queries[numbers, self._spans[number]] @ self._parts[number][:size].T
        found |= {
            query: self._exact(queries[query], FoundRows.of(own, least))
            for query, own in zip(numbers.tolist(), products, strict=True)
        }
        return [found[query] for query in range(len(queries))]

    def _narrowed(self, query: Matrix, products: Matrix, number: int, least: float) -> FoundRows | None:
        """The rows that are found, given the products of the parts before this one; `None` when too many are open."""
        rest = query[self._spans[number].start :]
        most = self._behind[number - 1][: products.size] * np.float32(math.sqrt(rest @ rest))
        most += products
        rows = (most >= least - _MARGIN).nonzero()[0]
        if rows.size * _GATHERED > products.size:
            return None
        if not rows.size:
            return FoundRows(rows, products[rows])
        if rows.size <= _FEW:
            found = FoundRows(rows, self.products(query, rows))
        else:
            found = FoundRows(rows, self._gathered(query, rows, number, products[rows]))
        return found.only(found.products >= least)

    def _exact(self, query: Matrix, found: FoundRows) -> FoundRows:
        """What was found, with its products in float64 where it is little."""
        return found._replace(products=self.products(query, found.rows)) if 0 < found.rows.size <= _FEW else found

    def _gathered(self, query: Matrix, rows: NDArray[np.intp], first: int, products: Matrix) -> Matrix:
        """The products of some rows, given those of the parts before the first one that is left."""
        for number in range(first, len(self._parts)):
            products += self._parts[number].take(rows, axis=0) @ query[self._spans[number]]
        return products
