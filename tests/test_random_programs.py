"""One random program, every store: the same steps on each of them, and on a plain model of the rules.

A program of two users and four documents plays queries, saves, declines, votes, pins, removals, decay runs and moves
of the clock through the public methods of `RagWikiRetriever`, against all stores at once. After each step the
results, errors, records and histories must be the same everywhere, and what `model.py` says.

Hypothesis writes the programs, and shortens one that fails. They are the same on every run. With
`RAG_WIKI_PROGRAM_SECONDS=600` in the environment new and longer ones are played for that many seconds:

    RAG_WIKI_PROGRAM_SECONDS=600 pytest tests/test_random_programs.py -rP
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import pytest
from helpers import HandClock, TableEmbeddings, document
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from model import (
    Answer,
    Doc,
    Event,
    Model,
    Piece,
    Rules,
)
from pydantic import Field
from scenarios import OTHER_QUESTION, POD_QUESTION, PODS, USER, Paragraphs, World

from rag_wiki import (
    DecayConfig,
    DocumentState,
    MemoryStateStore,
    RagWikiRetriever,
    RagWikiRetrieverConfig,
    StateStore,
    UserDocRecord,
)
from rag_wiki.errors import RagWikiError
from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.storage.records import DocumentEvent
from rag_wiki.transparency.provenance import ProvenanceBlock

SECONDS = float(os.environ.get("RAG_WIKI_PROGRAM_SECONDS", "0"))

# -- what is asked, and what there is to find ----------------------------------------------------

USERS = ("ä:*/..", "Ä:*/.. ")
"""Two of the names of a program's users, which begin with a name that no other program has."""
DOC_IDS = ("a:b", "../a b%00☃*", "a" * 300, "a\x00\ud800")
PARTS = (
    ("Pods run one or more containers", "Zebra crossings need paint in June", "Quarterly tax forms"),
    ("Volumes outlive what mounts them", "My neighbour's violin squeaks"),
    ("Ingress maps hosts to services", "Lunch is served at noon sharp", "Ferries cross twice a week"),
    ("Secrets are not encrypted by default",),
)
"""What the parts of each document say. The pieces of the first two are numbered."""
NUMBERED = (True, True, False, False)
EDITIONS = 3


def _vectors() -> dict[str, Sequence[float]]:
    """The first part of a document is what it is about, the second is so in part, the third hardly.

    What all have in common is enough to put any two of them in an order.
    """
    table: dict[str, Sequence[float]] = {}
    for at, parts in enumerate(PARTS):
        for part, text in enumerate(parts):
            vector = [0.0] * 8
            vector[at], vector[4 + part] = ((1.0, 0.0), (0.6, 0.8), (0.3, 0.95))[part]
            vector[7] = 0.01 * (1 + 3 * at + part)
            table[text] = vector
        table[f"about {at}"] = [float(axis == at) for axis in range(7)] + [0.1]
        for other in range(len(PARTS)):
            if other != at:
                table[f"about {at} and {other}"] = [
                    0.8 if axis == at else 0.6 if axis == other else 0.0 for axis in range(7)
                ] + [0.1]
    table["about the neighbour"] = [0.0] * 5 + [1.0, 0.0, 0.1]
    table["about nothing"] = [0.0] * 6 + [1.0, 0.1]
    return table


VECTORS = _vectors()
QUESTIONS = sorted(text for text in VECTORS if text.startswith("about"))


def cosine(question: str, text: str) -> float:
    """Of a question and a text, worked out by hand."""
    one, other = VECTORS[question], VECTORS[text.partition(", edition ")[0]]
    return sum(a * b for a, b in zip(one, other, strict=True)) / (math.hypot(*one) * math.hypot(*other))


def text_of(at: int, part: int, edition: int) -> str:
    """A part of a document in an edition."""
    return f"{PARTS[at][part]}, edition {edition}."


def whole(at: int, edition: int) -> str:
    """A document in an edition."""
    return "\n\n".join(text_of(at, part, edition) for part in range(len(PARTS[at])))


class Shelf(BaseRetriever):
    """Shows the pieces that it was told to; takes an argument that it does not need."""

    pieces: list[Piece] = Field(default_factory=list)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, shelf: str | None = None
    ) -> list[Document]:
        return [
            Document(
                page_content=piece.text,
                metadata={
                    "doc_id": piece.doc_id,
                    "doc_title": piece.title,
                    "doc_path": piece.path,
                    **({} if piece.number is None else {"chunk_index": piece.number}),
                },
            )
            for piece in self.pieces
        ]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: Any, shelf: str | None = None
    ) -> list[Document]:
        return self._get_relevant_documents(query, run_manager=run_manager, shelf=shelf)


# -- where it is kept ----------------------------------------------------------------------------


@dataclass
class Process:
    """What one process has open of a place."""

    store: StateStore
    chunks: ChunkStore | None
    retriever: RagWikiRetriever | None = None
    suggested: list[tuple[str, str, str, str, int]] = field(default_factory=list)

    @property
    def memory(self) -> RagWikiRetriever:
        """The retriever of the program that runs."""
        assert self.retriever is not None
        return self.retriever


@dataclass
class Place:
    """A place for state and chunks, with two processes at work on it."""

    name: str
    open_store: Callable[[], StateStore]
    folder: Path | None = None
    processes: list[Process] = field(default_factory=list)

    def open(self) -> Process:
        """Open it as a new process does."""
        return Process(self.open_store(), None if self.folder is None else ChunkStore(self.folder))

    def close(self) -> None:
        """Close what is open."""
        for process in self.processes:
            process.store.close()


def _open_redis(port: int) -> StateStore:
    import redis

    from rag_wiki.storage.redis_store import RedisStateStore

    class OwnClient(RedisStateStore):
        """Closes the client as well, which is nobody else's."""

        def close(self) -> None:
            super().close()
            client.close()

    client = redis.Redis(host="127.0.0.1", port=port)
    return OwnClient(client)


@pytest.fixture
def places(postgres_url: str, valkey_port: int, tmp_path: Path) -> Iterator[list[Place]]:
    """Every store, with the chunks beside it, and chunks on disk."""
    from rag_wiki.storage.sql import SQLStateStore
    from rag_wiki.storage.sqlite import SQLiteStateStore

    in_memory, beside_disk = MemoryStateStore(), MemoryStateStore()
    every = [
        Place("memory", lambda: in_memory),
        Place("memory and disk", lambda: beside_disk, tmp_path / "wiki"),
        Place("SQLite", lambda: SQLiteStateStore(f"sqlite:///{tmp_path / 'state.db'}")),
        Place("PostgreSQL", lambda: SQLStateStore(postgres_url)),
        Place("Valkey", lambda: _open_redis(valkey_port)),
    ]
    for place in every:
        place.processes = [place.open(), place.open()]
    yield every
    for place in every:
        place.close()


# -- comparing -----------------------------------------------------------------------------------

OWN_NAMES = {"copy_id", "life"}
"""Fields of a record that differ from store to store."""
KNOWN_TO_MODEL = tuple(
    item.name for item in dataclasses.fields(Doc) if item.name in {of.name for of in dataclasses.fields(UserDocRecord)}
)


def _even(value: Any) -> Any:
    """A value with its numbers rounded: a product of matrices may end in another digit where rows lie elsewhere."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, Mapping):
        return {name: _even(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_even(item) for item in value]
    return value


def _record(record: UserDocRecord) -> dict[str, Any]:
    """All fields of a record that are the same in every store."""
    return _even({name: value for name, value in vars(record).items() if name not in OWN_NAMES})  # type: ignore[no-any-return]


def _as_model_sees(record: UserDocRecord, doc: Doc) -> tuple[dict[str, Any], dict[str, Any]]:
    """A record and the model's document, in the fields that mean something for it."""
    has_streak = doc.saved and not doc.pinned_by_user
    names = [name for name in KNOWN_TO_MODEL if has_streak or name != "cache_miss_streak"]
    told = {name: _even(getattr(record, name)) for name in names}
    expected = {name: _even(getattr(doc, name)) for name in names}
    told["retrieved"], expected["retrieved"] = len(record.retrieved), len(doc.seen)
    told["retrieved_chars"], expected["retrieved_chars"] = record.retrieved_chars, sum(map(len, doc.seen))
    return told, expected


def _differing(told: Any, expected: Any, at: str = "") -> str:
    """Where two values differ first, for whoever reads a failure."""
    if isinstance(told, dict) and isinstance(expected, dict) and told.keys() == expected.keys():
        pairs = [(f"{at}.{name}", told[name], expected[name]) for name in told]
    elif isinstance(told, list) and isinstance(expected, list) and len(told) == len(expected):
        pairs = [(f"{at}[{number}]", *pair) for number, pair in enumerate(zip(told, expected, strict=True))]
    else:
        return f"{at}: {told!r}, expected {expected!r}"
    return next((_differing(one, other, name) for name, one, other in pairs if one != other), "")


def _event(event: DocumentEvent | Event) -> Event:
    """An event as the model tells it."""
    return Event(
        event.what,
        DocumentState(event.from_state).value,
        DocumentState(event.to_state).value,
        # Whether the query that sees a copy to be out of date counts before that or after is not promised.
        0 if event.what == "stale" else event.fetch_count,
        _even(event.decay_score),
        event.at,
    )


def _told(provenance: ProvenanceBlock) -> dict[str, Any]:
    told = provenance.to_dict()
    del told["timings"]
    # In which order several are withheld or let go is not promised.
    for name in ("withheld", "let_go"):
        told[name].sort(key=lambda copy: copy["doc_id"])
    # In which order several are withheld or let go is not promised.
    for name in ("withheld", "let_go"):
        told[name].sort(key=lambda copy: copy["doc_id"])
    return _even(told)  # type: ignore[no-any-return]


def _outcome(do: Callable[[], Any]) -> tuple[str, Any]:
    """What comes of doing something: a value, or the type of the error."""
    try:
        return "done", do()
    except RagWikiError as error:
        return "refused", type(error).__name__


# -- programs ------------------------------------------------------------------------------------

documents = st.integers(0, len(DOC_IDS) - 1)
users = st.sampled_from(USERS)
met = st.integers(0, 3 * len(DOC_IDS) - 1)
"""A document by its number; from where there are no more, one of those that the user met."""
shown_parts = documents.flatmap(lambda at: st.tuples(st.just(at), st.integers(0, len(PARTS[at]) - 1)))


class Programs(RuleBasedStateMachine):
    """Steps that a program may take; each is played on every place and by the model, and compared."""

    places: ClassVar[list[Place]]
    loop: ClassVar[asyncio.AbstractEventLoop]
    programs: ClassVar[int] = 0
    steps: ClassVar[Counter[str]] = Counter()
    happened: ClassVar[Counter[str]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        type(self).programs += 1
        self.namespace = uuid.uuid4().hex
        self.clock = HandClock()
        self.shelf = Shelf()
        self.editions = [1] * len(DOC_IDS)
        self.library: dict[str, str] = {}
        self.denied: set[tuple[str, str]] = set()
        self.compared: dict[tuple[str, str], list[Event]] = {}
        self.going_by = Rules()
        self.model = Model(self.going_by, cosine, self.library, self.denied)

    @initialize(
        rules=st.builds(
            Rules,
            fetch_threshold=st.integers(1, 3),
            reset_threshold=st.integers(1, 4),
            max_cache_miss_streak=st.integers(1, 4),
            local_top_k=st.integers(1, 2),
            on_miss=st.booleans(),
            auto_save=st.sampled_from([False, False, True]),
            demotion_hold_days=st.sampled_from([0, 0.5, 2]),
            pin_hold_days=st.sampled_from([0, 0.5]),
        ),
        owned=st.lists(st.tuples(users, st.integers(0, len(DOC_IDS) - 1), st.booleans()), max_size=4),
    )
    def settle(self, rules: Rules, owned: Sequence[tuple[str, int, bool]]) -> None:
        """A program has its settings, and most begin with something saved."""
        self.going_by = rules
        self.model = Model(rules, cosine, self.library, self.denied)
        for place in self.places:
            for process in place.processes:
                self._equip(process)
        for user, at, given in owned:
            self.find_and_save(user=user, at=at, content="whole" if given else None, process=0, way=0)

    def _equip(self, process: Process) -> None:
        """A retriever of this program, on what a process has open."""
        rules = self.going_by
        process.suggested = suggested = []
        process.retriever = RagWikiRetriever(
            global_retriever=self.shelf,
            state_store=process.store,
            chunk_store=process.chunks,
            embedding_model=TableEmbeddings(VECTORS),
            on_suggestion=lambda event: suggested.append(
                (event.user_id, event.doc_id, event.doc_title, event.doc_path, event.fetch_count)
            ),
            document_loader=lambda record: self.library.get(record.doc_id),
            access_check=lambda user_id, doc_id: (user_id, doc_id) not in self.denied,
            clock=self.clock,
            config=RagWikiRetrieverConfig(
                fetch_threshold=rules.fetch_threshold,
                reset_threshold=rules.reset_threshold,
                similarity_threshold=rules.similarity_threshold,
                local_top_k=rules.local_top_k,
                global_search="on_miss" if rules.on_miss else "always",
                auto_save=rules.auto_save,
                text_splitter=Paragraphs(),
                decay=DecayConfig(
                    max_cache_miss_streak=rules.max_cache_miss_streak,
                    freq_cap=rules.freq_cap,
                    pin_threshold=rules.pin_threshold,
                    demotion_threshold=rules.demotion_threshold,
                    pin_hold_days=rules.pin_hold_days,
                    demotion_hold_days=rules.demotion_hold_days,
                ),
            ),
        )

    # -- queries -------------------------------------------------------------------------------

    @rule(
        user=users,
        question=st.sampled_from(QUESTIONS),
        shown=st.lists(shown_parts, max_size=4),
        k=st.sampled_from([None, None, None, 1, 2, 3]),
        narrowed=st.sampled_from([False, False, False, True]),
        process=st.integers(0, 1),
        way=st.integers(0, 5),
    )
    def ask(
        self,
        user: str,
        question: str,
        shown: Sequence[tuple[int, int]],
        k: int | None,
        narrowed: bool,
        process: int,
        way: int,
    ) -> None:
        """A question, and what the source shows for it."""
        self._ask(user, question, shown, k=k, narrowed=narrowed, process=process, way=way)

    @rule(user=users, at=met, times=st.integers(1, 4), process=st.integers(0, 1), way=st.integers(0, 5))
    def ask_about(self, user: str, at: int, times: int, process: int, way: int) -> None:
        """A question about one document, which the source shows, some times over."""
        at = self._named(user, at)
        for _ in range(times):
            self._ask(user, f"about {at}", [(at, 0), (at, len(PARTS[at]) - 1)], process=process, way=way)

    @rule(user=users, times=st.integers(1, 4), process=st.integers(0, 1), way=st.integers(0, 5))
    def ask_in_vain(self, user: str, times: int, process: int, way: int) -> None:
        """A question that nothing is found for, some times over."""
        for _ in range(times):
            self._ask(user, "about nothing", [], process=process, way=way)

    def _ask(
        self,
        user: str,
        question: str,
        shown: Sequence[tuple[int, int]],
        *,
        k: int | None = None,
        narrowed: bool = False,
        process: int,
        way: int,
    ) -> None:
        pieces = [self._piece(at, part) for at, part in shown]
        user_id = self._user_id(user)
        self.shelf.pieces = pieces
        answer = self.model.ask(user_id, question, pieces, k, self.clock.now, narrowed=narrowed)
        arguments: dict[str, Any] = {"k": k} if k is not None else {}
        if narrowed:
            arguments["shelf"] = "upper"
        told = self._everywhere(
            process, lambda memory: self._invoke(memory, user_id, question, arguments, way), "ask", user_id
        )
        kind, (served, sources) = told
        assert kind == "done"
        plainly = [(doc_id, cached, text) for doc_id, cached, text, _ in served]
        assert plainly == answer.served, _differing(plainly, answer.served)
        self._check_provenance(sources, answer)
        for place in self.places:
            suggested = place.processes[process].suggested
            assert sorted(suggested) == sorted((user_id, *event) for event in answer.suggestions), place.name
            suggested.clear()

    def _check_provenance(self, told: Mapping[str, Any], answer: Answer) -> None:
        assert told["asked"] == answer.asked
        assert {copy["doc_id"] for copy in told["let_go"]} == answer.let_go
        # In which order several come is not promised.
        assert sorted((event["doc_id"], event["fetch_count"]) for event in told["suggestions"]) == sorted(
            (doc_id, count) for doc_id, _, _, count in answer.suggestions
        )
        assert told["degraded"] == []
        docs = self.model.docs(told["user_id"])
        for source in told["sources"]:
            doc = docs[source["doc_id"]]
            assert source["fetch_count"] == doc.fetch_count or source["doc_id"] in answer.let_go
            assert (
                source["user_state"] == doc.user_state or source["doc_id"] in answer.let_go or self.going_by.auto_save
            )
            assert source["from_cache"] or source["stale"] == (doc.stale_since is not None) or self.going_by.auto_save

    def _invoke(
        self, memory: RagWikiRetriever, user_id: str, question: str, arguments: Mapping[str, Any], way: int
    ) -> tuple[list[tuple[str, bool, str, Any]], dict[str, Any]]:
        """Ask, naming the user in one of three ways, blocking or awaiting."""
        config: Any = None
        given = dict(arguments)
        if way % 3 == 0:
            given["user_id"] = user_id
        elif way % 3 == 1:
            config = {"configurable": {"user_id": user_id}}
        else:
            memory = memory.for_user(user_id)
        if way < 3:
            found, provenance = memory.invoke_with_provenance(question, config, **given)
        else:
            found, provenance = self._wait_for(memory.ainvoke_with_provenance(question, config, **given))
        served = [
            (item.metadata["doc_id"], item.metadata["from_cache"], item.page_content, _even(item.metadata))
            for item in found
        ]
        return served, _told(provenance)

    # -- what a user does ----------------------------------------------------------------------

    @rule(
        user=users,
        at=met,
        content=st.sampled_from([None, None, "whole", "whole", "older", "first part", "blank"]),
        refresh=st.booleans(),
        process=st.integers(0, 1),
        awaits=st.booleans(),
    )
    def save(self, user: str, at: int, content: str | None, refresh: bool, process: int, awaits: bool) -> None:
        """Accept a suggestion, pending or lapsed or none; or replace a copy."""
        at = self._named(user, at)
        text = {
            None: None,
            "whole": whole(at, self.editions[at]),
            "older": whole(at, 0),
            "first part": text_of(at, 0, self.editions[at]),
            "blank": " \n",
        }[content]
        self._act(
            "refresh" if refresh else "accept_suggestion",
            user,
            at,
            process,
            awaits,
            lambda user_id, doc_id: self.model.save(user_id, doc_id, text, self.clock.now, refresh=refresh),
            {"full_content": text},
        )

    @rule(user=users, at=met, process=st.integers(0, 1), awaits=st.booleans())
    def decline(self, user: str, at: int, process: int, awaits: bool) -> None:
        """Decline a suggestion, or none."""
        self._act(
            "decline_suggestion",
            user,
            at,
            process,
            awaits,
            lambda user_id, doc_id: self.model.decline(user_id, doc_id, self.clock.now),
        )

    @rule(user=users, at=met, up=st.booleans(), process=st.integers(0, 1), awaits=st.booleans())
    def vote(self, user: str, at: int, up: bool, process: int, awaits: bool) -> None:
        """Vote for or against a document."""
        signal, name = (1.0, "thumbs_up") if up else (-1.0, "thumbs_down")
        self._act(
            name,
            user,
            at,
            process,
            awaits,
            lambda user_id, doc_id: self.model.vote(user_id, doc_id, signal, self.clock.now),
        )

    @rule(user=users, at=met, process=st.integers(0, 1), awaits=st.booleans())
    def pin(self, user: str, at: int, process: int, awaits: bool) -> None:
        """Pin a document, saved or not."""
        self._act(
            "force_pin",
            user,
            at,
            process,
            awaits,
            lambda user_id, doc_id: self.model.pin(user_id, doc_id, self.clock.now),
        )

    @rule(user=users, at=met, process=st.integers(0, 1), awaits=st.booleans())
    def unpin(self, user: str, at: int, process: int, awaits: bool) -> None:
        """Take a pin away, or none."""
        self._act(
            "unpin",
            user,
            at,
            process,
            awaits,
            lambda user_id, doc_id: self.model.unpin(user_id, doc_id, self.clock.now),
        )

    @rule(user=users, at=met, process=st.integers(0, 1), awaits=st.booleans())
    def remove(self, user: str, at: int, process: int, awaits: bool) -> None:
        """Remove a document, in whatever state."""
        self._act(
            "force_remove",
            user,
            at,
            process,
            awaits,
            lambda user_id, doc_id: self.model.remove(user_id, doc_id, self.clock.now),
        )

    @rule(user=users, at=met, enabled=st.booleans(), process=st.integers(0, 1), awaits=st.booleans())
    def answer_in_full(self, user: str, at: int, enabled: bool, process: int, awaits: bool) -> None:
        """Want the whole document, or no more."""
        self._act(
            "set_always_full_doc",
            user,
            at,
            process,
            awaits,
            lambda user_id, doc_id: self.model.answer_in_full(user_id, doc_id, enabled),
            {"enabled": enabled},
        )

    @rule(
        user=users,
        at=met,
        content=st.sampled_from([None, "whole", "older"]),
        process=st.integers(0, 1),
        way=st.integers(0, 5),
    )
    def find_and_save(self, user: str, at: int, content: str | None, process: int, way: int) -> None:
        """Ask about a document, and save it."""
        at = self._named(user, at)
        self.ask_about(user=user, at=at, times=1, process=process, way=way)
        self.save(user=user, at=at, content=content, refresh=False, process=process, awaits=way > 2)

    @rule(user=users, sure=st.integers(0, 9), process=st.integers(0, 1), awaits=st.booleans())
    def forget(self, user: str, sure: int, process: int, awaits: bool) -> None:
        """Forget a user, which few programs do often; what went is counted."""
        if sure != 5:
            return
        user_id = self._user_id(user)
        expected = self.model.forget(user_id)
        told = self._everywhere(
            process,
            lambda memory: vars(self._call(memory, "forget_user", awaits, user_id=user_id)),
            "forget_user",
            user_id,
            but_for={"files"},
        )
        kind, counts = told
        assert kind == "done"
        names = ("documents", "events", "retrieved_texts", "chunks")
        assert tuple(counts[name] for name in names) == expected

    # -- time, and what goes on around -----------------------------------------------------------

    @rule(user=users, process=st.integers(0, 1), awaits=st.booleans(), again=st.booleans())
    def decay(self, user: str, process: int, awaits: bool, again: bool) -> None:
        """A decay run; once more finds nothing left to do."""
        user_id = self._user_id(user)
        for _ in range(1 + again):
            expected = self.model.decay(user_id, self.clock.now)
            told = self._everywhere(
                process,
                lambda memory: [
                    (item.doc_id, item.old_state.value, item.new_state.value, item.old_score, item.new_score)
                    for item in self._call(memory, "run_decay", awaits, user_id=user_id)
                ],
                "run_decay",
                user_id,
            )
            assert told == ("done", _even(expected))

    @rule(hours=st.one_of(st.integers(1, 72), st.integers(24, 60 * 24), st.integers(-5, -1)))
    def turn_clock(self, hours: int) -> None:
        """Time passes; a little of it may come back."""
        self.clock.turn(hours=hours)

    @rule(at=documents, edition=st.integers(1, EDITIONS))
    def publish(self, at: int, edition: int) -> None:
        """The source has another edition, or one of before, of a document."""
        self.editions[at] = edition

    @rule(user=users, at=met, edition=st.integers(1, EDITIONS), process=st.integers(0, 1), way=st.integers(0, 5))
    def find_news(self, user: str, at: int, edition: int, process: int, way: int) -> None:
        """A document comes out in another edition, and is asked about."""
        at = self._named(user, at)
        self.publish(at=at, edition=edition)
        self.ask_about(user=user, at=at, times=1, process=process, way=way)

    @rule(at=documents, there=st.booleans())
    def stock(self, at: int, there: bool) -> None:
        """The loader has a document in its present edition, or has it no more."""
        if there:
            self.library[DOC_IDS[at]] = whole(at, self.editions[at])
        else:
            self.library.pop(DOC_IDS[at], None)

    @rule(user=users, at=documents)
    def deny(self, user: str, at: int) -> None:
        """Access to a document ends, or begins again."""
        self.denied ^= {(self._user_id(user), DOC_IDS[at])}

    @rule(process=st.integers(0, 1), client=st.booleans())
    def reopen(self, process: int, client: bool) -> None:
        """A process starts again; or makes a new retriever on the store that it has open."""
        for place in self.places:
            if client:
                place.processes[process].store.close()
                place.processes[process] = place.open()
            self._equip(place.processes[process])

    @rule(user=users, process=st.integers(0, 1))
    def look(self, user: str, process: int) -> None:
        """Everything that is kept of a user."""
        self._check_all(process, user)

    def teardown(self) -> None:
        """At its end a program looks at everything, and leaves nothing."""
        if sys.exc_info()[0] is None and self.places[0].processes[0].retriever is not None:
            for process, user in enumerate(USERS):
                self._check_all(process, user)
        self.happened.update(
            event.what for docs in self.model.users.values() for doc in docs.values() for event in doc.events
        )
        for place in self.places:
            for user in USERS:
                place.processes[0].store.forget_user(self._user_id(user))

    # -- playing and comparing -------------------------------------------------------------------

    def _user_id(self, user: str) -> str:
        return f"{self.namespace}{user}"

    def _named(self, user: str, at: int) -> int:
        known = sorted(self.model.docs(self._user_id(user)))
        if at < len(DOC_IDS) or not known:
            return at % len(DOC_IDS)
        return DOC_IDS.index(known[at % len(known)])

    def _piece(self, at: int, part: int) -> Piece:
        edition = self.editions[at]
        return Piece(
            doc_id=DOC_IDS[at],
            title=f"Title {at}, edition {edition}",
            path=f"shelf/{at}.md",
            text=text_of(at, part, edition),
            number=part if NUMBERED[at] else None,
        )

    def _wait_for(self, doing: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(doing)

    def _call(self, memory: RagWikiRetriever, name: str, awaits: bool, *arguments: Any, **named: Any) -> Any:
        if awaits:
            return self._wait_for(getattr(memory, f"a{name}")(*arguments, **named))
        return getattr(memory, name)(*arguments, **named)

    def _act(
        self,
        name: str,
        user: str,
        at: int,
        process: int,
        awaits: bool,
        by_model: Callable[[str, str], None],
        arguments: Mapping[str, Any] | None = None,
    ) -> None:
        """An action on a document: the same error, or a record that is what is stored then."""
        user_id, doc_id = self._user_id(user), DOC_IDS[self._named(user, at)]
        kind, error = _outcome(lambda: by_model(user_id, doc_id))
        told = self._everywhere(
            process,
            lambda memory: _record(self._call(memory, name, awaits, doc_id, user_id=user_id, **(arguments or {}))),
            name,
            user_id,
        )
        assert told[0] == kind
        if kind == "refused":
            assert told == (kind, error)
            return
        stored = self.places[0].processes[process].store.get(user_id, doc_id)
        assert stored is not None
        assert {**told[1], "full_content": None} == {**_record(stored), "full_content": None}

    def _everywhere(
        self,
        process: int,
        do: Callable[[RagWikiRetriever], Any],
        name: str,
        user_id: str,
        but_for: Collection[str] = (),
    ) -> tuple[str, Any]:
        """Do something on every place; what came of it, which must be the same on each. Then the records must be."""
        self.steps[name] += 1
        first, *others = [
            (place, _outcome(lambda memory=place.processes[process].memory: do(memory)))  # type: ignore[misc]
            for place in self.places
        ]
        for place, (kind, told) in others:
            if but_for and kind == "done":
                told = {**told, **{item: first[1][1][item] for item in but_for}}
            found, expected = [kind, _even(told)], [first[1][0], _even(first[1][1])]
            assert found == expected, f"{place.name}: {_differing(found, expected)}"
        self._check_records(process, user_id)
        kind, told = first[1]
        return kind, _even(told)

    def _check_records(self, process: int, user_id: str, *, all_events: bool = False) -> None:
        """The records, and what happened to the documents, are the same on every place, and for the model."""
        docs = self.model.docs(user_id)
        moved = [
            doc_id for doc_id, doc in docs.items() if all_events or self.compared.get((user_id, doc_id)) != doc.events
        ]
        self.compared.update({(user_id, doc_id): list(docs[doc_id].events) for doc_id in moved})
        reference: tuple[Any, Any] | None = None
        for place in self.places:
            store = place.processes[process].store
            records = store.list_by_state(user_id)
            told = [_record(record) for record in records]
            events = {doc_id: store.history(user_id, doc_id) for doc_id in moved}
            if reference is None:
                reference = told, _even({doc_id: [vars(event) for event in own] for doc_id, own in events.items()})
                assert [record.doc_id for record in records] == sorted(docs)
                for record in records:
                    seen, expected = _as_model_sees(record, docs[record.doc_id])
                    assert seen == expected, f"{record.doc_id!r}: {_differing(seen, expected)}"
                for doc_id, own in events.items():
                    happened = [_event(event) for event in own]
                    foreseen = [_event(event) for event in docs[doc_id].events]
                    assert happened == foreseen, f"{doc_id!r}: {_differing(happened, foreseen)}"
            else:
                assert told == reference[0], f"{place.name}: {_differing(told, reference[0])}"
                assert _even({doc_id: [vars(event) for event in own] for doc_id, own in events.items()}) == reference[1]

    def _check_all(self, process: int, user: str) -> None:
        """What is kept of a user: records, whole histories, retrieved texts, chunks, numbers."""
        user_id = self._user_id(user)
        self._check_records(process, user_id, all_events=True)
        docs = self.model.docs(user_id)
        kept = {doc_id: list(doc.kept) for doc_id, doc in docs.items()}
        chunks = {
            doc_id: [(number, text, number in doc.hits) for number, text in doc.chunks] for doc_id, doc in docs.items()
        }
        saved = [doc for doc in docs.values() if doc.saved]
        for place in self.places:
            memory, store = place.processes[process].memory, place.processes[process].store
            assert [record.doc_id for record in memory.documents(user_id=user_id)] == sorted(docs)
            assert kept == {
                doc_id: [text.text for text in store.retrieved_texts(user_id, doc_id)] for doc_id in docs
            }, place.name
            assert chunks == {
                doc_id: [
                    (chunk["chunk_index"], chunk["text"], chunk["hit_count"] > 0)
                    for chunk in memory.chunk_store.load_chunks(user_id, doc_id)
                ]
                for doc_id in docs
            }, place.name
            stats = memory.stats(user_id)
            states = Counter(doc.user_state for doc in docs.values())
            assert {state: count for state, count in stats.states.items() if count} == states
            assert stats.chunks == sum(doc.chunk_count for doc in saved)
            assert stats.stale == sum(doc.stale_since is not None for doc in saved)
            assert (user_id in store.list_active_users()) == bool(saved)
            assert store.saved_count(user_id) == len(saved)


@pytest.fixture
def world() -> World:
    """An empty world in memory."""
    return World()


def _settings(programs: int, steps: int, *, fixed: bool) -> settings:
    return settings(
        max_examples=programs,
        stateful_step_count=steps,
        derandomize=fixed,
        database=None,
        deadline=None,
        # To explain a failure takes longer than to find it.
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def test_every_store_plays_a_program_as_the_model_does(places: list[Place]) -> None:
    """Results, errors, records and histories of random programs are the same on every store, and what the rules say."""
    Programs.places, Programs.loop = places, asyncio.new_event_loop()
    Programs.programs, Programs.steps, Programs.happened = 0, Counter(), Counter()
    try:
        run_state_machine_as_test(Programs, settings=_settings(75, 40, fixed=True))
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            run_state_machine_as_test(Programs, settings=_settings(20, 60, fixed=False))
    finally:
        Programs.loop.run_until_complete(Programs.loop.shutdown_default_executor())
        Programs.loop.close()
    sys.stdout.write(f"{Programs.programs} programs, {Programs.steps.total()} steps: {dict(Programs.steps)}\n")
    sys.stdout.write(f"what happened to documents: {dict(Programs.happened)}\n")
    assert Programs.steps.total() > Programs.programs


# -- what programs found once, in short ------------------------------------------------------------


def test_a_copy_refreshed_with_a_given_content_is_called_that(world: World) -> None:
    """A copy of retrieved chunks that is refreshed with a given content is of the caller's content from then on."""
    world.shows(document("pods", PODS))
    memory = world.retriever()
    memory.invoke(POD_QUESTION)
    assert memory.accept_suggestion("pods").content_source == "retrieved"
    assert memory.refresh("pods", full_content="Pods, in other words.").content_source == "argument"


def test_a_query_that_withholds_a_copy_has_missed_the_document(world: World) -> None:
    """A query that neither found a document nor was answered by its copy is one more that did not fetch it."""
    memory = world.retriever(access_check=lambda user_id, doc_id: False)
    world.save(memory, "pods", PODS)
    assert memory.invoke(POD_QUESTION) == []
    assert world.record("pods").queries_missed == 1


def test_a_new_part_is_kept_also_where_the_copy_has_nothing_to_say(world: World) -> None:
    """A new part that the source shows for another question is in the copy after a refresh."""
    memory = world.retriever()
    world.shows(document("pods", "Pods, part one.", chunk_index=0))
    memory.invoke(POD_QUESTION)
    memory.accept_suggestion("pods")
    world.shows(document("pods", "Tax, part two.", chunk_index=1))
    memory.invoke(OTHER_QUESTION)
    assert memory.refresh("pods").full_content == "Pods, part one.\n\nTax, part two."


def _let_go_and_met_again(world: World) -> RagWikiRetriever:
    """A memory that let go of a document, and then met it again."""
    memory = world.retriever(decay=DecayConfig(max_cache_miss_streak=1))
    world.save(memory, "pods", PODS)
    world.shows()
    memory.invoke(OTHER_QUESTION)
    assert world.state("pods") is DocumentState.DEMOTED
    world.shows(document("pods", PODS))
    memory.invoke(POD_QUESTION)
    return memory


def test_a_document_met_again_has_no_texts_of_before(world: World) -> None:
    """Of a document that was let go and is fetched again, the texts are kept that its record names, and no others."""
    _let_go_and_met_again(world)
    kept = [text.text for text in world.store.retrieved_texts(USER, "pods")]
    assert (kept, len(world.record("pods").retrieved)) == ([PODS], 1)


def test_the_texts_of_a_document_brought_back_are_counted(world: World) -> None:
    """A pin that brings a document back keeps its texts, and counts their characters among those that are kept."""
    record = _let_go_and_met_again(world).force_pin("pods")
    assert (len(record.retrieved), record.retrieved_chars) == (1, len(PODS))


def test_a_vote_leaves_the_texts_of_a_document_that_was_let_go(world: World) -> None:
    """A vote changes nothing but the vote: what is kept of a document that was let go can still be pinned."""
    memory = _let_go_and_met_again(world)
    memory.thumbs_up("pods")
    assert len(world.store.retrieved_texts(USER, "pods")) == len(world.record("pods").retrieved) == 1
    assert memory.force_pin("pods").full_content == PODS


def test_a_removal_leaves_no_names_of_texts_either(world: World) -> None:
    """A document that was let go, was met again and is removed then has no texts and names none."""
    record = _let_go_and_met_again(world).force_remove("pods")
    assert world.store.retrieved_texts(USER, "pods") == []
    assert (record.retrieved, record.retrieved_chars) == ((), 0)


def test_provenance_tells_the_count_of_a_pinned_document_without_a_hit(world: World) -> None:
    """What is told of a pinned document that only comes along is what its record says after the call."""
    memory = world.retriever()
    world.save(memory, "pods", PODS)
    memory.force_pin("pods")
    for _ in range(2):
        memory.invoke(POD_QUESTION)
    provenance = memory.invoke_with_provenance(OTHER_QUESTION).provenance
    told = [source.fetch_count for source in provenance.sources]
    assert told == [world.record("pods").fetch_count] == [3]
