"""Chunks of saved documents: their texts, vectors and hits.

`ChunkStore` is what everybody uses. Where the bytes lie is a `ChunkPlace`: memory and disk are in
`chunk_places`, SQL and Redis beside their state stores.

A document's chunks are written as one *copy* with an id of its own. A save writes a new copy first and
moves the record to it afterwards, so that no reader ever meets half of one, and a copy that no record
names is never served.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import uuid
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rag_wiki.clock import as_utc, utc_now
from rag_wiki.errors import CorruptDataError, InvalidDocumentError
from rag_wiki.forks import in_each_process
from rag_wiki.storage.codec import UNREADABLE, dump_json, load_json
from rag_wiki.storage.records import PurgedDocument, UserDocRecord, check_doc_id, check_user_id, join_halves

if TYPE_CHECKING:
    from rag_wiki.storage.chunk_places import PendingFile

__all__ = ["ChunkCopy", "ChunkHits", "ChunkPlace", "ChunkStore", "StoredCopy", "count_chunks", "new_copy_id"]

Vectors: TypeAlias = NDArray[np.float32]

CRASHED_AFTER_NS = 24 * 3600 * 10**9
"""A copy this old that no record names, or a file this old that is not in its place, is left over from a crash."""


def new_copy_id() -> str:
    """An id for a new copy: unique, and later ones sort after earlier ones."""
    return f"{time.time_ns():016x}{uuid.uuid4().hex[:12]}"


def copy_time(copy_id: str) -> int | None:
    """When a copy was begun, in nanoseconds; `None` where `new_copy_id` did not make its id."""
    try:
        return int(copy_id[:16], 16)
    except ValueError:
        return None


def _crashed_before() -> str:
    """The id of a copy that is just too young to be left over from a crash."""
    return f"{time.time_ns() - CRASHED_AFTER_NS:016x}"


def check_copy_id(copy_id: str) -> str:
    """Return `copy_id`, or raise: it becomes part of a file name."""
    if not (copy_id.isascii() and copy_id.isalnum() and len(copy_id) <= 64):
        msg = f"a copy id is 1 to 64 ASCII letters and digits, got {copy_id!r}"
        raise ValueError(msg)
    return copy_id


@dataclass(frozen=True)
class ChunkHits:
    """How often a chunk answered, and when it last did."""

    count: int
    last: datetime


@dataclass(frozen=True)
class ChunkCopy:
    """One copy of a document: `n` chunks in document order."""

    copy_id: str
    indices: tuple[int, ...]
    """The number of each chunk in its document."""
    texts: tuple[str, ...] | None
    """The text of each chunk; `None` when it was not read."""
    vectors: Vectors | None
    """(n, dim) float32, as the model gave them; `None` when not read, or when no chunk has one."""
    sections: tuple[str | None, ...] = ()
    """The heading that each chunk stands under, where known."""
    embedding: str = ""
    """The fingerprint of the model that made the vectors."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """The source's own metadata, in JSON types."""
    without_vector: tuple[int, ...] = ()
    """Positions whose row in `vectors` is a stand-in of zeros."""
    chunk_metadata: tuple[Mapping[str, Any], ...] = ()
    """What the source says of each chunk alone (its page, say), in JSON types; empty where it says nothing."""

    def section(self, position: int) -> str | None:
        """The heading of the chunk at a position."""
        return self.sections[position] if position < len(self.sections) else None


class StoredCopy(NamedTuple):
    """A copy as a place keeps it. `texts` and `vectors` are `None` when they were not asked for."""

    copy_id: str
    header: str
    texts: str | None
    vectors: bytes | None


def encode_copy(user_id: str, doc_id: str, copy: ChunkCopy) -> StoredCopy:
    """The stored form of a copy; its header says whose it is and holds the checksums of the rest."""
    texts = dump_json(list(copy.texts or ()))
    vectors = b"" if copy.vectors is None else np.ascontiguousarray(copy.vectors, dtype="<f4").tobytes()
    header = {
        "user_id": user_id,
        "doc_id": doc_id,
        "copy_id": copy.copy_id,
        "width": 0 if copy.vectors is None else int(copy.vectors.shape[1]),
        "indices": list(copy.indices),
        "sections": list(copy.sections),
        "embedding": copy.embedding,
        "metadata": dict(copy.metadata),
        "without_vector": list(copy.without_vector),
        "chunk_metadata": [dict(own) for own in copy.chunk_metadata],
        "texts_crc": zlib.crc32(texts.encode("ascii")),
        "vectors_crc": zlib.crc32(vectors),
    }
    return StoredCopy(copy.copy_id, dump_json(header), texts, vectors)


def decode_copy(user_id: str, doc_id: str, stored: StoredCopy) -> ChunkCopy:
    """The copy of a stored form.

    Raises:
        CorruptDataError: The bytes are torn, or belong to another user or document.
    """
    what = f"copy {stored.copy_id} of document {doc_id!r} of user {user_id!r}"
    header = load_json(stored.header, what)
    try:
        owner = header["user_id"], header["doc_id"], header["copy_id"]
        if owner != (join_halves(user_id), join_halves(doc_id), stored.copy_id):
            msg = f"stored {what} is in a foreign place: it is a copy of document {owner[1]!r}; refresh the document"
            raise CorruptDataError(msg)
        _check_header(header)
        indices = tuple(header["indices"])
        if stored.texts is not None and zlib.crc32(stored.texts.encode()) != header["texts_crc"]:
            msg = f"stored {what} has torn texts; refresh the document to save it anew"
            raise CorruptDataError(msg)
        if stored.vectors is not None and zlib.crc32(stored.vectors) != header["vectors_crc"]:
            msg = f"stored {what} has torn vectors; refresh the document to save it anew"
            raise CorruptDataError(msg)
        texts = None if stored.texts is None else tuple(json.loads(stored.texts))
        if texts is not None and (len(texts) != len(indices) or {*map(type, texts)} != {str}):
            msg = f"stored {what} has other texts than chunks; refresh the document to save it anew"
            raise CorruptDataError(msg)
        vectors: Vectors | None = None
        if stored.vectors is not None and header["width"]:
            vectors = np.frombuffer(stored.vectors, dtype="<f4").reshape(len(indices), header["width"])
        return ChunkCopy(
            copy_id=stored.copy_id,
            indices=indices,
            texts=texts,
            vectors=vectors,
            sections=tuple(header["sections"]),
            embedding=header["embedding"],
            metadata=header["metadata"],
            without_vector=tuple(header["without_vector"]),
            # Copies of before there was such a thing have none.
            chunk_metadata=tuple(header.get("chunk_metadata", ())),
        )
    except UNREADABLE as error:
        msg = f"stored {what} can't be read back: {error!r}; refresh the document to save it anew"
        raise CorruptDataError(msg) from error


_KINDS_IN_LISTS: tuple[tuple[str, frozenset[type]], ...] = (
    ("indices", frozenset({int})),
    ("sections", frozenset({str, type(None)})),
    ("without_vector", frozenset({int})),
    ("chunk_metadata", frozenset({dict})),
)
_KINDS: tuple[tuple[str, type], ...] = (("embedding", str), ("metadata", dict), ("width", int))


def _check_header(header: Mapping[str, Any]) -> None:
    """Raise `TypeError` or `ValueError` for fields that no copy has: whoever reads it relies on them."""
    wrong = [name for name, right in _KINDS_IN_LISTS if not right.issuperset(map(type, header.get(name, ())))]
    wrong += [name for name, right in _KINDS if type(header[name]) is not right]
    if wrong:
        msg = f"wrong types in {', '.join(wrong)}"
        raise TypeError(msg)
    chunks = len(header["indices"])
    if not chunks or not all(0 <= position < chunks for position in header["without_vector"]):
        msg = f"{chunks} chunks, of which {header['without_vector']} have no vector"
        raise ValueError(msg)
    if len(header.get("chunk_metadata", ())) not in (0, chunks):
        msg = f"{chunks} chunks, and metadata of {len(header['chunk_metadata'])}"
        raise ValueError(msg)


def count_chunks(header: str | bytes) -> int:
    """How many chunks a stored copy has, by its header; an unreadable one counts as none, and can be removed."""
    try:
        return len(load_json(header, "chunk header")["indices"])
    except (CorruptDataError, KeyError, TypeError):
        return 0


def owners_of(headers: Iterable[str | bytes]) -> list[str]:
    """The users that copies say they belong to, by their headers; unreadable ones belong to nobody."""
    owners = dict[str, None]()
    for header in headers:
        with contextlib.suppress(CorruptDataError, KeyError, TypeError):
            owners[str(load_json(header, "chunk header")["user_id"])] = None
    return list(owners)


class ChunkPlace(ABC):
    """Where copies lie. A backend supplies these hooks; ids are raw, and hostile.

    Promises: a copy is there wholly or not at all; reading what is not there gives `None`; deleting what
    is not there is no error; hits never touch the copy they belong to.
    """

    @abstractmethod
    def write(self, user_id: str, doc_id: str, copy: StoredCopy) -> None:
        """Keep a copy; others of the document stay."""

    @abstractmethod
    def copies(self, user_id: str, doc_id: str) -> list[str]:
        """The ids of the document's copies, oldest first."""

    @abstractmethod
    def read(self, user_id: str, doc_id: str, copy_id: str, *, texts: bool, vectors: bool) -> StoredCopy | None:
        """The copy, with only the parts asked for."""

    @abstractmethod
    def delete(self, user_id: str, doc_id: str, copy_ids: Collection[str] | None = None) -> int:
        """Remove the named copies of the document, all when `None`, and their hits; returns how many copies went."""

    @abstractmethod
    def delete_user(self, user_id: str) -> int:
        """Remove all of the user's copies and hits; returns how many chunks went."""

    @abstractmethod
    def add_hits(
        self, user_id: str, doc_id: str, copy_id: str, indices: Sequence[int], now: datetime, count: int = 1
    ) -> None:
        """Count hits, `count` of them for each chunk; those of a copy that is not there are not kept."""

    @abstractmethod
    def hits(self, user_id: str, doc_id: str, copy_id: str) -> dict[int, ChunkHits]:
        """The hits of a copy by chunk index; chunks never hit are not in it."""

    def read_many(
        self, user_id: str, wanted: Iterable[tuple[str, str]], *, texts: bool, vectors: bool
    ) -> Iterator[tuple[str, StoredCopy | CorruptDataError | None]]:
        """`read` for many (document id, copy id), an unreadable one as its error; overridden where one trip can do."""
        for doc_id, copy_id in wanted:
            try:
                yield doc_id, self.read(user_id, doc_id, copy_id, texts=texts, vectors=vectors)
            except CorruptDataError as error:
                yield doc_id, error

    def hit_counts(self, user_id: str, wanted: Iterable[tuple[str, str]]) -> dict[str, int]:
        """How many different chunks of each (document id, copy id) ever answered; overridden like `read_many`."""
        return {doc_id: len(self.hits(user_id, doc_id, copy_id)) for doc_id, copy_id in wanted}

    @abstractmethod
    def owners(self) -> list[str]:
        """The ids of users with a copy that can be read, in any order."""

    def purge(self, doc_id: str) -> int:
        """Remove all copies of a document, of all users, and their hits; returns how many copies went."""
        return sum(self.delete(user_id, doc_id) for user_id in self.owners())

    def list_copies(self, user_id: str, doc_ids: Iterable[str]) -> dict[str, list[str]]:
        """`copies` of many documents, without those that have none; overridden like `read_many`."""
        copies = {doc_id: self.copies(user_id, doc_id) for doc_id in doc_ids}
        return {doc_id: own for doc_id, own in copies.items() if own}

    def tidy(self, user_id: str | None = None) -> None:  # noqa: B027 - nothing is left where a write is one step
        """Remove what a crash left half written, of a user or of everybody; whose it was need not be known."""

    def close(self) -> None:  # noqa: B027 - a place without connections has nothing to close
        """Close what this place opened itself."""


class ChunkStore:
    """The chunks of saved documents, of any number of users.

    Args:
        wiki_save_dir: A folder to keep them in, with a readable copy of each saved document; in memory
            when `None`.
        place: Somewhere else to keep the chunks (see `ChunkPlace`); `wiki_save_dir` then only gets the
            readable copies.
    """

    def __init__(self, wiki_save_dir: str | Path | None = None, *, place: ChunkPlace | None = None) -> None:
        from rag_wiki.storage.chunk_places import (  # places are written against this module
            DiskPlace,
            DocumentFolder,
            MemoryPlace,
        )

        if place is None:
            place = MemoryPlace() if wiki_save_dir is None else DiskPlace(wiki_save_dir)
        self.place: ChunkPlace = place
        self.documents = None if wiki_save_dir is None else DocumentFolder(wiki_save_dir)
        in_each_process(self._make_lock)

    def _make_lock(self) -> None:
        self._merging = threading.Lock()

    def __deepcopy__(self, memo: dict[int, object]) -> ChunkStore:
        # As a state store does: whoever is copied goes on with the same chunks.
        return self

    # -- whole copies: what saving and the index use ---------------------------------------------

    def save_copy(self, user_id: str, doc_id: str, copy: ChunkCopy) -> None:
        """Keep a copy beside the others of the document; `retire` removes those."""
        check_copy_id(copy.copy_id)
        self.place.write(check_user_id(user_id), check_doc_id(doc_id), encode_copy(user_id, doc_id, copy))

    def load_copy(
        self, user_id: str, doc_id: str, copy_id: str, *, texts: bool = True, vectors: bool = True
    ) -> ChunkCopy | None:
        """The copy, or `None` when it is not there.

        Raises:
            CorruptDataError: It is there and can't be read back.
        """
        stored = self.place.read(user_id, doc_id, check_copy_id(copy_id), texts=texts, vectors=vectors)
        return None if stored is None else decode_copy(user_id, doc_id, stored)

    def load_copies(
        self, user_id: str, wanted: Iterable[tuple[str, str]], *, texts: bool = False, vectors: bool = True
    ) -> Iterator[tuple[str, ChunkCopy | CorruptDataError | None]]:
        """Many copies by (document id, copy id); one that can't be read back comes as its error."""
        for doc_id, stored in self.place.read_many(user_id, wanted, texts=texts, vectors=vectors):
            if not isinstance(stored, StoredCopy):
                yield doc_id, stored
                continue
            try:
                yield doc_id, decode_copy(user_id, doc_id, stored)
            except CorruptDataError as error:
                yield doc_id, error

    def retire(self, user_id: str, doc_id: str, gone: str | None, *, keep: str | None) -> None:
        """Remove a copy that no record names any more, and old ones that a crash left behind.

        Young copies that nobody names stay: somebody may be about to name them.
        """
        old = _crashed_before()
        copies = [copy_id for copy_id in self.place.copies(user_id, doc_id) if copy_id != keep]
        removable = [copy_id for copy_id in copies if copy_id == gone or copy_id < old]
        if removable:
            self.place.delete(user_id, doc_id, removable)

    def drop(self, user_id: str, doc_id: str, copy_id: str | None) -> None:
        """Remove the copy of a document that was let go; all copies when none is named."""
        if copy_id is None:
            self.delete(user_id, doc_id)
            return
        self.retire(user_id, doc_id, copy_id, keep=None)

    def sweep(self, user_id: str, named: Mapping[str, str | None]) -> int:
        """Remove what a crash left behind: old copies, for each document, but the one that its record names.

        Documents that are not in `named` are left alone: another application may keep them in the same place.
        Returns how many copies went.
        """
        old, gone = _crashed_before(), 0
        for doc_id, copies in self.place.list_copies(user_id, named).items():
            removable = [copy_id for copy_id in copies if copy_id != named[doc_id] and copy_id < old]
            gone += self.place.delete(user_id, doc_id, removable) if removable else 0
        self.tidy(user_id)
        return gone

    def tidy(self, user_id: str | None = None) -> None:
        """Remove files that a crash left half written, of a user or of everybody."""
        self.place.tidy(user_id)
        if self.documents is not None:
            self.documents.tidy(user_id)

    def unsettled(self, user_id: str, records: Sequence[UserDocRecord]) -> list[str]:
        """The documents whose readable copy does not fit their record: it is of another copy, missing, or too much."""
        if self.documents is None:
            return []
        times = self.documents.times(user_id, [record.doc_id for record in records])
        return [record.doc_id for record in records if not _is_settled(record, times)]

    def settle(
        self, user_id: str, doc_id: str, read: Callable[[], UserDocRecord | None], ready: PendingFile | None = None
    ) -> None:
        """Bring the readable copy in line with the record; called after a change, by whoever made it.

        Saves and removals may overlap, so the record is read again after each step: whoever wrote or removed the
        file last did it by the last record.

        Args:
            user_id: Whose document.
            doc_id: Which one.
            read: Reads the record.
            ready: The file for the change that was made, if it was prepared.
        """
        if self.documents is None:
            return
        holds = _to_read(read()) if ready is None else ready.holds
        while True:
            if holds is None:
                self.documents.delete(user_id, doc_id)
            else:
                (ready or self.documents.prepare(user_id, doc_id, *holds)).finish()
            ready, held, holds = None, holds, _to_read(read())
            if holds == held:
                return

    def hit_rates(self, user_id: str, wanted: Mapping[str, tuple[str, int]]) -> dict[str, float]:
        """The fraction of chunks that ever answered, by document id, for document id → (copy id, chunks)."""
        counts = self.place.hit_counts(user_id, [(doc_id, copy_id) for doc_id, (copy_id, _) in wanted.items()])
        return {doc_id: min(counts.get(doc_id, 0) / max(total, 1), 1.0) for doc_id, (_, total) in wanted.items()}

    def newest_copies(self, user_id: str, doc_ids: Iterable[str]) -> dict[str, tuple[str, int]]:
        """The newest copy of each document that has one, and how many chunks it has: what `hit_rates` asks for."""
        newest = {doc_id: copies[-1] for doc_id, copies in self.place.list_copies(user_id, doc_ids).items()}
        found = self.place.read_many(user_id, newest.items(), texts=False, vectors=False)
        return {
            doc_id: (newest[doc_id], count_chunks(copy.header))
            for doc_id, copy in found
            if isinstance(copy, StoredCopy)
        }

    # -- single chunks as dictionaries -----------------------------------------------------------

    def save_chunks(self, user_id: str, doc_id: str, chunks: Sequence[Mapping[str, Any]]) -> None:
        """Keep these chunks, with the hits that they bring, in place of all that the document had."""
        with self._merging:
            try:
                before = self._newest(user_id, doc_id)
            except CorruptDataError:
                # What gives way need not be readable: this is how a torn copy is healed.
                before = None
            self._replace(user_id, doc_id, chunks, before)

    def add_chunks(self, user_id: str, doc_id: str, chunks: Sequence[Mapping[str, Any]]) -> int:
        """Add chunks whose `chunk_index` the document does not have yet; returns how many were new."""
        with self._merging:
            before = self._newest(user_id, doc_id)
            present = self._dictionaries(user_id, doc_id, before)
            known = {chunk["chunk_index"] for chunk in present}
            new: dict[int, Mapping[str, Any]] = {}
            for chunk in chunks:
                if int(chunk["chunk_index"]) not in known:
                    new.setdefault(int(chunk["chunk_index"]), chunk)
            if new:
                self._replace(user_id, doc_id, [*present, *new.values()], before)
            return len(new)

    def load_chunks(self, user_id: str, doc_id: str) -> list[dict[str, Any]]:
        """The chunks of the newest copy in document order; an empty list when there is none.

        Each is a dictionary of `chunk_index`, `text`, `vector` (a list of floats, or `None`), `section`,
        `hit_count` and `last_hit_at`.
        """
        return self._dictionaries(user_id, doc_id, self._newest(user_id, doc_id))

    def _dictionaries(self, user_id: str, doc_id: str, copy: ChunkCopy | None) -> list[dict[str, Any]]:
        if copy is None:
            return []
        hits = self.place.hits(user_id, doc_id, copy.copy_id)
        return [
            {
                "chunk_index": index,
                "text": text,
                "vector": None
                if copy.vectors is None or position in copy.without_vector
                else copy.vectors[position].tolist(),
                "section": copy.section(position),
                "hit_count": hits[index].count if index in hits else 0,
                "last_hit_at": hits[index].last if index in hits else None,
            }
            for position, (index, text) in enumerate(zip(copy.indices, copy.texts or (), strict=True))
        ]

    def record_hits(
        self,
        user_id: str,
        doc_id: str,
        chunk_indices: Iterable[int],
        now: datetime | None = None,
        *,
        copy_id: str | None = None,
    ) -> None:
        """Count one hit for each chunk, of the newest copy unless `copy_id` names one."""
        copy_id = copy_id or next(reversed(self.place.copies(user_id, doc_id)), None)
        indices = sorted({int(index) for index in chunk_indices})
        if copy_id is not None and indices:
            self.place.add_hits(user_id, doc_id, copy_id, indices, as_utc(now or utc_now()))

    def get_hit_rate(self, user_id: str, doc_id: str) -> float:
        """The fraction of the newest copy's chunks that ever answered, in [0, 1]; 0 without chunks."""
        chunks = self.load_chunks(user_id, doc_id)
        return sum(chunk["hit_count"] > 0 for chunk in chunks) / len(chunks) if chunks else 0.0

    def delete(self, user_id: str, doc_id: str) -> bool:
        """Remove the document's chunks, hits and readable copy; tells whether there were chunks."""
        check_user_id(user_id), check_doc_id(doc_id)
        if self.documents is not None:
            self.documents.delete(user_id, doc_id)
        return self.place.delete(user_id, doc_id) > 0

    def delete_user(self, user_id: str) -> int:
        """Remove all chunks of the user, and the readable copies; returns how many chunks."""
        check_user_id(user_id)
        if self.documents is not None:
            self.documents.delete_user(user_id)
        return self.place.delete_user(user_id)

    def purge(self, doc_id: str) -> PurgedDocument:
        """Remove a document's chunks, hits and readable copies, of all users."""
        check_doc_id(doc_id)
        files = self.documents.purge(doc_id) if self.documents is not None else 0
        return PurgedDocument(doc_id, copies=self.place.purge(doc_id), files=files)

    def close(self) -> None:
        """Close what the place opened itself."""
        self.place.close()

    # -- arithmetic ------------------------------------------------------------------------------

    @staticmethod
    def build_matrix(chunks: Sequence[Mapping[str, Any]]) -> Vectors | None:
        """The chunks' vectors as (n, dim) float32, a row per chunk; `None` when no chunk has a vector.

        A chunk without a vector gets a row of zeros, so that row numbers stay chunk positions.

        Raises:
            ValueError: The vectors differ in width, or one is not finite.
        """
        rows = [None if chunk.get("vector") is None else as_row(chunk["vector"]) for chunk in chunks]
        for position, (chunk, row) in enumerate(zip(chunks, rows, strict=True)):
            if row is not None and not np.isfinite(row).all():
                msg = f"the vector of chunk {chunk.get('chunk_index', position)} holds NaN or infinity"
                raise ValueError(msg)
        widths = {row.shape[0] for row in rows if row is not None}
        if not widths:
            return None
        if len(widths) > 1:
            msg = f"the chunks' vectors differ in width: {sorted(widths)}"
            raise ValueError(msg)
        blank = np.zeros(widths.pop(), dtype=np.float32)
        return np.stack([blank if row is None else row for row in rows])

    @staticmethod
    def cosine_similarity_matrix(query: ArrayLike, matrix: ArrayLike) -> Vectors:
        """Cosine of a query (dim,) with each row of a matrix (n, dim): (n,) in [−1, 1].

        Vectors without a direction, of zeros or with NaN or infinity in them, score 0.
        """
        cosines: Vectors = np.clip(unit_rows(matrix) @ unit_rows(np.atleast_2d(as_row(query)))[0], -1.0, 1.0)
        return cosines

    # -- inside ----------------------------------------------------------------------------------

    def _newest(self, user_id: str, doc_id: str) -> ChunkCopy | None:
        check_user_id(user_id), check_doc_id(doc_id)
        gone: set[str] = set()
        # One that was replaced between listing and reading is not the last word: there is a newer one then.
        while copies := [copy_id for copy_id in self.place.copies(user_id, doc_id) if copy_id not in gone]:
            copy = self.load_copy(user_id, doc_id, copies[-1])
            if copy is not None:
                return copy
            gone.add(copies[-1])
        return None

    def _replace(
        self, user_id: str, doc_id: str, chunks: Sequence[Mapping[str, Any]], before: ChunkCopy | None
    ) -> None:
        ordered = sorted(chunks, key=lambda chunk: int(chunk["chunk_index"]))
        indices = tuple(int(chunk["chunk_index"]) for chunk in ordered)
        if len(set(indices)) != len(indices):
            msg = f"chunks of document {doc_id!r} of user {user_id!r} share a chunk_index: {list(indices)}"
            raise InvalidDocumentError(msg)
        if not chunks:
            self.place.delete(user_id, doc_id)
            return
        copy = ChunkCopy(
            copy_id=new_copy_id(),
            indices=indices,
            texts=tuple(str(chunk["text"]) for chunk in ordered),
            vectors=self.build_matrix(ordered),
            sections=tuple(chunk.get("section") for chunk in ordered),
            embedding="" if before is None else before.embedding,
            metadata={} if before is None else before.metadata,
            without_vector=tuple(at for at, chunk in enumerate(ordered) if chunk.get("vector") is None),
            chunk_metadata=_kept_metadata(before, ordered),
        )
        self.save_copy(user_id, doc_id, copy)
        for chunk in ordered:
            count, last = int(chunk.get("hit_count") or 0), as_utc(chunk.get("last_hit_at") or utc_now())
            if count > 0:
                self.place.add_hits(user_id, doc_id, copy.copy_id, [int(chunk["chunk_index"])], last, count)
        self.place.delete(user_id, doc_id, [old for old in self.place.copies(user_id, doc_id) if old != copy.copy_id])


def _kept_metadata(before: ChunkCopy | None, chunks: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """What was said of chunks that are as they were."""
    if before is None or not before.chunk_metadata:
        return ()
    known = dict(zip(zip(before.indices, before.texts or (), strict=False), before.chunk_metadata, strict=False))
    return tuple(known.get((int(chunk["chunk_index"]), str(chunk["text"])), {}) for chunk in chunks)


def _to_read(record: UserDocRecord | None) -> tuple[str, str, str | None] | None:
    """What the readable copy of a record holds: title, text and copy id; `None` when there should be none."""
    if record is None or not record.saved or record.full_content is None:
        return None
    return record.doc_title or record.doc_id, record.full_content, record.copy_id


def _is_settled(record: UserDocRecord, times: Mapping[str, int | None]) -> bool:
    """Whether a readable copy fits its record, as far as the time that it bears can tell."""
    if not record.saved or record.doc_id not in times:
        return record.saved is (record.doc_id in times)
    found, expected = times[record.doc_id], None if record.copy_id is None else copy_time(record.copy_id)
    # File systems keep microseconds, and not all of them more.
    return found is not None and (expected is None or found // 1000 == expected // 1000)


def read_or_raise(stored: StoredCopy | CorruptDataError | None) -> StoredCopy | None:
    """What `read_many` found for one copy, as `read` tells it."""
    if isinstance(stored, CorruptDataError):
        raise stored
    return stored


def as_row(vector: ArrayLike) -> Vectors:
    """A vector of any float type as (dim,) float32; what that can't hold becomes infinity."""
    with np.errstate(over="ignore"):
        return np.asarray(vector, dtype=np.float32).reshape(-1)


def unit_rows(matrix: ArrayLike) -> Vectors:
    """The rows of (n, dim) at length one, float32; rows of zeros stay zero, those with NaN or infinity become so.

    Lengths are taken in float64: rows of length 1e−30 or 1e30 rank as unit vectors do.
    """
    rows = np.asarray(matrix, dtype=np.float32)
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    finite = np.isfinite(lengths)
    if not finite.all():
        rows, lengths = np.where(finite[:, None], rows, np.float32(0)), np.where(finite, lengths, 0.0)
    scale = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    units: Vectors = (rows * scale[:, None]).astype(np.float32)
    return units


def without_texts(stored: StoredCopy, *, texts: bool, vectors: bool) -> StoredCopy:
    """The stored copy with only the parts asked for."""
    return stored._replace(texts=stored.texts if texts else None, vectors=stored.vectors if vectors else None)
