"""Opening what is named on the command line or handed in: the old place for reading, the new one as a store."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rag_wiki.errors import ConfigurationError
from rag_wiki.migrate.older_state import OlderRedis, OlderSQLite, OlderState, has_table, redis_client
from rag_wiki.storage.base import StateStore

if TYPE_CHECKING:
    import redis

__all__ = ["NewPlace", "OldPlace", "StorePlace", "is_set_up", "open_new", "open_old", "shown"]

OldPlace: TypeAlias = "str | Path | redis.Redis | redis.RedisCluster"
StorePlace: TypeAlias = "str | Path | StateStore | redis.Redis | redis.RedisCluster"

_REDIS = ("redis", "rediss", "valkey", "valkeys", "unix")
_SQLITE = re.compile(r"sqlite(?:\+[a-z]+)?:///([^?]*)(\?.*)?")


@dataclass
class NewPlace:
    """Where things go."""

    store: StateStore
    shown: str
    close: Callable[[], None]
    """Closes the store, where it was opened here."""


def shown(url: str) -> str:
    """A URL without its password."""
    return re.sub(r"([?&][^=&]*password=)[^&]*", r"\1***", re.sub(r"(://[^:/@]*):(.*)@", r"\1:***@", url))


def _scheme(place: str) -> str:
    found = re.match(r"([a-z][a-z0-9]*)(?:\+[a-z0-9_]+)?:", place)
    return found.group(1) if found and len(found.group(1)) > 1 else ""


def sqlite_path(place: object) -> Path | None:
    """The file of a path or of the URL of an SQLite database; `None` for another kind of place.

    Raises:
        ConfigurationError: It is the URL of one that is in no file.
    """
    if isinstance(place, Path):
        return place
    if not isinstance(place, str) or _scheme(place) not in ("", "sqlite"):
        return None
    if not _scheme(place):
        return Path(place)
    found = _SQLITE.fullmatch(place)
    name = found.group(1) if found else ""
    if not name or name == ":memory:" or name.startswith("file:"):
        msg = f"{place!r} names no file; it looks like sqlite:///relative/path.db or sqlite:////absolute/path.db"
        raise ConfigurationError(msg)
    return Path(name)


def open_old(place: object, *, new: object) -> OlderState:
    """The old place, for reading.

    Raises:
        ConfigurationError: It is none that 0.2 kept records in, or there are none.
        MissingExtraError: redis-py is not installed.
    """
    path = sqlite_path(place)
    if path is not None:
        target = sqlite_path(new) if isinstance(new, (str, Path)) and _scheme(str(new)) in ("", "sqlite") else None
        # A store that was handed in does not say which file it writes to.
        writes_here = _is_sqlite_store(new) or (target is not None and target.resolve() == path.resolve())
        return OlderSQLite(path, writes_here=writes_here)
    if isinstance(place, str) and _scheme(place) in _REDIS:
        return OlderRedis(redis_client(_redis_url(place)), shown(place), owned=True)
    if hasattr(place, "scan_iter") and hasattr(place, "hgetall"):
        return OlderRedis(place, f"the {type(place).__module__.partition('.')[0]} client handed in")
    given = shown(place) if isinstance(place, str) else f"a {type(place).__name__}"
    msg = (
        f"0.2 kept its records in SQLite or Redis: give sqlite:///path.db, redis://host:6379/0 or a client, not {given}"
    )
    raise ConfigurationError(msg)


def _is_sqlite_store(place: object) -> bool:
    # It can only be one where its module was imported; to import it here would need the extra.
    module = sys.modules.get("rag_wiki.storage.sqlite")
    return module is not None and isinstance(place, module.SQLiteStateStore)


def _redis_url(url: str) -> str:
    return re.sub(r"^valkey", "redis", url)


def open_new(place: Any) -> NewPlace:
    """The new place, as a store.

    Raises:
        ConfigurationError: There is no store for it.
        MissingExtraError: What the store needs is not installed.
    """
    if isinstance(place, StateStore):
        return NewPlace(place, f"the {type(place).__name__} handed in", lambda: None)
    if isinstance(place, str) and _scheme(place) in _REDIS:
        client = redis_client(_redis_url(place))
        return NewPlace(_redis_store(client), shown(place), client.close)
    if hasattr(place, "register_script"):
        return NewPlace(_redis_store(place), "the Redis client handed in", lambda: None)
    path = sqlite_path(place)
    if path is not None:
        from rag_wiki.storage.sqlite import SQLiteStateStore

        url = place if isinstance(place, str) and _scheme(place) else f"sqlite:///{path}"
        store: StateStore = SQLiteStateStore(url)
        return NewPlace(store, shown(url), store.close)
    if isinstance(place, str) and _scheme(place) == "postgresql":
        from rag_wiki.storage.sql import SQLStateStore

        store = SQLStateStore(place)
        return NewPlace(store, shown(place), store.close)
    given = shown(place) if isinstance(place, str) else f"a {type(place).__name__}"
    msg = f"there is no store for {given}: give sqlite:///path.db, postgresql://…, redis://…, a store or a Redis client"
    raise ConfigurationError(msg)


def _redis_store(client: Any) -> StateStore:
    from rag_wiki.storage.redis_store import RedisStateStore

    return RedisStateStore(client)


def is_set_up(place: object) -> bool:
    """Whether a place has our tables already: to open a store on one that has none would make them."""
    path = sqlite_path(place) if isinstance(place, (str, Path)) else None
    if path is not None:
        return path.is_file() and has_table(path, "rag_wiki_schema")
    if isinstance(place, str) and _scheme(place) == "postgresql":
        import sqlalchemy as sa

        url = sa.engine.make_url(place)
        # As the store does: psycopg2 is what SQLAlchemy fills in for no driver.
        ours = url.get_driver_name() in ("psycopg", "psycopg2")
        engine = sa.create_engine(url.set(drivername="postgresql+psycopg") if ours else url)
        try:
            return sa.inspect(engine).has_table("rag_wiki_schema")
        finally:
            engine.dispose()
    return True
