"""What a query costs the stores, counted at 10 and at 1,000 saved documents: it depends on what the query touched."""

from __future__ import annotations

import inspect
import re
import sqlite3
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import numpy as np
import pytest
import redis
import sqlalchemy as sa
from helpers import START, TableEmbeddings, document
from scenarios import USER, World, cached, doc_ids

from rag_wiki import DecayConfig, DocumentState, StateStore, UserDocRecord
from rag_wiki.storage.chunk_store import ChunkCopy, new_copy_id
from rag_wiki.storage.records import UserChange
from rag_wiki.storage.redis_store import RedisStateStore
from rag_wiki.storage.sqlite import SQLiteStateStore

FEW, MANY = 10, 1_000
HIT, OTHER_HIT, MISS = "what one saved document answers", "what another one answers", "something else"
ANSWERS = {HIT: "saved-0000", OTHER_HIT: "saved-0001"}
UNSAVED = [document(f"unsaved-{letter}", f"An unsaved text, {letter}.") for letter in "abc"]
CHUNKS, WIDTH = 2, 8
NEVER = 10**9
WARM_UP = 5
"""Rounds of questions after which the index is built, and texts, events and verdicts on copies are nothing new."""
ROWS_TOUCHED = {HIT: len(UNSAVED) + 1 + CHUNKS + 1, MISS: len(UNSAVED) + 1}
"""One for each document, for each chunk that answered, and for the user."""
SLACK = 32
"""Bytes, or steps, by which two queries may differ: counters have more digits.

A single byte or step for each saved document would be 990.
"""
LEAVES = 7
"""Pages that writing a row of ours can change at most, while no page is split.

Its leaf in the table, and in each of three indexes the leaf that its entry leaves and the one that it enters. The
inner pages, of which larger trees have more, stay as they are.
"""

for_each_question = pytest.mark.parametrize("question", [HIT, MISS], ids=["hit", "miss"])


class Reader:
    """A user with so many saved documents, who asked `HIT` and `MISS` so often that nothing about them is new."""

    def __init__(self, store: StateStore, saved: int, user_id: str = USER) -> None:
        save_documents(store, user_id, saved)
        self.world = World(store, TableEmbeddings({HIT: [1], OTHER_HIT: [0, 1], MISS: [0, 0, 1]}, width=WIDTH))
        self.retriever = self.world.retriever(
            user_id, fetch_threshold=NEVER, decay=DecayConfig(max_cache_miss_streak=NEVER), embedding_name="table"
        )
        for _ in range(WARM_UP):
            for question in (HIT, MISS):
                self.ask(question)

    def ask(self, question: str) -> None:
        """Ask; the source has three unsaved documents, and a piece of the saved one where that answers."""
        answering = [ANSWERS[question]] if question in ANSWERS else []
        self.world.shows(*UNSAVED, *(document(doc_id, texts_of(doc_id)[1]) for doc_id in answering))
        answer = self.retriever.invoke(question)
        assert doc_ids(cached(answer)) == answering
        assert len(answer) == len(UNSAVED) + len(answering)
        provenance = self.retriever.last_provenance
        assert provenance is not None
        assert provenance.degraded == ()


def texts_of(doc_id: str) -> tuple[str, ...]:
    """The chunks of a saved document."""
    return tuple(f"Chunk {number} of {doc_id}." for number in range(CHUNKS))


def save_documents(store: StateStore, user_id: str, count: int) -> None:
    """Save documents; two answer a question each, the others lie at right angles to all questions."""
    random = np.random.default_rng(count)
    records = []
    for number in range(count):
        doc_id = f"saved-{number:04}"
        vectors = np.zeros((CHUNKS, WIDTH), dtype=np.float32)
        vectors[:, 3:] = random.normal(size=(CHUNKS, WIDTH - 3))
        if doc_id in ANSWERS.values():
            vectors[:] = np.eye(WIDTH)[number]
        copy = ChunkCopy(new_copy_id(), tuple(range(CHUNKS)), texts_of(doc_id), vectors, embedding="table")
        store.chunk_store.save_copy(user_id, doc_id, copy)
        saved: dict[str, Any] = {"user_state": DocumentState.CLAIMED, "fetch_count": 3, "content_source": "argument"}
        saved |= {"copy_id": copy.copy_id, "chunk_count": CHUNKS, "full_content": "\n\n".join(copy.texts or ())}
        records.append(
            UserDocRecord(user_id, doc_id, doc_id.title(), "", cached_at=START, last_fetched_at=START, **saved)
        )
    contents = {record.doc_id: record.full_content for record in records}
    store.change(user_id, list(contents), lambda _: UserChange(records=records, contents=contents))


# -- every store


def watch(monkeypatch: pytest.MonkeyPatch, *watched: object) -> list[str]:
    """The names of the public methods that are called on some objects from now on."""
    calls: list[str] = []

    def noticed(name: str, method: Any, *arguments: Any, **options: Any) -> Any:
        calls.append(name)
        return method(*arguments, **options)

    for each in watched:
        for name, _ in inspect.getmembers(type(each), inspect.isfunction):
            if not name.startswith("_"):
                monkeypatch.setattr(each, name, partial(noticed, name, getattr(each, name)))
    return calls


def test_a_query_asks_the_store_twice(state_store: StateStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """A query is one `begin_query` and one `change`, and reads no chunk, with 10 saved documents as with 1,000."""
    chunks = state_store.chunk_store
    calls = watch(monkeypatch, state_store, chunks, chunks.place)
    for saved in (FEW, MANY):
        reader = Reader(state_store, saved, f"reader of {saved}")
        for question in (HIT, MISS):
            calls.clear()
            reader.ask(question)
            # Memory counts the hits of chunks at their own place, as part of the change.
            assert [name for name in calls if name != "add_hits"] == ["begin_query", "change"]


# -- SQLite


@dataclass
class Tap:
    """Listens on every SQLite connection below SQLAlchemy, so that no statement goes by unseen."""

    connections: list[sqlite3.Connection] = field(default_factory=list)
    statements: list[str] = field(default_factory=list)
    """As they ran; with their values, but on Python 3.10."""
    accesses: set[tuple[int, str | None, str | None]] = field(default_factory=set)
    """What statements do (an SQLite action code), to which table and column."""
    steps: int = 0
    """Instructions of SQLite's virtual machine: several for each row that is looked at."""

    def connected(self, connection: sqlite3.Connection, _record: object) -> None:
        """Begin to listen. The log is never folded back, so that it grows by every page that is written."""
        connection.execute("PRAGMA wal_autocheckpoint=0")
        connection.set_trace_callback(self.statements.append)
        self.connections.append(connection)

    @property
    def rows(self) -> int:
        """Rows that were inserted, updated or deleted so far."""
        return sum(connection.total_changes for connection in self.connections)

    def begin(self) -> None:
        """Forget what was heard, and have all statements compiled anew: what they access is told then."""
        self.statements.clear()
        self.accesses.clear()
        self.steps = 0
        for connection in self.connections:
            connection.set_authorizer(self._authorize)
            connection.set_progress_handler(self._step, 1)

    def _authorize(self, action: int, table: str | None, column: str | None, *_: str | None) -> int:
        self.accesses.add((action, table, column))
        return sqlite3.SQLITE_OK

    def _step(self) -> int:
        self.steps += 1
        return 0


@dataclass(frozen=True)
class SQLiteCost:
    """What one query cost an SQLite file."""

    statements: list[str]
    steps: int
    rows: int
    """Rows that were written."""
    pages: int
    """Pages that were written."""
    accesses: set[tuple[int, str | None, str | None]]

    @property
    def shapes(self) -> list[str]:
        """The statements without their values."""
        return [re.sub(r"[xX]?'(?:[^']|'')*'|\bNULL\b|-?\b\d+(?:\.\d+)?\b", "?", each) for each in self.statements]


def sqlite_cost(tap: Tap, reader: Reader, question: str, log: Path) -> SQLiteCost:
    """Ask, and count."""
    (page_size,) = tap.connections[0].execute("PRAGMA page_size").fetchone()
    rows, size = tap.rows, log.stat().st_size
    tap.begin()
    reader.ask(question)
    # In the log each page has a header of 24 bytes.
    pages = (log.stat().st_size - size) // (page_size + 24)
    return SQLiteCost(list(tap.statements), tap.steps, tap.rows - rows, pages, set(tap.accesses))


SQLiteCosts: TypeAlias = dict[tuple[int, str], SQLiteCost]


@pytest.fixture(scope="module")
def sqlite_costs(tmp_path_factory: pytest.TempPathFactory) -> SQLiteCosts:
    """The cost of each question in a file with few saved documents, and in one with many."""
    costs = {}
    for saved in (FEW, MANY):
        path, tap = tmp_path_factory.mktemp("costs") / "state.db", Tap()
        sa.event.listen(sa.Pool, "connect", tap.connected)
        try:
            with SQLiteStateStore(f"sqlite:///{path}") as store:
                reader = Reader(store, saved)
                for question in (HIT, MISS):
                    costs[saved, question] = sqlite_cost(tap, reader, question, Path(f"{path}-wal"))
        finally:
            sa.event.remove(sa.Pool, "connect", tap.connected)
    return costs


@for_each_question
def test_sqlite_runs_the_same_statements(sqlite_costs: SQLiteCosts, question: str) -> None:
    """A query runs the same statements, of the same size and work, with 10 saved documents as with 1,000."""
    few, many = sqlite_costs[FEW, question], sqlite_costs[MANY, question]
    assert few.shapes == many.shapes
    assert abs(sum(map(len, many.statements)) - sum(map(len, few.statements))) <= SLACK
    assert few.steps > 0
    assert abs(many.steps - few.steps) <= SLACK


@for_each_question
@pytest.mark.parametrize("saved", [FEW, MANY])
def test_sqlite_reads_once_and_writes_once(sqlite_costs: SQLiteCosts, question: str, saved: int) -> None:
    """A query is at most one transaction that reads, then one that says from the start that it will write."""
    statements = [statement.upper() for statement in sqlite_costs[saved, question].statements]
    verbs = "; ".join(text if text.startswith("BEGIN") else text.split()[0] for text in statements)
    reading = "(SELECT|BEGIN; (SELECT; )*COMMIT)"
    writing = "BEGIN IMMEDIATE; ((SELECT|INSERT|UPDATE|DELETE); )*COMMIT"
    assert re.fullmatch(f"({reading}; )?{writing}", verbs)


@for_each_question
@pytest.mark.parametrize("saved", [FEW, MANY])
def test_sqlite_writes_what_was_touched(sqlite_costs: SQLiteCosts, question: str, saved: int) -> None:
    """A query writes one row for each document and chunk that it touched and one for the user, and their pages."""
    cost = sqlite_costs[saved, question]
    assert cost.rows == ROWS_TOUCHED[question]
    assert 0 < cost.pages <= cost.rows * LEAVES


@for_each_question
@pytest.mark.parametrize("saved", [FEW, MANY])
def test_sqlite_leaves_texts_and_vectors_alone(sqlite_costs: SQLiteCosts, question: str, saved: int) -> None:
    """A query neither reads nor writes saved texts and vectors; of a copy that answered it sees that it is there."""
    accesses = sqlite_costs[saved, question].accesses
    writes = {sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE}
    written = {table for action, table, _ in accesses if action in writes}
    read = {(table, column) for action, table, column in accesses if action == sqlite3.SQLITE_READ}
    hits = {"rag_wiki_chunk_hits"} if question == HIT else set()
    keys = {("rag_wiki_chunks", column) for column in ("user_key", "doc_key", "copy_id")} if question == HIT else set()
    assert written == {"rag_wiki_users", "rag_wiki_documents"} | hits
    assert {(table, column) for table, column in read if table not in written} <= keys
    assert ("rag_wiki_documents", "content") not in read
    assert (sqlite3.SQLITE_UPDATE, "rag_wiki_documents", "content") not in accesses


# -- Valkey


class CountedConnection(redis.Connection):
    """Counts how often something is sent, which is how often an answer is waited for."""

    trips: ClassVar[list[int]] = []

    def send_packed_command(self, *arguments: Any, **options: Any) -> None:
        """Send a command, or several at once."""
        self.trips.append(1)
        super().send_packed_command(*arguments, **options)  # type: ignore[no-untyped-call] # redis-py has no types here


@dataclass(frozen=True)
class ValkeyCost:
    """What one query cost a Valkey server."""

    trips: int
    received: int
    """Bytes that the server got."""
    commands: Counter[str]
    """How often the server carried out each command, those of scripts included."""
    scripted: list[tuple[str, str]]
    """The commands of scripts, each with its key."""


def valkey_cost(admin: redis.Redis, reader: Reader, question: str) -> ValkeyCost:
    """Ask, and count."""
    unasked, before = server_counts(admin), server_counts(admin)
    CountedConnection.trips.clear()
    reader.ask(question)
    trips, after = len(CountedConnection.trips), server_counts(admin)
    with admin.monitor() as monitor:  # type: ignore[no-untyped-call] # redis-py has no types here
        reader.ask(question)
        admin.echo("the end")
        told = list(takewhile(lambda each: each["command"] != "ECHO the end", monitor.listen()))
    words = [each["command"].split(" ") for each in told if each["client_type"] == "lua"]
    commands, received = after[0] - before[0], (after[1] - before[1]) - (before[1] - unasked[1])
    return ValkeyCost(trips, received, commands, [(name.upper(), key) for name, key, *_ in words])


def server_counts(admin: redis.Redis) -> tuple[Counter[str], int]:
    """The commands carried out so far, this question aside, and the bytes received."""
    told: Any = admin.info("commandstats", "stats")
    calls = {name[8:]: value["calls"] for name, value in told.items() if name.startswith("cmdstat_")}
    return Counter({name: number for name, number in calls.items() if name != "info"}), told["total_net_input_bytes"]


ValkeyCosts: TypeAlias = dict[tuple[int, str], ValkeyCost]


@pytest.fixture(scope="module")
def counted(valkey_port: int) -> Iterator[redis.Redis]:
    """A client that counts its trips."""
    pool = redis.ConnectionPool(connection_class=CountedConnection, host="127.0.0.1", port=valkey_port)
    with redis.Redis(connection_pool=pool) as client:
        yield client
    pool.disconnect()


@pytest.fixture(scope="module")
def valkey_costs(counted: redis.Redis, valkey_port: int) -> ValkeyCosts:
    """The cost of each question beside few saved documents, and beside many."""
    costs = {}
    with redis.Redis(host="127.0.0.1", port=valkey_port) as admin:
        for saved in (FEW, MANY):
            store = RedisStateStore(counted, prefix=f"costs-{saved:04}")
            reader = Reader(store, saved)
            for question in (HIT, MISS):
                costs[saved, question] = valkey_cost(admin, reader, question)
            store.forget_user(USER)
    return costs


@for_each_question
def test_valkey_carries_out_the_same_commands(valkey_costs: ValkeyCosts, question: str) -> None:
    """A query has the server do the same, and sends it as much, with 10 saved documents as with 1,000."""
    few, many = valkey_costs[FEW, question], valkey_costs[MANY, question]
    assert few.commands == many.commands
    assert abs(many.received - few.received) <= SLACK


@for_each_question
@pytest.mark.parametrize("saved", [FEW, MANY])
def test_valkey_is_asked_twice(valkey_costs: ValkeyCosts, question: str, saved: int) -> None:
    """A query is two round trips: a script to begin, and one to apply."""
    cost = valkey_costs[saved, question]
    assert (cost.trips, cost.commands["evalsha"]) == (2, 2)


def test_valkey_is_asked_twice_whichever_document_answers(counted: redis.Redis) -> None:
    """When two saved documents answer in turn, each query still is two round trips."""
    store = RedisStateStore(counted, prefix="costs-in-turn")
    reader = Reader(store, MANY)
    trips = []
    for question in (HIT, OTHER_HIT) * WARM_UP:
        CountedConnection.trips.clear()
        reader.ask(question)
        trips.append(len(CountedConnection.trips))
    store.forget_user(USER)
    assert trips[-2:] == [2, 2]


@for_each_question
@pytest.mark.parametrize("saved", [FEW, MANY])
def test_valkey_leaves_texts_and_vectors_alone(valkey_costs: ValkeyCosts, question: str, saved: int) -> None:
    """A query touches no saved text, and no chunks but to see that a copy that answered is there."""
    scripted = valkey_costs[saved, question].scripted
    assert [name for name, key in scripted if ":chunks:" in key] == (["HEXISTS"] if question == HIT else [])
    assert [key for _, key in scripted if key.endswith(":content") or ":texts:" in key] == []
