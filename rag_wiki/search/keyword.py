"""Matching by words, for saved copies when there is no embedding model."""

from __future__ import annotations

import math
import re
import sys
import unicodedata
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate, chain, count
from operator import add
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["KeywordIndex", "forget_words", "word_shares", "words"]

Numbers: TypeAlias = NDArray[np.float64]
Counts: TypeAlias = NDArray[np.int64]

# Measured on the German and Spanish questions of XQuAD, and judged by the English ones.
_LEAST_SCORE = 0.3
"""The score from which a chunk answers when few are saved."""
_FEW_CHUNKS = 30
"""How many are few."""
_STRICTER = 0.04
"""What is asked for beyond, for each time that there are e times as many: one of many holds half a query by chance.
So, of a hundred questions about something else, one or two are answered, be there one chunk or two hundred."""
_STRICTEST = 0.5
"""What is asked for at most: three quarters of a query."""
_K1 = 0.5
"""BM25's k1, lower than for whole documents: that a word comes twice in a chunk says little."""
_B = 0.75
"""BM25's b: how much the length of a chunk counts."""
_LONGEST = 2.0
"""A chunk counts as so many times the usual length at most; else a long one that holds every word could not answer."""
_UNSEEN_CHUNKS = 10
"""Chunks that hold none of the words, counted beside the user's own: among two or three chunks of one subject, its
words would pass for words that are everywhere."""
_LENGTH_POWER = 0.75
"""How much the letters of a word count: between 1/2, best for hundreds of chunks, and 1, best for one."""
_OTHER_FORM = 0.5
"""What another form of a word counts in its place."""
_SHARED_START = 0.75
"""The share of the longer of two words that both begin with when they are forms of one."""
_SHORTEST_START = 3
"""The fewest letters that two forms begin with."""
_HIRAGANA = 0.25
"""What a character of hiragana weighs: it writes the grammar of a Japanese sentence, seldom what that is about."""
_MOST_COUNTED = 255
"""How often a word counts in one chunk at most."""
_MOST_READ = 20_000
"""Characters of a text whose words are compared with a query's: more takes longer than it tells."""
_MOST_KEPT = 4_000
"""Characters of a text whose words are kept in memory."""
_ROW_BITS = 32
"""The bits of a number that are for the row of a chunk."""

_POINTS = (
    "\u0300-\u036f\u0483-\u0487\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"  # Latin, Greek, Cyrillic
    "\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7"  # Hebrew
    "\u0610-\u061a\u0640\u064b-\u065f\u0670\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed"  # Arabic
)
"""Accents, vowel points and strokes that people leave out when they type."""
_INVISIBLE = "\u00ad\u034f\u061c\u200c-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff\U000e0100-\U000e01ef"
"""Soft hyphens, joiners, marks of direction and variant: a word is the same without."""
_SIGNS = "".join(
    chr(code)
    for code in chain(range(0x0300, 0x1E00), range(0xA66F, 0xAC00))
    if unicodedata.category(chr(code)).startswith("M")
)
r"""Vowel signs and the like, which are letters to those who write them. `\w` leaves them out."""
_IDEOGRAPHIC = (
    "\u3005\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"  # Chinese characters
    "\u3041-\u309f\u30a1-\u30fa\u30fc-\u30ff\u31f0-\u31ff"  # kana
    "\uac00-\ud7a3"  # Hangul has spaces, but its particles hang on to the words
)
"""Scripts without spaces of which two characters are about a word."""
_ALPHABETIC = (
    "\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ecf\u0edc-\u0edf"  # Thai, Lao
    "\u1780-\u17d3\u17d7\u17dc\u17dd"  # Khmer
    "\u1000-\u103f\u1050-\u109f\ua9e0-\ua9ef\ua9fa-\ua9fe\uaa60-\uaa7f"  # Burmese
)
"""Scripts without spaces of which two letters are in every text, and four are about a word."""
_IN_WORD = rf"\w{_SIGNS}"
_JOINTS = r"'’ʼ\-‐._·׳״"
_LAST = "\U0010ffff"

_LEFT_OUT = re.compile(f"[{_POINTS}{_INVISIBLE}]+")
_SPELLING = {"æ": "ae", "œ": "oe", "þ": "th", **dict(zip("øłđðħıيىك", "olddhiییک", strict=True))}
"""Letters that people type in another way, and that Unicode does not take apart."""
_RESPELT = re.compile(rf"[{''.join(_SPELLING)}]|[^\D0-9]")
_RUN = re.compile(f"[{_IDEOGRAPHIC}]+|[{_ALPHABETIC}]+")
_LETTER = re.compile(f"[{_ALPHABETIC}]")
_NAME = re.compile(rf"[{_IN_WORD}]+(?:(?:[{_JOINTS}]|\+\+)[{_IN_WORD}]+)*(?:\+\+|#(?![{_IN_WORD}]))?")
_PIECE = re.compile(rf"\d+(?:\.\d+)*|(?:[^\W\d_]|[{_SIGNS}])+(?:\+\+|#)?")
_JOINT = re.compile(rf"(?<!\d)[{_JOINTS}]|[{_JOINTS}](?!\d)")


def words(text: str) -> list[str]:
    """The words by which a text is found, each as often as it is there; their order says nothing.

    Case, accents and other points that people leave out don't count. A name with joints is found by its pieces and
    as a whole: `error-404` gives `error`, `404` and `error404`, `v1.2.3` its number and the parts of that as well.
    Where a script has no spaces, each character is a word together with the next one (Chinese, Japanese, Korean) or
    the next three (Thai, Lao, Khmer, Burmese).
    """
    names, runs = _names_and_runs(text)
    found = [name for name in names if name.isalpha()]
    for name in names if len(found) < len(names) else ():
        if not name.isalpha():
            pieces = _PIECE.findall(name)
            found += pieces
            found += (part for piece in pieces if "." in piece for part in piece.split("."))
            if len(pieces) > 1:
                found.append(_whole(name))
    for run in runs:
        found += _groups(run)
    return found


def _names_and_runs(text: str) -> tuple[list[str], list[str]]:
    """What stands between spaces and the like, and what is of a script that has none."""
    folded = _folded(text)
    if folded.isascii():
        return _NAME.findall(folded), []
    return _NAME.findall(_RUN.sub(" ", folded)), _RUN.findall(folded)


def _folded(text: str) -> str:
    """A text as everybody who means the same would type it."""
    if text.isascii():
        return text.lower()
    text = _LEFT_OUT.sub("", unicodedata.normalize("NFKD", text)).casefold()
    return _RESPELT.sub(_respelt, unicodedata.normalize("NFKC", text))


def _respelt(found: re.Match[str]) -> str:
    letter = found[0]
    return _SPELLING[letter] if letter in _SPELLING else str(unicodedata.decimal(letter))


def _whole(name: str) -> str:
    """A name without its joints; between two digits they stay, for 1.2 is not 12."""
    return _JOINT.sub("", name)


def _width(run: str) -> int:
    """How many neighbours in a run are about a word."""
    return 4 if _LETTER.match(run) else 2


def _groups(run: str) -> list[str]:
    """Each character of a run with those after it. A shorter group is found as the beginning of these."""
    if _width(run) == 2:
        return [*map(add, run, run[1:]), run[-1]]
    return [run[at : at + 4] for at in range(len(run))]


class _Unit(NamedTuple):
    """A part of a query that a chunk holds or does not."""

    word: str
    """Itself."""
    stand_ins: dict[str, float]
    """What in a chunk stands for it, and what each counts. What counts nothing only tells how common it is."""
    size: float
    """What it weighs beside others that are as common."""
    in_run: bool
    """Whether it is of a script without spaces: words that begin with a stand-in are the stand-in then."""


def _units(query: str) -> Iterator[_Unit]:
    """The parts of a query, each once."""
    names, runs = _names_and_runs(query)
    pieces: dict[str, dict[str, float]] = {}
    for name in names:
        own = _PIECE.findall(name)
        for piece in own:
            stand_ins = pieces.setdefault(piece, {piece: 1.0})
            if len(own) > 1:
                stand_ins[_whole(name)] = 1.0
    for piece, stand_ins in pieces.items():
        yield _Unit(piece, stand_ins, len(piece) ** _LENGTH_POWER, in_run=False)
    for run in dict.fromkeys(runs):
        yield from _units_of_run(run)


def _units_of_run(run: str) -> Iterator[_Unit]:
    """The groups of a run that are one shorter than a word: each is there when a longer group around it is.

    How common a group is, is asked of the shorter one. The longer ones reach from one word of the query into the next,
    are in no chunk for that reason, and would weigh more than the words.
    """
    width = _width(run)
    if len(run) < width:
        yield _Unit(run, {run: 1.0}, 1.0, in_run=True)
        return
    around = [run[at : at + width] for at in range(len(run) - width + 1)]
    for at in range(len(run) - width + 2):
        short = run[at : at + width - 1]
        stand_ins = {short: 0.0, **dict.fromkeys(around[max(at - 1, 0) : at + 1], 1.0)}
        yield _Unit(short, stand_ins, _HIRAGANA if "\u3041" <= short[0] <= "\u309f" else 1.0, in_run=True)


def word_shares(query: str, texts: Sequence[str]) -> list[float]:
    """What share of a query's words each of some texts holds, in [0, 1], by weight.

    A word weighs as in `KeywordIndex`, counted over these texts: what all of them hold tells nothing about any.
    """
    asked = frozenset(words(query[:_MOST_READ]))
    held = [asked & (_word_set(text) if len(text) <= _MOST_KEPT else _words_of(text)) for text in texts]
    holders = Counter(chain.from_iterable(held))
    weights = {word: len(word) ** _LENGTH_POWER * _rarity(len(texts), holders[word]) for word in asked}
    total = sum(weights.values())
    return [sum(weights[word] for word in own) / total if total else 0.0 for own in held]


def forget_words() -> None:
    """Drop what is remembered of texts."""
    _word_set.cache_clear()


def _words_of(text: str) -> frozenset[str]:
    return frozenset(words(text[:_MOST_READ]))


@lru_cache(maxsize=1_024)
def _word_set(text: str) -> frozenset[str]:
    """The words of a text; those of texts that come again and again are at hand."""
    return _words_of(text)


def _rarity(size: int, holders: int) -> float:
    """What a word that so many of so many texts hold weighs: inverse document frequency as BM25 has it."""
    return math.log(1 + (size - holders + 0.5) / (holders + 0.5))


class KeywordIndex:
    """The words of a user's saved chunks, and which chunks hold them.

    A chunk's score is its BM25 (Robertson and Zaragoza, 2009, "The Probabilistic Relevance Framework") as a share of
    what a chunk could reach at most, were it full of the query's words; so it is in [0, 1). A chunk of usual length
    that holds each of them once has 2/3, one that holds half of their weight once 1/3. A chunk answers from 0.3, and
    from more where there are more than 30: 0.35 of 100 chunks, 0.5 of 5,000.

    A word weighs `ln(1 + (N - n + 1/2) / (n + 1/2)) * letters ** 0.75`. The first factor is BM25's: n of N chunks hold
    the word. N is the user's chunks and ten more that hold nothing of the query, so that it means something when few
    are saved. A word that no chunk holds weighs most: a query full of unknown words is about something else. The
    second factor is for the same case, when counting can't tell what matters: the words that every sentence needs are
    short in all languages (Zipf, 1949, "Human Behavior and the Principle of Least Effort").

    Another form of a word, by its beginning (`logs` for `log`, `Systeme` for `System`), counts half. What a text does
    not say in words like the query's is not found: `car` for `automobile`, `Haus` for `Häuser`.
    """

    nbytes: int
    """Bytes of memory held."""

    def __init__(self, texts: Mapping[str, Sequence[str]]) -> None:
        chunks = list(chain.from_iterable(texts.values()))
        self._doc_ids = list(texts)
        self._starts = list(accumulate(map(len, texts.values()), initial=0))
        self._size = self._starts.pop()
        self._halfway = _halfway(chunks)
        self._least_score = _least_score(self._size)
        self._vocabulary, pairs, often = _counted(chunks)
        self._ends = np.searchsorted(pairs, np.arange(len(self._vocabulary) + 1, dtype=np.int64) << _ROW_BITS)
        self._rows = (pairs & ((1 << _ROW_BITS) - 1)).astype(np.int32)
        self._often = np.minimum(often, _MOST_COUNTED).astype(np.uint8)
        arrays = (self._ends, self._rows, self._often, self._halfway)
        lists = (self._doc_ids, self._starts, self._vocabulary)
        self.nbytes = sum(item.nbytes for item in arrays)
        self.nbytes += sum(map(sys.getsizeof, chain(lists, self._starts, self._vocabulary)))

    def search(self, query: str, top_k: int) -> dict[str, list[tuple[int, float]]]:
        """Document id → (position, score) of its best `top_k` chunks that answer, best first."""
        scores = self._scores(query)
        rows = np.flatnonzero(scores >= self._least_score)
        found: dict[str, list[tuple[int, float]]] = {}
        for row in rows[np.argsort(-scores[rows], kind="stable")].tolist():
            owner = bisect_right(self._starts, row) - 1
            own = found.setdefault(self._doc_ids[owner], [])
            if len(own) < top_k:
                own.append((row - self._starts[owner], float(scores[row])))
        return found

    def _scores(self, query: str) -> Numbers:
        """The score of each chunk."""
        scores, total = np.zeros(self._size), 0.0
        for unit in _units(query):
            held, holders = self._held(unit)
            weight = unit.size * _rarity(self._size + _UNSEEN_CHUNKS, holders)
            total += weight
            scores += weight * held / (held + self._halfway)
        return scores / total if total else scores

    def _held(self, unit: _Unit) -> tuple[Numbers, int]:
        """How often each chunk holds a part of a query, and how many hold anything that stands for it."""
        rows, counts = [], []
        for first, last, credit in self._places(unit):
            own = slice(self._ends[first], self._ends[last])
            rows.append(self._rows[own])
            counts.append(credit * self._often[own])
        if not rows:
            return np.zeros(self._size), 0
        together = np.concatenate(rows)
        holders = np.count_nonzero(np.bincount(together, minlength=self._size))
        held = np.bincount(together, np.concatenate(counts), self._size).astype(np.float64, copy=False)
        return held, int(holders)

    def _places(self, unit: _Unit) -> Iterator[tuple[int, int, float]]:
        """From where to where in the vocabulary something stands for a part of a query, and what it counts."""
        for word, credit in unit.stand_ins.items():
            first = bisect_left(self._vocabulary, word)
            if unit.in_run:
                last = bisect_left(self._vocabulary, word + _LAST, first)
            else:
                last = first + (self._vocabulary[first : first + 1] == [word])
            if first < last:
                yield first, last, credit
        for at in () if unit.in_run else self._other_forms(unit.word):
            yield at, at + 1, _OTHER_FORM

    def _other_forms(self, word: str) -> Iterator[int]:
        """Where in the vocabulary the other forms of a word are."""
        if len(word) < _SHORTEST_START or word[0].isdigit():
            return
        start = word[: max(_SHORTEST_START, math.ceil(_SHARED_START * len(word)))]
        first = bisect_left(self._vocabulary, start)
        for at in range(first, bisect_left(self._vocabulary, start + _LAST, first)):
            form = self._vocabulary[at]
            shared = math.ceil(_SHARED_START * max(len(form), len(word)))
            if form != word and shared <= len(word) and form.startswith(word[:shared]):
                yield at


def _counted(chunks: Sequence[str]) -> tuple[list[str], Counts, Counts]:
    """The words of chunks in order; the pairs of a word's place and a chunk's row in order, and how often each is."""
    numbers: defaultdict[str, int] = defaultdict(count().__next__)
    occurrences, lengths = array("i"), array("i")
    for chunk in chunks:
        # As numbers at once: the words of all chunks together would fill the memory.
        found = words(chunk)
        occurrences.extend(map(numbers.__getitem__, found))
        lengths.append(len(found))
    vocabulary = sorted(numbers)
    places = np.empty(len(numbers), np.int64)
    places[[numbers[word] for word in vocabulary]] = np.arange(len(numbers))
    # A pair is one number, because nothing brings equal ones together faster than sorting numbers.
    pairs = places[np.asarray(occurrences)] << _ROW_BITS | np.repeat(np.arange(len(chunks)), np.asarray(lengths))
    found_pairs, often = np.unique(pairs, return_counts=True)
    return vocabulary, found_pairs, often


def _least_score(chunks: int) -> float:
    """The score from which one of so many chunks answers."""
    return min(_LEAST_SCORE + _STRICTER * math.log(max(chunks / _FEW_CHUNKS, 1.0)), _STRICTEST)


def _halfway(chunks: Sequence[str]) -> Numbers:
    """How often each chunk must hold a word for half of what it could reach by it: long ones hold any more often."""
    lengths = np.asarray([len(chunk) for chunk in chunks], np.float64)
    usual = lengths.mean() if lengths.any() else 1.0
    return _K1 * (1 - _B + _B * np.minimum(lengths / usual, _LONGEST))
