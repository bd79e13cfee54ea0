"""What is hard on a store: ids and texts that break separators, patterns, file names and encodings; many threads."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from typing import Any, TypeVar

from rag_wiki.storage.records import DocumentEvent, DocumentState, RetrievedText, UserChange, UserDocRecord, UserView

__all__ = ["AWKWARD_IDS", "AWKWARD_TEXTS", "NOON", "a_record", "a_text", "an_event", "in_threads", "just"]

T = TypeVar("T")

NOON = datetime(2026, 3, 1, 12, 0, 0, 123456, tzinfo=timezone.utc)

_LONG = "x" * 3000

AWKWARD_IDS: tuple[str, ...] = (
    # separators of keys, and what a joined key would look like
    "a",
    "a:b",
    "a:b:c",
    "b:c",
    "a|b",
    "a,b",
    "state:CLAIMED",
    "rag_wiki:users",
    # paths
    ".",
    "..",
    "../x",
    "x/../../y",
    "/",
    "/etc/passwd",
    "\\",
    "C:\\x",
    "NUL",
    "con.txt",
    "a.",
    ".hidden",
    # patterns
    "%",
    "_",
    "*",
    "?",
    "[a]",
    "{a}",
    "}{",
    # the encoded form of another id
    "a%3Ab",
    "a%3ab",
    "%61",
    "~",
    "~" + hashlib.sha256(_LONG.encode()).hexdigest(),
    # statements and options
    "'; DROP TABLE x; --",
    '"',
    "--all",
    "null",
    "0",
    "00",
    # blanks
    "a b",
    "a  b",
    "a ",
    " a",
    "a\t",
    "a\n",
    "a\r\nb",
    "\u200b",
    # case, with the letters whose folding surprises
    "alice",
    "Alice",
    "ALICE",
    "alice ",
    "strasse",
    "straße",
    "\u0130",
    "\u0131",
    # what text columns and terminals choke on
    "\0",
    "a\0",
    "a\0b",
    "\x1b[31m",
    "🦜",
    "文档",
    "\u00e9",
    "e\u0301",
    "\ufb01",
    "fi",
    "\ud800",
    "a\udfff",
    # length
    _LONG,
    _LONG[:-1] + "y",
    "文" * 3000,
)
"""Pairwise different ids that a careless store would confuse, refuse, or take for a path or a pattern."""

AWKWARD_TEXTS: tuple[str, ...] = (
    "",
    " ",
    "\0",
    "a\0b",
    "line\r\nline\n\u2028line",
    "\ud83d",
    "🦜 文档 e\u0301 é",
    '"}{"\\u0000',
    "%s :name ? $1 {x}",
    "null",
    "x" * 300_000,
)
"""Texts that must come back as they went in."""


def a_record(user_id: str = "alice", doc_id: str = "d", **fields: Any) -> UserDocRecord:
    """A record of a document, with a title and path of its own."""
    named: dict[str, Any] = {"doc_title": "A Title", "doc_path": "a/path.md"}
    return UserDocRecord(user_id, doc_id, **{**named, **fields})


def an_event(doc_id: str = "d", what: str = "surfaced", **fields: Any) -> DocumentEvent:
    """An event in the life of a document."""
    values: dict[str, Any] = {
        "at": NOON,
        "why": "it was retrieved",
        "from_state": DocumentState.GLOBAL,
        "to_state": DocumentState.SURFACED,
        "fetch_count": 1,
        "decay_score": 0.5,
    }
    return DocumentEvent(doc_id, what=what, **{**values, **fields})


def a_text(doc_id: str = "d", digest: str = "one", text: str = "some text", **fields: Any) -> RetrievedText:
    """A text of a document as it was retrieved."""
    return RetrievedText(doc_id, digest, text, **fields)


def just(change: UserChange) -> Callable[[UserView], UserChange]:
    """A rule that wants this change, whatever there is."""
    return lambda _: change


def in_threads(count: int, task: Callable[[int], T]) -> list[T]:
    """What `task` gives for 0 … `count` − 1, each called in a thread of its own, all at once."""
    together = threading.Barrier(count)

    def run(number: int) -> T:
        together.wait()
        return task(number)

    interval = sys.getswitchinterval()
    # Threads that take turns often meet each other in the middle of things.
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(count) as threads:
            return list(threads.map(run, range(count)))
    finally:
        sys.setswitchinterval(interval)
