"""Opening what is named on the command line or handed in: the old place for reading, the new one as a store."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

from rag_wiki.errors import ConfigurationError, RagWikiError, StorageError
from rag_wiki.migrate.older_state import OlderRedis, OlderSQLite, OlderState, redis_client
from rag_wiki.migrate.sqlite_file import has_table
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_store import ChunkStore

if TYPE_CHECKING:
    import redis

__all__ = [
    "NewPlace",
    "OldPlace",
    "StorePlace",
    "check_folder",
    "chunk_store_of",
    "holds_store",
    "is_redis",
    "is_same_place",
    "look_at",
    "open_new",
    "open_old",
    "reason",
    "shown",
    "telling",
]

OldPlace: TypeAlias = "str | Path | redis.Redis | redis.RedisCluster"
StorePlace: TypeAlias = "str | Path | StateStore | redis.Redis | redis.RedisCluster"

_REDIS = ("redis", "rediss", "valkey", "valkeys", "unix")
_SQLITE = ("sqlite", "sqlite+pysqlite")
_SECRET = re.compile(r"([?&][^=&]*(?:pass|pwd|secret|token|key)[^=&]*=)[^&]*", re.IGNORECASE)
_OLD = "sqlite:///path.db, a path, redis://host:6379/0 (rediss, valkey, valkeys, unix) or a client"
_NEW = "sqlite:///path.db, a path, postgresql://…, redis://… (rediss, valkey, valkeys, unix), a store or a Redis client"


@dataclass
class NewPlace:
    """Where things go."""

    store: StateStore
    shown: str
    close: Callable[[], None]
    """Closes the store, where it was opened here."""


# -- what is named -----------------------------------------------------------------------------------------


def scheme_of(place: object) -> str:
    """The scheme of a URL, in small letters; empty for a path, and for what is no text.

    One letter is a drive. A file whose name has a colon is named by `./` before it.
    """
    found = re.match(r"([A-Za-z][A-Za-z0-9+.-]+):", place) if isinstance(place, str) else None
    return found.group(1).lower() if found else ""


def shown(place: object) -> str:
    """What to call a place in messages: never with a password, however wrongly it is written."""
    if not isinstance(place, str):
        return str(place) if isinstance(place, Path) else f"a {type(place).__name__}"
    scheme = scheme_of(place)
    if not scheme:
        return place
    rest = place[len(scheme) + 1 :]
    if scheme in (*_SQLITE, "unix", "file") and rest.startswith("///"):
        return f"{scheme}:{_without_secrets(rest)}"
    slashes = rest[: len(rest) - len(rest.lstrip("/"))][:2]
    user, at, host = rest[len(slashes) :].rpartition("@")
    name, colon, _ = user.partition(":")
    # What stands where a port would, and is none, is a password that lacks its host.
    host = re.sub(r"^(\[[^\]]*\]|[^:/?]*):(?!\d*(?:[/?]|$)).*", r"\1:***", host, flags=re.DOTALL)
    return f"{scheme}:{slashes}{name}{':***' if colon else ''}{at}{_without_secrets(host)}"


def _without_secrets(text: str) -> str:
    return _SECRET.sub(r"\1***", text)


def _checked(url: str) -> str:
    """A URL of a server with its scheme in small letters.

    Raises:
        ConfigurationError: It can't be told where the password ends and the host begins.
    """
    scheme = scheme_of(url)
    main, mark, query = url[len(scheme) + 1 :].partition("?")
    user, _, host = main.removeprefix("//").rpartition("@")
    port = re.fullmatch(r"(?:\[[^\]]*\]|[^:/\[\]]*)(?::(\d{0,5}))?(?:/.*)?", host, flags=re.DOTALL)
    if not main.startswith("//") or re.search(r"[/@#\[\]\s]", user) or not port or int(port.group(1) or 0) > 65535:
        msg = (
            f"{shown(url)} is no URL of a server: it looks like {scheme}://user:password@host:port/name, with a number "
            "for the port, and / @ : ? # in the user or password written as %2F %40 %3A %3F %23"
        )
        raise ConfigurationError(msg)
    return f"{scheme}:{main}{mark}{query}"


def sqlite_path(place: object, *, to_write: bool = False) -> Path | None:
    """The file of a path or of the URL of an SQLite database; `None` for another kind of place.

    Raises:
        ConfigurationError: It is the URL of one that is in no file.
    """
    if isinstance(place, Path):
        return place
    if not isinstance(place, str) or scheme_of(place) not in ("", *_SQLITE):
        return None
    name = place
    if scheme_of(place):
        found = re.fullmatch(r":///([^?]*)(?:\?.*)?", place[len(scheme_of(place)) :], flags=re.DOTALL)
        name = found.group(1) if found else ""
        if to_write:
            # Whether %41 in it is an A is for the SQLAlchemy that is installed to say: the application asks it, too.
            name = _parsed(place).database or ""
        elif not Path(name).exists():
            name = unquote(name)
    if not name or name == ":memory:" or name.startswith("file:"):
        msg = f"{shown(place)!r} names no file; it looks like sqlite:///relative/path.db or sqlite:////absolute/path.db"
        raise ConfigurationError(msg)
    return Path(name)


def _parsed(url: str) -> Any:
    """SQLAlchemy's view of a URL; the store's module, which names the extra, has been imported.

    Raises:
        ConfigurationError: It has none.
    """
    from sqlalchemy.engine import make_url

    try:
        return make_url(f"{scheme_of(url)}{url[len(scheme_of(url)) :]}")
    except Exception:
        msg = f"{shown(url)} is no URL of a database"
        raise ConfigurationError(msg) from None


def _url_of(path: str) -> Any:
    # Not put together as text: a question mark or a percent sign in the name would mean something there.
    from sqlalchemy.engine import URL

    return URL.create("sqlite", database=os.path.abspath(path))  # noqa: PTH100 - as it is, without following links


# -- the old place -----------------------------------------------------------------------------------------


def open_old(place: object, *, new: object, dry_run: bool = False) -> OlderState:
    """The old place, for reading.

    Raises:
        ConfigurationError: It is none that 0.2 kept records in, or there are none.
        MissingExtraError: redis-py is not installed.
    """
    path = sqlite_path(place)
    if path is not None:
        return OlderSQLite(path, shown(place), writes_here=_writes_to(new, path) and not dry_run)
    if isinstance(place, str) and scheme_of(place) in _REDIS:
        client = redis_client(_redis_url(place), shown(place))
        return OlderRedis(client, shown(place), owned=True)
    if hasattr(place, "scan_iter") and hasattr(place, "hgetall"):
        return OlderRedis(place, f"the {type(place).__module__.partition('.')[0]} client handed in")
    msg = f"0.2 kept its records in SQLite or Redis: give {_OLD}, not {shown(place)}"
    raise ConfigurationError(msg)


def _writes_to(new: object, path: Path) -> bool:
    """Whether the new place is in this file.

    Raises:
        ConfigurationError: It is, under another name. SQLite would keep two logs for it, and lose what is in one.
    """
    target = _sqlite_file(new)
    if target is None or not (target.exists() and path.exists() and target.samefile(path)):
        return False
    if target.resolve() != path.resolve():
        msg = f"{str(path)!r} and {str(target)!r} are hard links to one file: give one of the names for both places"
        raise ConfigurationError(msg)
    return True


def _sqlite_file(place: object) -> Path | None:
    """The file that a store of this release, or a place for one, is in."""
    # It can only be this store where its module was imported; to import it here would need the extra.
    module = sys.modules.get("rag_wiki.storage.sqlite")
    try:
        if module is not None and isinstance(place, module.SQLiteStateStore):
            # What it would tell a process that is to open the same one.
            place = place.__reduce__()[1][0]
        return sqlite_path(place, to_write=True)
    except (StorageError, ModuleNotFoundError):
        # Who opens it says what is wrong, or missing.
        return None


def is_redis(place: object) -> bool:
    """Whether a place is in Redis, by its URL or client."""
    return scheme_of(place) in _REDIS or hasattr(place, "register_script")


def is_same_place(one: object, other: object) -> bool:
    """Whether two places for a store are one, as far as their names tell."""
    first, second = _sqlite_file(one), _sqlite_file(other)
    if first is not None and second is not None:
        return first.exists() and second.exists() and first.samefile(second)
    return one is other or (isinstance(one, str) and one == other)


def _redis_url(url: str) -> str:
    return re.sub(r"^valkey", "redis", _checked(url))


# -- the new place -----------------------------------------------------------------------------------------


def open_new(place: Any) -> NewPlace:
    """The new place, as a store; nothing is made there yet.

    Raises:
        ConfigurationError: There is no store for it.
        MissingExtraError: What the store needs is not installed.
    """
    if isinstance(place, StateStore):
        return NewPlace(place, f"the {type(place).__name__} handed in", lambda: None)
    scheme = scheme_of(place)
    if scheme in _REDIS:
        client = redis_client(_redis_url(place), shown(place))
        return NewPlace(_redis_store(client), shown(place), client.close)
    if hasattr(place, "register_script"):
        return NewPlace(_redis_store(place), "the Redis client handed in", lambda: None)
    if isinstance(place, Path) or (isinstance(place, str) and scheme in ("", *_SQLITE)):
        from rag_wiki.storage.sqlite import SQLiteStateStore

        path = sqlite_path(place, to_write=True)
        url = _parsed(str(place)) if scheme else _url_of(str(path))
        store: StateStore = SQLiteStateStore(url)
        return NewPlace(store, shown(place), store.close)
    if scheme.partition("+")[0] == "postgresql":
        from rag_wiki.storage.sql import SQLStateStore

        store = SQLStateStore(_parsed(_checked(place)))
        return NewPlace(store, shown(place), store.close)
    msg = f"there is no store for {shown(place)}: give {_NEW}"
    raise ConfigurationError(msg)


def _redis_store(client: Any) -> StateStore:
    from rag_wiki.storage.redis_store import RedisStateStore

    return RedisStateStore(client)


def chunk_store_of(given: str | Path | ChunkStore | None, store: StateStore) -> tuple[ChunkStore, str]:
    """Where the chunks of a store's users are, and in words.

    Args:
        given: A `wiki_save_dir`, or a chunk store; `None` for beside the state.
        store: Where the state is.

    Raises:
        ConfigurationError: It is no folder to make files in.
        StorageError: We may not make files there.
    """
    if given is None:
        return store.chunk_store, "beside the state"
    if isinstance(given, ChunkStore):
        return given, "in the chunk store handed in"
    if not isinstance(given, (str, Path)) or not str(given).strip():
        msg = f"chunks are in a folder that has a name, or in a ChunkStore; got {given!r}"
        raise ConfigurationError(msg)
    check_folder(Path(given))
    return ChunkStore(given), f"in {given}"


def holds_store(place: object) -> bool:
    """Whether there is a store of this release in a place; nothing is made there to find out."""
    if isinstance(place, Path) or scheme_of(place) in _SQLITE or (isinstance(place, str) and not scheme_of(place)):
        import rag_wiki.storage.sqlite  # noqa: F401 - it says which extra is missing
    path = _sqlite_file(place)
    if path is not None:
        return path.is_file() and has_table(path, "rag_wiki_schema")
    return look_at(place)


def look_at(place: object) -> bool:
    """Whether a place has our tables already: to open a store on one that has none would make them.

    Raises:
        ConfigurationError: It can't be written to: there is something else.
        StorageError: It can't be written to: we may not, or can't reach it.
    """
    path = sqlite_path(place, to_write=True)
    if path is not None:
        _check_file(path)
        return path.is_file() and has_table(path, "rag_wiki_schema")
    if scheme_of(place).partition("+")[0] == "postgresql":
        return _look_at_postgresql(str(place))
    return True


def _look_at_postgresql(place: str) -> bool:
    import sqlalchemy as sa

    url = _parsed(_checked(place))
    # As the store does: psycopg2 is what SQLAlchemy fills in for no driver.
    ours = url.get_driver_name() in ("psycopg", "psycopg2")
    engine = sa.create_engine(url.set(drivername="postgresql+psycopg") if ours else url)
    try:
        with engine.connect() as connection:
            there = sa.inspect(connection).has_table("rag_wiki_schema")
            may = "has_table_privilege('rag_wiki_documents', 'INSERT')"
            if not there:
                may = "has_schema_privilege(current_schema(), 'CREATE')"
            reads_only = connection.exec_driver_sql("SHOW transaction_read_only").scalar() == "on"
            if reads_only or not connection.exec_driver_sql(f"SELECT {may}").scalar():
                msg = f"{shown(place)} can't be written to: the database or this user may only read"
                raise StorageError(msg)
            return there
    finally:
        engine.dispose()


def _check_file(path: Path) -> None:
    """See that a file can be made or written, and SQLite's own files beside it."""
    if path.is_symlink() or path.exists():
        if not path.is_file():
            msg = f"{str(path)!r} is no file: give the name of a database, which may be a new one"
            raise ConfigurationError(msg)
        if not os.access(path, os.W_OK):
            msg = f"{str(path)!r} can't be written to: it may only be read"
            raise StorageError(msg)
    check_folder(path.absolute().parent if not path.is_symlink() else path.resolve().parent)


def check_folder(folder: Path) -> None:
    """See that files can be made in a folder, or in the folder where it is to be made.

    Raises:
        ConfigurationError: There is something else.
        StorageError: We may not.
    """
    at = folder.absolute()
    while not at.exists() and at != at.parent:
        at = at.parent
    if not at.is_dir():
        msg = f"{str(at)!r} is no folder to make files in"
        raise ConfigurationError(msg)
    if not os.access(at, os.W_OK | os.X_OK):
        msg = f"no files can be made in {str(at)!r}: it may only be read"
        raise StorageError(msg)


# -- errors of others --------------------------------------------------------------------------------------


def reason(error: BaseException) -> str:
    """What an error of a database says, without the statement, the parameters and the links."""
    lines = str(getattr(error, "orig", None) or error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


@contextmanager
def telling(what: str, went_wrong: str = "can't be used") -> Iterator[None]:
    """Errors of others, while a place is opened, say, as ours.

    Raises:
        StorageError: Another error than our own came up.
    """
    try:
        yield
    except RagWikiError:
        raise
    except Exception as error:
        msg = f"{what} {went_wrong}: {reason(error)}"
        raise StorageError(msg) from error
