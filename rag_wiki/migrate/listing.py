"""What the old place holds, listed: sorted by user and document, each once, in bounded memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rag_wiki.migrate.older_chunks import file_of
from rag_wiki.migrate.older_state import Listed, Overwritten, batches

__all__ = ["ListedDocument", "Listing"]


class ListedDocument(NamedTuple):
    """A document of a user, and where its record lies."""

    user_id: str
    doc_id: str
    place: int | str | bytes
    shares_file: bool
    """Another document's chunks would be in the same file."""


class Listing:
    """The names of all records, in a temporary database of their own."""

    def __init__(self, *, ignores_case: bool) -> None:
        # A database without a name is a temporary file, which goes when it is closed.
        self._database = sqlite3.connect("", isolation_level=None)
        self._ignores_case = ignores_case
        # `file` is made of the ids alone, so that it is the same whether or not there is a folder of chunks.
        self._database.execute(
            "CREATE TABLE listed (user_id TEXT, doc_id TEXT, place, file TEXT, fits, UNIQUE (place))"
        )
        self.doubles = list[ListedDocument]()
        """Records that `pages` left out, because another one is of the same user and document."""

    def fill(self, listed: Iterable[Listed]) -> None:
        """List these, whose ids are texts, and make ready for reading."""
        for batch in batches(listed):
            rows = [(item.user_id, item.doc_id, item.place, self._file(item), item.fits) for item in batch]
            self._database.execute("BEGIN")
            self._database.executemany("INSERT OR IGNORE INTO listed VALUES (?, ?, ?, ?, ?)", rows)
            self._database.execute("COMMIT")
        self._database.execute("CREATE INDEX by_name ON listed (user_id, doc_id)")
        self._database.execute("CREATE INDEX by_file ON listed (file)")

    def _file(self, item: Listed) -> str:
        name = file_of(str(item.user_id), str(item.doc_id))
        return name.casefold() if self._ignores_case else name

    def counts(self) -> tuple[int, int]:
        """Records, and users."""
        row = self._database.execute("SELECT count(*), count(DISTINCT user_id) FROM listed").fetchone()
        return int(row[0]), int(row[1])

    def pages(self, size: int) -> Iterator[list[ListedDocument]]:
        """The documents in the order of users and ids; a page is of one user, and has at most `size`.

        Of records that are of one document, the one that lies where it should comes, else the first.
        """
        query = """
            SELECT user_id, doc_id, place, EXISTS (
                SELECT 1 FROM listed other
                WHERE other.file = mine.file AND (other.user_id, other.doc_id) != (mine.user_id, mine.doc_id)
            )
            FROM listed mine ORDER BY user_id, doc_id, fits DESC, place
        """
        last: tuple[str, str] | None = None
        page: list[ListedDocument] = []
        for user_id, doc_id, place, shares in self._database.execute(query):
            if last == (user_id, doc_id):
                self.doubles.append(ListedDocument(user_id, doc_id, place, bool(shares)))
                continue
            last = user_id, doc_id
            if page and (page[0].user_id != user_id or len(page) == size):
                yield page
                page = []
            page.append(ListedDocument(user_id, doc_id, place, bool(shares)))
        if page:
            yield page

    def lost(self, overwritten: Iterable[Overwritten]) -> Iterator[tuple[Overwritten, ListedDocument]]:
        """Those of whom there is no record, because another one has their key, and that one."""
        for item in overwritten:
            query = "SELECT 1 FROM listed WHERE user_id = ? AND doc_id = ?"
            if self._database.execute(query, (item.user_id, item.doc_id)).fetchone() is None:
                query = "SELECT user_id, doc_id, place, 0 FROM listed WHERE place = ?"
                found = self._database.execute(query, (item.key,)).fetchone()
                if found is not None:
                    yield item, ListedDocument(*found)

    def close(self) -> None:
        """Remove it."""
        self._database.close()
