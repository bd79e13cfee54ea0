"""Bringing what release 0.2 kept over into a place of this release.

From the command line::

    python -m rag_wiki.migrate sqlite:///old.db sqlite:///new.db --chunks old_folder --dry-run

or from a program::

    from rag_wiki.migrate import migrate

    report = migrate("sqlite:///old.db", store, old_chunks="old_folder", embedding_model=model)
    print(report.render())

The old place is only read. Old and new may be one database, one Redis, one folder: the names in it differ.

`copy_users` (on the command line `--this-release`) takes users from one store of this release to another.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rag_wiki.migrate.carry import migrate
    from rag_wiki.migrate.copying import copy_users
    from rag_wiki.migrate.report import DocumentNote, MigrationReport

__all__ = ["DocumentNote", "MigrationReport", "copy_users", "migrate"]


def __getattr__(name: str) -> Any:
    # Imported when asked for: the command line begins with catching an interruption, and imports afterwards.
    if name == "migrate":
        from rag_wiki.migrate.carry import migrate

        return migrate
    if name == "copy_users":
        from rag_wiki.migrate.copying import copy_users

        return copy_users
    if name in __all__:
        from rag_wiki.migrate import report

        return getattr(report, name)
    msg = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(msg)
