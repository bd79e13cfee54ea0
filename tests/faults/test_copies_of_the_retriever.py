"""Copies, subclasses and wrappings of the retriever: all of them know their user, and share what is to be shared."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from helpers import TableEmbeddings, document
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import ConfigurableField, RunnableLambda
from langchain_core.tools import create_retriever_tool
from pydantic import PrivateAttr
from scenarios import POD_QUESTION, PODS, USER, World, cached, chained, doc_ids, texts

from rag_wiki import DocumentState, MemoryStateStore, RagWikiRetriever, RagWikiRetrieverConfig, StateStore
from rag_wiki.errors import InvalidUserError, StorageError
from rag_wiki.storage.chunk_store import ChunkStore


class Source(BaseRetriever):
    """Returns one document; can be pickled."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [document("pods", PODS)]


class Labelled(RagWikiRetriever):
    """A retriever with a field and a private attribute of its own."""

    label: str = "none"
    _seen: list[str] = PrivateAttr(default_factory=list)
    _note: str = PrivateAttr(default="fresh")

    def _get_relevant_documents(self, query: str, *, run_manager: Any, **given: Any) -> list[Document]:
        self._seen.append(query)
        return super()._get_relevant_documents(query, run_manager=run_manager, **given)


def labelled(store: StateStore | None = None, **options: Any) -> Labelled:
    """One of those, over one document."""
    model = TableEmbeddings({"pods": [1.0], "Pods": [1.0]})
    options = {"user_id": USER, "state_store": store, "embedding_model": model, "label": "mine", **options}
    # The class adds a field; mypy takes its constructor for one of fields alone.
    make: Any = Labelled
    made: Labelled = make(Source(), **options)
    return made


COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "model_copy": lambda retriever: retriever.model_copy(),
    "model_copy, deep": lambda retriever: retriever.model_copy(deep=True),
    "for_user": lambda retriever: retriever.for_user(USER),
    "with_config": lambda retriever: retriever.with_config(tags=["copied"]),
    "bind": lambda retriever: retriever.bind(k=5),
    "with_retry": lambda retriever: retriever.with_retry(stop_after_attempt=2),
    "with_fallbacks": lambda retriever: retriever.with_fallbacks([RunnableLambda(lambda _: [])]),
    "chain": chained,
    "with_listeners": lambda retriever: retriever.with_listeners(on_end=lambda _: None),
    "with_types": lambda retriever: retriever.with_types(input_type=str),
    "configurable field": lambda retriever: retriever.configurable_fields(k=ConfigurableField(id="most")),
    "configurable alternatives": lambda retriever: retriever.configurable_alternatives(
        ConfigurableField(id="which"), default_key="wiki", bare=Source()
    ),
}


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
async def test_every_copy_shares_the_memory(make: Callable[[Any], Any]) -> None:
    """Whatever LangChain makes of a retriever counts for its user, answers from the same copies, and takes a user."""
    state_store = MemoryStateStore()
    retriever = labelled(state_store)
    made = make(retriever)
    assert texts(made.invoke(POD_QUESTION)) == [PODS]
    await made.ainvoke(POD_QUESTION)
    record = state_store.get(USER, "pods")
    assert record is not None
    assert record.fetch_count == 2
    retriever.accept_suggestion("pods")
    for found in (made.invoke(POD_QUESTION), await made.ainvoke(POD_QUESTION), *made.batch([POD_QUESTION] * 2)):
        assert texts(cached(found)) == [PODS]
    named: Any = {"configurable": {"user_id": "bob"}}
    for found in (made.invoke(POD_QUESTION, named), await made.ainvoke(POD_QUESTION, named)):
        assert cached(found) == []
    bobs = state_store.get("bob", "pods")
    assert bobs is not None
    assert (bobs.user_state, bobs.fetch_count) == (DocumentState.SURFACED, 2)


@pytest.mark.parametrize("name", ["copy", "deepcopy", "model_copy", "model_copy, deep", "for_user"])
def test_a_copy_is_of_its_class_with_its_own_fields(name: str) -> None:
    """A copy of a subclass is one too, with its field and what stands in its private attributes."""
    retriever = labelled()
    retriever._note = "written"
    made = COPIES[name](retriever)
    assert type(made) is Labelled
    assert (made.label, made._note, made.k) == ("mine", "written", None)
    made.label, made.k = "copied", 1
    assert (retriever.label, retriever.k) == ("mine", None)
    changed = retriever.model_copy(update={"label": "other", "user_id": "bob"})
    assert (changed.label, changed.user_id, retriever.label) == ("other", "bob", "mine")
    made.invoke(POD_QUESTION)
    assert made._seen[-1] == POD_QUESTION


class Plain(RagWikiRetriever):
    """Overrides LangChain's hook with the signature of its documentation."""

    def _get_relevant_documents(  # type: ignore[override]  # what LangChain asks of a hook, and no more
        self, query: str, *, run_manager: Any
    ) -> list[Document]:
        return super()._get_relevant_documents(query, run_manager=run_manager)


def test_a_subclass_with_the_plain_hook_serves_the_user_of_the_call() -> None:
    """A subclass whose hook takes a query and a run manager alone counts for the user of the call all the same."""
    make: Any = Plain
    retriever = make(Source(), USER, MemoryStateStore())
    retriever.invoke(POD_QUESTION, user_id="bob")
    retriever.invoke(POD_QUESTION, {"configurable": {"user_id": "bob"}})
    assert retriever.documents() == []
    assert [record.fetch_count for record in retriever.documents(user_id="bob")] == [2]


class Asking(RagWikiRetriever):
    """Asks twice, with words of its own."""

    def _get_relevant_documents(  # type: ignore[override]  # as `Plain`
        self, query: str, *, run_manager: Any
    ) -> list[Document]:
        first = super()._get_relevant_documents(f"{query} first", run_manager=run_manager)
        return first + super()._get_relevant_documents(f"{query} again", run_manager=run_manager)


def test_a_hook_that_asks_otherwise_asks_for_the_user_of_the_call() -> None:
    """A subclass may change the query and ask more than once; each time it is the call's user, `k` and arguments."""
    world = World()
    world.shows(document("pods", PODS), document("images", "Images"))
    make: Any = Asking
    retriever = make(world.source, USER, MemoryStateStore())
    documents, provenance = retriever.invoke_with_provenance(POD_QUESTION, user_id="bob", k=1)
    assert doc_ids(documents) == ["pods", "pods"]
    assert world.source.calls == [f"{POD_QUESTION} first", f"{POD_QUESTION} again"]
    assert (provenance.user_id, len(provenance.sources)) == ("bob", 1)
    assert retriever.documents() == []


def test_a_copy_for_another_user_has_a_provenance_of_its_own() -> None:
    """The last provenance of a copy is of the copy's calls, however it was copied."""
    retriever = labelled()
    retriever.invoke(POD_QUESTION)
    for name in ("deepcopy", "model_copy", "for_user"):
        assert COPIES[name](retriever).last_provenance is None
    other = retriever.for_user("bob")
    other.invoke(POD_QUESTION)
    assert retriever.last_provenance is not None
    assert retriever.last_provenance.user_id == USER
    assert other.last_provenance is not None
    assert other.last_provenance.user_id == "bob"


def test_a_copy_with_other_settings_follows_them(tmp_path: Any) -> None:
    """A copy with another threshold, access check or clock goes by it, and the one before goes on as it was."""
    retriever = labelled()
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    strict = retriever.model_copy(update={"access_check": lambda _user, _doc: False})
    assert cached(strict.invoke(POD_QUESTION)) == []
    eager = retriever.model_copy(update={"config": RagWikiRetrieverConfig(fetch_threshold=1), "user_id": "eve"})
    assert len(eager.invoke_with_provenance(POD_QUESTION).provenance.suggestions) == 1
    moved = retriever.model_copy(update={"chunk_store": ChunkStore(tmp_path)})
    assert "1 saved copy" in moved.invoke_with_provenance(POD_QUESTION).provenance.degraded[0]
    assert texts(cached(retriever.invoke(POD_QUESTION))) == [PODS]


@pytest.mark.parametrize("assign", [False, True], ids=["copied", "assigned"])
def test_a_folder_given_later_is_used(tmp_path: Any, assign: bool) -> None:
    """A configuration with a folder, given by a copy or by assignment, is where chunks go."""
    config = RagWikiRetrieverConfig(wiki_save_dir=tmp_path)
    retriever = labelled()
    if assign:
        retriever.config = config
    else:
        retriever = retriever.model_copy(update={"config": config})
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    assert [path.read_text() for path in tmp_path.rglob("*.md")] == [PODS]


def test_chunks_follow_a_store_that_is_assigned() -> None:
    """A state store that is assigned brings the chunks beside it, as one given by model_copy does."""
    retriever, other = labelled(), MemoryStateStore()
    retriever.state_store = other
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    assert [chunk["text"] for chunk in other.chunk_store.load_chunks(USER, "pods")] == [PODS]


def test_configurable_fields_are_configured_per_call() -> None:
    """A field that was made configurable changes the call that says so, and no other."""
    world = World()
    world.shows(document("pods", PODS), document("images", "Images"))
    made = world.retriever().configurable_fields(
        k=ConfigurableField(id="most"), user_id=ConfigurableField(id="user_id")
    )
    assert len(made.invoke(POD_QUESTION, {"configurable": {"most": 1}})) == 1
    assert len(made.invoke(POD_QUESTION)) == 2
    assert len(made.with_config(configurable={"user_id": "bob"}).invoke(POD_QUESTION)) == 2
    assert (world.record("pods", "bob").fetch_count, world.record("images").fetch_count) == (1, 2)
    with pytest.raises(InvalidUserError):
        made.invoke(POD_QUESTION, {"configurable": {"user_id": " "}})


def test_alternatives_are_chosen_per_call() -> None:
    """The wrapped retriever as an alternative counts nothing; the default counts."""
    retriever = labelled()
    made = COPIES["configurable alternatives"](retriever)
    assert "from_cache" not in made.invoke(POD_QUESTION, {"configurable": {"which": "bare"}})[0].metadata
    assert retriever.documents() == []
    made.invoke(POD_QUESTION)
    assert doc_ids(made.invoke(POD_QUESTION)) == ["pods"]
    assert [record.fetch_count for record in retriever.documents()] == [2]


async def test_a_failing_source_is_tried_again_and_falls_back() -> None:
    """A retry counts once, for the call that worked; a fallback answers for a source that is away."""
    world = World()
    world.shows(document("pods", PODS))
    calls: list[str] = []

    def flaky(query: str) -> list[Document]:
        calls.append(query)
        if len(calls) == 1:
            message = "away"
            raise ConnectionError(message)
        return list(world.source.documents)

    retriever = world.retriever(global_retriever=RunnableLambda(flaky))
    assert texts(retriever.with_retry(wait_exponential_jitter=False).invoke(POD_QUESTION)) == [PODS]
    assert world.record("pods").fetch_count == 1
    world.source.fail_with(ConnectionError("away"))
    fallen = world.retriever().with_fallbacks([RunnableLambda(lambda _: [Document("instead")])])
    assert texts(await fallen.ainvoke(POD_QUESTION)) == texts(fallen.invoke(POD_QUESTION)) == ["instead"]
    assert world.record("pods").fetch_count == 1


@pytest.mark.filterwarnings("ignore:This API is in beta")
async def test_a_tool_answers_and_names_its_user() -> None:
    """As a tool, of either kind, the retriever answers, counts, and takes the user from the configuration."""
    world = World()
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    named: Any = {"configurable": {"user_id": "bob"}}
    tool = retriever.as_tool(name="wiki", description="Looks things up.", arg_types=None)
    assert texts(tool.invoke(POD_QUESTION)) == texts(await tool.ainvoke(POD_QUESTION, named)) == [PODS]
    looked_up = create_retriever_tool(retriever, "wiki", "Looks things up.")
    assert looked_up.invoke({"query": POD_QUESTION}) == await looked_up.ainvoke({"query": POD_QUESTION}, named) == PODS
    assert (world.record("pods").fetch_count, world.record("pods", "bob").fetch_count) == (2, 2)


# -- pickling ------------------------------------------------------------------------------------


def test_a_retriever_that_can_travel_finds_its_memory(make_store: Callable[[str], StateStore]) -> None:
    """Over a file or a URL a retriever is pickled, with its settings and fields, and goes on there."""
    for kind in ("sqlite-file", "postgres"):
        retriever = labelled(make_store(kind), k=3)
        retriever.invoke(POD_QUESTION)
        retriever.accept_suggestion("pods")
        arrived = pickle.loads(pickle.dumps(retriever))  # noqa: S301 - our own bytes
        assert (type(arrived), arrived.label, arrived.k, arrived.user_id) == (Labelled, "mine", 3, USER)
        assert arrived.chunk_store is arrived.state_store.chunk_store
        assert arrived.last_provenance is None
        arrived._seen = []
        assert texts(cached(arrived.invoke(POD_QUESTION))) == [PODS]
        arrived.state_store.close()


def test_private_attributes_of_a_subclass_travel_along(make_store: Callable[[str], StateStore]) -> None:
    """What a subclass keeps in private attributes of its own is there after the journey."""
    retriever = labelled(make_store("sqlite-file"))
    retriever._note = "written"
    arrived = pickle.loads(pickle.dumps(retriever))  # noqa: S301 - our own bytes
    try:
        assert arrived._note == "written"
        assert texts(arrived.invoke(POD_QUESTION)) == [PODS]
    finally:
        arrived.state_store.close()


@pytest.mark.parametrize("kind", ["sqlite-memory", "memory", "valkey"])
def test_a_store_that_can_not_travel_says_so(make_store: Callable[[str], StateStore], kind: str) -> None:
    """Pickling a retriever whose memory lives in this process, or in a client, says what to do instead."""
    with pytest.raises(StorageError, match="pickled"):
        pickle.dumps(labelled(make_store(kind)))
