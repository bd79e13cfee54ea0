"""How the retriever behaves towards the code around it: arguments of a call, odd sources, words in time."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from helpers import ListRetriever, TableEmbeddings, document
from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langchain_core.vectorstores import InMemoryVectorStore
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, World, cached, doc_ids, topics

from rag_wiki import ConfigurationError, DecayConfig, RagWikiRetriever, UnexpectedArgumentError

IMAGES = "Images are built in layers."


def filtering_world(model: TableEmbeddings) -> tuple[World, RagWikiRetriever]:
    """Two documents of two tenants in a vector store that filters; the first one is saved."""
    vectors = InMemoryVectorStore(model)
    vectors.add_documents([document("pods", PODS, tenant="one"), document("images", IMAGES, tenant="two")])
    world = World(embeddings=model)
    retriever = world.retriever(global_retriever=vectors.as_retriever(search_kwargs={"k": 1}))
    retriever.invoke(POD_QUESTION)
    retriever.accept_suggestion("pods")
    return world, retriever


@pytest.mark.parametrize("setting", ["always", "on_miss"])
def test_a_filter_of_the_call_holds_for_saved_copies_too(setting: str) -> None:
    """A copy can't obey a filter, so in such a call it answers only for what the wrapped retriever found."""
    world, retriever = filtering_world(topics())
    retriever = world.retriever(global_retriever=retriever.global_retriever, global_search=setting)
    assert doc_ids(cached(retriever.invoke(POD_QUESTION))) == ["pods"]

    def of(tenant: str) -> list[Document]:
        return retriever.invoke(POD_QUESTION, filter=lambda found: found.metadata["tenant"] == tenant)

    assert [(found.metadata["doc_id"], found.metadata["from_cache"]) for found in of("two")] == [("images", False)]
    assert [(found.metadata["doc_id"], found.metadata["from_cache"]) for found in of("one")] == [("pods", True)]


def test_a_copy_that_is_let_go_is_announced() -> None:
    """The call whose search was the last straw says in its provenance what was let go, and why."""
    world = World()
    retriever = world.retriever(decay=DecayConfig(max_cache_miss_streak=2))
    world.save(retriever, "pods", PODS)
    _, before = retriever.invoke_with_provenance(OTHER_QUESTION)
    _, provenance = retriever.invoke_with_provenance(OTHER_QUESTION)
    assert before.let_go == ()
    assert [(gone.doc_id, gone.reason) for gone in provenance.let_go] == [
        ("pods", "it did not answer for too many searches in a row")
    ]
    assert 'Your copy of "Pods" was let go: it did not answer' in provenance.render()
    assert [gone["doc_id"] for gone in provenance.to_dict()["let_go"]] == ["pods"]


@pytest.mark.parametrize(
    ("returned", "named"),
    [(["a text"], "str"), ("a text", "str"), (None, "NoneType"), ([document("d", "t"), 3], "int")],
)
def test_a_source_that_returns_no_documents_is_named(returned: Any, named: str) -> None:
    """A wrapped runnable that returns something else is an error that says what; nothing is counted."""
    world = World()
    source: RunnableLambda[str, Any] = RunnableLambda(lambda query: returned)
    retriever = world.retriever(global_retriever=source)
    with pytest.raises(ConfigurationError, match=f"list of documents.*{named}"):
        retriever.invoke(POD_QUESTION)
    assert retriever.documents() == []


def test_a_query_that_is_no_text_is_refused() -> None:
    """A query must be a string; the wrapped retriever is not asked otherwise."""
    world = World()
    with pytest.raises(ConfigurationError, match="query must be a string, got int"):
        world.retriever().invoke(5)  # type: ignore[arg-type]  # that is the point
    assert world.source.calls == []


def test_an_unknown_argument_of_the_constructor_is_refused() -> None:
    """A misspelt argument is an error that names it, not a setting without effect."""
    with pytest.raises(UnexpectedArgumentError, match="on_sugestion"):
        RagWikiRetriever(ListRetriever(), USER, on_sugestion=print)


def test_langchains_own_fields_are_taken() -> None:
    """A name, tags and metadata can be given as to every LangChain retriever."""
    retriever = RagWikiRetriever(ListRetriever(), USER, name="memory", tags=["mine"], metadata={"team": "docs"})
    assert (retriever.get_name(), retriever.tags, retriever.metadata) == ("memory", ["mine"], {"team": "docs"})


def test_one_state_may_be_asked_for_by_name() -> None:
    """`documents` takes one state or several, and names the known ones when it is given another word."""
    world = World()
    retriever = world.retriever()
    world.save(retriever, "pods", PODS)
    assert [record.doc_id for record in retriever.documents("CLAIMED")] == ["pods"]
    assert retriever.documents(["PINNED", "DEMOTED"]) == []
    with pytest.raises(ConfigurationError, match="SAVED.*GLOBAL, SURFACED, SUGGESTED, CLAIMED, PINNED, DEMOTED"):
        retriever.documents("SAVED")


def test_suggesting_without_a_model_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing could be saved, the first suggestion says so in the log, once, and names the parameter."""
    world = World(embeddings=None)
    retriever = world.retriever(fetch_threshold=1)
    world.shows(document("pods", PODS), document("images", IMAGES))
    with caplog.at_level(logging.WARNING, "rag_wiki"):
        for _ in range(3):
            retriever.invoke(POD_QUESTION)
    assert [record.getMessage() for record in caplog.records] == [
        "saving was suggested, and no embedding model was found in ListRetriever: "
        "pass embedding_model to RagWikiRetriever, or saving will fail"
    ]


def test_another_users_last_provenance_is_not_shown() -> None:
    """A retriever made for a user shows nothing of what others asked before that user did."""
    world = World()
    world.shows(document("pods", PODS))
    shared = world.retriever("bob")
    shared.invoke(POD_QUESTION)
    assert shared.for_user("ada").last_provenance is None


def test_a_call_that_is_not_counted_claims_no_state() -> None:
    """With the state store down, provenance says that nothing was counted instead of naming a state."""
    world = World()
    world.shows(document("pods", PODS))
    retriever = world.retriever()

    def down(*_: object) -> None:
        message = "refused"
        raise ConnectionError(message)

    world.store.begin_query = down  # type: ignore[assignment,method-assign]  # a store that is down
    _, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert "1 passage  |  not counted" in provenance.render()
    assert provenance.degraded == ("the state store did not answer, nothing is counted (ConnectionError)",)
