"""Reading values of any type as what they should be; `None` for what they can't be."""

from __future__ import annotations

import math
from datetime import datetime

from rag_wiki.clock import parse_utc

__all__ = ["moment_of", "number_of", "text_of", "whole_of"]

_LARGEST = 2**53
"""Beyond it, counters are damage: nobody asked so often."""


def text_of(value: object) -> str | None:
    """Text that can be stored and read back."""
    return value if isinstance(value, str) else None


def number_of(value: object) -> float | None:
    """A finite number."""
    if not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (OverflowError, ValueError):
        return None
    return number if math.isfinite(number) else None


def whole_of(value: object) -> int | None:
    """A whole number."""
    number = number_of(value)
    if number is None or number != int(number) or abs(number) > _LARGEST:
        return None
    return int(number)


def moment_of(value: object) -> datetime | None:
    """A moment, aware, in UTC. Release 0.2 took UTC, and SQLite dropped the zone: a naive time is read as UTC."""
    if not isinstance(value, str):
        return None
    try:
        return parse_utc(value)
    except (OverflowError, ValueError):
        return None
