"""The rules of a user's memory once more, as plainly as can be: what every store is compared with.

Written from what the documentation promises, not from the code: dictionaries instead of stores, misses counted one
by one, every document looked at by every query. Nothing here is quick, and nothing is shared with `rag_wiki` but the
names of fields, states and errors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import zip_longest

from rag_wiki.errors import (
    ContentNotFoundError,
    InvalidDocumentError,
    InvalidTransitionError,
    UnknownDocumentError,
)

SURFACED, SUGGESTED, CLAIMED, PINNED, DEMOTED = "SURFACED", "SUGGESTED", "CLAIMED", "PINNED", "DEMOTED"
MOST_EVENTS = 50


@dataclass(frozen=True)
class Rules:
    """The settings that the rules go by."""

    fetch_threshold: int = 2
    reset_threshold: int = 2
    max_cache_miss_streak: int = 2
    similarity_threshold: float = 0.55
    local_top_k: int = 2
    on_miss: bool = False
    auto_save: bool = False
    w_recency: float = 0.40
    w_frequency: float = 0.30
    w_explicit: float = 0.20
    w_chunk_hit: float = 0.15
    decay_lambda: float = 0.05
    freq_cap: int = 4
    pin_threshold: float = 0.7
    demotion_threshold: float = 0.3
    pin_hold_days: float = 1
    demotion_hold_days: float = 1


@dataclass(frozen=True)
class Piece:
    """A piece that the source shows: of one part of a document, in one edition."""

    doc_id: str
    title: str
    path: str
    text: str
    number: int | None


@dataclass(frozen=True)
class Event:
    """A step in the life of a document."""

    what: str
    from_state: str
    to_state: str
    fetch_count: int
    decay_score: float
    at: datetime


@dataclass
class Kept:
    """A retrieved text that is kept for saving: its number, and the queries that showed it first and last."""

    number: int | None
    first: int
    last: int


@dataclass
class Doc:
    """What is known about a document; the fields of a record have a record's names."""

    doc_title: str = ""
    doc_path: str = ""
    user_state: str = SURFACED
    fetch_count: int = 0
    last_fetched_at: datetime | None = None
    suggestion_sent: bool = False
    decay_score: float = 1.0
    explicit_signal: float = 0.0
    full_content: str | None = None
    cached_at: datetime | None = None
    pinned_at: datetime | None = None
    demoted_at: datetime | None = None
    no_resiluggest_until: datetime | None = None
    next_suggest_at: int = 0
    queries_missed: int = 0
    cache_miss_streak: int = 0
    always_full_doc: bool = False
    decline_count: int = 0
    pinned_by_user: bool = False
    pin_candidate_since: datetime | None = None
    demotion_candidate_since: datetime | None = None
    chunk_count: int = 0
    content_source: str | None = None
    stale_since: datetime | None = None
    chunks: list[tuple[int, str]] = field(default_factory=list)
    """Number and text of each chunk of the copy."""
    hits: set[int] = field(default_factory=set)
    """The numbers of those that ever answered."""
    kept: dict[str, Kept] = field(default_factory=dict)
    """Retrieved texts that are kept for saving."""
    seen: list[str] = field(default_factory=list)
    """Texts that the source showed since the document was started afresh, or since its copy became stale."""
    events: list[Event] = field(default_factory=list)

    @property
    def saved(self) -> bool:
        """Whether a copy answers."""
        return self.user_state in (CLAIMED, PINNED)

    @property
    def counting(self) -> bool:
        """Whether absence would reset something."""
        return self.user_state in (SURFACED, SUGGESTED) and (self.fetch_count > 0 or self.suggestion_sent)


@dataclass(frozen=True)
class Answer:
    """What a query gives, and what it did."""

    served: list[tuple[str, bool, str]]
    """Document, whether from the saved copy, text."""
    suggestions: list[tuple[str, str, str, int]]
    """Document, title, path, count."""
    let_go: set[str]
    asked: bool


class Model:
    """The memory of all users.

    Args:
        rules: The settings.
        cosine: Of a question and a text.
        library: What the document loader gives, by document.
        denied: (user, document) whose copies may not be served.
    """

    def __init__(
        self,
        rules: Rules,
        cosine: Callable[[str, str], float],
        library: Mapping[str, str],
        denied: set[tuple[str, str]],
    ) -> None:
        self.rules = rules
        self.cosine = cosine
        self.library = library
        self.denied = denied
        self.users: dict[str, dict[str, Doc]] = {}
        self.queries = 0

    def docs(self, user: str) -> dict[str, Doc]:
        """The user's documents."""
        return self.users.setdefault(user, {})

    def known(self, user: str, doc_id: str) -> Doc:
        """A document that the user met."""
        if doc_id not in self.docs(user):
            raise UnknownDocumentError(user, doc_id)
        return self.docs(user)[doc_id]

    # -- a query ---------------------------------------------------------------------------------

    def ask(
        self, user: str, question: str, shown: Sequence[Piece], k: int | None, now: datetime, *, narrowed: bool = False
    ) -> Answer:
        """A query; `narrowed` says that the source was told something that a copy can't obey."""
        rules, docs = self.rules, self.docs(user)
        self.queries += 1
        saved = {doc_id: doc for doc_id, doc in docs.items() if doc.saved}

        # What the saved copies say: chunks at or above the threshold, or the best one of what is pinned.
        matched: set[str] = set()
        speaking: dict[str, tuple[float, list[int]]] = {}
        for doc_id, doc in saved.items():
            best = sorted(((self.cosine(question, text), at) for at, (_, text) in enumerate(doc.chunks)), reverse=True)
            good = [(score, at) for score, at in best if score >= rules.similarity_threshold][: rules.local_top_k]
            if good:
                matched.add(doc_id)
            if good or doc.user_state == PINNED:
                speaking[doc_id] = best[0][0], sorted(at for _, at in good or best[:1])
        withheld = {doc_id for doc_id, doc in saved.items() if doc.stale_since is not None}
        withheld |= {doc_id for doc_id in speaking if (user, doc_id) in self.denied}
        speaking = {doc_id: what for doc_id, what in speaking.items() if doc_id not in withheld}

        # What the source says, about the copies too.
        asked = not (rules.on_miss and not narrowed and any(doc_id in matched for doc_id in speaking))
        pieces = list(shown) if asked else []
        found = list(dict.fromkeys(piece.doc_id for piece in pieces))
        verdicts = {
            piece: _verdict(saved[piece.doc_id], piece)
            for piece in pieces
            if piece.doc_id in saved and saved[piece.doc_id].stale_since is None
        }
        stale = {piece.doc_id for piece, verdict in verdicts.items() if verdict == "stale"}

        # What is served: pinned documents, then copies and pieces in turn.
        serving = [
            doc_id
            for doc_id in sorted(speaking, key=lambda doc_id: -speaking[doc_id][0])
            if doc_id not in stale and (doc_id in found or not narrowed)
        ]
        beside = [piece for piece in pieces if piece.doc_id not in serving or verdicts.get(piece) == "new"]
        pinned = [doc_id for doc_id in serving if docs[doc_id].user_state == PINNED]
        claimed = [doc_id for doc_id in serving if docs[doc_id].user_state == CLAIMED]
        in_turn = [item for pair in zip_longest(claimed, beside) for item in pair if item is not None]
        chosen: list[str | Piece] = [*pinned, *in_turn][:k]
        # A copy brings the chunks along that the source found.
        along = {
            doc_id: {
                at
                for piece, verdict in verdicts.items()
                if piece.doc_id == doc_id and verdict == "same"
                for at, (_, text) in enumerate(docs[doc_id].chunks)
                if text == piece.text
            }
            for doc_id in serving
        }
        served = [
            (item.doc_id, False, item.text)
            if isinstance(item, Piece)
            else (item, True, _text(docs[item], sorted({*speaking[item][1], *along[item]})))
            for item in chosen
        ]

        # What that does to the documents.
        answered = {item for item in chosen if isinstance(item, str) and item in matched}
        in_use = set(found) & {item.doc_id if isinstance(item, Piece) else item for item in chosen}
        most_misses = rules.max_cache_miss_streak * len(saved)
        for doc in docs.values():
            doc.queries_missed += asked
            doc.cache_miss_streak += bool(saved)
        suggestions, let_go = [], set()
        for doc_id in dict.fromkeys([*found, *docs]):
            own = [piece for piece in pieces if piece.doc_id == doc_id]
            doc = docs.setdefault(doc_id, Doc())
            if doc_id in saved:
                if doc_id in stale - withheld:
                    doc.stale_since = now
                    doc.kept, doc.seen = {}, []
                if doc_id in answered | in_use:
                    _fetch(doc, now)
                if doc_id in stale - withheld:
                    _note(doc, "stale", doc.user_state, now)
                if doc_id in answered:
                    doc.hits |= {doc.chunks[at][0] for at in speaking[doc_id][1]}
                if doc_id in matched | in_use:
                    doc.cache_miss_streak = 0
                elif doc.cache_miss_streak >= most_misses and not doc.pinned_by_user:
                    let_go.add(doc_id)
                    _let_go(doc, "demoted", now)
            elif own:
                doc.doc_title, doc.doc_path = own[0].title, own[0].path
                if self._count(doc, now):
                    suggestions.append((doc_id, doc.doc_title, doc.doc_path, doc.fetch_count))
            elif asked and doc.counting and doc.queries_missed >= rules.reset_threshold:
                self._lapse(doc, now)
            if not doc.saved or doc.stale_since is not None or doc.content_source == "retrieved":
                for piece in own:
                    if piece.text not in doc.seen:
                        doc.seen.append(piece.text)
                        doc.kept[piece.text] = Kept(piece.number, self.queries, self.queries)
                    doc.kept[piece.text].last = self.queries
        if rules.auto_save:
            for doc_id, *_ in suggestions:
                self.save(user, doc_id, None, now)
        return Answer(served, suggestions, let_go, asked)

    def _count(self, doc: Doc, now: datetime) -> bool:
        """Count a fetch of a document that is not saved; whether saving is suggested."""
        before = doc.user_state
        first = doc.last_fetched_at is None
        if before == DEMOTED:
            _start_afresh(doc)
        _fetch(doc, now)
        if first or before == DEMOTED:
            _note(doc, "surfaced", before, now)
        due = doc.fetch_count >= (doc.next_suggest_at or self.rules.fetch_threshold)
        quiet = doc.no_resiluggest_until is not None and now < doc.no_resiluggest_until
        if doc.user_state != SURFACED or not due or quiet:
            return False
        doc.user_state, doc.suggestion_sent = SUGGESTED, True
        _note(doc, "suggested", SURFACED, now)
        return True

    def _gap(self, declines: int) -> int:
        return self.rules.fetch_threshold << declines

    def _lapse(self, doc: Doc, now: datetime) -> None:
        """Start a count again at zero; a pending suggestion goes, the gap that was earned stays."""
        before, count, worth_telling = doc.user_state, doc.fetch_count, doc.fetch_count > 1 or doc.suggestion_sent
        doc.user_state, doc.suggestion_sent, doc.fetch_count = SURFACED, False, 0
        doc.next_suggest_at = self._gap(doc.decline_count) if doc.decline_count else 0
        if worth_telling:
            _note(doc, "lapsed", before, now, count)

    # -- what a user does ------------------------------------------------------------------------

    def save(
        self, user: str, doc_id: str, content: str | None, now: datetime, *, refresh: bool = False, pin: bool = False
    ) -> None:
        """Save a document, or replace its copy; to pin it, also one that was let go."""
        doc = self.known(user, doc_id)
        if content is not None and not content.strip():
            raise InvalidDocumentError
        if (refresh and not doc.saved) or (doc.user_state == DEMOTED and not pin):
            raise InvalidTransitionError
        numbered: list[tuple[int, str]] = []
        if content is not None:
            source = "argument"
        elif doc_id in self.library:
            content, source = self.library[doc_id], "loader"
        elif numbered := _current({text: kept for text, kept in doc.kept.items() if text in doc.seen}):
            source = "retrieved"
            content = "\n\n".join(text for _, text in numbered)
        elif doc.full_content is not None and doc.stale_since is None:
            content, source = doc.full_content, doc.content_source or "argument"
        else:
            raise ContentNotFoundError
        before, was_saved = doc.user_state, doc.saved
        if before == DEMOTED:
            _start_afresh(doc, keep_texts=True)
        if not was_saved:
            doc.user_state = CLAIMED
            doc.suggestion_sent, doc.next_suggest_at, doc.decline_count = False, 0, 0
            doc.no_resiluggest_until, doc.cache_miss_streak = None, 0
        doc.full_content, doc.content_source, doc.cached_at, doc.stale_since = content, source, now, None
        doc.chunks = numbered or list(enumerate(content.split("\n\n")))
        doc.chunk_count, doc.hits = len(doc.chunks), set()
        if source != "retrieved":
            doc.kept = {}
        _note(doc, "refreshed" if was_saved else "saved", before, now)
        if pin:
            self.pin(user, doc_id, now)

    def pin(self, user: str, doc_id: str, now: datetime) -> None:
        """Pin a document for the user; saves it first if need be."""
        doc = self.known(user, doc_id)
        if not doc.saved:
            self.save(user, doc_id, None, now, pin=True)
        elif not doc.pinned_by_user:
            before, doc.pinned_by_user, doc.cache_miss_streak = doc.user_state, True, 0
            if before == CLAIMED:
                _become_pinned(doc, now)
            _note(doc, "pinned", before, now)

    def unpin(self, user: str, doc_id: str, now: datetime) -> None:
        """Take a pin away, whoever set it."""
        doc = self.known(user, doc_id)
        if doc.user_state != PINNED:
            raise InvalidTransitionError
        _become_claimed(doc)
        doc.cache_miss_streak = 0
        _note(doc, "unpinned", PINNED, now)

    def decline(self, user: str, doc_id: str, now: datetime) -> None:
        """Say no to a suggestion; without one nothing happens."""
        doc = self.known(user, doc_id)
        if doc.user_state == DEMOTED:
            raise InvalidTransitionError
        if doc.user_state == SUGGESTED:
            doc.user_state, doc.suggestion_sent = SURFACED, False
            doc.decline_count += 1
            doc.next_suggest_at = doc.fetch_count + self._gap(doc.decline_count)
            _note(doc, "declined", SUGGESTED, now)

    def vote(self, user: str, doc_id: str, signal: float, now: datetime) -> None:
        """The last vote counts; to say it again is no news."""
        doc = self.known(user, doc_id)
        new = doc.explicit_signal != signal
        doc.explicit_signal = signal
        if doc.saved:
            doc.decay_score = self._score(doc, now)
        if new:
            _note(doc, "voted", doc.user_state, now)

    def remove(self, user: str, doc_id: str, now: datetime) -> None:
        """Everything goes but the history; nothing is suggested for 30 days."""
        doc = self.known(user, doc_id)
        if doc.user_state != DEMOTED:
            _let_go(doc, "removed", now)
        doc.kept, doc.seen = {}, []
        doc.no_resiluggest_until = now + timedelta(days=30)

    def answer_in_full(self, user: str, doc_id: str, enabled: bool) -> None:
        """Answer with the whole document, or no more."""
        self.known(user, doc_id).always_full_doc = enabled

    def forget(self, user: str) -> tuple[int, int, int, int]:
        """No trace is left: documents, events, retrieved texts, chunks that went."""
        docs = self.users.pop(user, {}).values()
        return (
            len(docs),
            sum(len(doc.events) for doc in docs),
            sum(len(doc.kept) for doc in docs),
            sum(doc.chunk_count for doc in docs),
        )

    # -- decay -----------------------------------------------------------------------------------

    def decay(self, user: str, now: datetime) -> list[tuple[str, str, str, float, float]]:
        """A decay run: document, state and score before and after."""
        results = []
        for doc_id, doc in sorted(self.docs(user).items()):
            if doc.saved:
                state, score = doc.user_state, doc.decay_score
                if not doc.pinned_by_user:
                    self._decay(doc, now)
                results.append((doc_id, state, doc.user_state, score, doc.decay_score))
        return results

    def _decay(self, doc: Doc, now: datetime) -> None:
        rules = self.rules
        score = doc.decay_score = self._score(doc, now)
        if doc.user_state == PINNED:
            if score >= rules.pin_threshold:
                return
            _become_claimed(doc)
            _note(doc, "unpinned", PINNED, now)
        high, low = score >= rules.pin_threshold, score < rules.demotion_threshold
        doc.pin_candidate_since = (doc.pin_candidate_since or now) if high else None
        doc.demotion_candidate_since = (doc.demotion_candidate_since or now) if low else None
        if _days(doc.pin_candidate_since, now) >= rules.pin_hold_days:
            _become_pinned(doc, now)
            _note(doc, "pinned", CLAIMED, now)
        elif _days(doc.demotion_candidate_since, now) >= rules.demotion_hold_days:
            _let_go(doc, "demoted", now)

    def _score(self, doc: Doc, now: datetime) -> float:
        rules = self.rules
        fetched = doc.last_fetched_at or doc.cached_at
        recency = 0.0 if fetched is None else math.exp(-rules.decay_lambda * max(_days(fetched, now), 0.0))
        total = (
            rules.w_recency * recency
            + rules.w_frequency * min(doc.fetch_count / rules.freq_cap, 1.0)
            + rules.w_explicit * doc.explicit_signal
            + rules.w_chunk_hit * len(doc.hits) / doc.chunk_count
        )
        weights = rules.w_recency + rules.w_frequency + rules.w_explicit + rules.w_chunk_hit
        return min(max(total / weights, 0.0), 1.0)


def _days(since: datetime | None, now: datetime) -> float:
    return -1.0 if since is None else (now - since) / timedelta(days=1)


def _text(doc: Doc, positions: Sequence[int]) -> str:
    if doc.always_full_doc and doc.full_content is not None:
        return doc.full_content
    return "\n\n".join(doc.chunks[at][1] for at in positions)


def _verdict(doc: Doc, piece: Piece) -> str:
    """What a piece of the source says about a copy: the same, out of date, or a part that it never had."""
    if piece.text in (doc.full_content or ""):
        return "same"
    if doc.content_source == "retrieved":
        if piece.number is not None:
            had = piece.number in [number for number, _ in doc.chunks]
        else:
            had = part_of(piece.text) in [part_of(text) for _, text in doc.chunks]
        return "stale" if had else "new"
    return "stale"


def part_of(text: str) -> str:
    """What a text says, whatever its edition."""
    return text.partition(", edition ")[0]


def _current(kept: Mapping[str, Kept]) -> list[tuple[int, str]]:
    """Retrieved texts in document order: of two with one number the one that was seen last.

    Without numbers, an edition gives way to one that came up after it was last seen, which takes its place.
    """
    if all(one.number is not None for one in kept.values()):
        in_turn = sorted(kept, key=lambda text: kept[text].last)
        return sorted({kept[text].number or 0: text for text in in_turn}.items())
    current: list[str] = []
    for text in kept:
        old = [one for one in current if part_of(one) == part_of(text) and kept[one].last < kept[text].first]
        current = [text if one in old[:1] else one for one in current if one not in old[1:]]
        current += [] if old else [text]
    return list(enumerate(current))


def _fetch(doc: Doc, now: datetime) -> None:
    doc.fetch_count += 1
    doc.last_fetched_at = now
    doc.queries_missed = 0


def _start_afresh(doc: Doc, *, keep_texts: bool = False) -> None:
    """A document that was let go is met again."""
    doc.user_state, doc.demoted_at = SURFACED, None
    doc.fetch_count, doc.next_suggest_at, doc.decline_count, doc.suggestion_sent = 0, 0, 0, False
    doc.decay_score, doc.explicit_signal = 1.0, 0.0
    if not keep_texts:
        doc.kept, doc.seen = {}, []


def _become_pinned(doc: Doc, now: datetime) -> None:
    doc.user_state, doc.pinned_at = PINNED, now
    doc.pin_candidate_since = doc.demotion_candidate_since = None


def _become_claimed(doc: Doc) -> None:
    doc.user_state, doc.pinned_at, doc.pinned_by_user = CLAIMED, None, False
    doc.pin_candidate_since = doc.demotion_candidate_since = None


def _let_go(doc: Doc, what: str, now: datetime) -> None:
    """The copy, the count, the pin and what was retrieved go."""
    before, count = doc.user_state, doc.fetch_count
    doc.user_state, doc.demoted_at = DEMOTED, now
    doc.fetch_count, doc.next_suggest_at, doc.decline_count, doc.suggestion_sent = 0, 0, 0, False
    doc.pinned_at, doc.pinned_by_user, doc.pin_candidate_since, doc.demotion_candidate_since = None, False, None, None
    doc.full_content, doc.cached_at, doc.content_source, doc.stale_since = None, None, None, None
    doc.chunk_count, doc.chunks, doc.hits, doc.always_full_doc = 0, [], set(), False
    doc.kept, doc.seen = {}, []
    _note(doc, what, before, now, count)


def _note(doc: Doc, what: str, before: str, now: datetime, count: int | None = None) -> None:
    """An event, told at the count that it was taken at; one that starts the count afresh, at the count that ended."""
    told = doc.fetch_count if count is None else count
    doc.events.append(Event(what, before, doc.user_state, told, doc.decay_score, now))
    del doc.events[:-MOST_EVENTS]
