"""Runs in an environment with release 0.2: lets that package write into SQLite and Redis, and says what it reads back.

Everything is done by the older package's public names, as its README says. The last line of output is JSON: for each
place the records and chunks as the package itself gives them.
"""

from __future__ import annotations

import json
import sys
import zlib
from dataclasses import asdict
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever

WIDTH = 64
NEVER = 1000

PODS = "\n\n".join(
    [
        "# Pods\n\nA pod is the smallest unit that Kubernetes schedules. " + "Its containers share one address. " * 9,
        "## Restarts\n\nA container that fails is restarted by the kubelet. " + "The delay doubles each time. " * 9,
        "## Probes\n\nA probe asks a container whether it lives. " + "Readiness decides about traffic. " * 9,
    ]
)
BREAD = "Bread rises overnight in a cold kitchen. Bake it hot, and let it cool on a rack."
TEXTS = {"pods": PODS, "bread": BREAD}


class WordEmbeddings(Embeddings):
    """A vector of counted words: texts that share words are alike."""

    def __init__(self, salt: str = "") -> None:
        self.salt = salt
        self.embedded: list[str] = []

    @property
    def model(self) -> str:
        return f"words{self.salt}"

    def embed_query(self, text: str) -> list[float]:
        values = [0.0] * WIDTH
        for word in text.lower().split():
            values[zlib.crc32((self.salt + word.strip(".,:#")).encode()) % WIDTH] += 1.0
        length = sum(value * value for value in values) ** 0.5 or 1.0
        return [value / length for value in values]

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self.embedded += texts
        return [self.embed_query(text) for text in texts]


class Shelf(BaseRetriever):
    """Returns what is put on it."""

    documents: list[Document]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(page_content=item.page_content, metadata=dict(item.metadata)) for item in self.documents]


class Writer:
    """One place of the older package."""

    def __init__(self, store: Any, folder: str | None) -> None:
        self.store, self.folder = store, folder
        self.met: list[tuple[str, str]] = []

    def retriever(self, user: str, documents: list[Document]) -> Any:
        from rag_wiki import DecayConfig, RagWikiRetriever, RagWikiRetrieverConfig

        settings: dict[str, Any] = {"wiki_save_dir": self.folder, "fetch_threshold": 3, "reset_threshold": NEVER}
        if hasattr(RagWikiRetrieverConfig, "similarity_threshold"):
            settings |= {"similarity_threshold": 0.4, "decay": DecayConfig(max_cache_miss_streak=NEVER)}
            model: dict[str, Any] = {"embedding_model": WordEmbeddings()}
        else:
            model = {}
        return RagWikiRetriever(
            user_id=user,
            global_retriever=Shelf(documents=documents),
            state_store=self.store,
            config=RagWikiRetrieverConfig(**settings),
            **model,
        )

    def meet(
        self, user: str, doc_id: str, times: int, text: str = BREAD, path: str = "", number: int | None = 0
    ) -> Any:
        """Retrieve a document as often as that; returns the retriever."""
        metadata: dict[str, Any] = {"doc_id": doc_id, "doc_title": f"Title of {doc_id}", "doc_path": path}
        if number is not None:
            metadata["chunk_index"] = number
        retriever = self.retriever(user, [Document(page_content=text, metadata=metadata)])
        for _ in range(times):
            retriever.invoke("zzz unrelated zzz")
        if (user, doc_id) not in self.met:
            self.met.append((user, doc_id))
        return retriever

    def save(self, user: str, doc_id: str, text: str, path: str = "") -> Any:
        """Save a document: by accepting the suggestion, or by meeting it once too often."""
        if self.saves_by_itself:
            return self.meet(user, doc_id, 3, text, path)
        retriever = self.meet(user, doc_id, 3, text[:80], path)
        retriever.accept_suggestion(doc_id, full_content=text)
        return retriever

    @property
    def saves_by_itself(self) -> bool:
        from rag_wiki import RagWikiRetriever

        return not hasattr(RagWikiRetriever, "accept_suggestion")

    def run_decay(self, user: str, days: float) -> None:
        """Let a decay run pin nearly everything of a user."""
        from rag_wiki import DecayConfig, DecayEngine
        from rag_wiki.lifecycle.state_machine import StateMachine

        more: dict[str, Any] = {}
        if self.folder is not None and hasattr(DecayConfig, "max_cache_miss_streak"):
            from rag_wiki.storage.chunk_store import ChunkStore

            more["chunk_store"] = ChunkStore(self.folder)
        engine = DecayEngine(
            self.store, StateMachine(), DecayConfig(pin_threshold=0.1, demotion_threshold=0.05), **more
        )
        engine.run_for_user(user, datetime.now(timezone.utc) + timedelta(days=days))

    def write(self, content_file: str) -> None:
        """What the tests expect, in every state that the release reaches."""
        pods = self.save("ada", "pods", PODS, content_file)
        pods.thumbs_up("pods")
        pods.invoke("probe asks a container whether it lives readiness decides about traffic")
        self.save("ada", "pinned", BREAD).force_pin("pinned")
        self.save("ada", "removed", BREAD).force_remove("removed")
        self.meet("ada", "seen", 1)
        self.meet("ada", "seen", 1, "Butter melts.", number=4)
        if not self.saves_by_itself:
            self.meet("ada", "waiting", 3)
            self.meet("ada", "declined", 3).decline_suggestion("declined")
            self.meet("ada", "lost", 3)
            # As after a restart: the text that was retrieved is not known any more.
            self.retriever("ada", []).accept_suggestion("lost")
        else:
            self.save("ada", "whole", PODS, content_file).set_always_full_doc("whole")
            # Retrieved in parts, of which the release keeps the first as the content.
            for number, part in enumerate(PODS.split("\n\n## ")):
                self.meet("ada", "parts", 1, part, number=number)
        self.save("carl", "auto", PODS, content_file)
        self.run_decay("carl", 0)
        self.run_decay("carl", 8)
        self.save("carl", "candidate", BREAD)
        self.run_decay("carl", 9)
        for doc_id in ("a b/c.md", "a_b_c.md", "../up", "ünïcode ☃", "state:CLAIMED:x"):
            self.save("öda:1", doc_id, f"{doc_id} says: {BREAD}")
        self.save("bob", "x:y", "Bob's own text about bees and honey.")
        other = "The text of another user about wasps."
        if self.store.get("bob:x", "y") is None:
            self.save("bob:x", "y", other)
            return
        # Redis has one key for both: what is written last takes the place of what was there.
        from rag_wiki import DocumentState, UserDocRecord

        now, claimed = datetime.now(timezone.utc), DocumentState.CLAIMED
        self.store.upsert(UserDocRecord("bob:x", "y", "Wasps", "", claimed, 3, now, full_content=other, cached_at=now))
        self.met.append(("bob:x", "y"))

    def told(self) -> dict[str, Any]:
        """All that was met, as the release reads it back."""
        found: list[dict[str, Any]] = []
        for user, doc_id in self.met:
            record = self.store.get(user, doc_id)
            found.append({"user": user, "doc": doc_id, "record": None if record is None else asdict(record)})
            if self.folder is not None and record is not None:
                try:
                    from rag_wiki.storage.chunk_store import ChunkStore
                except ImportError:
                    continue
                found[-1]["chunks"] = ChunkStore(self.folder).load_chunks(user, doc_id)
        return {"documents": found, "active": self.store.list_active_users()}


def main() -> None:
    """Write into both places."""
    task = json.loads(sys.argv[1])
    import rag_wiki

    if not Path(rag_wiki.__file__ or "").is_relative_to(task["package"]):
        sys.exit(f"the rag_wiki that was found is {rag_wiki.__file__}")
    from rag_wiki.storage.sqlite import SQLiteStateStore

    Path(task["content_file"]).write_text(PODS, encoding="utf-8")
    places = {"sqlite": Writer(SQLiteStateStore(f"sqlite:///{task['database']}"), task["folder"])}
    if task["redis"] is not None:
        import redis

        from rag_wiki.storage.redis_store import RedisStateStore

        client = redis.Redis(host="127.0.0.1", port=task["redis"], db=task["number"])
        places["redis"] = Writer(RedisStateStore(client), task["folder"] + "-redis")
    for place in places.values():
        place.write(task["content_file"])
    print(json.dumps({name: place.told() for name, place in places.items()}, default=str))  # noqa: T201


if __name__ == "__main__":
    main()
