"""Bringing what release 0.2 kept over into a place of this release.

From the command line::

    python -m rag_wiki.migrate sqlite:///old.db sqlite:///new.db --chunks old_folder --dry-run

or from a program::

    from rag_wiki.migrate import migrate

    report = migrate("sqlite:///old.db", store, old_chunks="old_folder", embedding_model=model)
    print(report.render())

The old place is only read. Old and new may be one database, one Redis, one folder: the names in it differ.
"""

from rag_wiki.migrate.carry import migrate
from rag_wiki.migrate.report import DocumentNote, MigrationReport

__all__ = ["DocumentNote", "MigrationReport", "migrate"]
