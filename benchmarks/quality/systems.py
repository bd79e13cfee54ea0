"""What is compared, and how each goes through the sessions: the wrapped retriever alone, and ours around it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda

from benchmarks.quality.articles import Article
from benchmarks.quality.collection import DEPTH, Collection
from benchmarks.quality.models import Prepared
from benchmarks.quality.observations import Course, Piece, observe
from benchmarks.quality.sessions import Session
from benchmarks.results import Failed
from rag_wiki import (
    ConfigurationError,
    DecayConfig,
    MemoryStateStore,
    ProvenanceBlock,
    RagWikiRetriever,
    RagWikiRetrieverConfig,
    UserDocRecord,
)
from rag_wiki.storage.records import SAVED_STATES

K = 5
"""Chunks that the wrapped retriever returns wherever something is around it."""
PLAIN = tuple(f"plain k={k}" for k in range(1, DEPTH + 1))
REFERENCE = f"plain k={K}"
"""What the others are compared with."""
KEYWORD = "keyword"
OURS: dict[str, dict[str, Any]] = {
    "default": {"similarity_threshold": 0.75, "context": "all"},
    "auto": {"similarity_threshold": "auto"},
    "auto + focused": {"similarity_threshold": "auto", "context": "focused"},
    "auto + focused + neighbours": {"similarity_threshold": "auto", "context": "focused", "expand_neighbours": 1},
    "auto + focused + on_miss": {"similarity_threshold": "auto", "context": "focused", "global_search": "on_miss"},
    "auto + on_miss": {"similarity_threshold": "auto", "global_search": "on_miss"},
    KEYWORD: {},
}
"""Ours, by name: the settings that differ from the package's defaults."""
_OF_DECAY = "decay."


@dataclass(frozen=True)
class Situation:
    """What every system of an experiment is given."""

    sessions: Sequence[Session]
    articles: Mapping[str, Article]
    """By document id, of all languages."""
    embeddings: Prepared
    collection: Collection

    def load(self, record: UserDocRecord) -> str:
        """The whole text of a document that is to be saved."""
        return self.articles[record.doc_id].text


def make_config(name: str, changes: Mapping[str, Any]) -> RagWikiRetrieverConfig:
    """The configuration of one of ours.

    Args:
        name: Of `OURS`.
        changes: Settings that take the place of its own; `None` leaves a setting to the package.

    Raises:
        ConfigurationError: The package does not take it.
    """
    settings = {setting: value for setting, value in {**OURS[name], **changes}.items() if value is not None}
    decay = {setting: value for setting, value in settings.items() if setting.startswith(_OF_DECAY)}
    others = {setting: value for setting, value in settings.items() if setting not in decay}
    try:
        if decay:
            others["decay"] = DecayConfig(**{name.removeprefix(_OF_DECAY): value for name, value in decay.items()})
        return RagWikiRetrieverConfig(**others)
    except TypeError as error:
        # A setting that there is not.
        raise ConfigurationError(str(error)) from error


def run_plain(situation: Situation) -> dict[str, Course]:
    """The wrapped retriever alone, with each `k`: the first pieces of one long answer."""
    retriever = situation.collection.as_retriever(search_kwargs={"k": DEPTH})
    courses = {name: Course() for name in PLAIN}
    for session in situation.sessions:
        answers = [_pieces(retriever.invoke(question.text)) for question in session.questions]
        for k, course in enumerate(courses.values(), 1):
            course.sessions.append(
                [
                    observe(pieces[:k], question.doc_id, question.answers, searches=1)
                    for question, pieces in zip(session.questions, answers, strict=True)
                ]
            )
    return courses


def run_ours(situation: Situation, name: str, changes: Mapping[str, Any]) -> Course | Failed:
    """One of ours around the wrapped retriever: whatever it suggests is saved.

    A call that lost its personal layer answers as the wrapped retriever does, which would pass for a result of ours;
    so a course with such calls failed.

    Raises:
        RagWikiError: The configuration is refused, or saving failed.
    """
    given: dict[str, Any] = {"state_store": MemoryStateStore(), "config": make_config(name, changes)}
    collection, course, degraded = situation.collection, Course(), Counter[str]()
    wrapped = collection.as_retriever(search_kwargs={"k": K})
    asked = saving = RagWikiRetriever(wrapped, document_loader=situation.load, **given)
    if name == KEYWORD:
        # Who asks has no model to find, as where questions are answered without one; who saves has it, since saving
        # embeds. They share the state.
        asked = RagWikiRetriever(RunnableLambda(wrapped.invoke), **given)
    for session in situation.sessions:
        retriever, keeper, observations = asked.for_user(session.user_id), saving.for_user(session.user_id), []
        for question in session.questions:
            saved = {record.doc_id for record in keeper.documents(SAVED_STATES)}
            before = collection.searches
            documents, provenance = retriever.invoke_with_provenance(question.text)
            searches = collection.searches - before
            unsaved = bool(saved) and question.doc_id not in saved
            observations.append(
                observe(_pieces(documents), question.doc_id, question.answers, searches, about_unsaved=unsaved)
            )
            degraded.update(provenance.degraded)
            _accept(keeper, provenance, course)
        course.sessions.append(observations)
        course.saved += len(keeper.documents(SAVED_STATES))
    if degraded:
        return Failed(f"degraded: {', '.join(f'{what} ({times} ×)' for what, times in degraded.most_common(3))}")
    return course


def _accept(retriever: RagWikiRetriever, provenance: ProvenanceBlock, course: Course) -> None:
    for suggestion in provenance.suggestions:
        retriever.accept_suggestion(suggestion.doc_id)
    course.suggestions += len(provenance.suggestions)
    course.let_go += len(provenance.let_go)


def _pieces(documents: Sequence[Document]) -> list[Piece]:
    return [
        Piece(document.page_content, document.metadata["doc_id"], document.metadata.get("from_cache", False))
        for document in documents
    ]
