"""Putting chunks of a text together again."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["join_texts", "shared_length"]

_SHORTEST_OVERLAP = 20
"""Characters that two chunks share by chance at most."""
_LONGEST_OVERLAP = 1000


def shared_length(text: str, following: str) -> int:
    """How many characters at the end of a chunk are the start of the next; nothing where that may be chance."""
    longest = min(_LONGEST_OVERLAP, len(text), len(following))
    return next((size for size in range(longest, _SHORTEST_OVERLAP - 1, -1) if text.endswith(following[:size])), 0)


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
