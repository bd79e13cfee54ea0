"""Putting chunks of a text together again."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["join_texts", "shared_length"]

_SHORTEST_OVERLAP = 10
"""Characters that the end of a chunk and the start of the next have in common by chance at most."""


def shared_length(text: str, following: str) -> int:
    """How many characters at the end of a chunk are the start of the next; nothing where that may be chance."""
    last_line = text[text.rfind("\n") + 1 :]
    if last_line.strip() and f"{following}\n".startswith(f"{last_line}\n"):
        # A heading, say: splitters repeat it, however short it is.
        return len(last_line)
    start = following[:_SHORTEST_OVERLAP]
    if len(start) < _SHORTEST_OVERLAP:
        return 0
    at = text.find(start, max(len(text) - len(following), 0))
    while at >= 0:
        if following.startswith(text[at:]):
            return len(text) - at
        at = text.find(start, at + 1)
    return 0


def join_texts(texts: Sequence[str]) -> str:
    """Join neighbouring chunks, writing once what the end of one and the start of the next share."""
    joined = ""
    for text in texts:
        if not joined:
            joined = text
            continue
        shared = shared_length(joined, text)
        joined += text[shared:] if shared else "\n\n" + text
    return joined
