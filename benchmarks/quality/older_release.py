"""The older release, which goes through the same sessions in an environment of its own."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.older import Environment, ask
from benchmarks.quality.observations import Course, Observation
from benchmarks.quality.systems import K, Situation
from benchmarks.quality.vectors import Vectors, key, no_vectors, write_vectors
from benchmarks.results import Failed

VERSION = "0.2.2"
NAME = f"older {VERSION}"
_THRESHOLD = 0.75
_SECONDS = 900
_WORKER = Path(__file__).with_name("worker_older.py")


def run_older(situation: Situation, environment: Environment) -> Course | Failed:
    """Let the older release go through the sessions; or why it did not."""
    with tempfile.TemporaryDirectory(prefix="rag_wiki-quality-") as folder:
        work, vectors = Path(folder) / "work.json", Path(folder) / "vectors.npz"
        data = _work(situation)
        work.write_text(json.dumps(data), encoding="utf-8")
        task = {"work": str(work), "vectors": str(vectors), "model": situation.embeddings.model}
        split = _ask(environment, {**task, "task": "split"}, Path(folder))
        if isinstance(split, Failed):
            return split
        situation.embeddings.prepare("document", split["texts"])
        write_vectors(vectors, situation.embeddings.model, _vectors(situation, split["texts"]))
        answer = _ask(environment, {**task, "task": "ask", "threshold": _THRESHOLD}, Path(folder))
    return answer if isinstance(answer, Failed) else _course(answer["course"])


def _work(situation: Situation) -> dict[str, Any]:
    """What is asked, what the collection finds for it, and the articles that may be saved then."""
    retriever = situation.collection.as_retriever(search_kwargs={"k": K})
    places: dict[tuple[str, int], int] = {}
    chunks: list[dict[str, Any]] = []
    sessions: dict[str, list[dict[str, Any]]] = {}
    for session in situation.sessions:
        sessions[session.user_id] = asked = []
        for question in session.questions:
            found = []
            for chunk in retriever.invoke(question.text):
                place = places.setdefault((chunk.metadata["doc_id"], chunk.metadata["chunk_index"]), len(chunks))
                if place == len(chunks):
                    chunks.append({"text": chunk.page_content, "metadata": chunk.metadata})
                found.append(place)
            asked.append({**question.__dict__, "found": found})
    articles = {doc_id: situation.articles[doc_id] for doc_id, _ in places}
    return {
        "articles": {doc_id: {"title": article.title, "text": article.text} for doc_id, article in articles.items()},
        "chunks": chunks,
        "sessions": sessions,
    }


def _vectors(situation: Situation, texts: list[str]) -> Vectors:
    vectors, model = no_vectors(), situation.embeddings
    for session in situation.sessions:
        for question in session.questions:
            vectors["query"][key(question.text)] = np.asarray(model.embed_query(question.text), dtype=np.float32)
    for text, vector in zip(texts, model.embed_documents(texts), strict=True):
        vectors["document"][key(text)] = np.asarray(vector, dtype=np.float32)
    return vectors


def _ask(environment: Environment, task: Mapping[str, Any], folder: Path) -> dict[str, Any] | Failed:
    answer = ask(environment, task, _SECONDS, folder, _WORKER)
    if answer.failed is not None or not answer.lines:
        return answer.failed or Failed("no answer")
    return answer.lines[-1]


def _course(data: dict[str, Any]) -> Course:
    return Course(**{**data, "sessions": [[Observation(*line) for line in own] for own in data["sessions"]]})
