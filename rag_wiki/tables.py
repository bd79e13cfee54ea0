"""Lists of documents that print as a table: text for a console, HTML for a notebook."""

from __future__ import annotations

import html
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple, SupportsIndex, overload

from rag_wiki.clock import as_utc, utc_now
from rag_wiki.storage.records import DocumentState, UserDocRecord
from rag_wiki.transparency.provenance import as_ascii, one_line

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["DocumentList", "display_width", "time_ago"]

_MOST_ROWS = 50
_NONE = "–"


class DocumentList(list[UserDocRecord]):
    """Records of documents: a list like any other, that prints as a table.

    `print(documents)`, or the last line of a notebook's cell, shows the first 50 of them. A slice is such a list too.

    Args:
        records: The records.
        now: The moment that "3 days ago" counts from; the present one by default.
    """

    def __init__(self, records: Iterable[UserDocRecord] = (), now: datetime | None = None) -> None:
        super().__init__(records)
        self.now = utc_now() if now is None else as_utc(now)

    @overload
    def __getitem__(self, index: SupportsIndex, /) -> UserDocRecord: ...

    @overload
    def __getitem__(self, index: slice, /) -> Self: ...

    def __getitem__(self, index: SupportsIndex | slice, /) -> UserDocRecord | Self:
        if isinstance(index, slice):
            return type(self)(super().__getitem__(index), self.now)
        return super().__getitem__(index)

    def copy(self) -> Self:
        """The same list anew, with the same records."""
        return type(self)(self, self.now)

    def render(self, *, ascii: bool = False, rows: int = _MOST_ROWS) -> str:  # noqa: A002 - as provenance calls it
        """The table for a console; `ascii=True` for one that is not UTF-8. No title can break its layout.

        Args:
            ascii: Nothing but ASCII; what it has no letter for becomes `?`.
            rows: Documents that are shown at most.
        """
        rows = max(rows, 0)
        shown = [[column.cut(column.text(record, self.now), ascii) for column in _COLUMNS] for record in self[:rows]]
        columns = [number for number, column in enumerate(_COLUMNS) if not column.may_go or _tells(shown, number)]
        lines = [[_COLUMNS[number].name for number in columns], *([row[number] for number in columns] for row in shown)]
        widths = [max(display_width(cell) for cell in cells) for cells in zip(*lines, strict=True)]
        lines.insert(1, ["-" * width for width in widths])
        to_the_right = [_COLUMNS[number].is_number for number in columns]
        text = [
            "  ".join(
                _padded(cell, width, right) for cell, width, right in zip(line, widths, to_the_right, strict=True)
            ).rstrip()
            for line in lines
        ]
        closing = as_ascii(self._closing(rows)) if ascii else self._closing(rows)
        return "\n".join([*text, *([closing] if closing else [])]) if self else closing

    def __str__(self) -> str:
        return self.render()

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        body = "".join(self._html_row(record) for record in self[:_MOST_ROWS])
        header = "".join(f"<th>{column.name}</th>" for column in _COLUMNS)
        return (
            '<div class="rag-wiki-documents"><table>'
            f"<thead><tr>{header}</tr></thead><tbody>{body}</tbody></table>"
            f"<p>{html.escape(self._closing(_MOST_ROWS))}</p></div>"
        )

    def _html_row(self, record: UserDocRecord) -> str:
        cells = []
        for column in _COLUMNS:
            more = one_line(column.more(record), longest=_LONGEST_HINT)
            title = f' title="{html.escape(more)}"' if more else ""
            cells.append(f"<td{title}>{html.escape(column.text(record, self.now))}</td>")
        return f"<tr>{''.join(cells)}</tr>"

    def _closing(self, rows: int) -> str:
        """How many there are, and of what."""
        if not self:
            return "No documents."
        more = f"… and {len(self) - rows:,} more. " if len(self) > rows else ""
        counted = Counter(record.user_state for record in self)
        states = ", ".join(f"{counted[state]:,} {state}" for state in DocumentState if counted[state])
        return f"{more}{len(self):,} document{'' if len(self) == 1 else 's'}: {states}"


class _Column(NamedTuple):
    """What a column shows of a record."""

    name: str
    text: Callable[[UserDocRecord, datetime], str]
    longest: int = 24
    """Cells that it takes at most in a text."""
    is_number: bool = False
    may_go: bool = False
    """Whether it is left out where it says nothing."""
    more: Callable[[UserDocRecord], str] = lambda _record: ""
    """What a notebook tells beside it."""

    def cut(self, text: str, ascii: bool) -> str:  # noqa: A002 - as `render` calls it
        """A text that fits into the column."""
        return _cut(as_ascii(text), self.longest, "~") if ascii else _cut(text, self.longest, "…")


def _name(record: UserDocRecord, _: datetime) -> str:
    doc_id, title = one_line(record.doc_id), one_line(record.doc_title)
    return title or doc_id or "(untitled)"


def _score(record: UserDocRecord, _: datetime) -> str:
    return f"{record.decay_score:.2f}" if record.saved else _NONE


def _why(record: UserDocRecord, _: datetime) -> str:
    return one_line(record.why) or _NONE


def _last_use(record: UserDocRecord, now: datetime) -> str:
    return "never" if record.last_fetched_at is None else time_ago(record.last_fetched_at, now)


def _vote(record: UserDocRecord, _: datetime) -> str:
    return {1.0: "+1", -1.0: "−1", 0.0: ""}.get(record.explicit_signal, f"{record.explicit_signal:+g}")


def _notes(record: UserDocRecord, _: datetime) -> str:
    notes = []
    if record.pinned:
        notes.append("pinned by the user" if record.pinned_by_user else "pinned by its score")
    if record.stale_since is not None:
        notes.append("stale")
    if record.always_full_doc:
        notes.append("answers whole")
    return ", ".join(notes)


def _exact(moment: datetime | None) -> str:
    return "" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC"


_LONGEST_HINT = 500
_COLUMNS: Sequence[_Column] = (
    _Column("Document", _name, 36, more=lambda record: record.doc_id),
    _Column("Id", lambda record, _: one_line(record.doc_id), 28),
    _Column("State", lambda record, _: str(record.user_state)),
    _Column("Score", _score, is_number=True),
    _Column("Why", _why, 60, more=lambda record: record.why),
    _Column("Last use", _last_use, more=lambda record: _exact(record.last_fetched_at)),
    _Column("Fetches", lambda record, _: f"{record.fetch_count:,}", is_number=True),
    _Column("Vote", _vote, is_number=True, may_go=True),
    _Column("Notes", _notes, 40, may_go=True, more=lambda record: _exact(record.stale_since or record.pinned_at)),
)


def _tells(rows: Sequence[Sequence[str]], column: int) -> bool:
    return any(row[column] for row in rows)


def time_ago(moment: datetime, now: datetime) -> str:
    """How long ago a moment was, in words: the largest unit of which it is one or more.

    What is in the future is "just now": clocks of two hosts may disagree.
    """
    seconds = (now - moment).total_seconds()
    for unit, length in _UNITS:
        count = int(seconds // length)
        if count >= 1:
            return f"{count} {unit}{'' if count == 1 else 's'} ago"
    return "just now"


_UNITS = (("year", 31_556_952), ("month", 2_629_746), ("day", 86_400), ("hour", 3_600), ("minute", 60))

_EMOJI_STYLE = "\N{VARIATION SELECTOR-16}"
_SKIN_TONES = range(0x1F3FB, 0x1F400)


def display_width(text: str) -> int:
    """The cells that a text takes in a console: two for an East Asian wide character and an emoji, none for a mark."""
    if text.isascii():
        return len(text)
    return sum(_cells(text))


def _cells(text: str) -> list[int]:
    """The cells of each character."""
    cells: list[int] = []
    for char in text:
        before = cells[-1] if cells else 0
        if char == _EMOJI_STYLE and before == 1:
            # It turns a letter-like sign, ❤ say, into an emoji.
            cells.append(1)
        elif unicodedata.category(char) in ("Mn", "Me", "Cf") or (ord(char) in _SKIN_TONES and before == 2):
            cells.append(0)
        else:
            cells.append(2 if unicodedata.east_asian_width(char) in "WF" else 1)
    return cells


def _cut(text: str, longest: int, mark: str) -> str:
    """A text of so many cells at most, marked where it was cut."""
    if display_width(text) <= longest:
        return text
    room, end = longest - 1, 0
    for cells in _cells(text):
        room -= cells
        if room < 0:
            break
        end += 1
    return text[:end].rstrip() + mark


def _padded(text: str, width: int, to_the_right: bool) -> str:
    space = " " * (width - display_width(text))
    return space + text if to_the_right else text + space
