"""Clients that were set up for something else: their settings change nothing in what the stores keep."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
import redis
import sqlalchemy as sa
from helpers import document
from psycopg.rows import dict_row
from scenarios import POD_QUESTION, PODS, USER, World, story, texts

from rag_wiki import StateStore
from rag_wiki.errors import ConfigurationError
from rag_wiki.storage.records import UserChange, UserView
from rag_wiki.storage.redis_store import RedisStateStore
from rag_wiki.storage.sql import SQLStateStore
from rag_wiki.testing.awkward import AWKWARD_TEXTS

TITLE = "Größe 文档 \ud83d \0"
"""What an encoding other than UTF-8 would trip over."""


def tour(world: World, again: World) -> None:
    """Walk one document through its life, and read it by another client; the values are asserted on the way."""
    retriever = world.retriever(fetch_threshold=2)
    world.shows(document("größe", PODS + TITLE, doc_title=TITLE, tag=TITLE))
    retriever.invoke(POD_QUESTION)
    (suggestion,) = retriever.invoke_with_provenance(POD_QUESTION).provenance.suggestions
    assert suggestion.doc_title == TITLE
    world.shows()
    retriever.accept_suggestion("größe")
    retriever.force_pin("größe")
    found, provenance = retriever.invoke_with_provenance(POD_QUESTION)
    assert texts(found) == [PODS + TITLE]
    assert found[0].metadata["tag"] == TITLE
    assert provenance.degraded == ()
    assert [what for what, _, _ in story(retriever.history("größe"))] == ["surfaced", "suggested", "saved", "pinned"]
    assert [result.doc_id for result in retriever.run_decay()] == ["größe"]
    assert world.store.list_active_users() == [USER]

    other = again.retriever(fetch_threshold=2)
    assert texts(other.invoke(POD_QUESTION)) == [PODS + TITLE]
    assert again.record("größe") == world.record("größe")
    assert again.store.chunk_store.load_chunks(USER, "größe")[0]["hit_count"] == 2
    assert other.forget_user().documents == 1
    assert world.store.get(USER, "größe") is None


# -- Redis ---------------------------------------------------------------------------------------


REDIS_SETTINGS: dict[str, dict[str, Any]] = {
    "decoding": {"decode_responses": True},
    "the newer protocol": {"protocol": 3},
    "the newer protocol, decoding": {"protocol": 3, "decode_responses": True},
    "the older protocol": {"protocol": 2},
    "another database": {"db": 3},
    "Latin": {"encoding": "latin-1"},
    "Latin, decoding": {"encoding": "latin-1", "decode_responses": True},
    "ASCII, decoding": {"encoding": "ascii", "decode_responses": True},
    "errors ignored": {"encoding_errors": "ignore", "decode_responses": True},
    "one connection": {"single_connection_client": True},
}


@pytest.fixture
def redis_client(valkey_port: int) -> Iterator[Callable[..., redis.Redis]]:
    """Make clients of the server, which is empty at first."""
    made: list[redis.Redis] = []

    def make(**settings: Any) -> redis.Redis:
        client = redis.Redis(host="127.0.0.1", port=valkey_port, **settings)
        made.append(client)
        return client

    make().flushall()
    yield make
    for client in made:
        client.close()


@pytest.mark.parametrize("settings", REDIS_SETTINGS.values(), ids=REDIS_SETTINGS)
def test_settings_of_a_redis_client_change_nothing(
    redis_client: Callable[..., redis.Redis], settings: dict[str, Any]
) -> None:
    """Whatever a client decodes, and by which protocol, a plain client finds the same data."""
    plain = redis_client(db=settings.get("db", 0))
    tour(World(RedisStateStore(redis_client(**settings))), World(RedisStateStore(plain)))


def test_databases_and_prefixes_are_apart(redis_client: Callable[..., redis.Redis]) -> None:
    """What is kept in one database, or under one prefix, is seen in no other, and forgetting there leaves it."""
    here = World(RedisStateStore(redis_client()))
    here.save(here.retriever(), "pods", PODS)
    for elsewhere in (
        RedisStateStore(redis_client(db=3)),
        RedisStateStore(redis_client(), prefix="rag_wiki2"),
        RedisStateStore(redis_client(), prefix=""),
        RedisStateStore(redis_client(), prefix="rag_wiki:{ada}"),
    ):
        other = World(elsewhere)
        assert other.store.list_active_users() == []
        other.save(other.retriever(), "pods", "Pods of another application.")
        assert other.retriever().forget_user().documents == 1
    assert texts(here.retriever().invoke(POD_QUESTION)) == [PODS]


def test_an_encoding_that_no_script_survives_is_refused(redis_client: Callable[..., redis.Redis]) -> None:
    """A client that sends commands in UTF-16 is a wrong argument, told when the store is made."""
    with pytest.raises(ConfigurationError, match="encoding"):
        RedisStateStore(redis_client(encoding="utf-16"))


# -- PostgreSQL ----------------------------------------------------------------------------------


ENGINE_SETTINGS: dict[str, dict[str, Any]] = {
    "autocommit": {"isolation_level": "AUTOCOMMIT"},
    "read uncommitted": {"isolation_level": "READ UNCOMMITTED"},
    "repeatable read": {"isolation_level": "REPEATABLE READ"},
    "serializable": {"isolation_level": "SERIALIZABLE"},
    "autocommit by option": {"execution_options": {"isolation_level": "AUTOCOMMIT"}},
    "autocommit of the driver": {"connect_args": {"autocommit": True}},
    "no pool": {"poolclass": sa.NullPool},
    "one connection for all": {"poolclass": sa.StaticPool},
    "never two connections": {"poolclass": sa.AssertionPool},
    "a pool of one": {"pool_size": 1, "max_overflow": 0, "pool_timeout": 5},
    "no reset": {"pool_reset_on_return": None},
    "future": {"future": True},
    "Latin": {"connect_args": {"client_encoding": "latin1"}},
    "Windows": {"connect_args": {"client_encoding": "win1252"}},
    "always prepared": {"connect_args": {"prepare_threshold": 0}},
    "never prepared": {"connect_args": {"prepare_threshold": None}},
    "backslashes": {"connect_args": {"options": "-c standard_conforming_strings=off"}},
    "another zone": {"connect_args": {"options": "-c timezone=Asia/Kolkata -c datestyle=German"}},
    "text parameters": {"paramstyle": "format"},
}


@pytest.fixture
def engine_of(postgres_url: str, make_store: Callable[[str], StateStore]) -> Iterator[Callable[..., sa.Engine]]:
    """Make engines of the server, whose tables are empty at first."""
    make_store("postgres").list_active_users()
    made: list[sa.Engine] = []

    def make(**settings: Any) -> sa.Engine:
        url = sa.make_url(postgres_url).set(drivername="postgresql+psycopg")
        made.append(sa.create_engine(url, **settings))
        return made[-1]

    yield make
    for engine in made:
        engine.dispose()


@pytest.mark.parametrize("settings", ENGINE_SETTINGS.values(), ids=ENGINE_SETTINGS)
def test_settings_of_an_engine_change_nothing(
    engine_of: Callable[..., sa.Engine], postgres_url: str, settings: dict[str, Any]
) -> None:
    """Whatever isolation, pool and encoding an engine was given, a plain store finds the same data."""
    plain = SQLStateStore(postgres_url)
    try:
        tour(World(SQLStateStore(engine_of(**settings))), World(plain))
    finally:
        plain.close()


@pytest.mark.parametrize("settings", ["autocommit", "autocommit by option", "autocommit of the driver"])
def test_a_change_is_all_or_nothing_on_any_engine(engine_of: Callable[..., sa.Engine], settings: str) -> None:
    """A step that fails in the middle leaves nothing of itself, also where each statement is committed by itself."""
    world = World(SQLStateStore(engine_of(**ENGINE_SETTINGS[settings])))
    world.shows(document("pods", PODS))
    retriever = world.retriever()
    retriever.invoke(POD_QUESTION)
    before = world.record("pods")
    other = engine_of()
    with other.begin() as connection:
        # Written after the record: the change fails when half of it has been done.
        connection.execute(sa.text("ALTER TABLE rag_wiki_events ADD CONSTRAINT closed CHECK (number < 2) NOT VALID"))
    try:
        with pytest.raises(psycopg.errors.CheckViolation, match="closed"):
            retriever.accept_suggestion("pods")
    finally:
        with other.begin() as connection:
            connection.execute(sa.text("ALTER TABLE rag_wiki_events DROP CONSTRAINT closed"))
    assert world.record("pods") == before
    assert world.store.chunk_store.load_chunks(USER, "pods") == []
    retriever.accept_suggestion("pods")
    assert world.record("pods").saved


@pytest.mark.parametrize("settings", ["autocommit", "read uncommitted", "repeatable read", "serializable"])
def test_two_changes_at_once_both_count_on_any_engine(engine_of: Callable[..., sa.Engine], settings: str) -> None:
    """Of two processes that change a user at once both changes stand, whatever isolation their engines ask for."""
    first, second = (World(SQLStateStore(engine_of(**ENGINE_SETTINGS[settings]))) for _ in range(2))
    first.shows(document("pods", PODS))
    first.retriever().invoke(POD_QUESTION)
    second.shows(document("pods", PODS))
    second.retriever().documents()
    inside, go_on = threading.Event(), threading.Event()

    def hold(view: UserView) -> UserChange:
        inside.set()
        assert go_on.wait(60)
        return UserChange(records=[view.records["pods"].changed(fetch_count=5)])

    degraded: list[str] = []
    holding = threading.Thread(target=lambda: first.store.change(USER, ["pods"], hold))
    asking = threading.Thread(
        target=lambda: degraded.extend(second.retriever().invoke_with_provenance(POD_QUESTION).provenance.degraded)
    )
    holding.start()
    assert inside.wait(60)
    asking.start()
    waiting = sa.text("SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")
    with engine_of(isolation_level="AUTOCOMMIT").connect() as watching:
        while asking.is_alive() and not watching.execute(waiting).scalar():
            pass
    go_on.set()
    holding.join(60)
    asking.join(60)
    assert degraded == []
    assert first.record("pods").fetch_count == 6


def test_rows_in_another_form_cost_no_answer(engine_of: Callable[..., sa.Engine]) -> None:
    """An engine whose rows are dictionaries can't be worked with; a question is answered all the same."""
    world = World(SQLStateStore(engine_of(connect_args={"row_factory": dict_row})))
    world.shows(document("pods", PODS))
    found, provenance = world.retriever().invoke_with_provenance(POD_QUESTION)
    assert texts(found) == [PODS]
    assert len(provenance.degraded) == 1


def test_a_database_that_may_only_be_read_costs_no_answer(engine_of: Callable[..., sa.Engine]) -> None:
    """On a read-only connection saved copies answer, nothing is counted, and provenance says so; actions raise."""
    world = World(SQLStateStore(engine_of()))
    world.save(world.retriever(), "pods", PODS)
    before = world.record("pods")
    replica = World(SQLStateStore(engine_of(connect_args={"options": "-c default_transaction_read_only=on"})))
    found, provenance = replica.retriever().invoke_with_provenance(POD_QUESTION)
    assert texts(found) == [PODS]
    (told,) = provenance.degraded
    assert told.startswith("the state store did not answer")
    with pytest.raises(Exception, match="read-only"):
        replica.retriever().thumbs_up("pods")
    assert world.record("pods") == before


@pytest.mark.parametrize("text", AWKWARD_TEXTS[:-1], ids=ascii)
def test_texts_come_back_through_a_narrow_client(
    engine_of: Callable[..., sa.Engine], redis_client: Callable[..., redis.Redis], text: str
) -> None:
    """Texts that a client's own encoding can't hold come back through it as they went in."""
    latin = engine_of(connect_args={"client_encoding": "latin1"})
    for store in (SQLStateStore(latin), RedisStateStore(redis_client(encoding="ascii", decode_responses=True))):
        world = World(store)
        world.save(world.retriever(), "pods", f"Pods {text}")
        assert world.record("pods").full_content == f"Pods {text}"
