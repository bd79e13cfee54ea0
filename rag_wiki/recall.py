"""What happens between a query and its answer, apart from asking the wrapped retriever.

`search_copies` gathers what the saved copies say; `conclude` decides (by the pure functions of `answer`
and `lifecycle.query`), applies it in one atomic change, and tells of it. Both are procedures, so the
blocking and the awaiting retriever share every line of them (see `rag_wiki.steps`).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableConfig

from rag_wiki import events
from rag_wiki.answer import (
    Answer,
    ChunkScores,
    CopyFindings,
    CopyVerdict,
    compose,
    describe_sources,
    unavailable_copy,
)
from rag_wiki.clock import Clock
from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import ConfigurationError, CorruptDataError, EmbeddingUnavailableError, RagWikiError
from rag_wiki.forks import in_each_process
from rag_wiki.lifecycle.fetch_counter import SuggestionEvent
from rag_wiki.lifecycle.query import QueryOutcome, QueryRules, account_for_query
from rag_wiki.observing import CallTrace, observations_of
from rag_wiki.pieces import CachedDocument, GlobalDocument, read_global
from rag_wiki.relevance import Relevance
from rag_wiki.saving import SaveOrder, Saver
from rag_wiki.search.calibration import Calibration, Focus, ModelScores
from rag_wiki.search.calibration_pairs import PAIRS
from rag_wiki.search.embedding import FoundEmbeddings, QueryVector, check_query_vector, find_embeddings, fingerprint
from rag_wiki.search.index import (
    ChunkHit,
    DocumentHits,
    IndexedDocument,
    UserIndex,
    copy_name,
    shared_cache,
    with_neighbours,
)
from rag_wiki.steps import Convoy, Procedure, Step, blocking, call_user
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.storage.codec import is_same_user
from rag_wiki.storage.records import DocumentState, QueryStart, UserChange, UserDocRecord, UserView
from rag_wiki.texts import repeats
from rag_wiki.together import Together
from rag_wiki.transparency.latest import LatestProvenance
from rag_wiki.transparency.provenance import ProvenanceBlock, WithheldCopy
from rag_wiki.verdicts import CopyJudge

if TYPE_CHECKING:
    from rag_wiki.by_vector import Asked, ByVectorRetriever

__all__ = ["AccessCheck", "CacheFindings", "Call", "Recall", "SuggestionCallback", "embed_query"]

AccessCheck: TypeAlias = Callable[[str, str], bool | Awaitable[bool]]
SuggestionCallback: TypeAlias = Callable[[SuggestionEvent], Any]

_MOST_IDLE = 200
"""Idle documents that one query settles at most; the next query takes the next ones."""
_MOST_WARNINGS = 1_000
"""Warnings that are remembered as told; the one told longest ago is forgotten first."""
_OTHER_MODEL = "other embedding model"
_REMEDIES = {
    _OTHER_MODEL: "reindex() embeds them anew",
    "copy lost": "reindex() or refresh() makes them anew",
    "copy unreadable": "reindex() or refresh() makes them anew",
}
_SOON_BYTES = 32 * 1024 * 1024
"""A product with so many bytes takes about a millisecond: a switch to another thread and back is no sooner done."""
_BUSY_MS = 15.0
"""A call that works for longer does so in native code."""
_LET_GO = "it did not answer for too many searches in a row"


@dataclass
class Call:
    """One call: whose, what, how much, and what goes to the wrapped retriever."""

    query: str
    user_id: str
    k: int | None
    config: RunnableConfig
    arguments: dict[str, Any]
    now: datetime
    latest: LatestProvenance
    """Where its provenance is told."""
    together: Together | None = None
    """The questions that the user asks at the same time."""
    timings: dict[str, float] = field(default_factory=dict)
    provenance: ProvenanceBlock | None = None
    """Filled in when the call is done."""
    vector: QueryVector | None = None
    """The query's, once it was embedded."""
    failure: Exception | None = None
    """Why it could not be embedded."""
    by_vector: ByVectorRetriever | None = None
    """The wrapped retriever, where it can be asked by vector."""
    asked: Asked | None = None
    """What it was asked by vector, and the scores that it gave."""
    gauged: bool = False
    """Whether it was asked what the model's cosines mean."""
    scores: ModelScores | None = None
    """What they mean."""
    findings: CacheFindings = field(default_factory=lambda: CacheFindings())
    is_hit: bool = False
    """Whether a saved copy answered; known when the call is done."""
    trace: CallTrace | None = None
    """Where it is traced, its trace."""

    def timed(self, stage: str) -> AbstractContextManager[None]:
        """Note how long a stage takes, in milliseconds."""
        if self.trace is not None:
            return self.trace.stage(stage, self.timings)
        return _Stage(self.timings, stage)


class _Stage:
    """A `with` block whose time is noted. Not a generator: six of them a call would cost more than they tell."""

    __slots__ = ("_name", "_start", "_timings")

    def __init__(self, timings: dict[str, float], name: str) -> None:
        self._timings, self._name = timings, name

    def __enter__(self) -> None:
        self._start = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._timings[self._name] = (time.perf_counter() - self._start) * 1000


@dataclass
class CacheFindings(CopyFindings):
    """What is known of a call besides the wrapped retriever's answer."""

    start: QueryStart | None = None
    """`None` when the state store did not answer."""
    index: UserIndex | None = None
    mode: str = "none"
    threshold: float | None = None
    """The cosine from which a chunk was a hit; `None` when none was compared."""
    tells: bool = True
    """Whether a score says that a copy answers: `"auto"` knows of some models that theirs don't."""
    degraded: list[str] = field(default_factory=list)

    @property
    def answered(self) -> bool:
        """Whether a saved copy has an answer; a pinned document that is only along has none."""
        return self.tells and any(item.found.above_threshold for item in self.cached)

    def withhold(self, document: IndexedDocument, reason: str) -> None:
        """Keep back a copy that would have answered."""
        self.unavailable[document.record.doc_id] = unavailable_copy(document, reason)
        self.wanted.add(document.record.doc_id)


class Pace:
    """How long something lately took, and so whether threads are worth their switches.

    Args:
        quick_ms: Milliseconds that are too few for it.
    """

    _slow_ms = 50.0
    _remembered = 16

    def __init__(self, quick_ms: float) -> None:
        self._quick_ms = quick_ms
        self._latest: deque[float] = deque(maxlen=self._remembered)

    def note(self, milliseconds: float) -> None:
        """Note what a call took."""
        self._latest.append(milliseconds)

    @property
    def is_quick(self) -> bool:
        """Whether the latest calls took no time worth speaking of; False before there were some.

        Three in four were, and none took long: among busy threads a call that waits for nothing but its turn is
        held up now and then.
        """
        latest = sorted(self._latest.copy())
        many = len(latest) == self._remembered
        return many and latest[self._remembered * 3 // 4] < self._quick_ms and latest[-1] < self._slow_ms


class Recall:
    """The personal layer of a retriever: its stores, its rules, and what it keeps in this process.

    A retriever and its copies for other users share one.
    """

    def __init__(
        self,
        store: StateStore,
        chunks: ChunkStore,
        config: RagWikiRetrieverConfig,
        clock: Clock,
        *,
        saver: Saver,
        embedding_model: Embeddings | None,
        global_retriever: object,
        on_suggestion: SuggestionCallback | None,
        access_check: AccessCheck | None,
    ) -> None:
        self.store = store
        self.chunks = chunks
        self.config = config
        self.clock = clock
        self.saver = saver
        self.cache = shared_cache(chunks, config.index_max_bytes)
        self._rules = QueryRules(config.fetch_threshold, config.reset_threshold, config.decay.max_cache_miss_streak)
        self._found = FoundEmbeddings(embedding_model)
        self._global_retriever = global_retriever
        self._on_suggestion = on_suggestion
        self._access_check = access_check
        self._judge = CopyJudge(store, chunks, self.cache, config)
        self.observations = observations_of(store)
        self.observations.holds(self.cache)
        self.relevance = Relevance(store, self.cache, config, global_retriever, clock)
        # Searching beside the wrapped retriever costs two switches of threads, some 0.1 ms: more than there is to
        # gain beside one that always answers (out of memory, say) in no time.
        self.global_pace = Pace(quick_ms=0.5)
        self.call_pace = Pace(quick_ms=2.0)
        self._warned: OrderedDict[str, None] = OrderedDict()
        in_each_process(self._make_lock)
        self._beginning = Convoy(self._begin_all)
        self._applying = Convoy(self._apply_all)
        self._saving: set[tuple[str, str]] = set()
        """Documents that are being saved by themselves."""

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Recall:
        # Locks and caches can't be copied and need not be: a copy of the retriever shares them.
        return self

    @property
    def embeddings(self) -> FoundEmbeddings:
        """The model given, else the one found in the wrapped retriever; looked for until there is one."""
        if self._found.model is None:
            self._found = find_embeddings(self._global_retriever)
        return self._found

    def model_name(self, model: Embeddings) -> str:
        """The fingerprint of a model."""
        return fingerprint(model, self.config.embedding_name)

    def needed_embeddings(self, what: str) -> Embeddings:
        """The embedding model, or an error that says how to give one."""
        found = self.embeddings
        if found.model is None:
            msg = (
                f"{what} needs an embedding model, and {found.reason}. "
                "Pass one: RagWikiRetriever(..., embedding_model=...). Nothing was changed."
            )
            raise EmbeddingUnavailableError(msg)
        return found.model

    def _is_news(self, key: str) -> bool:
        """Whether it is to be told: what was told before is not."""
        with self._lock:
            is_new = key not in self._warned
            self._warned[key] = None
            self._warned.move_to_end(key)
            if len(self._warned) > _MOST_WARNINGS:
                self._warned.popitem(last=False)
        return is_new

    def note_pace(self, call: Call, worked_ms: float) -> None:
        """Note how long a call waited: those that wait for nothing are no sooner done by many threads.

        One interpreter runs them in turn. What works for long, though, is likely to be a model or a library that lets
        others run meanwhile.
        """
        total = call.timings["total"]
        self.call_pace.note(total - worked_ms if total < _BUSY_MS else total)

    def begin(self, call: Call) -> Procedure[None]:
        """Read what the store knows of the user. Never raises: what fails is said in the call's findings.

        Before anybody is asked: what is removed or forgotten while the wrapped retriever searches must be found to be.
        """
        try:
            with call.timed("begin"):
                call.findings.start = yield self._begin_step(call.user_id)
        except Exception as error:  # a personal layer that is down must not take retrieval down with it
            self._degrade(call.findings.degraded, "the state store did not answer, nothing is counted", error)

    def search_copies(self, call: Call) -> Procedure[CacheFindings]:
        """Search the user's saved copies. Never raises: what fails is said in `degraded`."""
        found = call.findings
        try:
            if found.start is not None and found.start.saved:
                yield from self._search_index(call, found, found.start)
            elif found.start is not None:
                self.cache.let_go(call.user_id)
        except Exception as error:  # as above
            self._degrade(found.degraded, "saved copies could not be searched", error)
            found.cached, found.searched, found.matched, found.mode = [], None, frozenset(), "none"
        return found

    def _begin_step(self, user_id: str) -> Step[QueryStart]:
        """Read what a query needs; where calls are awaited, once for all of the user that ask at the same time."""
        return Step(
            lambda: self._begin(user_id), (lambda: self._beginning.ask(user_id, None)) if self.store.waits else None
        )

    def _begin(self, user_id: str) -> QueryStart:
        return self.store.begin_query(user_id, self.config.reset_threshold, self.config.decay.max_cache_miss_streak)

    def _begin_all(self, user_id: Hashable, items: Sequence[None]) -> list[QueryStart]:
        return [self._begin(str(user_id))] * len(items)

    def prepare(self, call: Call) -> Procedure[None]:
        """Embed the query at once where the wrapped retriever can be asked by its vector."""
        model = self.embeddings.model
        # What a call tells the wrapped retriever (a filter, say) is for that one's own method.
        call.by_vector = None if call.arguments else self.relevance.by_vector(model)
        if call.by_vector is not None and model is not None:
            try:
                vector = yield from self._embed(call, model)
            except Exception as error:  # the search in the saved copies will say so
                call.failure = error
                return
            if vector.has_direction:
                call.asked = call.by_vector.asked(vector)

    def _embed(self, call: Call, model: Embeddings) -> Procedure[QueryVector]:
        """The query's vector; embedded once."""
        if call.failure is not None:
            raise call.failure
        if call.vector is None:
            with call.timed("embed"):
                if call.together is None:
                    call.vector = check_query_vector((yield embed_query(model, call.query)))
                else:
                    call.vector = yield call.together.embed(model, call.query)
        return call.vector

    def _scores(self, call: Call, degraded: list[str]) -> Procedure[ModelScores | None]:
        """What is known of the model; `None` where it can't be had. Asked for once a call."""
        model = self.embeddings.model
        if model is None or call.vector is None:
            return None
        if not call.gauged:
            call.gauged = True
            name, width = self.model_name(model), call.vector.unit.shape[0]
            call.scores = self.relevance.known(name, width)
            if call.scores is None:
                try:
                    with call.timed("calibrate"):
                        call.scores = yield self.relevance.gauge.scores(model, name, width)
                except Exception as error:  # somebody else's model may raise anything
                    self._degrade(degraded, "the embedding model could not be calibrated", error)
            if call.scores is not None and not call.scores.is_telling and self._is_news(f"not telling: {name}"):
                events.MODEL_NOT_TELLING.log(
                    "the embedding model %s scores unrelated texts (%.2f) about as high as matching ones (%.2f): "
                    "similarity_threshold='auto' can't tell what answers, context='focused' leaves nothing out",
                    name,
                    call.scores.unrelated.mean,
                    call.scores.matching.mean,
                    model=name,
                )
        return call.scores

    def _search_index(self, call: Call, found: CacheFindings, start: QueryStart) -> Procedure[None]:
        model = self.embeddings.model
        name = vector = scores = None
        if model is not None:
            try:
                vector = (yield from self._embed(call, model)).unit
            except Exception as error:  # somebody else's model may raise anything
                self._degrade(
                    found.degraded,
                    "the query could not be embedded, saved copies were not searched",
                    error,
                    quoted=not repeats(str(error), call.query),
                )
                return
            name = self.model_name(model)
            if self.relevance.needs_scores:
                scores = yield from self._scores(call, found.degraded)
                automatic = self.config.similarity_threshold == "auto"
                found.tells = not automatic or scores is None or scores.is_telling
        for attempt in range(_MOST_ATTEMPTS):
            hits = yield from self._find(call, found, start, name, vector, scores)
            allowed = yield from self._check_access(call, found, hits)
            with call.timed("read"):
                waits = any(self._must_read(call, hit.document.record) for hit in allowed)
                last = attempt == _MOST_ATTEMPTS - 1
                cached = yield blocking(self._read_texts, call, found, allowed, last, waits=waits)
            if cached is not None:
                found.cached = cached
                return
            # Somebody replaced or removed a copy in between: what is there now is searched.
            start = yield self._begin_step(call.user_id)

    def _find(
        self,
        call: Call,
        found: CacheFindings,
        start: QueryStart,
        name: str | None,
        vector: Any,
        scores: ModelScores | None,
    ) -> Procedure[list[DocumentHits]]:
        """The documents that match, by what the store held at a revision."""
        with call.timed("search"):
            at_hand = None if vector is None else self.cache.peek(call.user_id, start.revision, name, vector.shape[0])
            if at_hand is not None and scores is not None and not at_hand.knows_unrelated(scores):
                at_hand = None
            if at_hand is not None and call.together is not None and self.relevance.can_judge(scores):
                yield call.together.compare(at_hand, self.relevance.limits(at_hand, scores))
            waits = at_hand is None or (call.together is None and at_hand.nbytes > _SOON_BYTES)
            hits: list[DocumentHits] = yield blocking(
                self._match, call, found, start, name, vector, scores, waits=waits
            )
            return hits

    def _must_read(self, call: Call, record: UserDocRecord) -> bool:
        """Whether what a saved document answers with is yet to be read."""
        return record.always_full_doc or not self.cache.has_texts(call.user_id, *copy_name(record))

    def _match(
        self,
        call: Call,
        found: CacheFindings,
        start: QueryStart,
        name: str | None,
        vector: Any,
        scores: ModelScores | None,
    ) -> list[DocumentHits]:
        width = 0 if vector is None else vector.shape[0]
        index = self.cache.get(self.store, self.chunks, call.user_id, start.revision, name, width)
        found.index = index
        found.unavailable = {doc_id: unavailable_copy(index.documents[doc_id], why) for doc_id, why in index.problems}
        found.wanted = {doc_id for doc_id in found.unavailable if index.documents[doc_id].record.pinned}
        self._tell_problems(call, found, name)
        if vector is None:
            found.mode = "keyword"
            hits = _keyword_hits(index, call.query, self.config)
        elif call.vector is None or not call.vector.has_direction or not self.relevance.can_judge(scores):
            # A query without a direction, or a model of which nothing is known: nothing was compared, nothing missed.
            hits = index.pinned()
        else:
            found.mode = "semantic" if index.size else "none"
            found.searched = index.searched_ids if index.size else None
            limits = self.relevance.limits(index, scores)
            found.threshold = limits.threshold if index.size else None
            if call.together is None:
                hits = index.search(vector, limits)
            else:
                hits = call.together.search(index, call.query, limits)
        # A copy that matched and is withheld has not missed.
        found.matched = frozenset(hit.document.record.doc_id for hit in hits if hit.above_threshold)
        return [hit for hit in hits if hit.document.record.doc_id not in found.unavailable]

    def _tell_problems(self, call: Call, found: CacheFindings, model_name: str | None) -> None:
        """Say once in the log, and in this call's provenance, which copies can't answer and what helps."""
        if not found.unavailable:
            return
        for reason, remedy in _REMEDIES.items():
            affected = sorted(doc_id for doc_id, kept in found.unavailable.items() if kept.reason == reason)
            if affected:
                copies = "1 saved copy" if len(affected) == 1 else f"{len(affected)} saved copies"
                found.degraded.append(f"{copies} can't answer ({reason}); {remedy}")
                if self._is_news(f"{reason}:{call.user_id}:{model_name}"):
                    events.COPY_UNAVAILABLE.log(
                        "%s of user %r can't answer (%s; the model is %s); %s: %s",
                        copies,
                        call.user_id,
                        reason,
                        model_name,
                        remedy,
                        affected[:10],
                        user_id=call.user_id,
                        reason=reason,
                        copies=len(affected),
                    )

    def _check_access(
        self, call: Call, found: CacheFindings, hits: Sequence[DocumentHits]
    ) -> Procedure[list[DocumentHits]]:
        if self._access_check is None:
            return list(hits)
        allowed = []
        for hit in hits:
            doc_id = hit.document.record.doc_id
            reason = "access denied"
            try:
                if (yield call_user(self._access_check, call.user_id, doc_id, name="access_check")):
                    allowed.append(hit)
                    continue
            except ConfigurationError:
                raise
            except Exception as error:  # when nobody can say yes, the answer is no
                self._degrade(found.degraded, f"access to document {doc_id!r} could not be checked", error)
                reason = "access could not be checked"
            found.withhold(hit.document, reason)
        return allowed

    def _read_texts(
        self, call: Call, found: CacheFindings, hits: Sequence[DocumentHits], last: bool
    ) -> list[CachedDocument] | None:
        """What the documents answer with; `None` when the copy of one gave way to another meanwhile."""
        if not hits:
            return []
        cached = []
        full = {hit.document.record.doc_id: self._full_text(call, hit.document.record) for hit in hits}
        wanted = [copy_name(hit.document.record) for hit in hits if full[hit.document.record.doc_id] is None]
        texts = self.cache.texts(self.chunks, call.user_id, wanted)
        for hit in hits:
            doc_id = hit.document.record.doc_id
            whole, parts = full[doc_id], texts.get(doc_id)
            if whole is not None:
                cached.append(CachedDocument(hit, (whole,), full_document=True))
            elif parts is None:
                if self._names_copy(hit.document.record):
                    found.withhold(hit.document, "copy lost")
                elif not last:
                    return None
            elif isinstance(parts, CorruptDataError):
                events.COPY_UNREADABLE.log(
                    "the saved copy of document %r of user %r is unreadable",
                    doc_id,
                    call.user_id,
                    user_id=call.user_id,
                    doc_id=doc_id,
                )
                found.withhold(hit.document, "copy unreadable")
            else:
                reach = self.config.expand_neighbours
                cached.append(CachedDocument(hit, parts.texts, reach=reach, own=parts.metadata))
        return cached

    def _names_copy(self, before: UserDocRecord) -> bool:
        """Whether a document's record is still about the same copy."""
        now = self.store.get(before.user_id, before.doc_id)
        return now is not None and now.copy_id == before.copy_id

    def _full_text(self, call: Call, record: UserDocRecord) -> str | None:
        """The whole text of a document that answers with all of it."""
        stored = self.store.get(call.user_id, record.doc_id) if record.always_full_doc else None
        return None if stored is None else stored.full_content

    # -- decide and apply ------------------------------------------------------------------------

    def conclude(
        self, call: Call, documents: Sequence[Document] | None, cache: CacheFindings, start: float
    ) -> Procedure[tuple[list[Document], ProvenanceBlock]]:
        """Decide what is served and counted, apply it, and tell of it.

        `documents` are the wrapped retriever's; `None` when it was not asked.
        """
        focus, cosines = None, None
        if self.config.context == "focused" and cache.mode != "keyword":
            focus, cosines = yield from self._focus(call, cache, documents)
        found = None if documents is None else _read_all(documents, self.config, cosines)
        if found and None in [item.doc_id for item in found] and self._is_news("no id"):
            events.DOCUMENT_UNIDENTIFIED.log(_NO_ID_WARNING, self.config.document_id or "doc_id, source or doc_path")
        with call.timed("apply"):
            verdicts: Mapping[tuple[str, str], CopyVerdict] = {}
            if found and cache.index is not None:
                verdicts = yield from self._judge_copies(call, found, cache.index, cache.degraded)
            answer = compose(
                found,
                cache,
                verdicts,
                only_found=bool(call.arguments),
                k=call.k,
                query=call.query,
                focus=focus,
                scores_of=_chunk_scores(call, cache),
                began_at=0 if cache.start is None else cache.start.revision,
            )
            call.is_hit = cache.tells and bool(answer.findings.answered)
            outcome: QueryOutcome = yield self._apply_step(call, answer, cache)
        if outcome.suggestions and self.embeddings.model is None and self._is_news("no model"):
            events.MODEL_MISSING.log(
                "saving was suggested, and %s: pass embedding_model to RagWikiRetriever, or saving will fail",
                self.embeddings.reason,
            )
        self._watch_threshold(answer, cache)
        if focus is not None and found:
            self._watch_focus(found, focus)
        yield from self._announce(call, outcome, cache, answer.findings.fetched)
        call.timings["total"] = (time.perf_counter() - start) * 1000
        provenance = ProvenanceBlock(
            sources=tuple(describe_sources(answer, outcome.records)),
            suggestions=tuple(outcome.suggestions),
            user_id=call.user_id,
            mode=cache.mode,
            threshold=cache.threshold if cache.mode == "semantic" else None,
            asked=documents is not None,
            left_out=answer.left_out,
            withheld=answer.withheld,
            let_go=tuple(
                WithheldCopy(doc_id, outcome.records[doc_id].doc_title, _LET_GO) for doc_id, _ in outcome.dropped
            ),
            degraded=tuple(cache.degraded),
            timings=dict(call.timings),
        )
        return answer.documents, provenance

    def _focus(
        self, call: Call, cache: CacheFindings, documents: Sequence[Document] | None
    ) -> Procedure[tuple[Focus | None, Sequence[float] | None]]:
        """How close to the best an answer keeps, and the cosine of each of the wrapped retriever's documents."""
        cosines = None
        scores = yield from self._scores(call, cache.degraded)
        focus = None if scores is None else self.relevance.focus(scores)
        model = self.embeddings.model
        if focus is not None and model is not None and call.by_vector is not None and call.asked is not None:
            twin, found = call.by_vector, documents or ()
            try:
                texts = twin.unknown_texts(call.asked, found)
                if texts:
                    vectors = yield Step(partial(model.embed_documents, texts), partial(model.aembed_documents, texts))
                    twin.learn(call.asked, found, vectors)
                cosines = twin.cosines(call.asked, found)
            except Exception as error:  # somebody else's model may raise anything
                self._degrade(
                    cache.degraded, "it could not be found out what the store's scores are", error, quoted=False
                )
        return focus, cosines

    def _watch_threshold(self, answer: Answer, cache: CacheFindings) -> None:
        """Say once that a threshold means nothing with the model in use."""
        if cache.threshold is None or not cache.searched or self.config.similarity_threshold == "auto":
            return
        found = cache.searched & answer.found_ids
        problem = self.relevance.watch.note(len(cache.searched), len(cache.matched), found)
        if problem is None:
            return
        model = self.embeddings.model
        known = None if model is None else self.relevance.known(self.model_name(model))
        if known is None or self.relevance.calibrate(known, None).problem_with(cache.threshold) is not None:
            self._warn_threshold(f"{problem}; calibrate() tells more")

    def _watch_focus(self, found: Sequence[GlobalDocument], focus: Focus) -> None:
        """Say once that nothing of what is found counts: then nothing is ever suggested."""
        above = sum(item.score is None or item.score > focus.chance for item in found)
        in_vain = self.relevance.focus_watch.note(len(found), above)
        model = self.embeddings.model
        if in_vain and model is not None and self._is_news("focus"):
            name = self.model_name(model)
            events.FOCUS_SILENT.log(
                "context='focused': of what was found for many questions in a row nothing counted. With the embedding "
                "model %s it scored no more than unrelated texts do (%.2f), so saving will not be suggested; "
                "calibrate() tells more, context='all' counts all that is found",
                name,
                focus.chance,
                model=name,
            )

    def _warn_threshold(self, problem: str) -> None:
        if not self._is_news("threshold"):
            return
        threshold, model = self.config.similarity_threshold, self.embeddings.model
        name = None if model is None else self.model_name(model)
        events.THRESHOLD_DOUBTFUL.log(
            "similarity_threshold=%s seems to say nothing with the embedding model %s: %s. similarity_threshold='auto' "
            "finds one that does",
            threshold,
            name,
            problem,
            threshold=threshold,
            model=name,
        )

    def calibrate(self, user_id: str | None, model: Embeddings, *, anew: bool) -> Procedure[Calibration]:
        """What the model's cosines mean for a user's saved chunks; measured once for each model, or anew."""
        name = self.model_name(model)
        known = self.relevance.known(name)
        if known is None:
            width = check_query_vector((yield embed_query(model, PAIRS[0].question))).unit.shape[0]
        else:
            width = known.questions.shape[1]
        # Another worker may have measured it anew.
        scores = None if anew else (yield blocking(self.relevance.gauge.kept, name, width)) or known
        if scores is None:
            scores = yield self.relevance.gauge.scores(model, name, width, anew=anew)
        index = None if user_id is None else (yield blocking(self._index_of, user_id, name, width))
        calibration = self.relevance.calibrate(scores, index)
        threshold = self.config.similarity_threshold
        problem = None if threshold == "auto" else calibration.problem_with(threshold)
        if problem is not None:
            self._warn_threshold(problem)
        return calibration

    def _index_of(self, user_id: str, name: str, width: int) -> UserIndex | None:
        start = self._begin(user_id)
        if not start.saved:
            return None
        return self.cache.get(self.store, self.chunks, user_id, start.revision, name, width)

    def threshold_in_use(self, user_id: str) -> float | None:
        """The cosine from which a saved chunk of the user answers; `None` while nothing is calibrated here."""
        threshold = self.config.similarity_threshold
        if threshold != "auto":
            return threshold
        model = self.embeddings.model
        scores = None if model is None else self.relevance.known(self.model_name(model))
        if scores is None:
            return None
        index = self.cache.newest(user_id, scores.model, scores.questions.shape[1])
        return self.relevance.calibrate(scores, index).threshold

    def _judge_copies(
        self, call: Call, found: Sequence[GlobalDocument], index: UserIndex, degraded: list[str]
    ) -> Procedure[Mapping[tuple[str, str], CopyVerdict]]:
        """What the source says about the saved copies. Almost always from memory."""
        failed: list[tuple[str, Exception]] = []
        verdicts = yield from self._judge.judge(call.user_id, found, index, failed)
        for what, error in failed:
            self._degrade(degraded, what, error)
        return verdicts

    def _apply_step(self, call: Call, answer: Answer, cache: CacheFindings) -> Step[QueryOutcome]:
        """Write what the query did; where calls are awaited, with what others of the user did at the same time."""
        waits = self.store.waits or self.chunks is not self.store.chunk_store
        return Step(
            lambda: self._apply(call, answer, cache),
            (lambda: self._applying.ask(call.user_id, (call, answer, cache))) if waits else None,
        )

    def _apply(self, call: Call, answer: Answer, cache: CacheFindings) -> QueryOutcome:
        """Write what the query did, atomically. A store that fails costs the counting, not the answer."""
        return self._tell_outcome(
            call,
            cache,
            lambda: self.store.change(
                call.user_id,
                _concerned(answer),
                partial(self._account, call, answer),
                idle_keys=_idle_keys(cache),
            ),
        )

    def _apply_all(self, _user_id: Hashable, items: Sequence[tuple[Call, Answer, CacheFindings]]) -> list[QueryOutcome]:
        """`_apply` for queries of one user, in one step."""
        if len(items) == 1:
            return [self._apply(*items[0])]
        requests = [
            self.store.request_change(
                _concerned(answer), partial(self._account, call, answer), idle_keys=_idle_keys(cache)
            )
            for call, answer, cache in items
        ]
        begun = [request for request, (_, _, cache) in zip(requests, items, strict=True) if cache.start is not None]
        if begun:
            self.store.change_together(items[0][0].user_id, begun)
        return [
            self._tell_outcome(call, cache, request.result)
            for request, (call, _, cache) in zip(requests, items, strict=True)
        ]

    def _account(self, call: Call, answer: Answer, view: UserView) -> UserChange:
        if not is_same_user(answer.findings.began_at, view.revision):
            raise _ForgottenError
        return account_for_query(view, answer.findings, self._rules, call.now)

    def _tell_outcome(self, call: Call, cache: CacheFindings, carry_out: Callable[[], UserChange]) -> QueryOutcome:
        """Do what follows from a change: hits where the chunks lie elsewhere, and copies that are nobody's now."""
        if cache.start is None:
            return QueryOutcome({})
        try:
            change = carry_out()
        except _ForgottenError:
            return QueryOutcome({})
        except Exception as error:
            self._degrade(cache.degraded, "the state store did not answer, this query may not be counted", error)
            return QueryOutcome({})
        outcome: QueryOutcome = change.outcome
        if change.events:
            self.observations.tell(call.user_id, change.events, "query")
        try:
            if self.chunks is not self.store.chunk_store:
                for doc_id, (copy_id, indices) in change.chunk_hits.items():
                    self.chunks.record_hits(call.user_id, doc_id, indices, call.now, copy_id=copy_id)
            for doc_id, dropped in outcome.dropped:
                self.chunks.settle(call.user_id, doc_id, partial(self.store.get, call.user_id, doc_id))
                self.chunks.drop(call.user_id, doc_id, dropped)
        except Exception as error:
            self._degrade(cache.degraded, "the chunk store did not answer, hits are not counted", error)
        return outcome

    def _announce(
        self, call: Call, outcome: QueryOutcome, cache: CacheFindings, fetched: Iterable[str]
    ) -> Procedure[None]:
        """Tell of suggestions, and save at once where that is wanted."""
        for suggestion in outcome.suggestions:
            if self._on_suggestion is not None:
                try:
                    yield call_user(self._on_suggestion, suggestion, name="on_suggestion")
                except Exception as error:  # somebody else's callback must not cost the answer
                    self._degrade(cache.degraded, "on_suggestion failed", error)
        if self.config.auto_save:
            # All that are suggested still, not the new ones alone: what could not be saved is tried again.
            for doc_id in fetched:
                record = outcome.records.get(doc_id)
                if record is not None and record.user_state is DocumentState.SUGGESTED:
                    yield from self._save_by_itself(call.user_id, doc_id, cache)

    def _save_by_itself(self, user_id: str, doc_id: str, cache: CacheFindings) -> Procedure[None]:
        with self._lock:
            if (user_id, doc_id) in self._saving:
                return
            self._saving.add((user_id, doc_id))
        try:
            model = self.needed_embeddings("auto_save")
            yield from self.saver.save(
                SaveOrder(user_id, doc_id, "saved by itself (auto_save)", unless_saved=True, cause="auto_save"), model
            )
        except Exception as error:
            ours = isinstance(error, RagWikiError)
            self._degrade(cache.degraded, f"document {doc_id!r} could not be saved", error, quoted=ours)
        finally:
            self._saving.discard((user_id, doc_id))

    def _degrade(self, degraded: list[str], what: str, error: Exception, *, quoted: bool = True) -> None:
        """Note what a call has to do without.

        Args:
            degraded: What is noted so far.
            what: What it is.
            error: Why.
            quoted: Whether the warning has the error's own words. A model's may repeat what it was to embed: then they
                are told at DEBUG alone.
        """
        kind = type(error).__name__
        degraded.append(f"{what} ({kind})")
        # One line an incident: a store that is down is met by every call.
        why = error if quoted else "its message is logged at DEBUG"
        events.QUERY_DEGRADED.log("%s: %s: %s", what, kind, why, what=what, error_type=kind)
        events.QUERY_DEGRADED_TRACE.log("%s", what, what=what, error_type=kind, error=error)


class _ForgottenError(Exception):
    """The user was forgotten since the query began: nothing is to be left of it."""


_MOST_ATTEMPTS = 3
"""How often the copies are searched when others replace them meanwhile."""
_NO_ID_WARNING = (
    "the wrapped retriever returned documents that nothing identifies: their metadata has no %s. They are passed "
    "through and not tracked. Put one there, or name another key with RagWikiRetrieverConfig(document_id=...)."
)


def embed_query(model: Embeddings, query: str) -> Step[Any]:
    """Embed a query, by the model's own async method when awaited."""
    return Step(lambda: model.embed_query(query), lambda: model.aembed_query(query))


def _read_all(
    documents: Sequence[Document], config: RagWikiRetrieverConfig, cosines: Sequence[float] | None
) -> list[GlobalDocument]:
    if cosines is None:
        return [read_global(document, config) for document in documents]
    return [read_global(document, config, cosine) for document, cosine in zip(documents, cosines, strict=True)]


def _chunk_scores(call: Call, cache: CacheFindings) -> ChunkScores | None:
    """What tells how chunks score that were no hits; `None` where no cosines were compared."""
    if cache.mode != "semantic" or cache.index is None or call.vector is None:
        return None
    return partial(cache.index.scores_of, call.vector.unit)


def _concerned(answer: Answer) -> list[str]:
    """The documents that a query counts for, or tells of: the copies that came along, pinned, are read as well."""
    along = [item.record.doc_id for item in answer.origins if isinstance(item, CachedDocument)]
    return [*answer.findings.fetched, *answer.findings.matched, *along]


def _idle_keys(cache: CacheFindings) -> tuple[str, ...]:
    """The idle documents that it settles."""
    return () if cache.start is None else cache.start.idle_keys[:_MOST_IDLE]


def _keyword_hits(index: UserIndex, query: str, config: RagWikiRetrieverConfig) -> list[DocumentHits]:
    if index.keywords is None:
        return []
    hits = []
    for doc_id, scored in index.keywords.search(query, config.local_top_k).items():
        document = index.documents[doc_id]
        numbers: tuple[int, ...] = document.copy.indices if document.copy is not None else ()
        found = tuple(ChunkHit(position, numbers[position], round(score, 6)) for position, score in scored)
        if document.problem is None:
            hits.append(DocumentHits(document, found, above_threshold=True))
    found_ids = {hit.document.record.doc_id for hit in hits}
    hits += [hit for hit in index.pinned() if hit.document.record.doc_id not in found_ids]
    if config.expand_neighbours:
        hits = [
            with_neighbours(hit, config.expand_neighbours, lambda positions: [0.0] * len(positions)) for hit in hits
        ]
    return sorted(hits, key=lambda hit: (-hit.hits[0].score, hit.document.record.doc_id))
