"""Runs in the environment of an older release: goes through the sessions with it, as its README says.

The task on the command line names two files: what is asked, found and true, as JSON; and vectors, as the environment
has no embedding model. With the task `split` it tells which texts the release embeds when it saves, so that their
vectors can be made; with `ask` it does the work.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

import rag_wiki
from rag_wiki import FetchCounter, MemoryStateStore, RagWikiRetriever, RagWikiRetrieverConfig
from rag_wiki.lifecycle.state_machine import StateMachine

# Last, so that the installed package is found first, and not the one of this checkout.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks.quality.observations import Course, Observation, Piece, observe
from benchmarks.quality.vectors import Kind, key, read_vectors
from benchmarks.work import TableRetriever

_USER = "nobody"


class HandedOver(Embeddings):
    """Vectors that were made elsewhere; notes the texts that it has none for."""

    def __init__(self, path: Path, model: str) -> None:
        self._vectors = read_vectors(path, model)
        self.missing: list[str] = []

    def embed_query(self, text: str) -> list[float]:
        """The vector of a question."""
        return self._vector("query", text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of texts."""
        return [self._vector("document", text) for text in texts]

    def _vector(self, kind: Kind, text: str) -> list[float]:
        known = self._vectors[kind].get(key(text))
        if known is None:
            self.missing.append(text)
            known = np.zeros(1, dtype=np.float32)
        vector: list[float] = known.tolist()
        return vector


class CountedRetriever(TableRetriever):
    """The wrapped retriever: looks up what a question finds, and counts how often it is asked."""

    searches: int = 0

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        self.searches += 1
        # Copies: the release writes into what it gets.
        found = super()._get_relevant_documents(query, run_manager=run_manager)
        return [document.model_copy(deep=True) for document in found]


def split(articles: dict[str, dict[str, Any]], embeddings: HandedOver) -> list[str]:
    """The texts that saving these articles embeds."""
    retriever: Any = RagWikiRetriever(
        user_id=_USER,
        global_retriever=CountedRetriever(table={}),
        state_store=MemoryStateStore(),
        embedding_model=embeddings,
    )
    counter = FetchCounter(retriever.state_store, StateMachine(), fetch_threshold=1)
    for doc_id, article in articles.items():
        counter.record_fetch(_USER, doc_id, article["title"], "")
        retriever.accept_suggestion(doc_id=doc_id, full_content=article["text"])
    return embeddings.missing


def ask(work: dict[str, Any], threshold: float, embeddings: HandedOver) -> Course:
    """Go through the sessions; whatever is suggested is saved."""
    articles = work["articles"]
    chunks = [Document(page_content=chunk["text"], metadata=chunk["metadata"]) for chunk in work["chunks"]]
    course = Course()
    for user_id, questions in work["sessions"].items():
        wrapped = CountedRetriever(table={item["text"]: [chunks[at] for at in item["found"]] for item in questions})
        retriever: Any = RagWikiRetriever(
            user_id=user_id,
            global_retriever=wrapped,
            state_store=MemoryStateStore(),
            config=RagWikiRetrieverConfig(similarity_threshold=threshold),
            embedding_model=embeddings,
        )
        observations: list[Observation] = []
        saved: set[str] = set()
        for item in questions:
            before = wrapped.searches
            observations.append(_observation(retriever.invoke(item["text"]), item, wrapped, before))
            suggestion = retriever.last_provenance.suggestion
            kept = _saved(retriever.state_store, user_id)
            course.let_go += len(saved - kept)
            if suggestion is not None:
                course.suggestions += 1
                retriever.accept_suggestion(doc_id=suggestion.doc_id, full_content=articles[suggestion.doc_id]["text"])
            saved = _saved(retriever.state_store, user_id)
        course.sessions.append(observations)
        course.saved += len(saved)
    return course


def _observation(
    documents: list[Document], item: dict[str, Any], wrapped: CountedRetriever, before: int
) -> Observation:
    pieces = [
        Piece(document.page_content, document.metadata["doc_id"], document.metadata.get("from_cache", False))
        for document in documents
    ]
    return observe(pieces, item["doc_id"], item["answers"], wrapped.searches - before)


def _saved(store: Any, user_id: str) -> set[str]:
    return {record.doc_id for record in (*store.list_claimed(user_id), *store.list_pinned(user_id))}


def main() -> None:
    """Do the task named on the command line."""
    task = json.loads(sys.argv[1])
    if not Path(rag_wiki.__file__ or "").is_relative_to(sys.prefix):
        sys.exit("the rag_wiki that was found is not the installed one")
    work = json.loads(Path(task["work"]).read_text(encoding="utf-8"))
    embeddings = HandedOver(Path(task["vectors"]), task["model"])
    answer: dict[str, Any] = {"version": version("langchain-rag-wiki")}
    if task["task"] == "split":
        answer["texts"] = split(work["articles"], embeddings)
    else:
        answer["course"] = asdict(ask(work, task["threshold"], embeddings))
        if embeddings.missing:
            sys.exit(f"{len(embeddings.missing)} texts came without a vector, first: {embeddings.missing[0][:80]!r}")
    print("@@" + json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
