"""Runs in the environment of an older release: does one task with it, and prints what it took as JSON lines.

The older package is driven as its README says, through its public names. Where its releases differ (the older
one saves when a suggestion is accepted, the newer one saves by itself what it retrieved), the installed
package itself is asked.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rag_wiki
from rag_wiki import DecayConfig, DecayEngine, FetchCounter, MemoryStateStore, RagWikiRetriever, RagWikiRetrieverConfig
from rag_wiki.lifecycle.state_machine import StateMachine
from rag_wiki.storage.base import DocumentState, UserDocRecord

# Last, so that the installed package is found first, and not the one of this checkout.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.work import (
    CHUNKS,
    LONG,
    NEVER,
    THRESHOLD,
    USER,
    Pace,
    PeakMemory,
    Question,
    TableEmbeddings,
    TableRetriever,
    Work,
    added_seconds,
    content,
    doc_id,
    retrieved,
    wrapped_retriever,
)

_SAVED_AT_ONCE = 25
"""Documents that are retrieved together where retrieving saves."""
SAVES_BY_ITSELF = not hasattr(RagWikiRetriever, "accept_suggestion")


def say(**line: object) -> None:
    """Print a line for the benchmark."""
    print("@@" + json.dumps(line), flush=True)


def make_store(task: dict[str, Any]) -> Any:
    """The state store of a task."""
    kind = task["store"].removesuffix("+disk")
    if kind == "memory":
        return MemoryStateStore()
    if kind == "sqlite":
        from rag_wiki.storage.sqlite import SQLiteStateStore

        return SQLiteStateStore(f"sqlite:///{Path(task['folder']) / 'older.db'}")
    import redis

    from rag_wiki.storage.redis_store import RedisStateStore

    return RedisStateStore(redis.Redis(host="127.0.0.1", port=int(task["address"]), db=0))


def make_retriever(task: dict[str, Any], wrapped: TableRetriever, embeddings: TableEmbeddings) -> Any:
    """The retriever of a task. Where it saves by itself it does so at once; else it suggests nothing."""
    folder = None
    if task["store"].endswith("+disk"):
        folder = str(Path(task["folder"]) / "older-documents")
        Path(folder).mkdir()
    config = RagWikiRetrieverConfig(
        fetch_threshold=1 if SAVES_BY_ITSELF else NEVER,
        similarity_threshold=THRESHOLD,
        wiki_save_dir=folder,
        decay=DecayConfig(max_cache_miss_streak=NEVER),
    )
    return RagWikiRetriever(
        user_id=USER,
        global_retriever=wrapped,
        state_store=make_store(task),
        config=config,
        embedding_model=embeddings,
    )


def save(retriever: Any, wrapped: TableRetriever, embeddings: TableEmbeddings, documents: range, chunks: int) -> None:
    """Save documents: by accepting them, or by retrieving them."""
    if SAVES_BY_ITSELF:
        for group in _groups(documents):
            wrapped.table["save"] = [
                retrieved(document, chunk, chunks) for document in group for chunk in range(chunks)
            ]
            embeddings.table["save"] = embeddings.rows[0].tolist()
            retriever.invoke("save")
        return
    counter = FetchCounter(retriever.state_store, StateMachine(), fetch_threshold=1)
    for document in documents:
        counter.record_fetch(USER, doc_id(document), f"Document {document}", f"/documents/{document:06d}.txt")
        retriever.accept_suggestion(doc_id=doc_id(document), full_content=content(document, chunks))


def _groups(documents: range) -> Iterator[range]:
    for first in range(documents.start, documents.stop, _SAVED_AT_ONCE):
        yield range(first, min(first + _SAVED_AT_ONCE, documents.stop))


def query(task: dict[str, Any]) -> None:
    """What a warm question costs beyond the wrapped retriever."""
    start = time.perf_counter()
    work = Work(task["n"])
    questions: dict[str, list[Question]] = {kind: work.questions(kind) for kind in task["kinds"]}
    everything = [question for group in questions.values() for question in group]
    wrapped, embeddings = wrapped_retriever(everything), TableEmbeddings(work, everything)
    retriever = make_retriever(task, wrapped, embeddings)
    save(retriever, wrapped, embeddings, range(task["n"]), CHUNKS)
    say(saved=len(retriever.state_store.list_claimed(USER)), embedded=embeddings.texts)
    left = task["seconds"] - (time.perf_counter() - start)
    pace = Pace(task["repeats"], min(task["kind_seconds"], 0.5 * left / len(questions)), at_least=2)
    for kind, asked in questions.items():
        say(kind=kind, samples=added_seconds(retriever.invoke, wrapped.invoke, asked, pace).added)


def save_long(task: dict[str, Any]) -> None:
    """What saving one long document costs beyond embedding it."""
    work = Work(1)
    wrapped, embeddings = wrapped_retriever([]), TableEmbeddings(work)
    retriever = make_retriever(task, wrapped, embeddings)
    for document in range(task["repeats"]):
        embedding, start = embeddings.seconds, time.perf_counter()
        save(retriever, wrapped, embeddings, range(document, document + 1), LONG)
        say(kind="save", samples=[time.perf_counter() - start - (embeddings.seconds - embedding)])


def decay(task: dict[str, Any]) -> None:
    """Records a second of a decay run, and how far memory grew."""
    store = make_store(task)
    now = datetime.now(timezone.utc)
    for document in range(task["n"]):
        store.upsert(
            UserDocRecord(
                user_id=USER,
                doc_id=doc_id(document),
                doc_title=f"Document {document}",
                doc_path=f"/documents/{document:06d}.txt",
                user_state=DocumentState.CLAIMED,
                fetch_count=document % 25,
                last_fetched_at=now - timedelta(days=document % 60),
                cached_at=now - timedelta(days=60),
            )
        )
    engine = DecayEngine(store, StateMachine(), config=DecayConfig())
    memory, rates = PeakMemory(), []
    for run in range(task["repeats"]):
        moment = now + timedelta(days=run + 1)
        with memory.watched():
            start = time.perf_counter()
            results = engine.run_for_user(USER, moment) if _takes_now(engine) else engine.run_for_user(USER)
            rates.append(task["n"] / (time.perf_counter() - start))
        if len(results) < task["n"]:
            break  # those that were let go would be missing in the next run
        if (run + 2) * task["n"] / rates[-1] > 0.5 * task["seconds"]:
            break
    say(kind="rate", samples=rates)
    say(kind="growth", samples=[memory.growth])


def _takes_now(engine: DecayEngine) -> bool:
    return "now" in inspect.signature(engine.run_for_user).parameters


def main() -> None:
    """Do the task named on the command line."""
    task = json.loads(sys.argv[1])
    if not Path(rag_wiki.__file__ or "").is_relative_to(sys.prefix):
        sys.exit("the rag_wiki that was found is not the installed one")
    say(version=version("langchain-rag-wiki"))
    {"query": query, "save": save_long, "decay": decay}[task["task"]](task)
    say(done=True)


if __name__ == "__main__":
    main()
