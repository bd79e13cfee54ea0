"""What is noted of each answer. The older release's environment reads this too: no more than Python is needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Piece(NamedTuple):
    """A piece of an answer."""

    text: str
    doc_id: str
    from_cache: bool = False


class Observation(NamedTuple):
    """What is noted of one answer."""

    rank: int
    """Where the first piece stands that holds the answer, from 1; 0 when none does."""
    characters: int
    pieces: int
    first_from_cache: bool
    """The first piece is of a saved copy."""
    from_cache: bool
    """Some piece is."""
    searches: int
    """How often the wrapped retriever was asked."""
    about_unsaved: bool = False
    """Some documents were saved, and the one that the question is about was not."""


def observe(
    pieces: Sequence[Piece], doc_id: str, answers: Sequence[str], searches: int, *, about_unsaved: bool = False
) -> Observation:
    """Note what there is to note of an answer.

    Args:
        pieces: What was returned, in order.
        doc_id: The document that the question is about. A piece of another one may name the answer by chance, or in
            another language, and does not count.
        answers: The texts that answer it; one of them is enough.
        searches: How often the wrapped retriever was asked.
        about_unsaved: Whether other documents than this one were saved.
    """
    holders = (
        place
        for place, piece in enumerate(pieces, 1)
        if piece.doc_id == doc_id and any(answer in piece.text for answer in answers)
    )
    return Observation(
        rank=next(holders, 0),
        characters=sum(len(piece.text) for piece in pieces),
        pieces=len(pieces),
        first_from_cache=bool(pieces) and pieces[0].from_cache,
        from_cache=any(piece.from_cache for piece in pieces),
        searches=searches,
        about_unsaved=about_unsaved,
    )


@dataclass
class Course:
    """How a system went through all sessions."""

    sessions: list[list[Observation]] = field(default_factory=list)
    saved: int = 0
    """Documents that are saved at the end, of all users."""
    suggestions: int = 0
    """Documents that were suggested, and accepted."""
    let_go: int = 0
    """Saved documents that were let go on the way."""
