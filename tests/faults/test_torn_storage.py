"""Stored bytes that are torn, foreign, exchanged or hostile: a miss that is told of, never somebody else's text."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import redis
import sqlalchemy as sa
from helpers import document
from places import PlacedWorld, make_world
from scenarios import POD_QUESTION, PODS, USER, doc_ids, texts

from rag_wiki import DecayConfig, DocumentState, RetrievalResult, StateStore, UserDocRecord
from rag_wiki.errors import CorruptDataError

IMAGES = "Images are built of layers."
IMAGE_QUESTION = "what are images?"
BOBS = "Pods that only bob may know of."
UNREADABLE = "1 saved copy can't answer (copy unreadable); reindex() or refresh() makes them anew"


def fill(world: PlacedWorld) -> PlacedWorld:
    """Two documents of ada's, and one of bob's that has the id of one of them."""
    world.save(world.retriever(), "pods", PODS)
    world.save(world.retriever(), "images", IMAGES)
    world.save(world.retriever("bob"), "pods", BOBS)
    return world


def ask(world: PlacedWorld, question: str = POD_QUESTION, **options: Any) -> RetrievalResult:
    """Ask as a fresh process; what it says can be shown in every form."""
    result = world.reopened().retriever(**options).invoke_with_provenance(question)
    provenance = result.provenance
    assert BOBS not in "".join(texts(result.documents))
    json.dumps([provenance.to_dict(), provenance.render(), provenance.to_markdown(), provenance._repr_html_()])
    return result


def check_miss(world: PlacedWorld, *, by_words: bool = True) -> None:
    """The pods of ada can't answer, which is told; her images can; saving the pods again heals them."""
    modes: list[dict[str, Any]] = [{}, *([{"embedding_model": None}] if by_words else [])]
    for options in modes:
        found, provenance = ask(world, **options)
        assert texts(found) == []
        assert provenance.degraded == (UNREADABLE,)
        assert texts(ask(world, IMAGE_QUESTION, **options).documents) == [IMAGES]
    world.reopened().retriever().refresh("pods", full_content=PODS)
    found, provenance = ask(world)
    assert (texts(found), provenance.degraded) == ([PODS], ())


class RunsWhenUnpickled:
    """Leaves a file behind where somebody unpickles it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.write_text, (self.path, "run")


# -- files ---------------------------------------------------------------------------------------


@dataclass
class Disk:
    """A world with its chunks in a folder, and the folder around it."""

    world: PlacedWorld
    outside: Path

    def file(self, text: str, kind: str) -> Path:
        """The one file of a kind that belongs to the copy with a text."""
        root = self.world.folder
        assert root is not None
        (chunks,) = [path for path in root.rglob("*.chunks") if text.encode() in path.read_bytes()]
        (found,) = chunks.parent.glob(f"{chunks.stem}.*{kind}")
        return found


@pytest.fixture
def disk(make_store: Callable[[str], StateStore], tmp_path: Path) -> Disk:
    """Saved documents on disk, with a file outside the folder."""
    outside = tmp_path / "outside.txt"
    outside.write_text("nobody's business\n")
    return Disk(fill(make_world("memory+disk", make_store, tmp_path)), outside)


def truncate(disk: Disk, path: Path) -> None:
    """Cut the last byte off."""
    path.write_bytes(path.read_bytes()[:-1])


def empty(disk: Disk, path: Path) -> None:
    """Leave nothing of it."""
    path.write_bytes(b"")


def garble(disk: Disk, path: Path) -> None:
    """Write noise in its place."""
    path.write_bytes(b"\xff\x00" * 500)


def store_pickle(disk: Disk, path: Path) -> None:
    """Write what would leave a file behind where somebody unpickles it."""
    path.write_bytes(pickle.dumps(RunsWhenUnpickled(disk.outside.with_name("run"))))


def claim_much(disk: Disk, path: Path) -> None:
    """Claim lengths that no file has."""
    content = path.read_bytes()
    start = content.index(b"\n") + 1
    path.write_bytes(content[:start] + struct.pack("<QQQ", 2**63, 2**62, 2**62) + content[start + 24 :])


def link_outside(disk: Disk, path: Path) -> None:
    """Make it a link to a file outside the folder."""
    path.unlink()
    path.symlink_to(disk.outside)


def link_to_itself(disk: Disk, path: Path) -> None:
    """Make it a link that leads nowhere else."""
    path.unlink()
    path.symlink_to(path)


def make_folder(disk: Disk, path: Path) -> None:
    """Make it a folder that is not empty."""
    path.unlink()
    path.mkdir()
    (path / "file").write_text("not ours")


def take_bobs(disk: Disk, path: Path) -> None:
    """Put the chunks of bob's document there."""
    shutil.copy(disk.file(BOBS, "chunks"), path)


def take_another(disk: Disk, path: Path) -> None:
    """Put the chunks of another document there."""
    shutil.copy(disk.file(IMAGES, "chunks"), path)


@pytest.mark.parametrize(
    "damage",
    [
        truncate,
        empty,
        garble,
        store_pickle,
        claim_much,
        link_outside,
        take_bobs,
        take_another,
        link_to_itself,
        make_folder,
    ],
)
def test_a_damaged_chunk_file_costs_itself_only(disk: Disk, damage: Callable[[Disk, Path], None]) -> None:
    """A chunk file that is not what was written is a miss that is told of, runs nothing, and can be saved anew."""
    before = disk.outside.read_text()
    damage(disk, disk.file(PODS, "chunks"))
    check_miss(disk.world)
    assert disk.outside.read_text() == before
    assert not disk.outside.with_name("run").exists()


@pytest.mark.parametrize("damage", [truncate, garble, link_outside, link_to_itself, make_folder])
def test_what_is_damaged_can_be_removed(disk: Disk, damage: Callable[[Disk, Path], None]) -> None:
    """Removing a document, and forgetting a user, work whatever lies where the chunks were, and touch nothing else."""
    before = disk.outside.read_text()
    damage(disk, disk.file(PODS, "chunks"))
    retriever = disk.world.reopened().retriever()
    assert retriever.force_remove("pods").user_state is DocumentState.DEMOTED
    assert retriever.forget_user().documents == 2
    assert disk.outside.read_text() == before
    assert texts(disk.world.reopened().retriever("bob").invoke(POD_QUESTION)) == [BOBS]


def test_exchanged_files_answer_for_nobody(disk: Disk) -> None:
    """Two users' chunk files in each other's place give neither user a text, and both are told."""
    mine, bobs = disk.file(PODS, "chunks"), disk.file(BOBS, "chunks")
    content = mine.read_bytes()
    mine.write_bytes(bobs.read_bytes())
    bobs.write_bytes(content)
    for user in (USER, "bob"):
        found, provenance = disk.world.reopened().retriever(user).invoke_with_provenance(POD_QUESTION)
        assert (texts(found), provenance.degraded) == ([], (UNREADABLE,))


@pytest.mark.parametrize("kind", ["chunks", "hits"])
def test_a_pipe_in_place_of_a_file_holds_nobody_up(disk: Disk, kind: str) -> None:
    """A named pipe where a file should be does not make a question wait for a writer that never comes."""
    # Hits go to a file of their process.
    world = disk.world.reopened()
    world.retriever().invoke(POD_QUESTION)
    path = disk.file(PODS, kind)
    path.unlink()
    os.mkfifo(path)
    retriever = (world if kind == "hits" else disk.world.reopened()).retriever()
    results: list[RetrievalResult] = []
    asking = threading.Thread(
        target=lambda: results.append(retriever.invoke_with_provenance(POD_QUESTION)), daemon=True
    )
    asking.start()
    asking.join(2)
    waited = asking.is_alive()
    while asking.is_alive():
        # Let it go, in whichever direction it waits.
        other_end = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        asking.join(0.1)
        os.close(other_end)
        asking.join(0.1)
    assert not waited
    assert results[0].provenance.degraded != ()


@pytest.mark.parametrize("damage", [truncate, empty, garble, store_pickle, link_outside, link_to_itself, make_folder])
def test_damaged_hits_cost_no_answer_and_no_decay(disk: Disk, damage: Callable[[Disk, Path], None]) -> None:
    """Hits that can't be read count for nothing: the copy answers, the job runs, no file elsewhere is written."""
    # Hits go to a file of their process.
    retriever = disk.world.reopened().retriever()
    retriever.invoke(POD_QUESTION)
    before = disk.outside.read_text()
    damage(disk, disk.file(PODS, "hits"))
    assert texts(retriever.invoke(POD_QUESTION)) == [PODS]
    assert texts(ask(disk.world).documents) == [PODS]
    assert [result.doc_id for result in disk.world.reopened().retriever().run_decay()] == ["images", "pods"]
    assert disk.outside.read_text() == before


@pytest.mark.parametrize("damage", [truncate, garble, link_outside, link_to_itself, make_folder])
def test_what_lies_where_a_readable_copy_goes_does_not_matter(disk: Disk, damage: Callable[[Disk, Path], None]) -> None:
    """A readable copy takes the place of whatever lies there; a link is not followed, and a save is never half done."""
    before = disk.outside.read_text()
    assert disk.world.folder is not None
    (readable,) = [path for path in disk.world.folder.rglob("*.md") if path.read_text() == PODS]
    damage(disk, readable)
    disk.world.reopened().retriever().refresh("pods", full_content="Pods anew.")
    assert texts(ask(disk.world).documents) == ["Pods anew."]
    assert readable.read_text() == "Pods anew."
    assert disk.outside.read_text() == before


@pytest.mark.parametrize("damage", [empty, garble, make_folder])
def test_a_database_file_that_is_none_costs_no_answer(
    make_store: Callable[[str], StateStore], tmp_path: Path, damage: Callable[[Disk, Path], None]
) -> None:
    """A SQLite file that is torn, foreign or a folder takes the personal layer away, and no answer of the source."""
    world = fill(make_world("sqlite", make_store, tmp_path))
    world.store.close()
    for path in tmp_path.glob("state.db-*"):
        path.unlink()
    damage(Disk(world, tmp_path), tmp_path / "state.db")
    world.shows(document("tax", "About tax."))
    found, provenance = ask(world, "what about tax?")
    assert "About tax." in texts(found)
    if damage is not empty:
        # An empty file is a new database.
        assert provenance.degraded != ()


# -- rows and keys -------------------------------------------------------------------------------


class Raw:
    """The stored bytes of one document, by a client that knows nothing of the product."""

    def chunks(self, user: str, doc_id: str, part: str) -> Any:
        """The `header`, `texts` or `vectors` of the one copy."""
        raise NotImplementedError

    def set_chunks(self, user: str, doc_id: str, part: str, value: Any) -> None:
        raise NotImplementedError

    def row(self, user: str, doc_id: str, column: str) -> Any:
        """The `payload` or `content` of a record, or the first of its `texts` or `events`."""
        raise NotImplementedError

    def set_row(self, user: str, doc_id: str, column: str, value: Any) -> None:
        raise NotImplementedError

    def damage_record(self, user: str, doc_id: str) -> None:
        """Write something else in the place of a record's payload."""
        self.set_row(user, doc_id, "payload", "x")

    def exchange(self, column: str, one: tuple[str, str], other: tuple[str, str]) -> None:
        """Put what two documents have in each other's place."""
        first, second = self.row(*one, column), self.row(*other, column)
        self.set_row(*one, column, second)
        self.set_row(*other, column, first)


def edited(text: str, changes: dict[str, str]) -> str:
    """JSON with some fields changed to something written in JSON."""
    written = json.dumps({**json.loads(text), **{name: f"@{name}@" for name in changes}}, separators=(",", ":"))
    for name, value in changes.items():
        written = written.replace(f'"@{name}@"', value)
    return written


class RawSQL(Raw):
    """Rows, by SQL."""

    def __init__(self, engine: sa.Engine) -> None:
        self.engine = engine

    def _run(self, statement: str, **values: Any) -> Any:
        with self.engine.begin() as connection:
            result = connection.execute(sa.text(statement), values)
            return result.scalars().first() if result.returns_rows else result.rowcount

    def chunks(self, user: str, doc_id: str, part: str) -> Any:
        statement = f"SELECT {part} FROM rag_wiki_chunks WHERE user_key=:u AND doc_key=:d"  # noqa: S608 - a column
        return self._run(statement, u=user, d=doc_id)

    def set_chunks(self, user: str, doc_id: str, part: str, value: Any) -> None:
        statement = f"UPDATE rag_wiki_chunks SET {part}=:v WHERE user_key=:u AND doc_key=:d"  # noqa: S608 - a column
        assert self._run(statement, u=user, d=doc_id, v=value) == 1

    def row(self, user: str, doc_id: str, column: str) -> Any:
        table, name = self._place(column)
        return self._run(f"SELECT {name} FROM {table} WHERE user_key=:u AND doc_key=:d", u=user, d=doc_id)  # noqa: S608

    def set_row(self, user: str, doc_id: str, column: str, value: Any) -> None:
        table, name = self._place(column)
        statement = f"UPDATE {table} SET {name}=:v WHERE user_key=:u AND doc_key=:d"  # noqa: S608 - names of ours
        assert self._run(statement, u=user, d=doc_id, v=value) >= 1

    @staticmethod
    def _place(column: str) -> tuple[str, str]:
        if column in ("texts", "events"):
            return f"rag_wiki_{column}", "payload"
        return "rag_wiki_documents", column


class RawKeys(Raw):
    """Keys, by a Redis client."""

    def __init__(self, client: redis.Redis) -> None:
        self.client: Any = client

    def _part(self, user: str, doc_id: str, part: str) -> tuple[str, bytes]:
        key = f"rag_wiki:{{{user}}}:chunks:{doc_id}"
        (name,) = [name for name in self.client.hkeys(key) if name.endswith(f":{part}".encode())]
        return key, name

    def chunks(self, user: str, doc_id: str, part: str) -> Any:
        value = self.client.hget(*self._part(user, doc_id, part))
        return value if part == "vectors" else value.decode()

    def set_chunks(self, user: str, doc_id: str, part: str, value: Any) -> None:
        self.client.hset(*self._part(user, doc_id, part), value)

    def row(self, user: str, doc_id: str, column: str) -> Any:
        base = f"rag_wiki:{{{user}}}"
        if column in ("texts", "events"):
            return self.client.lindex(f"{base}:{column}:{doc_id}", 0).decode()
        if column == "content":
            return self.client.hget(f"{base}:content", doc_id).decode()
        return self.client.hget(f"{base}:docs", doc_id).decode().split(" ", 2)[2]

    def set_row(self, user: str, doc_id: str, column: str, value: Any) -> None:
        base = f"rag_wiki:{{{user}}}"
        if column in ("texts", "events"):
            self.client.lset(f"{base}:{column}:{doc_id}", 0, value)
        elif column == "content":
            self.client.hset(f"{base}:content", doc_id, value)
        else:
            state, score, _ = self.client.hget(f"{base}:docs", doc_id).decode().split(" ", 2)
            self.client.hset(f"{base}:docs", doc_id, f"{state} {score} {value}")
            # As if somebody else had written it: what a process remembers is of an older version.
            self.client.hset(f"{base}:user", "version", os.urandom(8).hex())


class RawValues(RawKeys):
    """Keys, of which nothing is left as it was."""

    def damage_record(self, user: str, doc_id: str) -> None:
        self.client.hset(f"rag_wiki:{{{user}}}:docs", doc_id, "CLAIMED x")
        self.client.hset(f"rag_wiki:{{{user}}}:user", "version", os.urandom(8).hex())


SQL_AND_KEYS = ["sqlite", "valkey"]
EVERYWHERE = [*SQL_AND_KEYS, "postgres"]
DAMAGED = [*EVERYWHERE, "valkey, whole values"]


@pytest.fixture(params=SQL_AND_KEYS)
def stored(
    request: pytest.FixtureRequest, make_store: Callable[[str], StateStore], tmp_path: Path
) -> Iterator[tuple[PlacedWorld, Raw]]:
    """Saved documents in a database, and a client that edits it behind the product's back."""
    world = fill(make_world(request.param.split(",")[0], make_store, tmp_path))
    if request.param.startswith("valkey"):
        client = redis.Redis(host="127.0.0.1", port=request.getfixturevalue("valkey_port"))
        yield world, RawKeys(client) if request.param == "valkey" else RawValues(client)
        client.close()
        return
    url = f"sqlite:///{tmp_path / 'state.db'}"
    if request.param == "postgres":
        url = sa.make_url(request.getfixturevalue("postgres_url")).set(drivername="postgresql+psycopg")  # type: ignore[assignment]
    engine = sa.create_engine(url)
    yield world, RawSQL(engine)
    engine.dispose()


HEADERS: dict[str, Any] = {
    "no JSON": "x",
    "empty": "",
    "a list": "[]",
    "nothing in it": "{}",
    "another user's": "bob",
    "indices of a wrong type": {"indices": '["x"]'},
    "more indices than texts": {"indices": "[0,1]"},
    "sections that are a number": {"sections": "5"},
    "a huge width": {"width": "1000000000000"},
    "too deep": "[" * 100_000,
    "an endless index": {"indices": "[1e400]"},
    "no indices": {"indices": "[]", "width": "0"},
    "metadata that are a number": {"metadata": "5"},
    "metadata that are a list": {"metadata": "[1]"},
    "no metadata": {"metadata": "null"},
    "sections that are numbers": {"sections": "[5]"},
    "a chunk without a vector that is none of them": {"without_vector": "[7]"},
    "a model that is a number": {"embedding": "5"},
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_damaged_header_costs_its_copy_only(stored: tuple[PlacedWorld, Raw], header: Any) -> None:
    """Whatever a copy's header says, it is a miss that is told of, and the other copies answer."""
    world, raw = stored
    if isinstance(header, dict):
        header = edited(raw.chunks(USER, "pods", "header"), header)
    elif header == "bob":
        header = raw.chunks("bob", "pods", "header")
    raw.set_chunks(USER, "pods", "header", header)
    # Where words are matched the vectors are not read, and what is wrong about them does not matter.
    about_vectors = isinstance(header, str) and ('"width":1000000000000' in header or '"indices":[0,1]' in header)
    check_miss(world, by_words=not about_vectors)


PARTS: dict[str, tuple[str, Any]] = {
    "torn texts": ("texts", '["Pods'),
    "other texts": ("texts", json.dumps([BOBS])),
    "no texts": ("texts", ""),
}


@pytest.mark.parametrize(("part", "value"), PARTS.values(), ids=PARTS)
def test_damaged_texts_are_not_served(stored: tuple[PlacedWorld, Raw], part: str, value: Any) -> None:
    """Texts that are not those that were written are served to nobody, which is told."""
    world, raw = stored
    raw.set_chunks(USER, "pods", part, value)
    found, provenance = ask(world)
    assert texts(found) == []
    assert [(kept.doc_id, kept.reason) for kept in provenance.withheld] == [("pods", "copy unreadable")]
    assert texts(ask(world, IMAGE_QUESTION).documents) == [IMAGES]


@pytest.mark.parametrize(
    "vectors", [b"", b"abc", b"\0" * 32, pickle.dumps([1.0] * 8)], ids=["none", "torn", "zero", "pickle"]
)
def test_damaged_vectors_are_not_compared(stored: tuple[PlacedWorld, Raw], vectors: bytes) -> None:
    """Vectors that are not those that were written are a miss that is told of."""
    world, raw = stored
    raw.set_chunks(USER, "pods", "vectors", vectors)
    check_miss(world, by_words=False)


@pytest.mark.parametrize("stored", ["sqlite"], indirect=True)
@pytest.mark.parametrize(
    ("part", "value"),
    [("header", b"\xff"), ("texts", b"[]"), ("vectors", "text"), ("payload", b"\xff"), ("score", b"x")],
)
def test_columns_of_another_type_are_told_of(stored: tuple[PlacedWorld, Raw], part: str, value: Any) -> None:
    """A column that holds a value of another type, which SQLite allows, makes a miss that is told of."""
    world, raw = stored
    change = raw.set_row if part in ("payload", "score") else raw.set_chunks
    change(USER, "pods", part, value)
    found, provenance = ask(world)
    assert texts(found) == []
    assert provenance.degraded or provenance.withheld


@pytest.mark.parametrize("stored", EVERYWHERE, indirect=True)
@pytest.mark.parametrize(
    ("part", "other"),
    [
        ("header", (USER, "images")),
        ("texts", (USER, "images")),
        ("vectors", (USER, "images")),
        ("header", ("bob", "pods")),
        ("texts", ("bob", "pods")),
    ],
    ids=str,
)
def test_exchanged_parts_answer_for_nobody(stored: tuple[PlacedWorld, Raw], part: str, other: tuple[str, str]) -> None:
    """Parts of two copies in each other's place give neither text under the other's name."""
    world, raw = stored
    mine, others = raw.chunks(USER, "pods", part), raw.chunks(*other, part)
    assert mine != others
    raw.set_chunks(USER, "pods", part, others)
    raw.set_chunks(*other, part, mine)
    found, provenance = ask(world)
    assert texts(found) == []
    assert provenance.degraded or provenance.withheld
    assert PODS not in "".join(texts(world.reopened().retriever("bob").invoke(POD_QUESTION)))


RECORDS: dict[str, Any] = {
    "no JSON": "x",
    "a list": "[]",
    "nothing in it": "{}",
    "too deep": "[" * 100_000,
    "another user's": "bob",
    "a count that is a text": {"fetch_count": '"x"'},
    "a title that is a number": {"doc_title": "5"},
    "a copy id that is a number": {"copy_id": "5"},
    "a copy id that leads outside": {"copy_id": '"/../../../../outside"'},
    "no copy id": {"copy_id": "null"},
    "a time that is none": {"cached_at": '"yesterday"'},
    "a clock that is a text": {"seen_at": '"x"'},
    "texts that are a number": {"retrieved": "5"},
    "a field from nowhere": {"nobody_knows": "1"},
    "a huge count": {"fetch_count": "1" + "0" * 400},
}


def test_a_damaged_record_is_told_of(stored: tuple[PlacedWorld, Raw]) -> None:
    """A record that is not what was written raises in no question, gives nobody else's text, and is told of."""
    world, raw = stored
    as_it_was = raw.row(USER, "pods", "payload")
    for name, record in RECORDS.items():
        changed = edited(as_it_was, record) if isinstance(record, dict) else record
        raw.set_row(USER, "pods", "payload", raw.row("bob", "pods", "payload") if changed == "bob" else changed)
        found, provenance = ask(world)
        assert texts(found) in ([], [PODS]), name
        assert found or provenance.degraded or provenance.withheld, name
        assert texts(world.reopened().retriever("bob").invoke(POD_QUESTION)) == [BOBS], name


def test_a_record_in_the_place_of_another_is_told_of(stored: tuple[PlacedWorld, Raw]) -> None:
    """A document whose record became another document's is missed, not silently gone."""
    world, raw = stored
    raw.set_row(USER, "pods", "payload", raw.row(USER, "images", "payload"))
    found, provenance = ask(world)
    assert texts(found) == []
    assert provenance.degraded or provenance.withheld


@pytest.mark.parametrize("stored", DAMAGED, indirect=True)
@pytest.mark.parametrize("question", [POD_QUESTION, IMAGE_QUESTION])
@pytest.mark.parametrize("options", [{}, {"embedding_model": None}], ids=["by vector", "by words"])
def test_a_damaged_record_costs_itself_only(
    stored: tuple[PlacedWorld, Raw], options: dict[str, Any], question: str
) -> None:
    """One unreadable record takes away its own copy, which is told, and no other."""
    world, raw = stored
    raw.damage_record(USER, "pods")
    found, provenance = ask(world, question, **options)
    assert texts(found) == ([] if question == POD_QUESTION else [IMAGES])
    assert provenance.degraded == (UNREADABLE,)


@pytest.mark.parametrize("stored", DAMAGED, indirect=True)
def test_a_damaged_record_keeps_no_question_from_being_counted(stored: tuple[PlacedWorld, Raw]) -> None:
    """One unreadable record that has been idle for long is passed over: the others are counted and let go."""
    world, raw = stored
    raw.damage_record(USER, "pods")
    world.shows(document("tax", "About tax."))
    retriever = world.reopened().retriever(decay=DecayConfig(max_cache_miss_streak=1), fetch_threshold=100)
    for _ in range(4):
        _, provenance = retriever.invoke_with_provenance("what about tax?")
        assert "not be counted" not in "".join(provenance.degraded)
    assert world.record("tax").fetch_count == 4
    assert world.state("images") is DocumentState.DEMOTED


@pytest.mark.parametrize("stored", DAMAGED, indirect=True)
def test_a_damaged_record_stops_no_decay(stored: tuple[PlacedWorld, Raw]) -> None:
    """One unreadable record does not keep the others from being scored; then it is an error."""
    world, raw = stored
    raw.damage_record(USER, "pods")
    world.clock.turn(days=30)
    with pytest.raises(CorruptDataError, match="'pods'"):
        world.reopened().retriever().run_decay()
    assert world.record("images").decay_score < 1.0


@pytest.mark.parametrize("stored", DAMAGED, indirect=True)
@pytest.mark.parametrize("remedy", ["delete", "purge", "upsert", "force_remove"])
def test_a_damaged_record_can_be_removed_and_replaced(stored: tuple[PlacedWorld, Raw], remedy: str) -> None:
    """What the error advises works, and leaves counters that are right; so does putting another record there."""
    world, raw = stored
    raw.damage_record(USER, "pods")
    again = world.reopened()
    retriever, store = again.retriever(), again.store
    with pytest.raises(CorruptDataError, match="Delete it"):
        store.get(USER, "pods")
    with pytest.raises(CorruptDataError):
        retriever.documents()
    remedies: dict[str, Callable[[], Any]] = {
        "delete": lambda: store.delete(USER, "pods"),
        "purge": lambda: retriever.purge("pods"),
        "upsert": lambda: store.upsert(UserDocRecord(USER, "pods", "Pods", "", user_state=DocumentState.PINNED)),
        "force_remove": lambda: retriever.force_remove("pods"),
    }
    assert remedies[remedy]() is not False
    states = {
        "upsert": {"pods": DocumentState.PINNED},
        "force_remove": {"pods": DocumentState.DEMOTED},
    }.get(remedy, {})
    found = {record.doc_id: record.user_state for record in retriever.documents()}
    assert found == {"images": DocumentState.CLAIMED, **states}
    assert store.saved_count(USER) == 1 + (remedy == "upsert")
    for seen in (again, world.reopened()):
        assert texts(seen.retriever().invoke(IMAGE_QUESTION)) == [IMAGES]
        unreadable = "copy unreadable" in "".join(seen.retriever().invoke_with_provenance(POD_QUESTION)[1].degraded)
        assert not unreadable
    if remedy == "force_remove":
        assert [event.what for event in retriever.history("pods")][-1] == "removed"
        assert retriever.chunk_store.place.copies(USER, "pods") == []


@pytest.mark.parametrize("stored", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("other", [(USER, "images"), ("bob", "pods")], ids=["of the same user", "of another user"])
def test_a_record_in_a_foreign_place_is_not_believed(stored: tuple[PlacedWorld, Raw], other: tuple[str, str]) -> None:
    """A record that is somebody else's, or another document's, is corrupt data, not an answer."""
    world, raw = stored
    raw.set_row(USER, "pods", "payload", raw.row(*other, "payload"))
    with pytest.raises(CorruptDataError):
        world.reopened().store.get(USER, "pods")


@pytest.mark.parametrize("stored", EVERYWHERE, indirect=True)
@pytest.mark.parametrize("other", [(USER, "images"), ("bob", "pods")], ids=["of the same user", "of another user"])
def test_exchanged_contents_answer_for_nobody(stored: tuple[PlacedWorld, Raw], other: tuple[str, str]) -> None:
    """The whole texts of two documents in each other's place are served under neither name."""
    world, raw = stored
    world.retriever().set_always_full_doc("pods")
    raw.exchange("content", (USER, "pods"), other)
    found, provenance = world.reopened().retriever().invoke_with_provenance(POD_QUESTION)
    assert texts(found) in ([], [PODS])
    assert found or provenance.degraded or provenance.withheld


@pytest.mark.parametrize("other", [(USER, "images"), ("bob", "pods")], ids=["of the same user", "of another user"])
def test_exchanged_retrieved_texts_are_not_saved(stored: tuple[PlacedWorld, Raw], other: tuple[str, str]) -> None:
    """What was retrieved for two documents, in each other's place, is saved under neither name."""
    world, raw = stored
    world.shows(document("new", "Pods that are new."))
    world.retriever().invoke(POD_QUESTION)
    user, doc_id = other if other[0] == "bob" else (USER, "newer")
    doc_id = "new" if user == "bob" else doc_id
    world.shows(document(doc_id, BOBS))
    world.retriever(user).invoke(POD_QUESTION)
    raw.exchange("texts", (USER, "new"), (user, doc_id))
    with pytest.raises(CorruptDataError):
        world.reopened().retriever().accept_suggestion("new")


def test_damaged_events_cost_the_history_only(stored: tuple[PlacedWorld, Raw]) -> None:
    """An event that can't be read is an error of the history, and of nothing else."""
    world, raw = stored
    raw.set_row(USER, "pods", "events", '{"what":')
    again = world.reopened().retriever()
    assert texts(again.invoke(POD_QUESTION)) == [PODS]
    with pytest.raises(CorruptDataError):
        again.history("pods")
    assert doc_ids(again.invoke(IMAGE_QUESTION)) == ["images"]
    assert again.force_remove("pods").user_state is DocumentState.DEMOTED


@pytest.mark.parametrize("name", ["docs", "content", "user", "saved", "chunks:pods", "hits", "seen", "hit", "revised"])
def test_a_key_of_another_kind_costs_no_answer(
    make_store: Callable[[str], StateStore], tmp_path: Path, valkey_port: int, name: str
) -> None:
    """A key that holds something else than what was written takes the personal layer away, and no answer."""
    world = fill(make_world("valkey", make_store, tmp_path))
    with redis.Redis(host="127.0.0.1", port=valkey_port) as client:
        key = f"rag_wiki:{{{USER}}}:{name}"
        if name == "hits":
            key = f"{key}:pods:{world.record('pods').copy_id}"
        client.delete(key)
        client.lpush(key, "x") if name != "chunks:pods" else client.set(key, "x")
    world.shows(document("tax", "About tax."))
    found, provenance = ask(world)
    assert "About tax." in texts(found)
    assert provenance.degraded or PODS in texts(found)
    assert BOBS in texts(world.reopened().retriever("bob").invoke(POD_QUESTION))
