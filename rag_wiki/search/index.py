"""The per-user index: unit rows of all saved chunks, kept in process.

An index is a cache of what the stores hold. When the user's revision moved, the documents that changed since
are read; the others are taken over as they are.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rag_wiki.by_identity import ByIdentity
from rag_wiki.errors import CorruptDataError
from rag_wiki.forks import in_each_process
from rag_wiki.search.calibration import ModelScores, Spread
from rag_wiki.search.rows import DIGITS, FoundRows, Matrix, UnitRows
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkStore
from rag_wiki.storage.records import UserDocRecord
from rag_wiki.turn import Turn

if TYPE_CHECKING:
    from rag_wiki.search.keyword import KeywordIndex

__all__ = [
    "ChunkHit",
    "DocumentHits",
    "IndexCache",
    "IndexedDocument",
    "SearchLimits",
    "UserIndex",
    "copy_name",
    "shared_cache",
    "with_neighbours",
]

_ROUNDING = 1e-6
"""Cosines of float32 unit vectors are good to about this; an equal one must count as equal."""
_MOST_SCORES = 16 * 1024 * 1024
"""Scores of many queries that are computed at once: 64 MiB."""
_MOST_ROWS = 2_048
"""Rows that are compared with the calibration's questions; more would tell no more."""
_MOST_READINGS = 3
"""How often an index is built anew because somebody saves or removes what it is built of."""
_LONGEST_PAUSE = 64
"""Questions between two looks for copies that could not be read."""
_FEW = 64
"""Rows that Python sorts sooner than numpy is called for it."""


class SearchLimits(NamedTuple):
    """What a search is asked for."""

    threshold: float
    """The cosine from which a document is a hit."""
    top_k: int
    """Hits of one document at most."""
    neighbours: int = 0
    """Chunks before and after each hit that come along."""
    slack: float = 0.0
    """How far below the threshold further chunks of such a document may lie."""


class ChunkHit(NamedTuple):
    """A chunk that matched, or one that comes along."""

    position: int
    """Its place in the copy."""
    chunk_index: int
    score: float
    is_neighbour: bool = False
    """It is no hit: it is along because it is beside one, or holds what the wrapped retriever found."""

    def is_beside(self, other: ChunkHit, reach: int) -> bool:
        """Whether it is at most so many chunks before or after another one, without any missing between them."""
        distance = self.position - other.position
        return abs(distance) <= reach and self.chunk_index - other.chunk_index == distance


class IndexedDocument(NamedTuple):
    """A saved document as the index knows it."""

    record: UserDocRecord
    copy: ChunkCopy | None
    """The copy without texts and vectors; `None` when it is lost or unreadable."""
    problem: str | None = None
    """Why the copy can't answer: `copy lost`, `copy unreadable`, `other embedding model`."""
    start: int = 0
    """Its first row in the index."""

    @property
    def stop(self) -> int:
        """The row after its last."""
        return self.start + (len(self.copy.indices) if self.copy is not None and self.problem is None else 0)


class CopyTexts(NamedTuple):
    """What the chunks of a copy say, and what is said of them."""

    texts: tuple[str, ...]
    metadata: tuple[Mapping[str, Any], ...] = ()
    """Of each chunk alone; empty where there is none."""

    @property
    def nbytes(self) -> int:
        """About how much room it takes."""
        values = sum(128 + len(str(value)) for own in self.metadata for value in own.values())
        return sum(len(text) for text in self.texts) * 2 + 64 * len(self.texts) + values


class DocumentHits(NamedTuple):
    """The best chunks of a document, best first."""

    document: IndexedDocument
    hits: tuple[ChunkHit, ...]
    """Then what comes along with these."""
    above_threshold: bool
    """False for a pinned document that is included although nothing of it reached the threshold."""


@dataclass(frozen=True)
class UserIndex:
    """A user's saved documents at one revision. Never changed; a newer one may share its rows."""

    revision: int
    embedding: str
    """The fingerprint of the model whose vectors these are."""
    documents: dict[str, IndexedDocument]
    """In the order of their rows; those without rows anywhere."""
    width: int
    rows: UnitRows
    size: int
    """How many of the rows are its own: the first ones."""
    keywords: KeywordIndex | None = field(default=None, compare=False)
    _unrelated: list[tuple[ModelScores, Spread | None]] = field(default_factory=list, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        """Bytes held for this user."""
        return self.rows.nbytes + (self.keywords.nbytes if self.keywords else 0) + 512 * len(self.documents)

    @cached_property
    def _compared(self) -> tuple[list[IndexedDocument], list[int], list[int]]:
        """The documents with rows in the order of their rows, where each begins, and which are pinned."""
        documents = [document for document in self.documents.values() if document.stop > document.start]
        starts = [document.start for document in documents]
        pinned = [at for at, item in enumerate(documents) if item.record.pinned]
        return documents, starts, pinned

    @cached_property
    def problems(self) -> list[tuple[str, str]]:
        """The documents whose copy can't answer or should not, and why."""
        return [
            (doc_id, document.problem or "stale")
            for doc_id, document in self.documents.items()
            if document.problem is not None or document.record.stale_since is not None
        ]

    def unrelated_to(self, model: ModelScores) -> Spread | None:
        """How the user's chunks score with the questions that a model was calibrated with; `None` without chunks.

        Worked out once for each index, from evenly spread rows.
        """
        if not self.knows_unrelated(model):
            rows = self.rows.whole(slice(0, self.size, -(-self.size // _MOST_ROWS) or 1))
            spread = model.unrelated_to(rows)._replace(size=self.size) if self.size else None
            self._unrelated[:] = [(model, spread)]
        return self._unrelated[0][1]

    def knows_unrelated(self, model: ModelScores) -> bool:
        """Whether `unrelated_to` has been worked out."""
        return bool(self._unrelated) and self._unrelated[0][0] is model

    def searched(self) -> list[IndexedDocument]:
        """The documents whose vectors are compared."""
        return self._compared[0]

    @cached_property
    def searched_ids(self) -> frozenset[str]:
        """Their ids."""
        return frozenset(document.record.doc_id for document in self.searched())

    def pinned(self) -> list[DocumentHits]:
        """The pinned documents, each with its first chunk: what is in every answer when nothing is compared."""
        return [
            DocumentHits(document, (ChunkHit(0, document.copy.indices[0], 0.0),), above_threshold=False)
            for document in self.documents.values()
            if document.record.pinned and document.problem is None and document.copy and document.copy.indices
        ]

    def search(self, query: Matrix, limits: SearchLimits) -> list[DocumentHits]:
        """The best chunks at or above the threshold of each document, by cosine to a unit vector (dim,).

        A PINNED document is always in the result, with its single best chunk when none reached the threshold.
        The result is in the order of the best scores.
        """
        if not self._compared[0] or query.shape[0] != self.width:
            return []
        found = self.rows.at_least(query, self.size, _least(limits))
        return self._found(query, found, limits)

    def search_many(self, queries: Matrix, limits: SearchLimits) -> list[list[DocumentHits]]:
        """`search` for each row of (n, dim), comparing many of them at once."""
        if not self._compared[0] or queries.shape[1] != self.width:
            return [[] for _ in queries]
        results = []
        at_once = max(_MOST_SCORES // self.size, 1)
        for first in range(0, len(queries), at_once):
            some = queries[first : first + at_once]
            for query, found in zip(some, self.rows.at_least_of_all(some, self.size, _least(limits)), strict=True):
                results.append(self._found(query, found, limits))
        return results

    def scores_of(self, query: Matrix, document: IndexedDocument, positions: Sequence[int]) -> list[float]:
        """The cosines of some chunks of a document to a unit vector, by their places in its copy."""
        return [score for score, _ in self._scored(query, [document.start + position for position in positions])]

    def _scored(self, query: Matrix, rows: Sequence[int]) -> list[tuple[float, int]]:
        """The cosine of each of some rows, with the row."""
        return list(zip(map(_as_cosine, self.rows.products(query, rows).tolist()), rows, strict=True))

    def _found(self, query: Matrix, found: FoundRows, limits: SearchLimits) -> list[DocumentHits]:
        """The result of a search, of the rows that may be in it."""
        documents, starts, pinned = self._compared
        top_k = limits.top_k
        if limits.slack and found.rows.size:
            found = self._near_hits(found, limits.threshold - _ROUNDING)
        if not found.rows.size and not pinned:
            return []
        if found.rows.size > _FEW:
            found = found.only(_best_of_each(found, starts, top_k))
        hits: dict[int, list[tuple[float, int]]] = {}
        # By their cosines: of equal rows these are the same in a batch, and in another process.
        distances = [-_as_cosine(product) for product in found.products.tolist()]
        for distance, row in sorted(zip(distances, found.rows.tolist(), strict=True)):
            own = hits.setdefault(bisect_right(starts, row) - 1, [])
            if len(own) < top_k:
                own.append((-distance, row))
        results = [_hits(documents[owner], own, above=True) for owner, own in hits.items()]
        for owner in pinned:
            document = documents[owner]
            if owner not in hits:
                best = self.rows.best(query, document.start, document.stop)
                results.append(_hits(document, self._scored(query, [best]), above=False))
        if limits.neighbours:
            results = [
                with_neighbours(result, limits.neighbours, partial(self.scores_of, query, result.document))
                for result in results
            ]
        # Rows are in the order in which they were saved here; of equals the first id is the same everywhere.
        return sorted(results, key=lambda result: (-result.hits[0].score, result.document.record.doc_id))

    def _near_hits(self, found: FoundRows, least: float) -> FoundRows:
        """Of rows that are close, those of the documents that have a hit among them."""
        owners = np.searchsorted(self._compared[1], found.rows, side="right")
        return found.only(np.isin(owners, owners[found.products >= least]))


def _least(limits: SearchLimits) -> float:
    """The product from which a row may be in a result."""
    return limits.threshold - _ROUNDING - limits.slack


def copy_name(record: UserDocRecord) -> tuple[str, str]:
    """The name of a record's copy: document id, copy id."""
    return record.doc_id, record.copy_id or ""


def with_neighbours(
    result: DocumentHits, reach: int, scores_of: Callable[[Sequence[int]], Sequence[float]]
) -> DocumentHits:
    """A result with the chunks beside its hits, as far as the copy has them in a row."""
    document = result.document
    indices = document.copy.indices if document.copy is not None else ()
    hits = {hit.position for hit in result.hits}
    around = {
        position
        for hit in result.hits
        for position in range(max(hit.position - reach, 0), min(hit.position + reach + 1, len(indices)))
    }
    beside = sorted(around - hits)
    along = [
        ChunkHit(position, indices[position], score, is_neighbour=True)
        for position, score in zip(beside, scores_of(beside), strict=True)
    ]
    along = [hit for hit in along if any(hit.is_beside(other, reach) for other in result.hits)]
    return result._replace(hits=(*result.hits, *along))


def _best_of_each(found: FoundRows, starts: Sequence[int], top_k: int) -> NDArray[np.intp]:
    """Which of the rows are the best `top_k` of each document."""
    owners = np.searchsorted(starts, found.rows, side="right") - 1
    # By document, best first; the rank within a document is the distance from where it begins.
    order = np.lexsort((found.rows, -_as_cosines(found.products), owners))
    owners = owners[order]
    ranks = np.arange(order.size) - np.searchsorted(owners, owners, side="left")
    best: NDArray[np.intp] = np.sort(order[ranks < top_k])
    return best


def _hits(document: IndexedDocument, scored: Sequence[tuple[float, int]], *, above: bool) -> DocumentHits:
    """Rows of a document with their scores, as hits."""
    copy, start = document.copy, document.start
    indices: tuple[int, ...] = copy.indices if copy is not None else ()
    hits = [ChunkHit(row - start, indices[row - start], score) for score, row in scored]
    return DocumentHits(document, tuple(hits), above)


def _as_cosine(product: float) -> float:
    """A product of unit vectors, rid of what rounding added to it."""
    return round(min(max(float(product), -1.0), 1.0), DIGITS)


def _as_cosines(products: NDArray[np.floating]) -> NDArray[np.float64]:
    """`_as_cosine` of many."""
    cosines: NDArray[np.float64] = products.astype(np.float64).clip(-1.0, 1.0).round(DIGITS)
    return cosines


@dataclass
class _Pause:
    """How many questions go by until copies that could not be read are looked for again."""

    length: int
    left: int


class IndexCache:
    """Indexes of many users, bounded in bytes; and texts of copies that answered lately, bounded as well."""

    max_text_bytes = 32 * 1024 * 1024

    def __init__(self) -> None:
        self.max_bytes = 0
        in_each_process(self._make_locks)
        self._pauses: dict[tuple[str, str, int], _Pause] = {}
        """For the indexes that lack a copy: a folder may be away for a moment."""
        self._indexes: OrderedDict[tuple[str, str, int], UserIndex] = OrderedDict()
        self._texts: OrderedDict[tuple[str, str, str], CopyTexts] = OrderedDict()
        self._text_bytes = 0
        self._held: Counter[str] = Counter()
        """How many indexes and texts of each user are here."""
        self._models: dict[tuple[str, int], ModelScores] = {}
        """Replaced and never changed: it is read without the lock."""

    def _make_locks(self) -> None:
        self._lock = threading.Lock()
        self._building = [Turn() for _ in range(64)]

    def get(
        self, store: StateStore, chunks: ChunkStore, user_id: str, revision: int, embedding: str | None, width: int
    ) -> UserIndex:
        """The user's index at a revision (or a newer one), built of what the stores hold when need be.

        `embedding` and `width` are the fingerprint of the model in use; `None` asks for the keyword index instead.
        """
        key = (user_id, embedding or "", width)
        with self._lock:
            cached = self._indexes.get(key)
            if cached is not None and cached.revision == revision and not self._tries_again(key):
                self._indexes.move_to_end(key)
                return cached
            before = cached

        def build(at: int, known: UserIndex | None) -> UserIndex:
            return _build(store, chunks, user_id, at, embedding, width, known)

        with self._building[hash(key) % len(self._building)].take(key):
            with self._lock:
                cached = self._indexes.get(key)
            if cached is None or cached.revision != revision:
                cached = _of_one_moment(build, partial(store.revision, user_id), revision, cached)
                self._keep(key, cached)
            elif cached is before:
                with suppress(Exception):  # what is here answers still
                    cached = build(revision, cached)
                self._keep(key, cached)
        return cached

    def _tries_again(self, key: tuple[str, str, int]) -> bool:
        """Whether copies that could not be read are looked for once more: after 1 question, after 2 more, 4 more."""
        pause = self._pauses.get(key)
        if pause is None:
            return False
        pause.left -= 1
        return pause.left <= 0

    def model_scores(self, model: str, width: int | None) -> ModelScores | None:
        """How a model of a width scores the calibration's pairs, if that is known here; `None` for the latest width."""
        if width is None:
            return next((known for (name, _), known in reversed(self._models.items()) if name == model), None)
        return self._models.get((model, width))

    def keep_model_scores(self, scores: ModelScores) -> None:
        """Keep them here."""
        key = scores.model, scores.questions.shape[1]
        with self._lock:
            self._models = {**{other: self._models[other] for other in self._models if other != key}, key: scores}

    def peek(self, user_id: str, revision: int, embedding: str | None, width: int) -> UserIndex | None:
        """The user's index at a revision, if it is here."""
        with self._lock:
            cached = self._indexes.get((user_id, embedding or "", width))
            pause = self._pauses.get((user_id, embedding or "", width))
        if cached is None or cached.revision != revision or (pause is not None and pause.left <= 1):
            return None
        return cached

    def newest(self, user_id: str, embedding: str, width: int) -> UserIndex | None:
        """The user's index that is here, if there is one, at whatever revision."""
        with self._lock:
            return self._indexes.get((user_id, embedding, width))

    def has_texts(self, user_id: str, doc_id: str, copy_id: str) -> bool:
        """Whether the texts of a copy are here."""
        return (user_id, doc_id, copy_id) in self._texts

    def texts(
        self, chunks: ChunkStore, user_id: str, wanted: Sequence[tuple[str, str]]
    ) -> dict[str, CopyTexts | CorruptDataError]:
        """The texts of copies' chunks, by document id, for (document id, copy id); those not here are read together.

        A copy that can't be read back comes as its error; one that is gone is not in it.
        """
        found: dict[str, CopyTexts | CorruptDataError] = {}
        with self._lock:
            for doc_id, copy_id in wanted:
                texts = self._texts.get((user_id, doc_id, copy_id))
                if texts is not None:
                    self._texts.move_to_end((user_id, doc_id, copy_id))
                    found[doc_id] = texts
        missing = {doc_id: copy_id for doc_id, copy_id in wanted if doc_id not in found}
        for doc_id, copy in chunks.load_copies(user_id, missing.items(), texts=True, vectors=False) if missing else ():
            if isinstance(copy, CorruptDataError):
                found[doc_id] = copy
            elif copy is not None and copy.texts is not None:
                texts = found[doc_id] = CopyTexts(copy.texts, copy.chunk_metadata)
                self._keep_texts((user_id, doc_id, missing[doc_id]), texts)
        return found

    def _keep_texts(self, key: tuple[str, str, str], texts: CopyTexts) -> None:
        with self._lock:
            if key not in self._texts:
                self._texts[key] = texts
                self._text_bytes += texts.nbytes
                self._held[key[0]] += 1
            while self._text_bytes > self.max_text_bytes and len(self._texts) > 1:
                self._drop_texts(next(iter(self._texts)))

    def forget(self, user_id: str) -> None:
        """Drop everything about a user, and the words of texts, which may be the user's."""
        from rag_wiki.search.keyword import forget_words

        forget_words()
        self.let_go(user_id)

    def let_go(self, user_id: str) -> None:
        """Drop the indexes and texts of a user; no work where there are none."""
        if user_id not in self._held:
            return
        with self._lock:
            for key in [key for key in self._indexes if key[0] == user_id]:
                self._drop(key)
            for text_key in [text_key for text_key in self._texts if text_key[0] == user_id]:
                self._drop_texts(text_key)

    def nbytes(self, user_id: str | None = None) -> int:
        """Bytes held in indexes, of all users or one."""
        with self._lock:
            return sum(index.nbytes for key, index in self._indexes.items() if user_id in (None, key[0]))

    def _keep(self, key: tuple[str, str, int], index: UserIndex) -> None:
        with self._lock:
            self._held[key[0]] += key not in self._indexes
            self._indexes[key] = index
            self._indexes.move_to_end(key)
            self._note_pause(key, index)
            held = sum(kept.nbytes for kept in self._indexes.values())
            while held > self.max_bytes and self._indexes:
                held -= self._drop(next(iter(self._indexes))).nbytes

    def _note_pause(self, key: tuple[str, str, int], index: UserIndex) -> None:
        before = self._pauses.pop(key, None)
        if any(item.copy is None for item in index.documents.values()):
            length = 1 if before is None else min(before.length * 2, _LONGEST_PAUSE)
            self._pauses[key] = _Pause(length, length)

    def _drop(self, key: tuple[str, str, int]) -> UserIndex:
        self._pauses.pop(key, None)
        self._count_out(key[0])
        return self._indexes.pop(key)

    def _drop_texts(self, key: tuple[str, str, str]) -> None:
        self._count_out(key[0])
        self._text_bytes -= self._texts.pop(key).nbytes

    def _count_out(self, user_id: str) -> None:
        self._held[user_id] -= 1
        if not self._held[user_id]:
            del self._held[user_id]


class _Caches:
    """The caches of this process, one for each chunk store."""

    def __init__(self) -> None:
        self._by_store: ByIdentity[ChunkStore, IndexCache] = ByIdentity()
        in_each_process(self._make_lock)

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def of(self, chunks: ChunkStore, max_bytes: int) -> IndexCache:
        with self._lock:
            cache = self._by_store.get_or_make(chunks, IndexCache)
            cache.max_bytes = max(cache.max_bytes, max_bytes)
            return cache


_caches = _Caches()


def shared_cache(chunks: ChunkStore, max_bytes: int) -> IndexCache:
    """The one cache of all retrievers over a chunk store: a retriever made for one request finds it warm.

    The largest `max_bytes` that any of them asks for counts.
    """
    return _caches.of(chunks, max_bytes)


def _of_one_moment(
    build: Callable[[int, UserIndex | None], UserIndex],
    revision_now: Callable[[], int],
    revision: int,
    before: UserIndex | None,
) -> UserIndex:
    """Records and copies are read one after the other: a copy that goes in between is not lost, but replaced."""
    index = build(revision, before)
    for _ in range(_MOST_READINGS):
        if all(item.copy is not None for item in index.documents.values()):
            break
        now = revision_now()
        if now == index.revision:
            break
        index = build(now, index)
    return index


def _build(
    store: StateStore,
    chunks: ChunkStore,
    user_id: str,
    revision: int,
    embedding: str | None,
    width: int,
    before: UserIndex | None,
) -> UserIndex:
    if embedding is None:
        return _build_keywords(chunks, user_id, revision, *store.list_saved(user_id))
    known = before.documents if before is not None else {}
    kept: dict[str, IndexedDocument] = {}
    new: list[UserDocRecord] = []
    records: Sequence[UserDocRecord]
    unreadable: Sequence[UserDocRecord] = ()
    changes = None
    if before is not None and all(item.copy is not None for item in known.values()):
        changes = store.saved_since(user_id, before.revision)
    if changes is None:
        # Also where something could not be read before, be it the record or the copy: it is tried again.
        records, unreadable = store.list_saved(user_id)
    else:
        records, moved = changes.saved, {*changes.gone, *(record.doc_id for record in changes.saved)}
        kept = {doc_id: item for doc_id, item in known.items() if doc_id not in moved}
    for record in records:
        old = known.get(record.doc_id)
        if old is not None and old.copy is not None and old.record.copy_id == record.copy_id:
            kept[record.doc_id] = IndexedDocument(record, old.copy, old.problem, old.start)
        else:
            new.append(record)
    loaded = _load(chunks, user_id, new, embedding, width)
    loaded += [(_without_copy(record), None) for record in unreadable]
    return _assemble(revision, embedding, width, before, kept, loaded)


def _without_copy(record: UserDocRecord) -> IndexedDocument:
    """A document that can't answer because its copy, or the record that names it, can't be read back."""
    return IndexedDocument(record, None, "copy unreadable")


def _load(
    chunks: ChunkStore, user_id: str, records: Sequence[UserDocRecord], embedding: str, width: int
) -> list[tuple[IndexedDocument, Matrix | None]]:
    by_id = {record.doc_id: record for record in records}
    wanted = [(record.doc_id, record.copy_id) for record in records if record.copy_id is not None]
    loaded: list[tuple[IndexedDocument, Matrix | None]] = [
        (IndexedDocument(record, None, "copy lost"), None) for record in records if record.copy_id is None
    ]
    for doc_id, copy in chunks.load_copies(user_id, wanted):
        record = by_id[doc_id]
        if copy is None or isinstance(copy, CorruptDataError):
            lost = IndexedDocument(record, None, "copy lost")
            loaded.append((lost if copy is None else _without_copy(record), None))
            continue
        light = ChunkCopy(copy.copy_id, copy.indices, None, None, copy.sections, copy.embedding, copy.metadata)
        if copy.vectors is None or (copy.embedding, copy.vectors.shape[1]) != (embedding, width):
            loaded.append((IndexedDocument(record, light, "other embedding model"), None))
        else:
            loaded.append((IndexedDocument(record, light), copy.vectors))
    return loaded


def _assemble(
    revision: int,
    embedding: str,
    width: int,
    before: UserIndex | None,
    kept: dict[str, IndexedDocument],
    loaded: Sequence[tuple[IndexedDocument, Matrix | None]],
) -> UserIndex:
    """Put rows together: appended where nothing went, copied where something did."""
    documents = {doc_id: document for doc_id, document in kept.items() if document.stop == document.start}
    old_rows = sorted((item for item in kept.values() if item.stop > item.start), key=lambda item: item.start)
    fitting = [(document, vectors) for document, vectors in loaded if vectors is not None]
    documents |= {document.record.doc_id: document for document, vectors in loaded if vectors is None}
    size = sum(item.stop - item.start for item in old_rows)
    total = size + sum(len(vectors) for _, vectors in fitting)
    whole = before is not None and size == before.size
    if before is not None and whole and before.rows.used == size and total <= before.rows.capacity:
        rows = before.rows
    else:
        # Room for a quarter more, so that a run of saves copies the rows a few times rather than each time;
        # a first build has nothing to foresee.
        capacity = total if before is None else total + total // 4
        rows = UnitRows(capacity, width)
    at = 0
    for item in old_rows:
        count = item.stop - item.start
        if before is not None and rows is not before.rows:
            rows.take(at, before.rows, item.start, item.stop)
        else:
            at = item.start
        documents[item.record.doc_id] = IndexedDocument(item.record, item.copy, None, at)
        at += count
    rows.used = rows.write(at, [vectors for _, vectors in fitting])
    for document, vectors in fitting:
        documents[document.record.doc_id] = IndexedDocument(document.record, document.copy, None, at)
        at += len(vectors)
    return UserIndex(revision, embedding, documents, width, rows, at)


def _build_keywords(
    chunks: ChunkStore,
    user_id: str,
    revision: int,
    records: Sequence[UserDocRecord],
    unreadable: Sequence[UserDocRecord],
) -> UserIndex:
    # Its tables of scripts take some milliseconds to make, and most programs never match by words.
    from rag_wiki.search.keyword import KeywordIndex

    documents: dict[str, IndexedDocument] = {
        record.doc_id: IndexedDocument(record, None, "copy lost") for record in records
    }
    texts: dict[str, tuple[str, ...]] = {}
    wanted = [(record.doc_id, record.copy_id) for record in records if record.copy_id is not None]
    for doc_id, copy in chunks.load_copies(user_id, wanted, texts=True, vectors=False):
        record = documents[doc_id].record
        if isinstance(copy, ChunkCopy):
            texts[doc_id] = copy.texts or ()
            light = ChunkCopy(copy.copy_id, copy.indices, None, None, copy.sections, copy.embedding, copy.metadata)
            documents[doc_id] = IndexedDocument(record, light)
        elif copy is not None:
            documents[doc_id] = _without_copy(record)
    documents |= {record.doc_id: _without_copy(record) for record in unreadable}
    return UserIndex(revision, "", documents, 0, UnitRows(0, 0), 0, KeywordIndex(texts))
