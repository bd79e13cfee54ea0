"""What the chat examples share: a conversation in a terminal about a collection, with a memory of who asks.

`chat_chroma_ollama.py` and `chat_chroma_openai.py` bring the models. In an application of yours the loop below is the
part that your user interface has already.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser

from rag_wiki import ProvenanceBlock, RagWikiError, RagWikiRetriever, RagWikiRetrieverConfig, UserDocRecord

if TYPE_CHECKING:
    from langchain_chroma import Chroma

    from examples.corpus import DOCUMENTS, load_chunks
else:  # a script finds its neighbours by their bare names
    from corpus import DOCUMENTS, load_chunks

INSTRUCTIONS = (
    "Answer the user's question from the passages below, briefly. "
    "Say so when they do not answer it.\n\nPassages:\n\n{passages}"
)
REMEMBERED = 6
"""Messages of the conversation that the model is shown again."""

HELP = """Ask a question, or:
  /save [which]    keep a document in your knowledge base      /no [which]  decline a suggestion
  /pin  [which]    make it part of every answer                /unpin [which]
  /up   [which]    vote for it                                 /down [which]
  /remove [which]  let it go                                   /list        what you have met and saved
  /help            this                                        /quit        or Ctrl-D
[which] is the number of a source of the last answer, or a document's id; without it, what was just suggested, or the
first source."""


class NotThereError(Exception):
    """Something that an example needs is not there; the message is the sentence that says what, and how to get it."""


def run(main: Callable[[], None]) -> None:
    """Run an example: where something is not there, say so in one sentence and end as a program ends."""
    for console in (sys.stdin, sys.stdout):
        reconfigure = getattr(console, "reconfigure", None)
        if reconfigure is not None:
            # What one side can't read or show becomes a question mark, rather than end the conversation.
            reconfigure(errors="replace")
    try:
        main()
    except (NotThereError, RagWikiError) as missing:
        print(one_line(missing))
    except KeyboardInterrupt:
        print()


def need(*packages: str) -> None:
    """Check that packages are installed, by the names that pip knows.

    Raises:
        NotThereError: Names all that are missing, and the line that installs them.
    """
    missing = [name for name in packages if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise NotThereError(f"This example needs {' and '.join(missing)}: pip install {' '.join(packages)}")


def one_line(error: BaseException) -> str:
    """What an error says, on one line."""
    return " ".join(str(error).split()) or type(error).__name__


def read_arguments(description: str, collection: str, **models: str) -> argparse.Namespace:
    """The command line of a chat: where things are kept, who asks, and which models."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--db", default="./chroma_db", help="folder of the Chroma collection")
    parser.add_argument("--collection", default=collection, help="its name; an empty one gets the example documents")
    parser.add_argument("--memory", type=Path, default=Path("wiki"), help="folder of what is remembered")
    parser.add_argument("--user", default="ada", help="whose memory")
    for name, default in models.items():
        parser.add_argument(f"--{name.replace('_', '-')}", default=default)
    return parser.parse_args()


def open_collection(folder: str, name: str, embeddings: Embeddings) -> Chroma:
    """Open a Chroma collection, as `ingest.py` fills it; an empty one gets the example documents."""
    import chromadb
    from chromadb.config import Settings
    from langchain_chroma import Chroma

    client = chromadb.PersistentClient(path=folder, settings=Settings(anonymized_telemetry=False))
    collection = Chroma(collection_name=name, embedding_function=embeddings, client=client)
    if not collection.get(limit=1)["ids"]:
        chunks = load_chunks()
        print(f"Filling the collection {name!r} with {len(chunks)} chunks of the example documents ...")
        ids = [f"{chunk.metadata['doc_id']}#{chunk.metadata['chunk_index']}" for chunk in chunks]
        collection.add_documents(chunks, ids=ids)
    return collection


def remember(collection: Chroma, user_id: str, folder: Path) -> RagWikiRetriever:
    """The collection's retriever, with a memory of the user in a SQLite file. Close its `state_store` in the end."""
    from rag_wiki.storage.sqlite import SQLiteStateStore

    folder.mkdir(parents=True, exist_ok=True)
    return RagWikiRetriever(
        global_retriever=collection.as_retriever(search_kwargs={"k": 4}),
        user_id=user_id,
        state_store=SQLiteStateStore(f"sqlite:///{folder / 'state.db'}"),
        config=RagWikiRetrieverConfig(
            similarity_threshold="auto",  # measures what the model's cosines mean, once
            context="focused",
            document_roots=[DOCUMENTS],  # a saved example document is the whole file
        ),
    )


def say(text: str) -> None:
    """Print a line."""
    print(text, flush=True)


def stream(part: str) -> None:
    """Print a part of a line."""
    print(part, end="", flush=True)


@dataclass
class Chat:
    """A conversation."""

    retriever: RagWikiRetriever
    model: BaseChatModel
    read: Callable[[str], str] = input
    messages: list[BaseMessage] = field(default_factory=list)
    provenance: ProvenanceBlock = field(default_factory=ProvenanceBlock)
    """Of the last answer."""
    offered: str | None = None
    """The document that was suggested and not answered yet."""

    def talk(self) -> None:
        """Ask and answer until the user has had enough."""
        say(HELP)
        while True:
            try:
                line = self.read(f"\n{self.retriever.user_id}> ").strip()
            except (EOFError, KeyboardInterrupt):
                say("\nSee you.")
                return
            if line == "/quit":
                say("See you.")
                return
            try:
                self._take(line)
            except KeyboardInterrupt:
                say("\n(stopped)")
            except Exception as error:  # what a model's or a collection's server raises is up to its client
                say(f"That did not work: {one_line(error)}")

    def _take(self, line: str) -> None:
        offered, self.offered = self.offered, None
        if offered is not None and line.lower() in ("y", "yes", "n", "no"):
            line = f"/save {offered}" if line.lower().startswith("y") else f"/no {offered}"
        if line.startswith("/"):
            self.offered = offered
            self._obey(*line.split(maxsplit=1))
        elif line:
            self._answer(line)

    def _answer(self, question: str) -> None:
        documents, self.provenance = self.retriever.invoke_with_provenance(question)
        asked = HumanMessage(question)
        prompt = [SystemMessage(INSTRUCTIONS.format(passages=_passages(documents))), *self.messages, asked]
        words: list[str] = []
        for part in (self.model | StrOutputParser()).stream(prompt):
            words.append(part)
            stream(part)
        say("\n")
        self.messages = [*self.messages, asked, AIMessage("".join(words))][-REMEMBERED:]
        say(self.provenance.render(ascii=not utf8()))
        if self.provenance.suggestion is not None:
            self.offered = self.provenance.suggestion.doc_id
            say("[y]es, [n]o, or ask on:")

    def _obey(self, command: str, which: str | None = None) -> None:
        actions: dict[str, Callable[[str], UserDocRecord]] = {
            "/save": self.retriever.accept_suggestion,
            "/no": self.retriever.decline_suggestion,
            "/pin": self.retriever.force_pin,
            "/unpin": self.retriever.unpin,
            "/up": self.retriever.thumbs_up,
            "/down": self.retriever.thumbs_down,
            "/remove": self.retriever.force_remove,
        }
        if command == "/list":
            self._list()
        elif command not in actions:
            say(HELP)
        else:
            doc_id = self._named(which)
            if doc_id is None:
                say("Which document? Ask something first, or name it by its id; /list shows those that you have met.")
                return
            record = actions[command](doc_id)
            self.offered = None
            say(f"{record.doc_title}: {_standing(record)}")

    def _named(self, which: str | None) -> str | None:
        """The id of the document that a command is about."""
        sources = [source.doc_id for source in self.provenance.sources]
        if which is None:
            return self.offered or next((doc_id for doc_id in sources if doc_id is not None), None)
        which = which.strip()
        number = int(which) if which.isdecimal() else 0
        return sources[number - 1] if 0 < number <= len(sources) else which

    def _list(self) -> None:
        records = self.retriever.documents()
        for record in records:
            say(f"  {record.doc_id}  {record.doc_title}: {_standing(record)}")
        if not records:
            say("  Nothing yet.")


def _passages(documents: Sequence[Document]) -> str:
    titled = [f"[{document.metadata.get('doc_title', 'untitled')}]\n{document.page_content}" for document in documents]
    return "\n\n".join(titled) or "(none)"


def _standing(record: UserDocRecord) -> str:
    of_what = {"file": "its file", "retrieved": "what was retrieved"}.get(record.content_source or "", "its text")
    copied = f", {record.chunk_count} chunks of {of_what}" if record.saved else ""
    return f"{record.user_state}, fetched {record.fetch_count}x{copied}"


def utf8() -> bool:
    """Whether the console can show everything."""
    return (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
