"""Processes that are killed at any moment: what they had done is there, what they were doing is there or is not."""

from __future__ import annotations

import logging
import os
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from kill_worker import PARTS, TARGETS, Victims, actions
from load_worker import Place, content, make_place, open_retriever, open_store, versions_in
from scenarios import cached

from rag_wiki import RagWikiRetriever, StateStore
from rag_wiki.scheduler import DecayScheduler
from rag_wiki.storage import chunk_places, chunk_store
from rag_wiki.storage.records import DocumentState, UserChange
from rag_wiki.storage.sql_tables import metadata, schema_table

KILLS = int(os.environ.get("RAG_WIKI_KILLS", "12"))
"""Processes that are killed in each place."""
OWN_VERSION = 10**9
"""From here on, versions are of texts that this process saves."""

Target = tuple[str, str]
_SURFACED = DocumentState.SURFACED


@dataclass(frozen=True)
class Known:
    """What is known of a document."""

    state: DocumentState = _SURFACED
    version: int | None = None
    """Of the saved text."""
    by_user: bool = False
    """The pin is the user's own."""
    vote: float = 0.0
    fetches: int = 0

    @property
    def saved(self) -> bool:
        """Whether a copy answers."""
        return self.version is not None


World = Mapping[Target, Known]
"""All documents of which there is a record."""


def fetched(known: Known | None) -> Known:
    """What a query that asks for it makes of a document."""
    if known is None or known.state is DocumentState.DEMOTED:
        return Known(fetches=1)
    return replace(known, fetches=known.fetches + 1)


def let_go(known: Known) -> Known:
    """What a removal, or the decay job, makes of a document."""
    return Known(DocumentState.DEMOTED, vote=known.vote)


def decayed(known: Known) -> Known:
    """What the decay job makes of a document: it goes by votes alone, and at once."""
    if not known.saved or known.by_user:
        return known
    if known.vote < 0:
        return let_go(known)
    return replace(known, state=DocumentState.PINNED if known.vote > 0 else DocumentState.CLAIMED)


def acted(known: Known, name: str, version: int) -> Known:
    """What an action makes of a document; what it refuses changes nothing."""
    if name == "remove":
        return let_go(known)
    if name in ("up", "down"):
        return replace(known, vote=1.0 if name == "up" else -1.0)
    if name == "unpin" and known.state is DocumentState.PINNED:
        return replace(known, state=DocumentState.CLAIMED, by_user=False)
    if name == "pin":
        if known.state is DocumentState.DEMOTED:
            known = Known()
        return replace(
            known, state=DocumentState.PINNED, by_user=True, version=known.version if known.saved else version
        )
    if name in ("save", "refresh") and known.saved:
        return replace(known, version=version)
    if name == "save" and known.state is _SURFACED:
        return replace(known, state=DocumentState.CLAIMED, version=version)
    return known


def after(world: World, name: str, target: Target, version: int) -> World:
    """The world after an action."""
    user = target[0]
    if name == "forget":
        return {other: known for other, known in world.items() if other[0] != user}
    if name == "decay":
        return {other: decayed(known) if other[0] == user else known for other, known in world.items()}
    if name == "fetch":
        return {**world, target: fetched(world.get(target))}
    return {**world, target: acted(world[target], name, version)} if target in world else world


@dataclass
class Chronicle:
    """What was done so far, and by whom it was left half done."""

    world: World = field(default_factory=dict)
    dirty: set[Target] = field(default_factory=set)
    """Documents at which somebody was killed since they were last removed: there may be something left over."""
    finished: Counter[str] = field(default_factory=Counter)
    cut_off: Counter[str] = field(default_factory=Counter)

    def done(self, name: str, target: Target, version: int) -> None:
        """An action that was carried out."""
        self.world = after(self.world, name, target, version)
        self.finished[name] += 1
        if name in ("remove", "forget"):
            gone = {target} if name == "remove" else {other for other in TARGETS if other[0] == target[0]}
            # Of a document without a record there is nothing to remove.
            self.dirty -= gone if name == "forget" or target in self.world else set()

    def read(self, said: list[list[str]]) -> tuple[str, Target, int] | None:
        """Follow what a process said; what it was doing when it was killed."""
        begun: tuple[str, Target, int] | None = None
        for word, *rest in said:
            if word == "begin":
                name, user, doc_id, version = rest
                begun = (name, (user, doc_id), int(version))
            else:
                assert word == "done", rest
                assert begun is not None
                self.done(*begun)
                begun = None
        return begun

    def settle(self, begun: tuple[str, Target, int], seen: World) -> None:
        """What was seen after a process was killed at something: it is done, or it is not."""
        name, target, version = begun
        assert seen in (self.world, after(self.world, name, target, version)), begun
        self.cut_off[f"{name}, {'not ' if seen == self.world else ''}done"] += 1
        self.world = seen
        if name in ("decay", "forget"):
            self.dirty |= {other for other in TARGETS if other[0] == target[0]}
        elif name != "fetch":
            self.dirty.add(target)


def look(store: StateStore) -> World:
    """The world as the store has it: texts are whole, of one version."""
    world = {}
    for user in {user for user, _ in TARGETS}:
        # Somebody's last step may still be on its way to a server: it holds the lock that this waits for.
        store.change(user, [], lambda _: UserChange())
        for record in store.list_by_state(user):
            version = None
            if record.saved:
                assert record.full_content is not None
                (version,) = versions_in(record.full_content)
                assert record.full_content == content(record.doc_id, version, PARTS)
            else:
                assert (record.full_content, record.copy_id) == (None, None)
            # Whether saving was suggested makes no difference to what can be done.
            state = _SURFACED if record.user_state is DocumentState.SUGGESTED else record.user_state
            world[user, record.doc_id] = Known(
                state, version, record.pinned_by_user, record.explicit_signal, record.fetch_count
            )
    return world


def ask(retriever: RagWikiRetriever, chronicle: Chronicle, target: Target) -> None:
    """Ask for a document: all of its copy answers, or none where none is saved; nothing is amiss."""
    user, doc_id = target
    found = retriever.invoke_with_provenance(doc_id, user_id=user)
    assert (found.provenance.degraded, found.provenance.withheld) == ((), ())
    answers = [item for item in cached(found.documents) if item.metadata["doc_id"] == doc_id]
    known = chronicle.world.get(target)
    version = None if known is None else known.version
    assert [item.page_content for item in answers] == ([] if version is None else [content(doc_id, version, PARTS)])
    chronicle.done("fetch", target, 0)


def check_copies(retriever: RagWikiRetriever, place: Place, chronicle: Chronicle) -> Counter[str]:
    """Every copy is of a record, but for what was left by those who were killed; counts that."""
    left: Counter[str] = Counter()
    for user, doc_id in TARGETS:
        record = retriever.state_store.get(user, doc_id)
        named = [] if record is None or record.copy_id is None else [record.copy_id]
        copies = retriever.chunk_store.place.copies(user, doc_id)
        assert set(named) <= set(copies)
        if (user, doc_id) not in chronicle.dirty:
            assert copies == named
        left["copies that no record names"] += len(copies) - len(named)
        left["of documents that are not saved"] += 0 if named else len(copies)
    files = list(Path(place.folder).rglob("*")) if place.folder else []
    left["files not in their place"] = sum(path.name.startswith(".writing-") for path in files)
    for user in {user for user, _ in TARGETS if place.folder}:
        saved = {target: known for target, known in chronicle.world.items() if target[0] == user and known.saved}
        wanted = {content(doc_id, known.version or 0, PARTS) for (_, doc_id), known in saved.items()}
        readable = set(place.readable(user))
        dirty = {doc_id for other, doc_id in chronicle.dirty if other == user}
        # Nobody knows of what a readable copy is but by its text.
        assert {text for text in readable ^ wanted if text.split(" ")[0] not in dirty} == set()
        left["readable copies of another text"] += len(readable - wanted)
        left["readable copies missing"] += len(wanted - readable)
    return left


@contextmanager
def reopened(place: Place) -> Iterator[RagWikiRetriever]:
    """A retriever of a fresh process: a new client, no caches."""
    with open_store(place.url) as store:
        yield open_retriever(
            store, place.folder, load=lambda record: content(record.doc_id, OWN_VERSION, PARTS), parts=PARTS
        )


def go_on(retriever: RagWikiRetriever, chronicle: Chronicle, chance: random.Random, version: int) -> None:
    """Work with what was left as if nothing had happened: save a document, ask for it, and perhaps remove it."""
    target = chance.choice(TARGETS)
    user, doc_id = target
    names = ["fetch", "save", "refresh", *chance.choice((["remove", "remove"], ["pin"], []))]
    for name in names:
        actions(retriever, user, doc_id, version)[name]()
        chronicle.done(name, target, version)
        if "remove" in names[-1:] and name == "remove":
            assert retriever.chunk_store.place.copies(user, doc_id) == []
    ask(retriever, chronicle, target)


@pytest.fixture(params=["sqlite", "sqlite+disk", "postgres", "valkey", "valkey+disk"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """An empty place of each kind that outlives a process."""
    return make_place(request.param, request, tmp_path)


@pytest.fixture(scope="module")
def victims() -> Iterator[Victims]:
    """Starts processes and kills them."""
    if not hasattr(os, "fork"):
        pytest.skip("what is killed are forks")
    with Victims() as victims:
        yield victims


def test_a_kill_leaves_no_half(place: Place, victims: Victims, caplog: pytest.LogCaptureFixture) -> None:
    """After each kill all that was done is there; what was being done is there, or not at all; and all goes on."""
    chronicle, chance = Chronicle(), random.Random(5)
    left, before = Counter[str](), Counter[str]()
    for seed in range(1, KILLS + 1):
        begun = chronicle.read(victims.kill_one(place, seed))
        with reopened(place) as retriever:
            seen = look(retriever.state_store)
            if begun is None:
                assert seen == chronicle.world
            else:
                chronicle.settle(begun, seen)
            for target in TARGETS:
                ask(retriever, chronicle, target)
            left += check_copies(retriever, place, chronicle) - before
            go_on(retriever, chronicle, chance, OWN_VERSION + seed)
            assert look(retriever.state_store) == chronicle.world
            before = check_copies(retriever, place, chronicle)
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    told = {"finished": chronicle.finished, "cut off": chronicle.cut_off, "left": left, "still there": before}
    for name, counts in told.items():
        logging.getLogger(__name__).info("%s: %s", name, dict(sorted(counts.items())))
    check_nothing_outlives_its_user(place)


def check_nothing_outlives_its_user(place: Place) -> None:
    """What was left over goes when the users are forgotten."""
    with reopened(place) as retriever:
        for user in {user for user, _ in TARGETS}:
            retriever.forget_user(user)
    assert kept_at(place) == []


def kept_at(place: Place) -> list[str]:
    """All that is kept of anybody: files, and rows or keys."""
    files = [str(path) for path in Path(place.folder).rglob("*")] if place.folder else []
    if place.url.startswith("redis"):
        with redis.Redis.from_url(place.url) as client:
            return files + [str(key) for key in client.scan_iter()]
    url = sa.engine.make_url(place.url)
    engine = sa.create_engine(url if url.get_backend_name() == "sqlite" else url.set(drivername="postgresql+psycopg"))
    with engine.connect() as connection:
        for table in metadata.sorted_tables:
            rows = connection.execute(sa.select(table)).all() if table is not schema_table else []
            files += [f"{table.name}: {row}" for row in rows]
    engine.dispose()
    return files


class Killed(BaseException):
    """The process ends here."""


@pytest.mark.parametrize("name", ["remove", "decay"])
def test_copies_of_a_document_that_was_let_go_do_not_stay(
    place: Place, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a kill comes between the record and its copies, a decay job a day later removes what is left."""
    user, doc_id = target = TARGETS[0]
    with reopened(place) as retriever:
        for first in ("fetch", "save", "down"):
            actions(retriever, user, doc_id, 1)[first]()
        with monkeypatch.context() as patched:
            patched.setattr(type(retriever.chunk_store.place), "delete", raise_killed)
            with pytest.raises(Killed):
                actions(retriever, user, doc_id, 1)[name]()
        assert len(retriever.chunk_store.place.copies(user, doc_id)) == 1
    run_job_a_day_later(place, monkeypatch)
    with reopened(place) as retriever:
        assert look(retriever.state_store)[target].state is DocumentState.DEMOTED
        assert (retriever.chunk_store.place.copies(user, doc_id), place.readable(user)) == ([], [])


@pytest.fixture
def folder_place(tmp_path: Path) -> Place:
    """An empty place with its chunks in a folder."""
    return make_place("sqlite+disk", None, tmp_path)


@pytest.mark.parametrize(
    ("name", "owner", "step"),
    [
        ("remove", chunk_store.ChunkStore, "settle"),
        ("decay", chunk_store.ChunkStore, "settle"),
        ("save", chunk_places, "put_in_place"),
    ],
)
def test_files_of_a_user_who_has_no_copies_do_not_stay(
    folder_place: Place, name: str, owner: object, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a kill comes before a file is in its place, or out of it, a decay job a day later removes that file."""
    user, doc_id = TARGETS[0]
    with reopened(folder_place) as retriever:
        for first in ("fetch",) if name == "save" else ("fetch", "save", "down"):
            actions(retriever, user, doc_id, 1)[first]()
        with monkeypatch.context() as patched:
            patched.setattr(owner, step, raise_killed)
            with pytest.raises(Killed):
                actions(retriever, user, doc_id, 1)[name]()
    # The chunks, which say whose they are, go after the readable copy.
    assert set(texts_in(folder_place)) == {content(doc_id, 1, PARTS).split("\n")[0]}
    run_job_a_day_later(folder_place, monkeypatch)
    assert texts_in(folder_place) == []


def run_job_a_day_later(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the decay job in a process of its own, at a time when nothing of now is young any more."""
    with reopened(place) as retriever, monkeypatch.context() as patched:
        for module in (chunk_store, chunk_places):
            patched.setattr(module, "CRASHED_AFTER_NS", 0)
        scheduler = DecayScheduler(retriever.decay_engine, retriever.state_store)
        scheduler.run_all_users()
        assert scheduler.failures == {}


def texts_in(place: Place) -> list[str]:
    """The first part of each text that some file of the folder holds."""
    files = [path.read_bytes().decode(errors="replace") for path in Path(place.folder).rglob("*") if path.is_file()]
    found = [re.search(r"\w+ in version \d+, part 0", text) for text in files]
    return [match.group() for match in found if match is not None]


def raise_killed(*_arguments: object) -> int:
    """What a process does that is killed."""
    raise Killed


def test_a_readable_copy_catches_up(folder_place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kill comes between a refresh and its readable copy, the next decay job brings that up to date."""
    user, doc_id = TARGETS[0]
    with reopened(folder_place) as retriever:
        for first in ("fetch", "save"):
            actions(retriever, user, doc_id, 1)[first]()
        with monkeypatch.context() as patched:
            patched.setattr(chunk_places.PendingFile, "finish", raise_killed)
            with pytest.raises(Killed):
                actions(retriever, user, doc_id, 2)["refresh"]()
    run_job_a_day_later(folder_place, monkeypatch)
    assert folder_place.readable(user) == [content(doc_id, 2, PARTS)]
