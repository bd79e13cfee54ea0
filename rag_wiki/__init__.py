"""A memory of its user for any LangChain retriever."""

from rag_wiki.actions import UserStats
from rag_wiki.config import DecayConfig, RagWikiRetrieverConfig
from rag_wiki.errors import (
    ConfigurationError,
    ContentNotFoundError,
    CorruptDataError,
    DocumentRemovedError,
    EmbeddingError,
    EmbeddingUnavailableError,
    InvalidDocumentError,
    InvalidTransitionError,
    InvalidUserError,
    MissingExtraError,
    RagWikiError,
    SchemaVersionError,
    StorageError,
    UnexpectedArgumentError,
    UnknownDocumentError,
)
from rag_wiki.lifecycle.decay_engine import DecayEngine, DecayResult
from rag_wiki.lifecycle.fetch_counter import FetchCounter, SuggestionEvent
from rag_wiki.lifecycle.state_machine import StateMachine
from rag_wiki.retriever import RagWikiRetriever, RetrievalResult
from rag_wiki.search.calibration import Calibration
from rag_wiki.storage.base import (
    DocumentEvent,
    DocumentState,
    ForgottenUser,
    PurgedDocument,
    StateStore,
    UserDocRecord,
)
from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.storage.memory import MemoryStateStore
from rag_wiki.transparency.provenance import ProvenanceBlock, SourceEntry
from rag_wiki.users import using_user

__version__ = "1.0.0"

__all__ = [
    "Calibration",
    "ChunkStore",
    "ConfigurationError",
    "ContentNotFoundError",
    "CorruptDataError",
    "DecayConfig",
    "DecayEngine",
    "DecayResult",
    "DocumentEvent",
    "DocumentRemovedError",
    "DocumentState",
    "EmbeddingError",
    "EmbeddingUnavailableError",
    "FetchCounter",
    "ForgottenUser",
    "InvalidDocumentError",
    "InvalidTransitionError",
    "InvalidUserError",
    "MemoryStateStore",
    "MissingExtraError",
    "ProvenanceBlock",
    "PurgedDocument",
    "RagWikiError",
    "RagWikiRetriever",
    "RagWikiRetrieverConfig",
    "RetrievalResult",
    "SchemaVersionError",
    "SourceEntry",
    "StateMachine",
    "StateStore",
    "StorageError",
    "SuggestionEvent",
    "UnexpectedArgumentError",
    "UnknownDocumentError",
    "UserDocRecord",
    "UserStats",
    "__version__",
    "using_user",
]
