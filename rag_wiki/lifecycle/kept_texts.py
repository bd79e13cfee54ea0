"""Which of the retrieved texts that are kept for saving a document its source still has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

from rag_wiki.storage.codec import plain
from rag_wiki.storage.records import RetrievedText, UserDocRecord
from rag_wiki.texts import are_alike

__all__ = ["current_texts", "last_seen", "source_version"]


def source_version(metadata: Mapping[str, Any], version_key: str | None) -> str | None:
    """The source's version that a piece of it is of; `None` where it names none."""
    version = plain(metadata.get(version_key)) if version_key is not None else None
    return None if version is None else str(version)


def last_seen(record: UserDocRecord) -> dict[str, int]:
    """The texts that are kept, in the order in which they were first seen: digest → query that showed it last."""
    return {**dict.fromkeys(record.retrieved, 0), **dict(zip(record.retrieved, record.retrieved_seen, strict=False))}


def current_texts(
    record: UserDocRecord, texts: Sequence[RetrievedText], version_key: str | None
) -> list[RetrievedText]:
    """What of the kept texts the source still has, as far as can be told, in document order.

    Of several versions the one seen last stays, and of several texts under one number. Where no number tells, a
    text gives way to one much like it that came up after it was last seen: parts of one text that are alike have
    been seen together, or in turn.

    Args:
        record: The document's record, which knows when each text was last seen.
        texts: The kept texts, in the order in which they were first seen. What the record does not name is not kept.
        version_key: The metadata key of the source's version.
    """
    seen = last_seen(record)
    kept = [text for text in texts if text.digest in seen]
    versions = {text.digest: source_version(text.metadata, version_key) for text in kept}
    # Of those that one query showed, the one that came up last is the newest.
    in_turn = sorted(kept, key=lambda text: seen[text.digest])
    named = [version for text in in_turn if (version := versions[text.digest]) is not None]
    in_turn = [text for text in in_turn if versions[text.digest] in (None, *named[-1:])]
    numbers = _numbers(kept, seen)
    latest = {text.digest if numbers[text.digest] is None else numbers[text.digest]: text for text in in_turn}.values()
    current: list[RetrievedText] = []
    for text in [text for text in kept if text in latest]:
        old = [
            at
            for at, other in enumerate(current)
            if (numbers[other.digest] is None or numbers[text.digest] is None)
            and (versions[other.digest] is None or versions[text.digest] is None)
            and seen[other.digest] < text.first_seen
            and are_alike(other.text, text.text)
        ]
        if not old:
            current.append(text)
            continue
        # It takes the place of what it is the new version of.
        current[old[0]] = text
        for at in reversed(old[1:]):
            del current[at]
    if all(text.chunk_index is not None for text in current):
        current.sort(key=lambda text: text.chunk_index or 0)
    return current


def _numbers(texts: Sequence[RetrievedText], seen: Mapping[str, int]) -> dict[str, int | None]:
    """The number of the piece that each text is, where it has one that tells: digest → number.

    Under one that a query gave to several unlike texts stand parts of a piece: a compressor has cut it, say.
    """
    shared = {
        text.chunk_index
        for text, other in combinations([text for text in texts if text.chunk_index is not None], 2)
        if text.chunk_index == other.chunk_index
        and (0 < text.first_seen == other.first_seen or 0 < seen[text.digest] == seen[other.digest])
        and not are_alike(text.text, other.text)
    }
    return {text.digest: None if text.chunk_index in shared else text.chunk_index for text in texts}
