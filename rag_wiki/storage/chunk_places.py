"""Places for chunks that need no service: this process's memory, and a folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import stat
import struct
import tempfile
import threading
import time
import uuid
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from rag_wiki import events
from rag_wiki.clock import as_utc, parse_utc
from rag_wiki.errors import CorruptDataError
from rag_wiki.forks import in_each_process
from rag_wiki.storage.chunk_store import (
    CRASHED_AFTER_NS,
    ChunkHits,
    ChunkPlace,
    StoredCopy,
    copy_time,
    count_chunks,
    owners_of,
    without_texts,
)

__all__ = ["DiskPlace", "DocumentFolder", "MemoryPlace", "PendingFile"]


class MemoryPlace(ChunkPlace):
    """Chunks in this process; gone with it. Safe for any number of threads."""

    def __init__(self) -> None:
        in_each_process(self._make_lock)
        self._copies: dict[str, dict[str, dict[str, StoredCopy]]] = {}
        self._hits: dict[tuple[str, str, str], dict[int, ChunkHits]] = defaultdict(dict)

    def _make_lock(self) -> None:
        self._lock = threading.RLock()

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
_SMALL_FILE = 256 * 1024
"""Bytes of a chunk file that are read at once; of a larger one the parts that are asked for."""


class DiskPlace(ChunkPlace):
    """Chunks in a folder: a file per copy, and beside it a small one from each process that counts hits of it.

    Names are hashes of the ids, so no id can name a file outside the folder, and ids that differ only in
    case stay apart on any file system. A file is written aside and renamed: readers see all of it or
    nothing. Nothing is unpickled.

    Only the process that a file of hits is named for adds to it and sums it up, so nobody waits for anybody. Those
    of processes that are gone, `tidy` makes one of.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)
        in_each_process(self._begin)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._writer = uuid.uuid4().hex[:12]

    def write(self, user_id: str, doc_id: str, copy: StoredCopy) -> None:
        """Keep a copy."""
        header, texts = copy.header.encode(), (copy.texts or "").encode()
        vectors = copy.vectors or b""
        lengths = _LENGTHS.pack(len(header), len(texts), len(vectors), zlib.crc32(header))
        path = Path(self._path(user_id, doc_id, copy.copy_id))
        write_aside(path, b"".join([_MAGIC, lengths, header, texts, vectors]))

    def copies(self, user_id: str, doc_id: str) -> list[str]:
        """The ids of the document's copies."""
        return sorted(copy_id for copy_id, _ in self._files(user_id, doc_id, "chunks"))

    def read(self, user_id: str, doc_id: str, copy_id: str, *, texts: bool, vectors: bool) -> StoredCopy | None:
        """The copy, or `None`."""
        path = self._path(user_id, doc_id, copy_id)
        try:
            opened = _open(path)
            if opened is None:
                return None
            size = os.fstat(opened).st_size
            # Most files are small, and then one read gets all of them.
            with os.fdopen(opened, "rb", buffering=min(max(size, 512), _SMALL_FILE)) as file:
                head = file.read(len(_MAGIC) + _LENGTHS.size)
                if len(head) != len(_MAGIC) + _LENGTHS.size or not head.startswith(_MAGIC):
                    raise _torn(path)
                *sizes, checksum = _LENGTHS.unpack(head[len(_MAGIC) :])
                if size != len(head) + sum(sizes):
                    raise _torn(path)
                header = file.read(sizes[0])
                if zlib.crc32(header) != checksum:
                    raise _torn(path)
                if texts:
                    text_bytes = file.read(sizes[1])
                else:
                    file.seek(sizes[1], os.SEEK_CUR)
                vector_bytes = file.read(sizes[2]) if vectors else None
            return StoredCopy(copy_id, header.decode(), text_bytes.decode() if texts else None, vector_bytes)
        except (OSError, UnicodeDecodeError) as error:
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
        folders = (_named_files(folder, "chunks") for folder in _listed(self.root, "*/chunks"))
        return owners_of(header for files in folders for header in islice(filter(None, map(_header, files)), 1))

    def purge(self, doc_id: str) -> int:
        """Remove all copies of a document, of all users, and their hits."""
        gone = 0
        with self._lock:
            for path in _of_everybody(self.root, "chunks", f"{_digest(doc_id)}.*"):
                _remove(path)
                _remove_empty(path.parent)
                gone += path.suffix == ".chunks"
        return gone

    def tidy(self, user_id: str | None = None) -> None:
        """Remove what a crash left half written, and sum up the hits that processes left behind."""
        folders = _listed(self.root, f"{_EVERYBODYS}/chunks") if user_id is None else [self._folder(user_id)]
        for folder in folders:
            for (digest, copy_id), paths in _hits_by_copy(folder).items():
                if len(paths) > 1:
                    with self._lock:
                        _make_few(paths, folder / f"{digest}.{copy_id}.chunks")
        _tidy(folders)

    def delete(self, user_id: str, doc_id: str, copy_ids: Collection[str] | None = None) -> int:
        """Remove copies and their hits."""
        gone = 0
        with self._lock:
            for kind in ("chunks", "hits"):
                for copy_id, path in self._files(user_id, doc_id, kind):
                    if copy_ids is None or copy_id in copy_ids:
                        _remove(path)
                        gone += kind == "chunks"
        _tidy([self._folder(user_id)])
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
        _forget_names()
        return chunks

    def add_hits(
        self, user_id: str, doc_id: str, copy_id: str, indices: Sequence[int], now: datetime, count: int = 1
    ) -> None:
        """Count hits of each chunk: a few bytes are appended, nothing is rewritten."""
        stem, moment = self._stem(user_id, doc_id, copy_id), as_utc(now).isoformat()
        path, hits = f"{stem}.chunks", f"{stem}.{self._writer}.hits"
        lines = "".join([f"{index} {count} {moment}\n" for index in indices]).encode("ascii")
        with self._lock:
            size = _append(hits, lines)
            if size is None:
                # The first hits of the copy, or it is gone; hits without one would be left over for good.
                with contextlib.suppress(FileNotFoundError):
                    if Path(path).exists():
                        size = _append(hits, lines, os.O_CREAT)
                if not Path(path).exists():
                    Path(hits).unlink(missing_ok=True)
            if size is not None and size > _LONGEST_HITS_FILE:
                write_aside(Path(hits), _encode_hits(_sum_hits(_read_hits([Path(hits)]))))

    def hits(self, user_id: str, doc_id: str, copy_id: str) -> dict[int, ChunkHits]:
        """The hits of a copy."""
        return self._hits(user_id, doc_id, copy_id, None)

    def _hits(self, user_id: str, doc_id: str, copy_id: str, listed: Sequence[Path] | None) -> dict[int, ChunkHits]:
        """The hits of a copy, whose files may be listed already."""
        for _ in range(_MOST_ATTEMPTS):
            if listed is None:
                listed = [path for own, path in self._files(user_id, doc_id, "hits") if own == copy_id]
            files = _read_hits(listed)
            if len(files) == len(listed):
                break
            # One is gone: another one that was not there yet may hold its sums.
            listed = None
        return _sum_hits(files)

    def hit_counts(self, user_id: str, wanted: Iterable[tuple[str, str]]) -> dict[str, int]:
        """How many chunks of each copy ever answered: the folder is read once."""
        files = _hits_by_copy(self._folder(user_id))
        return {
            doc_id: len(self._hits(user_id, doc_id, copy_id, files.get((_digest(doc_id), copy_id), ())))
            for doc_id, copy_id in wanted
        }

    def _folder(self, user_id: str) -> Path:
        return user_folder(self.root, user_id) / "chunks"

    def _path(self, user_id: str, doc_id: str, copy_id: str) -> str:
        """The file of a copy."""
        return f"{self._stem(user_id, doc_id, copy_id)}.chunks"

    def _stem(self, user_id: str, doc_id: str, copy_id: str) -> str:
        """What the files of a copy begin with. As text: each hit asks for it, and a Path takes ten times as long."""
        return f"{user_folder(self.root, user_id)}{os.sep}chunks{os.sep}{_digest(doc_id)}.{copy_id}"

    def _files(self, user_id: str, doc_id: str, kind: str) -> list[tuple[str, Path]]:
        """The document's files of a kind, each with the id of its copy; others in the folder are not ours."""
        found = _named_files(self._folder(user_id), kind, _digest(doc_id))
        return [(copy_id, path) for _, copy_id, path in found]


class PendingFile(NamedTuple):
    """A file that is written but not yet in its place."""

    temporary: Path
    path: Path
    replaces: list[Path]
    holds: tuple[str, str, str | None]
    """Title, text, and the id of the copy that the text is of."""

    def finish(self) -> None:
        """Put it in its place; the time that it bears there is that of its copy, so that `times` tells of which."""
        try:
            self._put(self.temporary)
        except FileNotFoundError:
            # The user's folder went meanwhile, with it. Whether that stands, the record tells: see `ChunkStore.settle`.
            self._put(write_temporary(self.path.parent, _encode_text(self.holds[1])))
        for old in self.replaces:
            _remove(old)

    def _put(self, temporary: Path) -> None:
        copy_id = self.holds[2]
        time_ns = None if copy_id is None else copy_time(copy_id)
        if time_ns is not None:
            # Where a file system refuses, a sweep writes the file once more.
            with contextlib.suppress(OSError, OverflowError):
                os.utime(temporary, ns=(time_ns, time_ns))
        put_in_place(temporary, self.path)

    def abandon(self) -> None:
        """Leave nothing of it."""
        _abandon(self.temporary)


class DocumentFolder:
    """Readable copies of saved documents: one text file per document, for people and other programs."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def prepare(self, user_id: str, doc_id: str, title: str, content: str, copy_id: str | None = None) -> PendingFile:
        """Write the text aside.

        That is what can fail (a full disk, a missing permission), so it comes before a save is decided;
        putting it in its place comes after.
        """
        path = self._folder(user_id) / f"{readable_name(title, doc_id)}.md"
        temporary = write_temporary(path.parent, _encode_text(content))
        # The title may have changed since the last save.
        replaces = [old for old in self._files(user_id, doc_id) if old != path]
        return PendingFile(temporary, path, replaces, (title, content, copy_id))

    def delete(self, user_id: str, doc_id: str) -> int:
        """Remove the document's file; returns how many went."""
        files = self._files(user_id, doc_id)
        for path in files:
            _remove(path)
        self.tidy(user_id)
        return len(files)

    def purge(self, doc_id: str) -> int:
        """Remove the document's file of every user; returns how many went."""
        files = _of_everybody(self.root, "documents", f"*-{_digest(doc_id)[:24]}.md")
        for path in files:
            _remove(path)
            _remove_empty(path.parent)
        return len(files)

    def tidy(self, user_id: str | None = None) -> None:
        """Remove what a crash left half written, of a user or of everybody."""
        _tidy(_listed(self.root, f"{_EVERYBODYS}/documents") if user_id is None else [self._folder(user_id)])

    def times(self, user_id: str, doc_ids: Iterable[str]) -> dict[str, int | None]:
        """Those of many documents that have a file, each with the time that the file bears, in nanoseconds.

        `None` where something else lies there, or more than one file.
        """
        folder, found = self._folder(user_id), defaultdict[str, list[Path]](list)
        for path in _listed(folder, "*.md"):
            found[path.stem[-24:]].append(path)
        digests = {doc_id: _digest(doc_id)[:24] for doc_id in doc_ids}
        return {doc_id: _time_of(found[digest]) for doc_id, digest in digests.items() if digest in found}

    def delete_user(self, user_id: str) -> int:
        """Remove all of the user's files; returns how many went."""
        folder = self._folder(user_id)
        files = len(_listed(folder, "*.md"))
        _remove_folder(folder)
        _forget_names()
        return files

    def count(self, user_id: str) -> int:
        """How many files the user has."""
        folder = self._folder(user_id)
        return len(_listed(folder, "*.md"))

    def _folder(self, user_id: str) -> Path:
        return user_folder(self.root, user_id) / "documents"

    def _files(self, user_id: str, doc_id: str) -> list[Path]:
        # The title may have changed since; the hash of the id has not.
        folder = self._folder(user_id)
        return sorted(_listed(folder, f"*-{_digest(doc_id)[:24]}.md"))


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


@lru_cache(maxsize=4096)
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


def _forget_names() -> None:
    """Remember no id whose files were asked for."""
    user_folder.cache_clear()
    _digest.cache_clear()


def write_aside(path: Path, content: bytes) -> None:
    """Write a file beside its place and rename it there: all of it, or nothing."""
    for attempts_left in reversed(range(_MOST_ATTEMPTS)):
        try:
            put_in_place(write_temporary(path.parent, content), path)
        except FileNotFoundError:
            # The user's folder went meanwhile, with what was written aside.
            if not attempts_left:
                raise
        else:
            return


def put_in_place(temporary: Path, path: Path) -> None:
    """Rename a file that was written aside; nothing is left of it when that fails."""
    try:
        try:
            temporary.replace(path)
        except OSError:
            # A folder is the one thing that a file does not take the place of.
            if not path.is_dir():
                raise
            _remove(path)
            temporary.replace(path)
    except BaseException:
        _abandon(temporary)
        raise


_PASSING = ".writing-"
_MOST_ATTEMPTS = 10
_EVERYBODYS = "*-" + "[0-9a-f]" * 24
"""The folders of all users; others below the root are not ours."""


def write_temporary(folder: Path, content: bytes) -> Path:
    """Write a file under a passing name; nothing is left of it when that fails."""
    handle, name = _make_temporary(folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        _abandon(Path(name))
        raise
    return Path(name)


def _make_temporary(folder: Path) -> tuple[int, str]:
    attempts = 0
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            return tempfile.mkstemp(prefix=_PASSING, dir=folder)
        except (FileNotFoundError, FileExistsError):
            # Whoever finds the folder empty removes it, perhaps just before this file is in it, or just after it is
            # found to be there.
            attempts += 1
            if attempts == _MOST_ATTEMPTS:
                raise


def _abandon(temporary: Path) -> None:
    """Leave nothing of a file that was written aside, nor of folders that were made for it alone."""
    temporary.unlink(missing_ok=True)
    _remove_empty(temporary.parent)


def _tidy(folders: Iterable[Path]) -> None:
    """Remove files that a crash left under their passing name: whose text they hold, nobody can tell."""
    for folder in list(folders):
        for path in _listed(folder, f"{_PASSING}*"):
            try:
                if path.lstat().st_mtime_ns < time.time_ns() - CRASHED_AFTER_NS:
                    _remove(path)
            except FileNotFoundError:
                # Another process is as tidy at this very moment.
                continue
            except OSError as error:
                # The next sweep tries again; other users' folders must not wait for this one.
                events.LEFTOVER_KEPT.log(
                    "%s, left over from a crash, can't be removed: %s", path, error, file=str(path)
                )
        _remove_empty(folder)


def _remove(path: Path) -> None:
    """Remove whatever lies there: a link itself, a folder of that very name with all that is in it."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        if path.is_symlink() or not path.is_dir():
            raise
        shutil.rmtree(path)


def _remove_empty(folder: Path) -> None:
    """Remove a user's folder of one kind, and the user's folder, where nothing is in them: they bear a user's name."""
    for each in (folder, folder.parent):
        # Not there, or with files in it, be they somebody else's: all are fine.
        with contextlib.suppress(OSError):
            each.rmdir()


def _remove_folder(folder: Path) -> None:
    """Remove a user's folder of one kind, and the user's folder when nothing else is in it."""
    for attempts_left in reversed(range(_MOST_ATTEMPTS)):
        if not folder.is_dir():
            break
        try:
            shutil.rmtree(folder)
        except OSError as error:
            # Somebody else removes things here, too, or put a file there just now.
            if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST) or not attempts_left:
                raise
    _remove_empty(folder)


def _time_of(paths: Sequence[Path]) -> int | None:
    if len(paths) != 1:
        return None
    try:
        found = paths[0].lstat()
    except OSError:
        return None
    return found.st_mtime_ns if stat.S_ISREG(found.st_mode) else None


def _torn(path: str | Path) -> CorruptDataError:
    name = Path(path).name
    return CorruptDataError(
        f"the chunk file {name} is torn or not ours; refresh the document to save it anew, or delete the file"
    )


_GUARDED = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)


def _open(path: str | Path, flags: int = os.O_RDONLY) -> int | None:
    """Open a file of ours; `None` when it is not there. All that is read or added to is opened here.

    Whatever else lies there is not waited for, as a pipe would have us do, and not followed, as a link would.

    Raises:
        CorruptDataError: It is something else than a file.
        OSError: It can't be opened, as a link can't.
    """
    try:
        file = os.open(path, flags | _GUARDED, 0o600)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if stat.S_ISREG(os.fstat(file).st_mode):
        return file
    os.close(file)
    raise _torn(path)


def _append(path: str | Path, content: bytes, flags: int = 0) -> int | None:
    """Add to the end of a file; its size then, or `None` when it is not there."""
    file = _open(path, os.O_WRONLY | os.O_APPEND | flags)
    if file is None:
        return None
    try:
        os.write(file, content)
        return os.lseek(file, 0, os.SEEK_CUR)
    finally:
        os.close(file)


_CLOSED = "x"
"""What the name of a writer begins with that adds nothing any more; others are hexadecimal."""
_IN_PLACE_OF = "="
"""What the first line begins with of a file that sums up others; their writers follow."""


class _HitsFile(NamedTuple):
    """A file of hits, read."""

    writer: str
    """Who adds to it, as its name says."""
    lines: list[str]

    @property
    def in_place_of(self) -> list[str]:
        """The writers of the files that it sums up: those count no more, should they still be there."""
        first = self.lines[0].split(" ") if self.lines else [""]
        return first[1:] if first[0] == _IN_PLACE_OF else []


def _writer_of(path: Path) -> str:
    return path.name.split(".")[2]


def _read_hits_file(path: Path) -> _HitsFile | None:
    """The file, or `None` when it is not there."""
    opened = _open(path)
    if opened is None:
        return None
    with os.fdopen(opened, encoding="ascii", errors="replace") as file:
        return _HitsFile(_writer_of(path), file.read().splitlines())


def _read_hits(paths: Iterable[Path]) -> list[_HitsFile]:
    """Those of the files that are there."""
    found = []
    for path in paths:
        try:
            file = _read_hits_file(path)
        except (OSError, CorruptDataError) as error:
            # Hits tell how much a copy is used; whatever became of them, the copy is as good as before.
            events.HITS_UNREADABLE.log(
                "the hits of %s can't be read and count for nothing: %r", path.name, error, file=path.name
            )
            file = _HitsFile(_writer_of(path), [])
        if file is not None:
            found.append(file)
    return found


def _sum_hits(files: Sequence[_HitsFile]) -> dict[int, ChunkHits]:
    replaced = {writer for file in files for writer in file.in_place_of}
    total: dict[int, ChunkHits] = {}
    for file in files:
        if file.writer in replaced:
            continue
        counted: dict[int, ChunkHits] = {}
        for line in file.lines:
            parts = line.split(" ")
            # A line that a crash cut short is a hit lost, not a reason to lose the others.
            try:
                index, count, last = int(parts[0]), int(parts[1]), parse_utc(parts[2])
            except (IndexError, ValueError):
                continue
            counted[index] = ChunkHits((counted[index].count if index in counted else 0) + count, last)
        for index, hits in counted.items():
            other = total.get(index)
            total[index] = hits if other is None else ChunkHits(other.count + hits.count, max(other.last, hits.last))
    return total


def _encode_hits(hits: Mapping[int, ChunkHits]) -> bytes:
    return "".join([f"{index} {hit.count} {hit.last.isoformat()}\n" for index, hit in hits.items()]).encode("ascii")


def _hits_by_copy(folder: Path) -> dict[tuple[str, str], list[Path]]:
    """All files of hits, by the hash of the document and the id of the copy."""
    found = defaultdict[tuple[str, str], list[Path]](list)
    for digest, copy_id, path in _named_files(folder, "hits"):
        found[digest, copy_id].append(path)
    return found


def _make_few(paths: Sequence[Path], chunks: Path) -> None:
    """Make one of the files of hits of a copy that were closed long ago, and close those long not added to.

    To close a file is to rename it: its writer, should it still be there, begins another. Whoever had the file open
    at that moment has time enough until it is summed up.
    """
    made: list[Path] = []
    try:
        files = {path: file for path in paths if (file := _read_hits_file(path)) is not None}
        replaced = {writer for file in files.values() for writer in file.in_place_of}
        for path in [path for path, file in files.items() if file.writer in replaced]:
            # A crash left it.
            path.unlink(missing_ok=True)
            del files[path]
        old = [path for path in files if path.lstat().st_mtime_ns < time.time_ns() - CRASHED_AFTER_NS]
        closed = [path for path in old if files[path].writer.startswith(_CLOSED)]
        made.extend(_close(path) for path in old if path not in closed)
        if len(closed) > 1:
            # Under new names they are ours: whoever is as tidy at this moment does not find them, or not old.
            made.extend(map(_close, closed))
            ours = made[-len(closed) :]
            counted = _sum_hits([file for path in ours if (file := _read_hits_file(path)) is not None])
            first = " ".join([_IN_PLACE_OF, *map(_writer_of, ours)])
            made.append(_closed_name(chunks))
            write_aside(made[-1], first.encode("ascii") + b"\n" + _encode_hits(counted))
            for path in ours:
                path.unlink(missing_ok=True)
    except FileNotFoundError:
        # The copy was removed meanwhile, or another process is as tidy at this very moment: what is there still counts.
        pass
    except (OSError, CorruptDataError) as error:
        events.HITS_NOT_SUMMED.log(
            "hits beside %s are not summed up this time: %r", chunks.name, error, file=chunks.name
        )
    finally:
        if not chunks.exists():
            # It was removed meanwhile; hits without it would be left over for good.
            for path in made:
                path.unlink(missing_ok=True)
            # Its folder went with the last copy, perhaps before what is summed up was written into it.
            _remove_empty(chunks.parent)


def _close(path: Path) -> Path:
    """Rename a file of hits so that nobody adds to it any more. It is made young before: nobody finds it old then."""
    renamed = _closed_name(path)
    os.utime(path)
    path.rename(renamed)
    return renamed


def _closed_name(path: Path) -> Path:
    """A new name for a closed file of hits, beside another file of the copy."""
    digest, copy_id, *_ = path.name.split(".")
    return path.with_name(f"{digest}.{copy_id}.{_CLOSED}{uuid.uuid4().hex[:12]}.hits")


def _listed(folder: Path, pattern: str) -> list[Path]:
    """What of a pattern lies in a folder; nothing where the folder is not there, or goes meanwhile."""
    try:
        return list(folder.glob(pattern))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _of_everybody(root: Path, kind: str, pattern: str) -> list[Path]:
    """What of a pattern lies in the folders of a kind, of all users."""
    return [path for folder in _listed(root, f"*/{kind}") for path in _listed(folder, pattern)]


def _named_files(folder: Path, kind: str, digest: str = "*") -> list[tuple[str, str, Path]]:
    """The files of a kind, each with the hash of its document and the id of its copy; others there are not ours."""
    found = []
    for path in _listed(folder, f"{digest}.*.{kind}"):
        own, copy_id, *more = path.name.split(".")
        named = len(more) == 1 or (kind == "hits" and len(more) == 2 and more[0].isalnum())
        if copy_id.isalnum() and named:
            found.append((own, copy_id, path))
    return found


def _header(named: tuple[str, str, Path]) -> bytes | None:
    """The header of a chunk file, as far as it can be read."""
    try:
        opened = _open(named[2])
        if opened is None:
            return None
        with os.fdopen(opened, "rb") as file:
            length, *_ = _LENGTHS.unpack(file.read(len(_MAGIC) + _LENGTHS.size)[len(_MAGIC) :])
            # Read as far as the file goes: a torn one may claim any length.
            return file.read(min(length, os.fstat(opened).st_size))
    except (OSError, struct.error, CorruptDataError):
        return None
