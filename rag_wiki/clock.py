"""The one place that knows what time it is.

Rules take `now` as an argument; whoever acts holds a `Clock` and asks it once per operation.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from typing import TypeAlias

__all__ = ["Clock", "as_utc", "days_between", "later", "parse_utc", "utc_now"]

Clock: TypeAlias = Callable[[], datetime]
"""Something that tells the present moment as an aware UTC datetime."""


def utc_now() -> datetime:
    """The present moment, aware, in UTC."""
    return datetime.now(timezone.utc)


def as_utc(moment: datetime) -> datetime:
    """The same instant in UTC; a naive time is read as UTC, never as local time."""
    if moment.tzinfo is None:
        return moment.replace(tzinfo=timezone.utc)
    return moment.astimezone(timezone.utc)


def parse_utc(text: str) -> datetime:
    """The instant of its ISO form, in UTC; without an offset it is read as UTC.

    Raises:
        ValueError: It is none, or none that UTC has.
    """
    # Python 3.10 does not know the letter.
    moment = datetime.fromisoformat(f"{text[:-1]}+00:00" if text[-1:] in ("Z", "z") else text)
    try:
        return as_utc(moment)
    except OverflowError as error:
        msg = f"UTC has no such time: {text!r}"
        raise ValueError(msg) from error


def later(moment: datetime, span: timedelta) -> datetime:
    """The moment that is a span after an aware UTC one; the last one there is, where the calendar ends before."""
    last = datetime.max.replace(tzinfo=timezone.utc)
    return moment + span if span < last - moment else last


def days_between(earlier: datetime, later: datetime) -> float:
    """Days from `earlier` to `later`, fractional, never negative (clocks of two hosts may disagree)."""
    return max((later - earlier).total_seconds() / 86_400.0, 0.0)
