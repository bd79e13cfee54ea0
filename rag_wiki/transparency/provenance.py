"""Where each piece of an answer came from: frozen facts, and four ways to show them."""

from __future__ import annotations

import html
import math
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rag_wiki.lifecycle.fetch_counter import SuggestionEvent
from rag_wiki.storage.records import SAVED_STATES, DocumentState

__all__ = ["ProvenanceBlock", "SourceEntry", "WithheldCopy", "as_ascii", "one_line"]

_RULE = "─" * 60
_LONGEST_NAME = 120
_ASCII = str.maketrans(
    {"─": "-", "📄": "#", "•": "*", "💡": "!", "⚠": "!", "×": "x", "…": "...", "→": ">"}
    | {"–": "-", "−": "-", "—": "-", "·": "|"}
)


@dataclass(frozen=True)
class SourceEntry:
    """One document that a call used."""

    doc_id: str | None
    """`None` for a document that nothing identifies; it passes through untracked."""
    doc_title: str
    doc_path: str
    user_state: DocumentState
    fetch_count: int
    chunks_used: Sequence[int] = ()
    """The numbers of the chunks used, where known."""
    total_chunks: int | None = None
    """How many chunks the document has, where known."""
    section_heading: str | None = None
    from_cache: bool = False
    """Answered from the user's saved copy."""
    scores: Sequence[float] = ()
    """Cosine of each chunk used to the query, where one was computed."""
    stale: bool = False
    """The saved copy differs from its source; what is shown comes from the source."""
    full_document: bool = False
    """The whole document was used."""
    content_source: str | None = None
    """Where the saved text came from: `argument`, `loader`, `file` or `retrieved`."""
    also_global: bool = False
    """The wrapped retriever found the document too; its pieces gave way to the saved copy."""
    passages: int | None = None
    """Pieces used, where their numbers are not known."""

    @property
    def origins(self) -> tuple[str, ...]:
        """Where the document was found: `cache`, `global`, or both."""
        if self.from_cache:
            return ("cache", "global") if self.also_global else ("cache",)
        return ("global",)

    @property
    def name(self) -> str:
        """What to call the document in front of people: its title, else its id, on one line."""
        return one_line(self.doc_title) or one_line(self.doc_id or "") or "(untitled)"

    @property
    def extent(self) -> str:
        """How much of the document was used, in words."""
        if self.full_document:
            return "Full document"
        if self.chunks_used:
            chunks = ", ".join(str(index) for index in self.chunks_used)
            total = f" of {self.total_chunks}" if self.total_chunks else ""
            return f"Chunks {chunks}{total}"
        if self.passages:
            return f"{self.passages} passage{'s' if self.passages > 1 else ''}"
        return "Full document"

    @property
    def standing(self) -> str:
        """Where the document stands for the user, in words."""
        if self.doc_id is None:
            return "not tracked (no document id)"
        if self.user_state is DocumentState.GLOBAL:
            return "not counted"
        if self.user_state is DocumentState.PINNED:
            return "Pinned in your KB"
        if self.user_state is DocumentState.CLAIMED:
            return "Saved to your KB"
        return f"{self.user_state} (fetched {self.fetch_count}×)"

    @property
    def mark(self) -> str:
        """What is special about it, in brackets, or nothing."""
        if self.from_cache:
            return " [from your KB]"
        if self.stale:
            return " [changed since you saved it]"
        return " [from the collection]" if self.user_state in SAVED_STATES else ""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {
            "doc_id": self.doc_id,
            "doc_title": self.doc_title,
            "doc_path": self.doc_path,
            "user_state": self.user_state.value,
            "fetch_count": self.fetch_count,
            "chunks_used": [int(index) for index in self.chunks_used],
            "total_chunks": self.total_chunks,
            "section_heading": self.section_heading,
            "from_cache": self.from_cache,
            "scores": [round(float(score), 6) for score in self.scores if math.isfinite(score)],
            "stale": self.stale,
            "full_document": self.full_document,
            "content_source": self.content_source,
            "origins": list(self.origins),
            "passages": self.passages,
        }


@dataclass(frozen=True)
class WithheldCopy:
    """A saved copy that was not served, or was let go."""

    doc_id: str
    doc_title: str
    reason: str
    """`stale`, `access denied`, `copy lost`, `copy unreadable`, `other embedding model`; or why it was let go."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"doc_id": self.doc_id, "doc_title": self.doc_title, "reason": self.reason}


@dataclass(frozen=True)
class ProvenanceBlock:
    """What one call used, suggested, and could not do."""

    sources: Sequence[SourceEntry] = ()
    suggestion: SuggestionEvent | None = None
    """The first of the suggestions, or `None`."""
    suggestions: Sequence[SuggestionEvent] = ()
    user_id: str | None = None
    mode: str = "none"
    """How saved copies were searched: `semantic`, `keyword`, or `none`."""
    threshold: float | None = None
    """The cosine from which a saved chunk answered."""
    withheld: Sequence[WithheldCopy] = ()
    """Saved copies that were not served, and why."""
    asked: bool = True
    """Whether the wrapped retriever was asked."""
    left_out: int = 0
    """Documents and pieces that were found and lay too far from the best one (`context="focused"`)."""
    let_go: Sequence[WithheldCopy] = ()
    """Saved copies that this call let go, and why."""
    degraded: Sequence[str] = ()
    """What could not be done, a sentence each; empty when all is well."""
    timings: Mapping[str, float] = field(default_factory=dict)
    """Milliseconds by stage."""

    def __post_init__(self) -> None:
        # Either form may be given; both are read.
        if self.suggestions and self.suggestion is None:
            object.__setattr__(self, "suggestion", self.suggestions[0])
        elif self.suggestion is not None and not self.suggestions:
            object.__setattr__(self, "suggestions", (self.suggestion,))

    def render(self, *, ascii: bool = False) -> str:  # noqa: A002 - the name that says it
        """The block for a console; `ascii=True` for one that is not UTF-8. No title can break its layout."""
        lines = [_RULE, "📄 Sources used in this response"]
        for source in self.sources:
            section = one_line(source.section_heading or "")
            details = [source.extent, *([f"Section: {section}"] if section else []), source.standing]
            lines += [f"  • {source.name}{source.mark}", f"    {'  |  '.join(details)}"]
        if not self.sources:
            lines.append("  (none)")
        if not self.asked:
            lines.append("  Answered from your KB alone: nothing else was searched.")
        lines += [f'⚠ Your copy of "{_title(copy)}" was not used: {_reason(copy)}.' for copy in self.withheld]
        lines += [f'⚠ Your copy of "{_title(copy)}" was let go: {copy.reason}.' for copy in self.let_go]
        lines += [f"⚠ {one_line(sentence, longest=300)}" for sentence in self.degraded]
        for suggestion in self.suggestions:
            lines += [
                "",
                f"💡 {_suggestion_sentence(suggestion)}",
                "   Would you like to save it to your personal knowledge base?",
            ]
        lines.append(_RULE)
        text = "\n".join(lines)
        return as_ascii(text) if ascii else text

    def __str__(self) -> str:
        return self.render()

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, without NaN."""
        suggestions = [_suggestion_dict(suggestion) for suggestion in self.suggestions]
        return {
            "sources": [source.to_dict() for source in self.sources],
            "suggestion": suggestions[0] if suggestions else None,
            "suggestions": suggestions,
            "user_id": self.user_id,
            "mode": self.mode,
            "threshold": self.threshold,
            "asked": self.asked,
            "left_out": self.left_out,
            "withheld": [copy.to_dict() for copy in self.withheld],
            "let_go": [copy.to_dict() for copy in self.let_go],
            "degraded": list(self.degraded),
            "timings": {stage: round(float(milliseconds), 3) for stage, milliseconds in self.timings.items()},
        }

    def to_markdown(self) -> str:
        """A Markdown list for chats and pages."""
        lines = ["**Sources used in this response**", ""]
        lines += [
            f"- **{_markdown(source.name)}**{_markdown(source.mark)}: "
            f"{_markdown(f'{source.extent} · {source.standing}')}"
            for source in self.sources
        ]
        if not self.sources:
            lines.append("- (none)")
        notes = [f'your copy of "{_title(copy)}" was not used: {_reason(copy)}' for copy in self.withheld]
        notes += [f'your copy of "{_title(copy)}" was let go: {copy.reason}' for copy in self.let_go]
        lines += [f"- ⚠ {_markdown(note)}" for note in [*notes, *map(one_line, self.degraded)]]
        for suggestion in self.suggestions:
            lines += ["", f"> 💡 {_markdown(f'{_suggestion_sentence(suggestion)} Save it?')}"]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """A table for notebooks."""
        rows = []
        for source in self.sources:
            scores = ", ".join(f"{score:.2f}" for score in source.scores)
            cells = [f"{source.name}{source.mark}", source.extent, source.standing, scores]
            rows.append("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in cells) + "</tr>")
        notes = [f'⚠ Your copy of "{_title(copy)}" was not used: {_reason(copy)}.' for copy in self.withheld]
        notes += [f'⚠ Your copy of "{_title(copy)}" was let go: {copy.reason}.' for copy in self.let_go]
        notes += [f"⚠ {one_line(sentence)}" for sentence in self.degraded]
        notes += [f"💡 {_suggestion_sentence(suggestion)} Save it?" for suggestion in self.suggestions]
        header = "".join(f"<th>{name}</th>" for name in ("Source", "Used", "For you", "Scores"))
        paragraphs = "".join(f"<p>{html.escape(note)}</p>" for note in notes)
        return (
            '<div class="rag-wiki-provenance"><table>'
            f"<thead><tr>{header}</tr></thead><tbody>{''.join(rows)}</tbody></table>{paragraphs}</div>"
        )


def _reason(copy: WithheldCopy) -> str:
    return "stale; refresh replaces it" if copy.reason == "stale" else copy.reason


def as_ascii(text: str) -> str:
    """A text for a console that is not UTF-8; what ASCII has nothing like becomes `?`."""
    return text.translate(_ASCII).encode("ascii", "replace").decode("ascii")


def one_line(text: str, *, longest: int = _LONGEST_NAME) -> str:
    """Text that can't break a layout: no line ends, control, direction or private characters, and not too long."""
    kept = "".join(" " if unicodedata.category(char)[0] in "CZ" else char for char in text)
    flat = " ".join(kept.split())
    return flat if len(flat) <= longest else flat[: longest - 1] + "…"


def _title(named: WithheldCopy | SuggestionEvent) -> str:
    return one_line(named.doc_title) or one_line(named.doc_id)


def _suggestion_sentence(suggestion: SuggestionEvent) -> str:
    times = f"{suggestion.fetch_count} time{'s' if suggestion.fetch_count != 1 else ''}"
    return f'"{_title(suggestion)}" has appeared in your queries {times}.'


def _suggestion_dict(suggestion: SuggestionEvent) -> dict[str, Any]:
    return {
        "doc_id": suggestion.doc_id,
        "doc_title": suggestion.doc_title,
        "fetch_count": suggestion.fetch_count,
        "doc_path": suggestion.doc_path,
    }


def _markdown(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|!~])", r"\\\1", text)
