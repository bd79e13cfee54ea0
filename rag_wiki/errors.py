"""Every error that rag_wiki raises.

Catch `RagWikiError` for all of them, or the built-in that a leaf also inherits::

    RagWikiError
    ├── InvalidUserError (ValueError)          no user, a blank one, or not a string
    ├── InvalidDocumentError (ValueError)      a blank or non-string id, blank content
    ├── ConfigurationError (ValueError)        a setting out of range, or settings that exclude each other
    ├── UnknownDocumentError (LookupError)     an action on a document that this user never met
    ├── ContentNotFoundError (LookupError)     nothing to save: no content, loader, file or retrieved text
    ├── InvalidTransitionError (ValueError)    the lifecycle has no such step
    ├── DocumentRemovedError (RuntimeError)    the document was removed while it was being saved
    ├── EmbeddingError (ValueError)            the model's answer can't be used
    ├── EmbeddingUnavailableError (RuntimeError) no embedding model to save with
    ├── UnexpectedArgumentError (TypeError)    a call-time keyword that nobody would receive
    ├── StorageError (RuntimeError)            a store can't do its work
    │   ├── CorruptDataError                   stored bytes that can't be read back
    │   └── SchemaVersionError                 the database was written by a newer release
    └── MissingExtraError (ImportError)        an optional dependency is not installed
"""

from __future__ import annotations

__all__ = [
    "ConfigurationError",
    "ContentNotFoundError",
    "CorruptDataError",
    "DocumentRemovedError",
    "EmbeddingError",
    "EmbeddingUnavailableError",
    "InvalidDocumentError",
    "InvalidTransitionError",
    "InvalidUserError",
    "MissingExtraError",
    "RagWikiError",
    "SchemaVersionError",
    "StorageError",
    "UnexpectedArgumentError",
    "UnknownDocumentError",
]


class RagWikiError(Exception):
    """The root of all errors of this library."""


class InvalidUserError(RagWikiError, ValueError):
    """The user is missing, blank, or not a string."""


class InvalidDocumentError(RagWikiError, ValueError):
    """A document id or content is blank, or not a string."""


class ConfigurationError(RagWikiError, ValueError):
    """A setting is out of range, or two settings exclude each other."""


class UnknownDocumentError(RagWikiError, LookupError):
    """An action names a document of which this user has no record."""

    def __init__(self, user_id: str, doc_id: str) -> None:
        super().__init__(
            f"user {user_id!r} has no record of document {doc_id!r}: "
            "it was never retrieved for this user, or everything about it was deleted. "
            "Retrieve it once with this user, or check the id (documents() lists the known ones)."
        )
        self.user_id = user_id
        self.doc_id = doc_id

    def __reduce__(self) -> tuple[type[UnknownDocumentError], tuple[str, str]]:
        return type(self), (self.user_id, self.doc_id)


class ContentNotFoundError(RagWikiError, LookupError):
    """There is no content to save for a document."""


class InvalidTransitionError(RagWikiError, ValueError):
    """The lifecycle has no step from the document's state to the wanted one."""


class DocumentRemovedError(RagWikiError, RuntimeError):
    """The document was removed while a save was under way; the removal stands."""


class EmbeddingError(RagWikiError, ValueError):
    """The embedding model returned too few, unequal or non-finite vectors."""


class EmbeddingUnavailableError(RagWikiError, RuntimeError):
    """Saving or re-indexing needs an embedding model, and none was found."""


class UnexpectedArgumentError(RagWikiError, TypeError):
    """A call-time keyword argument would be dropped without anybody seeing it."""


class StorageError(RagWikiError, RuntimeError):
    """A store can't do its work."""


class CorruptDataError(StorageError):
    """Stored data can't be read back: torn, foreign, or of another document."""


class SchemaVersionError(StorageError):
    """The database was written by a newer release than this one."""


class MissingExtraError(RagWikiError, ImportError):
    """An optional dependency is not installed."""

    def __init__(self, needed_by: str, extra: str) -> None:
        super().__init__(
            f"{needed_by} requires the extra '{extra}'. Install it with: pip install 'langchain-rag-wiki[{extra}]'"
        )
        self.needed_by = needed_by
        self.extra = extra

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str]]:
        return type(self), (self.needed_by, self.extra)
