"""Places for chunks that need no service: this process's memory, and a folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import struct
import tempfile
import threading
import time
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path

from rag_wiki.clock import as_utc
from rag_wiki.errors import CorruptDataError
from rag_wiki.storage.chunk_store import (
    CRASHED_AFTER_NS,
    ChunkHits,
    ChunkPlace,
    StoredCopy,
    count_chunks,
    owners_of,
    without_texts,
)

__all__ = ["DiskPlace", "DocumentFolder", "MemoryPlace", "PendingFile"]


class MemoryPlace(ChunkPlace):
    """Chunks in this process; gone with it. Safe for any number of threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._copies: dict[str, dict[str, dict[str, StoredCopy]]] = {}
        self._hits: dict[tuple[str, str, str], dict[int, ChunkHits]] = defaultdict(dict)

    def write(self, user_id: str, doc_id: str, copy: StoredCopy) -> None:
        """Keep a copy."""
        with self._lock:
            self._copies.setdefault(user_id, {}).setdefault(doc_id, {})[copy.copy_id] = copy

    def copies(self, user_id: str, doc_id: str) -> list[str]:
        """The ids of the document's copies."""
        with self._lock:
            return sorted(self._copies.get(user_id, {}).get(doc_id, {}))

    def read(self, user_id: str, doc_id: str, copy_id: str, *, texts: bool, vectors: bool) -> StoredCopy | None:
        """The copy, or `None`."""
        with self._lock:
            stored = self._copies.get(user_id, {}).get(doc_id, {}).get(copy_id)
        return None if stored is None else without_texts(stored, texts=texts, vectors=vectors)

    def delete(self, user_id: str, doc_id: str, copy_ids: Collection[str] | None = None) -> int:
        """Remove copies and their hits."""
        with self._lock:
            copies = self._copies.get(user_id, {}).get(doc_id, {})
            gone = [copy_id for copy_id in copies if copy_ids is None or copy_id in copy_ids]
            for copy_id in gone:
                del copies[copy_id]
                self._hits.pop((user_id, doc_id, copy_id), None)
            if not copies and user_id in self._copies:
                self._copies[user_id].pop(doc_id, None)
                if not self._copies[user_id]:
                    del self._copies[user_id]
            return len(gone)

    def delete_user(self, user_id: str) -> int:
        """Remove all of the user's copies and hits."""
        with self._lock:
            documents = self._copies.pop(user_id, {})
            for key in [key for key in self._hits if key[0] == user_id]:
                del self._hits[key]
        return sum(count_chunks(copy.header) for copies in documents.values() for copy in copies.values())

    def owners(self) -> list[str]:
        """The users with a copy."""
        with self._lock:
            return list(self._copies)

    def add_hits(
        self, user_id: str, doc_id: str, copy_id: str, indices: Sequence[int], now: datetime, count: int = 1
    ) -> None:
        """Count hits of each chunk."""
        with self._lock:
            if copy_id not in self._copies.get(user_id, {}).get(doc_id, {}):
                return
            hits = self._hits[user_id, doc_id, copy_id]
            for index in indices:
                hits[index] = ChunkHits(hits[index].count + count if index in hits else count, now)

    def hits(self, user_id: str, doc_id: str, copy_id: str) -> dict[int, ChunkHits]:
        """The hits of a copy."""
        with self._lock:
            return dict(self._hits.get((user_id, doc_id, copy_id), {}))


_MAGIC = b"rag_wiki chunks 1\n"
_LENGTHS = struct.Struct("<QQQI")
"""The lengths of header, texts and vectors, and the header's checksum; it holds those of the other two."""
_LONGEST_HITS_FILE = 64 * 1024


class DiskPlace(ChunkPlace):
    """Chunks in a folder: a file per copy, and a small one beside it for its hits.

    Names are hashes of the ids, so no id can name a file outside the folder, and ids that differ only in
    case stay apart on any file system. A file is written aside and renamed: readers see all of it or
    nothing. Nothing is unpickled.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        self._lock = threading.Lock()

    def write(self, user_id: str, doc_id: str, copy: StoredCopy) -> None:
        """Keep a copy."""
        header, texts = copy.header.encode(), (copy.texts or "").encode()
        vectors = copy.vectors or b""
        lengths = _LENGTHS.pack(len(header), len(texts), len(vectors), zlib.crc32(header))
        path = self._path(user_id, doc_id, copy.copy_id)
        write_aside(path, b"".join([_MAGIC, lengths, header, texts, vectors]))

    def copies(self, user_id: str, doc_id: str) -> list[str]:
        """The ids of the document's copies."""
        return sorted(copy_id for copy_id, _ in self._files(user_id, doc_id, "chunks"))

    def read(self, user_id: str, doc_id: str, copy_id: str, *, texts: bool, vectors: bool) -> StoredCopy | None:
        """The copy, or `None`."""
        path = self._path(user_id, doc_id, copy_id)
        try:
            with path.open("rb") as file:
                head = file.read(len(_MAGIC) + _LENGTHS.size)
                if len(head) != len(_MAGIC) + _LENGTHS.size or not head.startswith(_MAGIC):
                    raise _torn(path)
                *sizes, checksum = _LENGTHS.unpack(head[len(_MAGIC) :])
                if file.seek(0, os.SEEK_END) != len(head) + sum(sizes):
                    raise _torn(path)
                file.seek(len(head))
                header = file.read(sizes[0])
                if zlib.crc32(header) != checksum:
                    raise _torn(path)
                if texts:
                    text_bytes = file.read(sizes[1])
                else:
                    file.seek(sizes[1], os.SEEK_CUR)
                vector_bytes = file.read(sizes[2]) if vectors else None
        except (FileNotFoundError, NotADirectoryError):
            return None
        try:
            return StoredCopy(copy_id, header.decode(), text_bytes.decode() if texts else None, vector_bytes)
        except UnicodeDecodeError as error:
            raise _torn(path) from error

    def list_copies(self, user_id: str, doc_ids: Iterable[str]) -> dict[str, list[str]]:
        """The ids of the copies of many documents: the folder is read once."""
        found = defaultdict[str, list[str]](list)
        by_digest = {_digest(doc_id): doc_id for doc_id in doc_ids}
        for digest, copy_id, _ in sorted(_named_files(self._folder(user_id), "chunks")) if by_digest else ():
            if digest in by_digest:
                found[by_digest[digest]].append(copy_id)
        return dict(found)

    def owners(self) -> list[str]:
        """The users with a copy, by what their copies say."""
        # One that can be read is enough for each folder.
        folders = (_named_files(folder, "chunks") for folder in self.root.glob("*/chunks"))
        return owners_of(header for files in folders for header in islice(filter(None, map(_header, files)), 1))

    def purge(self, doc_id: str) -> int:
        """Remove all copies of a document, of all users, and their hits."""
        gone = 0
        with self._lock:
            for path in self.root.glob(f"*/chunks/{_digest(doc_id)}.*"):
                path.unlink(missing_ok=True)
                gone += path.suffix == ".chunks"
        return gone

    def tidy(self, user_id: str) -> None:
        """Remove what a crash left half written."""
        _remove_leftovers(self._folder(user_id))

    def delete(self, user_id: str, doc_id: str, copy_ids: Collection[str] | None = None) -> int:
        """Remove copies and their hits."""
        gone = 0
        with self._lock:
            for kind in ("chunks", "hits"):
                for copy_id, path in self._files(user_id, doc_id, kind):
                    if copy_ids is None or copy_id in copy_ids:
                        path.unlink(missing_ok=True)
                        gone += kind == "chunks"
        _remove_leftovers(self._folder(user_id))
        return gone

    def delete_user(self, user_id: str) -> int:
        """Remove all of the user's copies and hits."""
        folder = self._folder(user_id)
        chunks = 0
        with self._lock:
            for named in _named_files(folder, "chunks"):
                # A torn one counts as none, and goes all the same.
                chunks += count_chunks(_header(named) or b"")
            _remove_folder(folder)
        return chunks

    def add_hits(
        self, user_id: str, doc_id: str, copy_id: str, indices: Sequence[int], now: datetime, count: int = 1
    ) -> None:
        """Count hits of each chunk: a few bytes are appended, nothing is rewritten."""
        path = self._path(user_id, doc_id, copy_id)
        hits, moment = path.with_suffix(".hits"), as_utc(now).isoformat()
        lines = "".join([f"{index} {count} {moment}\n" for index in indices]).encode("ascii")
        with self._lock:
            size = _append(hits, lines)
            if size is None:
                # The first hits of the copy, or it is gone; hits without one would be left over for good.
                with contextlib.suppress(FileNotFoundError):
                    if path.exists():
                        size = _append(hits, lines, os.O_CREAT)
                if not path.exists():
                    hits.unlink(missing_ok=True)
            if size is not None and size > _LONGEST_HITS_FILE:
                counted = [f"{index} {hit.count} {hit.last.isoformat()}\n" for index, hit in _read_hits(hits).items()]
                write_aside(hits, "".join(counted).encode("ascii"))

    def hits(self, user_id: str, doc_id: str, copy_id: str) -> dict[int, ChunkHits]:
        """The hits of a copy."""
        return _read_hits(self._path(user_id, doc_id, copy_id).with_suffix(".hits"))

    def _folder(self, user_id: str) -> Path:
        return user_folder(self.root, user_id) / "chunks"

    def _path(self, user_id: str, doc_id: str, copy_id: str) -> Path:
        return self._folder(user_id) / f"{_digest(doc_id)}.{copy_id}.chunks"

    def _files(self, user_id: str, doc_id: str, kind: str) -> list[tuple[str, Path]]:
        """The document's files of a kind, each with the id of its copy; others in the folder are not ours."""
        found = _named_files(self._folder(user_id), kind, _digest(doc_id))
        return [(copy_id, path) for _, copy_id, path in found]


@dataclass(frozen=True)
class PendingFile:
    """A file that is written but not yet in its place."""

    temporary: Path
    path: Path
    replaces: list[Path]

    def finish(self) -> None:
        """Put it in its place."""
        put_in_place(self.temporary, self.path)
        for old in self.replaces:
            old.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Leave nothing of it."""
        self.temporary.unlink(missing_ok=True)


class DocumentFolder:
    """Readable copies of saved documents: one text file per document, for people and other programs."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def prepare(self, user_id: str, doc_id: str, title: str, content: str) -> PendingFile:
        """Write the text aside.

        That is what can fail (a full disk, a missing permission), so it comes before a save is decided;
        putting it in its place comes after.
        """
        path = self._folder(user_id) / f"{readable_name(title, doc_id)}.md"
        temporary = write_temporary(path.parent, content.encode("utf-8", "surrogatepass"))
        # The title may have changed since the last save.
        return PendingFile(temporary, path, [old for old in self._files(user_id, doc_id) if old != path])

    def delete(self, user_id: str, doc_id: str) -> int:
        """Remove the document's file; returns how many went."""
        files = self._files(user_id, doc_id)
        for path in files:
            path.unlink(missing_ok=True)
        _remove_leftovers(self._folder(user_id))
        return len(files)

    def purge(self, doc_id: str) -> int:
        """Remove the document's file of every user; returns how many went."""
        files = list(self.root.glob(f"*/documents/*-{_digest(doc_id)[:24]}.md"))
        for path in files:
            path.unlink(missing_ok=True)
        return len(files)

    def tidy(self, user_id: str) -> None:
        """Remove what a crash left half written."""
        _remove_leftovers(self._folder(user_id))

    def present(self, user_id: str, doc_ids: Iterable[str]) -> set[str]:
        """Those of many documents that have a file."""
        folder = self._folder(user_id)
        found = {path.stem[-24:] for path in folder.glob("*.md")} if folder.is_dir() else set()
        return {doc_id for doc_id in doc_ids if _digest(doc_id)[:24] in found}

    def delete_user(self, user_id: str) -> int:
        """Remove all of the user's files; returns how many went."""
        folder = self._folder(user_id)
        files = len(list(folder.glob("*.md"))) if folder.is_dir() else 0
        _remove_folder(folder)
        return files

    def count(self, user_id: str) -> int:
        """How many files the user has."""
        folder = self._folder(user_id)
        return len(list(folder.glob("*.md"))) if folder.is_dir() else 0

    def _folder(self, user_id: str) -> Path:
        return user_folder(self.root, user_id) / "documents"

    def _files(self, user_id: str, doc_id: str) -> list[Path]:
        # The title may have changed since; the hash of the id has not.
        folder = self._folder(user_id)
        return sorted(folder.glob(f"*-{_digest(doc_id)[:24]}.md")) if folder.is_dir() else []


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def readable_name(text: str, identity: str) -> str:
    """A file name for people: a slug of `text`, and a hash of `identity` that keeps different ids apart."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].strip("-")
    return f"{slug or 'x'}-{_digest(identity)[:24]}"


@lru_cache(maxsize=1024)
def user_folder(root: Path, user_id: str) -> Path:
    """The folder of one user below `root`; each question of the user needs it."""
    return root / readable_name(user_id, user_id)


def write_aside(path: Path, content: bytes) -> None:
    """Write a file beside its place and rename it there: all of it, or nothing."""
    put_in_place(write_temporary(path.parent, content), path)


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a file that was written aside; nothing is left of it when that fails."""
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


_PASSING = ".writing-"


def write_temporary(folder: Path, content: bytes) -> Path:
    """Write a file under a passing name; nothing is left of it when that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=_PASSING, dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return Path(name)


def _remove_leftovers(folder: Path) -> None:
    """Remove files that a crash left under their passing name: whose text they hold, nobody can tell."""
    for path in folder.glob(f"{_PASSING}*") if folder.is_dir() else ():
        # Another process may be as tidy at this very moment.
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_mtime_ns < time.time_ns() - CRASHED_AFTER_NS:
                path.unlink()


def _remove_folder(folder: Path) -> None:
    """Remove a user's folder of one kind, and the user's folder when nothing else is in it."""
    if folder.is_dir():
        shutil.rmtree(folder)
    # Not there, or with somebody else's files in it: both are fine.
    with contextlib.suppress(OSError):
        folder.parent.rmdir()


def _torn(path: Path) -> CorruptDataError:
    return CorruptDataError(
        f"the chunk file {path.name} is torn or not ours; refresh the document to save it anew, or delete the file"
    )


def _append(path: Path, content: bytes, flags: int = 0) -> int | None:
    """Add to the end of a file; its size then, or `None` when it is not there."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_APPEND | getattr(os, "O_BINARY", 0) | flags, 0o600)
    except FileNotFoundError:
        return None
    try:
        os.write(file, content)
        return os.fstat(file).st_size
    finally:
        os.close(file)


def _read_hits(path: Path) -> dict[int, ChunkHits]:
    try:
        lines = path.read_text(encoding="ascii", errors="replace").splitlines()
    except (FileNotFoundError, NotADirectoryError):
        return {}
    counted: dict[int, ChunkHits] = {}
    for line in lines:
        parts = line.split(" ")
        # A line that a crash cut short is a hit lost, not a reason to lose the others.
        try:
            index, count, last = int(parts[0]), int(parts[1]), as_utc(datetime.fromisoformat(parts[2]))
        except (IndexError, ValueError):
            continue
        before = counted[index].count if index in counted else 0
        counted[index] = ChunkHits(before + count, last)
    return counted


def _named_files(folder: Path, kind: str, digest: str = "*") -> list[tuple[str, str, Path]]:
    """The files of a kind, each with the hash of its document and the id of its copy; others there are not ours."""
    found = []
    for path in folder.glob(f"{digest}.*.{kind}") if folder.is_dir() else ():
        own, copy_id, *more = path.name.split(".")
        if copy_id.isalnum() and len(more) == 1:
            found.append((own, copy_id, path))
    return found


def _header(named: tuple[str, str, Path]) -> bytes | None:
    """The header of a chunk file, as far as it can be read."""
    path = named[2]
    try:
        with path.open("rb") as file:
            length, *_ = _LENGTHS.unpack(file.read(len(_MAGIC) + _LENGTHS.size)[len(_MAGIC) :])
            # Read as far as the file goes: a torn one may claim any length.
            return file.read(min(length, path.stat().st_size))
    except (OSError, struct.error):
        return None
