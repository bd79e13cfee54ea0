"""Wrong input and broken parts: who is told what, and that nothing has changed."""

from __future__ import annotations

import logging
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from helpers import TableEmbeddings, document
from scenarios import (
    OTHER_QUESTION,
    POD_QUESTION,
    PODS,
    USER,
    World,
    cached,
    chained,
    doc_ids,
    topics,
)

from rag_wiki import (
    ChunkStore,
    ConfigurationError,
    DecayConfig,
    DocumentState,
    EmbeddingUnavailableError,
    InvalidDocumentError,
    InvalidTransitionError,
    InvalidUserError,
    MemoryStateStore,
    ProvenanceBlock,
    RagWikiError,
    RagWikiRetriever,
    StateStore,
    UnexpectedArgumentError,
    UnknownDocumentError,
    UserDocRecord,
)
from rag_wiki.storage.chunk_places import MemoryPlace
from rag_wiki.storage.chunk_store import StoredCopy

NOBODY: tuple[Any, ...] = ("", " ", "\n\t", 0, 7, b"ada", ["ada"], True, frozenset({"ada"}))
ACTIONS: dict[str, Callable[[RagWikiRetriever, str], Any]] = {
    "accept_suggestion": lambda retriever, doc_id: retriever.accept_suggestion(doc_id),
    "accept_suggestion with content": lambda retriever, doc_id: retriever.accept_suggestion(doc_id, full_content="x"),
    "decline_suggestion": lambda retriever, doc_id: retriever.decline_suggestion(doc_id),
    "thumbs_up": lambda retriever, doc_id: retriever.thumbs_up(doc_id),
    "thumbs_down": lambda retriever, doc_id: retriever.thumbs_down(doc_id),
    "force_pin": lambda retriever, doc_id: retriever.force_pin(doc_id),
    "unpin": lambda retriever, doc_id: retriever.unpin(doc_id),
    "force_remove": lambda retriever, doc_id: retriever.force_remove(doc_id),
    "set_always_full_doc": lambda retriever, doc_id: retriever.set_always_full_doc(doc_id),
    "refresh": lambda retriever, doc_id: retriever.refresh(doc_id),
    "history": lambda retriever, doc_id: retriever.history(doc_id),
}
ABOUT_A_USER: dict[str, Callable[[RagWikiRetriever, Any], Any]] = {
    "invoke": lambda retriever, user: retriever.invoke(POD_QUESTION, user_id=user),
    "configurable": lambda retriever, user: retriever.invoke(POD_QUESTION, {"configurable": {"user_id": user}}),
    "batch": lambda retriever, user: retriever.batch([POD_QUESTION], {"configurable": {"user_id": user}}),
    "stream": lambda retriever, user: list(retriever.stream(POD_QUESTION, user_id=user)),
    "chain": lambda retriever, user: chained(retriever).invoke(POD_QUESTION, {"configurable": {"user_id": user}}),
    "for_user": lambda retriever, user: retriever.for_user(user),
    "accept_suggestion": lambda retriever, user: retriever.accept_suggestion("pods", user_id=user),
    "decline_suggestion": lambda retriever, user: retriever.decline_suggestion("pods", user_id=user),
    "thumbs_up": lambda retriever, user: retriever.thumbs_up("pods", user_id=user),
    "force_pin": lambda retriever, user: retriever.force_pin("pods", user_id=user),
    "force_remove": lambda retriever, user: retriever.force_remove("pods", user_id=user),
    "run_decay": lambda retriever, user: retriever.run_decay(user_id=user),
    "documents": lambda retriever, user: retriever.documents(user_id=user),
    "history": lambda retriever, user: retriever.history("pods", user_id=user),
    "stats": lambda retriever, user: retriever.stats(user_id=user),
    "reindex": lambda retriever, user: retriever.reindex(user_id=user),
    "forget_user": lambda retriever, user: retriever.forget_user(user_id=user),
}


def provenance(retriever: RagWikiRetriever) -> ProvenanceBlock:
    """The provenance of the last call."""
    assert retriever.last_provenance is not None
    return retriever.last_provenance


# -- users


@pytest.mark.parametrize("call", ABOUT_A_USER.values(), ids=ABOUT_A_USER)
@pytest.mark.parametrize("user", NOBODY, ids=repr)
def test_a_user_who_is_nobody_is_an_error(call: Callable[[RagWikiRetriever, Any], Any], user: Any) -> None:
    """Blank or not a string, in whatever call: a ValueError of ours, before the source or a store is touched."""
    world = World()
    world.shows(document("pods", PODS))
    with pytest.raises(InvalidUserError, match="user") as caught:
        call(world.retriever("ada"), user)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RagWikiError)
    assert world.source.calls == []
    assert world.store.list_by_state("ada") == []


@pytest.mark.parametrize("user", NOBODY, ids=repr)
def test_a_retriever_for_nobody_is_an_error(user: Any) -> None:
    """The constructor refuses a blank user, and one that is no string."""
    with pytest.raises(InvalidUserError, match="user_id"):
        World().retriever(user)


async def test_a_call_that_names_nobody_says_how_to(state_store: StateStore) -> None:
    """With no user anywhere, calls and actions say the three ways to name one, and nothing is asked or counted."""
    world = World(state_store)
    world.shows(document("pods", PODS))
    retriever = world.retriever(None)
    for call in (
        lambda: retriever.invoke(POD_QUESTION),
        lambda: retriever.accept_suggestion("pods"),
        lambda: retriever.documents(),
        lambda: retriever.forget_user(),
    ):
        with pytest.raises(InvalidUserError, match=r"user_id.*configurable"):
            call()
    with pytest.raises(InvalidUserError, match=r"user_id.*configurable"):
        await retriever.ainvoke(POD_QUESTION)
    assert (world.source.calls, state_store.list_active_users()) == ([], [])


@pytest.mark.parametrize("k", [0, -1, 1.5, True, "3"])
def test_a_senseless_k_is_an_error(k: Any) -> None:
    """`k` below 1 or no whole number is a ValueError that names it, at construction and per call."""
    world = World()
    with pytest.raises(ConfigurationError, match="k must"):
        world.retriever(k=k)
    with pytest.raises(ConfigurationError, match="k must"):
        world.retriever().invoke(POD_QUESTION, k=k)
    assert world.source.calls == []


# -- documents


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_an_unknown_document_is_an_error(
    state_store: StateStore, action: Callable[[RagWikiRetriever, str], Any]
) -> None:
    """An action on a document that the user never met: a LookupError of ours with both ids and the remedy."""
    world = World(state_store)
    retriever = world.retriever()
    world.save(world.retriever("bob"), "never met", PODS)
    before = state_store.get("bob", "never met")
    with pytest.raises(UnknownDocumentError, match=r"'ada'.*'never met'.*documents\(\)") as caught:
        action(retriever, "never met")
    assert isinstance(caught.value, LookupError)
    assert isinstance(caught.value, RagWikiError)
    assert (state_store.get(USER, "never met"), state_store.get("bob", "never met")) == (None, before)


@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
@pytest.mark.parametrize("doc_id", ["", "  ", None, 7, b"pods", ["pods"]], ids=repr)
def test_an_id_that_names_nothing_is_an_error(action: Callable[[RagWikiRetriever, Any], Any], doc_id: Any) -> None:
    """A blank id, or one that is no string, is a ValueError of ours in every action."""
    with pytest.raises(InvalidDocumentError, match="doc_id") as caught:
        action(World().retriever(), doc_id)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("content", ["", " \n\t", 7, b"bytes", ["text"], True], ids=repr)
def test_content_that_is_no_text_is_an_error(content: Any) -> None:
    """Blank content, or none of a string: a ValueError of ours with both ids; nothing else is saved in its place."""
    world = World()
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    retriever.invoke(POD_QUESTION)
    before = world.record("pods")
    with pytest.raises(InvalidDocumentError, match=r"'pods'.*'ada'") as caught:
        retriever.accept_suggestion("pods", full_content=content)
    assert isinstance(caught.value, ValueError)
    assert (world.record("pods"), world.table.batches) == (before, [])


def in_state(world: World, retriever: RagWikiRetriever, state: DocumentState) -> UserDocRecord:
    """Bring "pods" into a state by what a user can do."""
    world.shows(document("pods", PODS))
    for _ in range(3 if state is DocumentState.SUGGESTED else 1):
        retriever.invoke(POD_QUESTION)
    world.shows()
    if state in (DocumentState.CLAIMED, DocumentState.PINNED):
        retriever.accept_suggestion("pods")
    if state is DocumentState.PINNED:
        retriever.force_pin("pods")
    if state is DocumentState.DEMOTED:
        retriever.force_remove("pods")
    record = world.record("pods")
    assert record.user_state is state
    return record


@pytest.mark.parametrize(
    ("action", "state", "remedy"),
    [
        ("accept_suggestion with content", DocumentState.DEMOTED, "force_pin"),
        ("decline_suggestion", DocumentState.DEMOTED, "fetched again"),
        ("unpin", DocumentState.SURFACED, "no pin"),
        ("unpin", DocumentState.SUGGESTED, "no pin"),
        ("unpin", DocumentState.CLAIMED, "no pin"),
        ("unpin", DocumentState.DEMOTED, "no pin"),
        ("refresh", DocumentState.SURFACED, "accept_suggestion"),
        ("refresh", DocumentState.SUGGESTED, "accept_suggestion"),
        ("refresh", DocumentState.DEMOTED, "force_pin"),
    ],
)
def test_an_action_that_the_state_does_not_allow_is_an_error(
    state_store: StateStore, action: str, state: DocumentState, remedy: str
) -> None:
    """A ValueError of ours with both ids, the state and what to do; record, history and chunks are as before."""
    world = World(state_store)
    retriever = world.retriever()
    before = in_state(world, retriever, state)
    told, chunks = retriever.history("pods"), retriever.chunk_store.load_chunks(USER, "pods")
    with pytest.raises(InvalidTransitionError, match=rf"(?s)'pods'.*'ada'.*{state}.*{remedy}") as caught:
        ACTIONS[action](retriever, "pods")
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RagWikiError)
    assert (world.record("pods"), retriever.history("pods")) == (before, told)
    assert retriever.chunk_store.load_chunks(USER, "pods") == chunks


@pytest.mark.parametrize("action", ["accept_suggestion", "force_pin", "accept_suggestion with content"])
def test_saving_without_a_model_says_what_to_pass(state_store: StateStore, action: str) -> None:
    """With no embedding model anywhere: an error of ours with both ids and the parameter to pass; all is as before."""
    world = World(state_store, embeddings=None)
    retriever = world.retriever()
    before = in_state(world, retriever, DocumentState.SUGGESTED)
    with pytest.raises(EmbeddingUnavailableError, match=r"'pods'.*'ada'.*embedding_model") as caught:
        ACTIONS[action](retriever, "pods")
    assert isinstance(caught.value, RuntimeError)
    assert world.record("pods") == before
    with pytest.raises(EmbeddingUnavailableError, match=r"'ada'.*embedding_model"):
        retriever.reindex()


def test_an_argument_that_nobody_takes_changes_nothing(state_store: StateStore) -> None:
    """A mistyped keyword of a call is a TypeError of ours that names it, before anything is counted."""
    world = World(state_store)
    world.shows(document("pods", PODS))
    with pytest.raises(UnexpectedArgumentError, match="userid") as caught:
        world.retriever().invoke(POD_QUESTION, userid="bob")
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, RagWikiError)
    assert (world.source.calls, state_store.get(USER, "pods")) == ([], None)


def test_search_arguments_that_are_no_mapping_are_an_error() -> None:
    """`search_kwargs` that is no dictionary is a TypeError of ours that names it."""
    from langchain_core.vectorstores import InMemoryVectorStore

    retriever = World().retriever(global_retriever=InMemoryVectorStore(topics()).as_retriever())
    for wrong in (None, 3, "k=2", ["k"]):
        with pytest.raises(UnexpectedArgumentError, match="search_kwargs"):
            retriever.invoke(POD_QUESTION, search_kwargs=wrong)


MISSING = {
    "sqlalchemy for SQLite": ("sqlalchemy", "rag_wiki.storage.sqlite", "", "SQLiteStateStore", "sqlite"),
    "sqlalchemy": ("sqlalchemy", "rag_wiki.storage.sql", "", "SQLStateStore", "postgres"),
    "psycopg": (
        "psycopg",
        "rag_wiki.storage.sql",
        "SQLStateStore('postgresql://localhost/x')",
        "SQLStateStore",
        "postgres",
    ),
    "redis": ("redis", "rag_wiki.storage.redis_store", "", "RedisStateStore", "redis"),
    "llama-index": ("llama_index", "rag_wiki.adapters.llamaindex", "", "LlamaIndexRetrieverAdapter", "llama"),
}


@pytest.mark.parametrize(("library", "module", "use", "name", "extra"), MISSING.values(), ids=MISSING)
def test_a_missing_extra_names_our_class_and_the_line_to_run(
    library: str, module: str, use: str, name: str, extra: str
) -> None:
    """Without an optional library: an ImportError of ours with our class and the exact `pip install` line."""
    code = f"""
import sys
sys.modules[{library!r}] = None
import rag_wiki
from rag_wiki import MissingExtraError
try:
    from {module} import {name}
    {use or "pass"}
except ImportError as error:
    assert isinstance(error, MissingExtraError), type(error)
    assert isinstance(error, rag_wiki.RagWikiError)
    print(error)
else:
    raise SystemExit("no error")
"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert name in done.stdout
    assert f"pip install 'langchain-rag-wiki[{extra}]'" in done.stdout


# -- a state store that is down


class BrokenStore(MemoryStateStore):
    """Can be told to fail: on reads, on writes, or on both."""

    reads_fail = False
    writes_fail = False

    def _check(self, failing: bool) -> None:
        if failing:
            raise ConnectionError("the store is away")

    def _read_user(self, user_key: str) -> Any:
        self._check(self.reads_fail)
        return super()._read_user(user_key)

    def _read_document(self, user_key: str, doc_key: str) -> Any:
        self._check(self.reads_fail)
        return super()._read_document(user_key, doc_key)

    def _scan(self, user_key: str, states: Any, **options: Any) -> Any:
        self._check(self.reads_fail)
        return super()._scan(user_key, states, **options)

    def _read_start(self, user_key: str, lapse_after: int, demote_after: int) -> Any:
        self._check(self.reads_fail)
        return super()._read_start(user_key, lapse_after, demote_after)

    def _change(self, user_key: str, doc_keys: Any, step: Any) -> None:
        self._check(self.writes_fail)
        super()._change(user_key, doc_keys, step)

    def _read_events(self, user_key: str, doc_key: str) -> Any:
        self._check(self.reads_fail)
        return super()._read_events(user_key, doc_key)

    def _forget(self, user_key: str) -> Any:
        self._check(self.writes_fail)
        return super()._forget(user_key)


class Broken:
    """A world whose store can fail, with one saved and one counted document."""

    def __init__(self, **options: Any) -> None:
        self.store = BrokenStore()
        self.world = World(self.store)
        self.retriever = self.world.retriever(**options)
        self.world.save(self.retriever, "pods", PODS)
        self.world.shows(document("images", "Images are layered."))
        self.retriever.invoke(OTHER_QUESTION)

    def fail(self, reads: bool, writes: bool) -> None:
        """Fail from now on, or work again."""
        self.store.reads_fail, self.store.writes_fail = reads, writes

    def kept(self) -> list[UserDocRecord]:
        """All records, read while the store works."""
        self.fail(False, False)
        return self.store.list_by_state(USER)


async def ask(retriever: RagWikiRetriever, awaiting: bool, query: str = POD_QUESTION) -> list[Any]:
    """One query, plain or awaited."""
    return await retriever.ainvoke(query) if awaiting else retriever.invoke(query)


BOTH = pytest.mark.parametrize("awaiting", [False, True], ids=["sync", "async"])


@BOTH
@pytest.mark.parametrize(
    ("reads", "writes"), [(True, False), (False, True), (True, True)], ids=["read", "write", "both"]
)
async def test_a_store_that_is_down_costs_no_answer(
    awaiting: bool, reads: bool, writes: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The global results come, one warning says what is wrong, provenance is degraded, and nothing is counted."""
    broken = Broken()
    before = broken.kept()
    caplog.clear()
    broken.fail(reads, writes)
    with caplog.at_level(logging.WARNING, logger="rag_wiki"):
        found = await ask(broken.retriever, awaiting)
    assert "images" in doc_ids(found)
    assert [record.getMessage().count("state store") for record in caplog.records] == [1]
    block = provenance(broken.retriever)
    assert [("state store" in sentence) for sentence in block.degraded] == [True]
    assert block.suggestions == ()
    assert "state store" in block.render()
    assert broken.kept() == before


@BOTH
async def test_after_an_outage_everything_goes_on(awaiting: bool) -> None:
    """When the store is back, copies answer and counts go on from where they were."""
    broken = Broken()
    broken.fail(True, True)
    for _ in range(4):
        await ask(broken.retriever, awaiting)
    broken.fail(False, False)
    assert doc_ids(await ask(broken.retriever, awaiting)) == ["pods", "images"]
    assert [(record.doc_id, record.fetch_count) for record in broken.kept()] == [("images", 2), ("pods", 2)]
    assert list(provenance(broken.retriever).degraded) == []


def test_an_outage_demotes_and_lapses_nothing() -> None:
    """Queries during an outage are neither misses of saved documents nor absences of counted ones."""
    broken = Broken(decay=DecayConfig(max_cache_miss_streak=2), reset_threshold=2)
    broken.world.shows()
    before = broken.kept()
    broken.fail(True, True)
    for _ in range(5):
        assert broken.retriever.invoke(OTHER_QUESTION) == []
    assert broken.kept() == before


USER_ACTIONS: dict[str, Callable[[RagWikiRetriever], Any]] = {
    "accept_suggestion": lambda retriever: retriever.accept_suggestion("images", full_content="Images."),
    "decline_suggestion": lambda retriever: retriever.decline_suggestion("images"),
    "thumbs_up": lambda retriever: retriever.thumbs_up("pods"),
    "thumbs_down": lambda retriever: retriever.thumbs_down("pods"),
    "force_pin saved": lambda retriever: retriever.force_pin("pods"),
    "force_pin unsaved": lambda retriever: retriever.force_pin("images"),
    "force_remove": lambda retriever: retriever.force_remove("pods"),
    "set_always_full_doc": lambda retriever: retriever.set_always_full_doc("pods"),
    "refresh": lambda retriever: retriever.refresh("pods", full_content="Pods."),
    "run_decay": lambda retriever: retriever.run_decay(),
}


@pytest.mark.parametrize("action", USER_ACTIONS.values(), ids=USER_ACTIONS)
@pytest.mark.parametrize(("reads", "writes"), [(False, True), (True, True)], ids=["write", "both"])
def test_an_action_without_its_store_raises(
    action: Callable[[RagWikiRetriever], Any], reads: bool, writes: bool
) -> None:
    """What a user asks for and can't be kept is the store's own exception, and nothing has changed."""
    broken = Broken()
    broken.world.clock.turn(days=1)
    before = broken.kept()
    broken.fail(reads, writes)
    with pytest.raises(ConnectionError, match="the store is away"):
        action(broken.retriever)
    assert broken.kept() == before
    broken.world.shows()
    assert doc_ids(broken.retriever.invoke(POD_QUESTION)) == ["pods"]


@pytest.mark.parametrize("look", ["documents", "stats", "forget_user"])
def test_looking_without_a_store_raises(look: str) -> None:
    """Lists and figures that can't be read are the store's own exception, never an empty answer."""
    broken = Broken()
    broken.fail(True, True)
    with pytest.raises(ConnectionError):
        getattr(broken.retriever, look)()


# -- other parts that are down


@BOTH
async def test_a_query_that_can_not_be_embedded_costs_no_answer(
    state_store: StateStore, awaiting: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The global results come and are counted, one warning says why copies did not answer, and no miss is noted."""
    world = World(state_store)
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(document("images", "Images are layered."))
    world.table.error = ConnectionError("the model is away")
    with caplog.at_level(logging.WARNING, logger="rag_wiki"):
        assert doc_ids(await ask(retriever, awaiting)) == ["images"]
    assert len(caplog.records) == 1
    assert "embedded" in caplog.records[0].getMessage()
    (sentence,) = provenance(retriever).degraded
    assert "embedded" in sentence
    assert (world.record("images").fetch_count, world.record("pods").cache_miss_streak) == (1, 0)
    world.table.error = None
    assert doc_ids(cached(await ask(retriever, awaiting))) == ["pods"]


class OddEmbeddings(TableEmbeddings):
    """Answers a query with whatever a test wants."""

    answer: Any = None

    def embed_query(self, text: str) -> list[float]:
        super().embed_query(text)
        return self.answer  # type: ignore[no-any-return]  # a lie is the test


@pytest.mark.parametrize(
    "answer", [[float("nan")] * 8, [float("inf")] * 8, [], None, "vector", [[1.0, 0.0], [1.0]], [1e300] * 8], ids=repr
)
def test_a_senseless_query_vector_costs_no_answer(answer: Any) -> None:
    """NaN, infinity, nothing or no vector at all: the global results come, and provenance says so."""
    model = OddEmbeddings(topics().table)
    world = World(embeddings=model)
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(document("images", "Images are layered."))
    model.answer = answer
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["images"]
    assert len(provenance(retriever).degraded) == 1
    assert world.record("pods").cache_miss_streak == 0


@BOTH
async def test_a_source_that_fails_raises_its_own_error(state_store: StateStore, awaiting: bool) -> None:
    """The wrapped retriever's exception reaches the caller; nothing is counted, missed or suggested."""
    world = World(state_store)
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    world.shows(document("images", "Images are layered."))
    retriever.invoke(OTHER_QUESTION)
    before = state_store.list_by_state(USER)
    world.source.fail_with(TimeoutError("the vector store is slow"))
    with pytest.raises(TimeoutError, match="is slow"):
        await ask(retriever, awaiting)
    assert state_store.list_by_state(USER) == before


class BrokenPlace(MemoryPlace):
    """A place for chunks that can be told to fail."""

    broken = False

    def read(self, user_id: str, doc_id: str, copy_id: str, *, texts: bool, vectors: bool) -> StoredCopy | None:
        if self.broken:
            raise ConnectionError("the chunks are away")
        return super().read(user_id, doc_id, copy_id, texts=texts, vectors=vectors)

    def add_hits(self, *arguments: Any, **named: Any) -> None:
        if self.broken:
            raise ConnectionError("the chunks are away")
        super().add_hits(*arguments, **named)


@BOTH
async def test_chunks_that_can_not_be_read_cost_no_answer(awaiting: bool) -> None:
    """With the chunk store down the global results come and are counted, provenance says so, and nothing is demoted."""
    place = BrokenPlace()
    world = World()
    retriever = world.retriever(chunk_store=ChunkStore(place=place), decay=DecayConfig(max_cache_miss_streak=2))
    world.save(retriever, "pods", PODS)
    world.shows(document("images", "Images are layered."))
    place.broken = True
    for _ in range(3):
        assert doc_ids(await ask(retriever, awaiting)) == ["images"]
    assert provenance(retriever).degraded
    assert (world.record("images").fetch_count, world.state("pods")) == (3, DocumentState.CLAIMED)
    place.broken = False
    world.shows()
    assert doc_ids(await ask(retriever, awaiting)) == ["pods"]


def test_hits_that_can_not_be_kept_cost_no_answer() -> None:
    """When hits can't be recorded the copy answers all the same, and provenance says that they were not."""
    place = BrokenPlace()
    world = World()
    retriever = world.retriever(chunk_store=ChunkStore(place=place))
    world.save(retriever, "pods", PODS)
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["pods"]
    place.broken = True
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["pods"]
    assert any("hits" in sentence for sentence in provenance(retriever).degraded)


def test_chunks_of_another_width_are_no_error(state_store: StateStore) -> None:
    """A chunk store filled by a model of another width: the source answers, and provenance names the remedy."""
    world = World(state_store)
    world.save(world.retriever(), "pods", PODS)
    world.embeddings = TableEmbeddings({"pods": [1.0]}, width=3)
    world.shows(document("images", "Images are layered."))
    retriever = world.retriever()
    assert doc_ids(retriever.invoke(POD_QUESTION)) == ["images"]
    assert any("reindex()" in sentence for sentence in provenance(retriever).degraded)
    assert world.record("pods").cache_miss_streak == 0


@pytest.mark.parametrize("given", [None, "pods", {"doc_id": "pods"}, [document("pods", PODS)]])
def test_what_is_no_document_has_no_id(given: Any) -> None:
    """`doc_id_of` says so, rather than that something has no metadata."""
    with pytest.raises(InvalidDocumentError, match=f"takes a document of an answer, got {type(given).__name__}"):
        World().retriever().doc_id_of(given)
