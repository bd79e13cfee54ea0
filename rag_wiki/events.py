"""The events that rag_wiki logs: one stable name each, its level, and what it tells.

All go to Python's logger `rag_wiki`. A record's `event_name` is the name (as OpenTelemetry calls it), and each thing
it tells is an attribute that begins with `rag_wiki_`, so that no other library's fields are in its way::

    handler.addFilter(lambda record: getattr(record, "event_name", "") == "rag_wiki.document.saved")

The message is for people and may change; the names and the attributes stay. No event holds a query or a text.
Documents are named by their id. Users are named (`rag_wiki_user_id`) only while the logger lets DEBUG through; the
sentences of warnings may name both.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = ["EVENTS", "LogEvent"]

logger = logging.getLogger("rag_wiki")

_EVERY: dict[str, LogEvent] = {}


@dataclass(frozen=True)
class LogEvent:
    """Something that is logged."""

    name: str
    """Stable; dotted, from the general to the particular, as OpenTelemetry names events."""
    level: int
    when: str
    """When it is logged, as a sentence for people."""
    tells: tuple[str, ...] = ()
    """The attributes of its records, without their `rag_wiki_`."""

    def __post_init__(self) -> None:
        _EVERY[self.name] = self

    @property
    def is_on(self) -> bool:
        """Whether anybody would see it: asked before what it tells is put together."""
        return logger.isEnabledFor(self.level)

    def log(
        self,
        message: str,
        *arguments: object,
        user_id: str | None = None,
        error: BaseException | None = None,
        **told: object,
    ) -> None:
        """Log it.

        Args:
            message: For people, with places for the arguments.
            *arguments: What goes there.
            user_id: Whose it is, if anybody's.
            error: Adds the traceback of this one.
            **told: What `tells` names.
        """
        if not logger.isEnabledFor(self.level):
            return
        extra: dict[str, object] = {"event_name": self.name}
        extra.update({f"rag_wiki_{name}": value for name, value in told.items()})
        if user_id is not None and logger.isEnabledFor(logging.DEBUG):
            extra["rag_wiki_user_id"] = user_id
        logger.log(self.level, message, *arguments, extra=extra, exc_info=error, stacklevel=2)


# -- questions

QUERY_ANSWERED: Final = LogEvent(
    "rag_wiki.query.answered",
    logging.DEBUG,
    "a question was answered",
    ("outcome", "mode", "documents", "from_copies", "asked", "degraded", "duration_ms"),
)
QUERY_FAILED: Final = LogEvent(
    "rag_wiki.query.failed", logging.DEBUG, "a question ended in an error, which the caller gets", ("error_type",)
)
QUERY_DEGRADED: Final = LogEvent(
    "rag_wiki.query.degraded",
    logging.WARNING,
    "part of the personal layer could not do its work; the answer says so too",
    ("what", "error_type"),
)
QUERY_DEGRADED_TRACE: Final = LogEvent(
    "rag_wiki.query.degraded_trace", logging.DEBUG, "the same, with the traceback", ("what", "error_type")
)

# -- documents: what happened to one, by the words of its history

_OF_A_DOCUMENT = ("doc_id", "why", "cause", "from_state", "to_state", "fetch_count", "score")

DOCUMENT_EVENTS: Final[Mapping[str, LogEvent]] = {
    what: LogEvent(f"rag_wiki.document.{what}", level, when, _OF_A_DOCUMENT)
    for what, level, when in (
        ("surfaced", logging.DEBUG, "a document was fetched for the first time, or again after it was let go"),
        ("lapsed", logging.DEBUG, "a count began again, and a suggestion went, because it was not fetched any more"),
        ("suggested", logging.INFO, "saving a document was suggested"),
        ("declined", logging.INFO, "the user declined a suggestion"),
        ("saved", logging.INFO, "a document was saved"),
        ("refreshed", logging.INFO, "a saved copy was replaced"),
        ("stale", logging.INFO, "a saved copy was seen to differ from its source"),
        ("voted", logging.INFO, "the user voted"),
        ("pinned", logging.INFO, "a document was pinned, by the user or by its score"),
        ("unpinned", logging.INFO, "a pin ended"),
        ("demoted", logging.INFO, "a saved document was let go, by its score or by misses"),
        ("removed", logging.INFO, "the user removed a document"),
    )
}
DOCUMENT_PURGED: Final = LogEvent(
    "rag_wiki.document.purged",
    logging.INFO,
    "a withdrawn document was removed for all users",
    ("doc_id", "users", "copies", "files"),
)
DOCUMENT_UNIDENTIFIED: Final = LogEvent(
    "rag_wiki.document.unidentified",
    logging.WARNING,
    "the wrapped retriever returned documents that nothing identifies (once)",
)
USER_FORGOTTEN: Final = LogEvent(
    "rag_wiki.user.forgotten",
    logging.INFO,
    "all that was kept of a user was removed",
    ("documents", "events", "retrieved_texts", "chunks", "files"),
)

# -- saving

SAVE_NOT_TIDIED: Final = LogEvent(
    "rag_wiki.save.not_tidied",
    logging.WARNING,
    "a document was saved, and what is left over goes later",
    ("doc_id", "error_type"),
)
CONTENT_MISSING: Final = LogEvent(
    "rag_wiki.content.missing", logging.WARNING, "a saved document has no text to embed anew", ("doc_id",)
)
FILE_UNREADABLE: Final = LogEvent(
    "rag_wiki.file.unreadable", logging.WARNING, "a document's file can't be read", ("doc_id", "error_type")
)
FILE_AMBIGUOUS: Final = LogEvent(
    "rag_wiki.file.ambiguous", logging.WARNING, "a document's path leads to several files; none was read", ("doc_id",)
)

# -- saved copies

COPY_UNAVAILABLE: Final = LogEvent(
    "rag_wiki.copy.unavailable",
    logging.WARNING,
    "saved copies can't answer (once for a user, reason and model)",
    ("reason", "copies"),
)
COPY_UNREADABLE: Final = LogEvent(
    "rag_wiki.copy.unreadable", logging.WARNING, "a saved copy can't be read back", ("doc_id",)
)
HITS_UNREADABLE: Final = LogEvent(
    "rag_wiki.hits.unreadable", logging.WARNING, "a file of hits can't be read; they count for nothing", ("file",)
)
HITS_NOT_SUMMED: Final = LogEvent(
    "rag_wiki.hits.not_summed", logging.WARNING, "files of hits were not summed up this time", ("file",)
)
LEFTOVER_KEPT: Final = LogEvent(
    "rag_wiki.leftover.kept", logging.WARNING, "what a crash left can't be removed; it is tried again", ("file",)
)

# -- embedding models and thresholds

MODEL_CALIBRATED: Final = LogEvent(
    "rag_wiki.model.calibrated", logging.INFO, "it was measured what a model's cosines mean", ("model",)
)
MODEL_MISSING: Final = LogEvent(
    "rag_wiki.model.missing", logging.WARNING, "saving was suggested, and there is no embedding model (once)"
)
MODEL_NOT_TELLING: Final = LogEvent(
    "rag_wiki.model.not_telling", logging.WARNING, "a model's cosines tell nothing (once for a model)", ("model",)
)
THRESHOLD_DOUBTFUL: Final = LogEvent(
    "rag_wiki.threshold.doubtful",
    logging.WARNING,
    "`similarity_threshold` seems to mean nothing with the model (once)",
    ("threshold", "model"),
)
FOCUS_SILENT: Final = LogEvent(
    "rag_wiki.focus.silent",
    logging.WARNING,
    'nothing of what is found counts for many questions in a row (`context="focused"`; once)',
    ("model",),
)
CALIBRATION_UNREADABLE: Final = LogEvent(
    "rag_wiki.calibration.unreadable", logging.WARNING, "a kept calibration can't be read; it is made anew", ("model",)
)
CALIBRATION_NOT_KEPT: Final = LogEvent(
    "rag_wiki.calibration.not_kept", logging.WARNING, "a calibration could not be kept for other workers", ("model",)
)
SOURCE_BY_RANK: Final = LogEvent(
    "rag_wiki.source.by_rank",
    logging.WARNING,
    'a vector store\'s results are ranked by their rank (`context="focused"`)',
    ("store",),
)

# -- decay

DECAY_RUN: Final = LogEvent(
    "rag_wiki.decay.run", logging.INFO, "a user's saved documents were scored", ("documents", "moved", "duration_ms")
)
DECAY_JOB_DONE: Final = LogEvent(
    "rag_wiki.decay.job.done", logging.INFO, "the decay job ran for all users", ("users", "failed")
)
DECAY_JOB_USER_FAILED: Final = LogEvent(
    "rag_wiki.decay.job.user_failed",
    logging.ERROR,
    "the decay job failed for a user, and went on with the others",
    ("error_type",),
)
DECAY_JOB_FAILED: Final = LogEvent(
    "rag_wiki.decay.job.failed",
    logging.ERROR,
    "the decay job could not begin, or not look for leftovers",
    ("step", "error_type"),
)

# -- databases

DATABASE_OLDER: Final = LogEvent(
    "rag_wiki.database.older",
    logging.WARNING,
    "a database holds records of release 0.2, which stay there and are not read",
    ("records",),
)
DATABASE_REPLACED: Final = LogEvent(
    "rag_wiki.database.replaced", logging.WARNING, "the SQLite file was deleted or replaced under way"
)
DATABASE_LOG_KEPT: Final = LogEvent(
    "rag_wiki.database.log_kept", logging.WARNING, "a reader kept SQLite's log from being emptied"
)

EVENTS: Final[Mapping[str, LogEvent]] = _EVERY
"""Every event by its name."""
