"""What a migration did, counted; as a table for people, and as plain values for programs."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from rag_wiki.storage.records import DocumentState

__all__ = ["DocumentNote", "MigrationReport"]

_SHOWN = 20
"""Documents that the table names under each heading; `to_dict` has all."""


@dataclass(frozen=True)
class DocumentNote:
    """Something to know about one document of one user."""

    user_id: str
    doc_id: str
    text: str

    def __str__(self) -> str:
        return f"{self.user_id!r}, {self.doc_id!r}: {self.text}"


@dataclass
class MigrationReport:
    """What was brought over; in a dry run, what would be."""

    old: str
    new: str
    old_chunks: str | None = None
    chunks_in: str = "beside the state"
    """Where the chunks went: the retriever must look for them there."""
    embedding: str | None = None
    """What the vectors of the model that was given are called."""
    dry_run: bool = False

    found: int = 0
    """Records in the old place."""
    users: int = 0
    """Users who have one."""
    brought: Counter[str] = field(default_factory=Counter)
    """Records brought over, by state."""
    completed: int = 0
    """Records that an earlier run brought, and this one gave the copy that was missing."""
    there: int = 0
    """Records that an earlier run brought, and that are as it left them."""
    contents: int = 0
    chunks: int = 0
    vectors_kept: int = 0
    """Chunks whose old vector proved to be the model's."""
    vectors_made: int = 0
    """Chunks that the model embedded now."""
    vectors_unknown: int = 0
    """Chunks whose old vector came along, without a model to tell whose it is; `reindex()` makes new ones."""
    vectors_missing: int = 0
    """Chunks without a vector; `reindex()` makes them."""
    kept_texts: int = 0
    """Retrieved texts of documents that are not saved, kept for saving them."""
    user_pins: int = 0
    """PINNED documents taken as pinned by the user."""
    verified: int = 0
    """Records read back and found equal, with their chunks."""

    kept: list[DocumentNote] = field(default_factory=list)
    """Documents that the new place has in another form: it stands."""
    removed: list[DocumentNote] = field(default_factory=list)
    """Records that an earlier run brought, and that were removed from the new place since: they stay away. Who was
    forgotten there is still in the old place, until it is removed from there, too."""
    changed_meanwhile: list[DocumentNote] = field(default_factory=list)
    """Records that somebody changed in the new place before they were read back: nothing can be said of them."""
    skipped: list[DocumentNote] = field(default_factory=list)
    """Records that were not brought over."""
    unread_chunks: list[DocumentNote] = field(default_factory=list)
    """Records that came over without the chunks of a file, which could not be read."""
    lost: list[DocumentNote] = field(default_factory=list)
    """Saved documents of which the old place has neither content nor chunks. They stay saved; the wrapped retriever
    answers for them until `refresh` or `reindex` has made a copy."""
    notes: list[DocumentNote] = field(default_factory=list)
    """Documents that came over with something left out or changed."""
    mismatches: list[DocumentNote] = field(default_factory=list)
    """Documents that were read back from the new place and are not what was written."""
    problems: list[str] = field(default_factory=list)
    """What keeps the old place as a whole from having been read as it is."""

    @property
    def written(self) -> int:
        """Records written, or to be written."""
        return sum(self.brought.values()) + self.completed

    @property
    def is_whole(self) -> bool:
        """Whether every record is in the new place as the old one has it, but for those that were removed there."""
        return not (self.kept or self.skipped or self.unread_chunks or self.mismatches or self.problems)

    def to_dict(self) -> dict[str, Any]:
        """All of it in plain JSON types."""
        return {**asdict(self), "brought": dict(self.brought), "written": self.written, "is_whole": self.is_whole}

    def render(self) -> str:
        """The table."""
        would = "would be " if self.dry_run else ""
        lines = [
            f"from   {self.old}" + (f", chunks in {self.old_chunks}" if self.old_chunks else ""),
            f"to     {self.new}, chunks {self.chunks_in}",
            f"found  {_counted(self.found, 'record')} of {_counted(self.users, 'user')}",
            "",
        ]
        figures = [(f"records that {would or 'were '}brought over", sum(self.brought.values()))]
        figures += [(f"  {state}", self.brought[state.value]) for state in DocumentState if self.brought[state.value]]
        optional = [
            (f"records that {would or 'were '}completed", self.completed),
            ("records there already, as they were brought", self.there),
            ("records that the new place has in another form: left alone", len(self.kept)),
            ("records removed from the new place since an earlier run: left out", len(self.removed)),
            ("records changed in the new place before they were read back", len(self.changed_meanwhile)),
            ("records that could not be brought over", len(self.skipped)),
            ("records without their chunks, whose file could not be read", len(self.unread_chunks)),
            ("contents", self.contents),
            ("chunks", self.chunks),
            ("  with the vector they had, which is the model's", self.vectors_kept),
            ("  embedded " + ("then" if self.dry_run else "now"), self.vectors_made),
            ("  with a vector of an unnamed model: reindex() makes a new one", self.vectors_unknown),
            ("  without a vector: reindex() makes one", self.vectors_missing),
            ("retrieved texts of documents not saved", self.kept_texts),
            ("pins taken as the user's own", self.user_pins),
            ("saved documents without any text: refresh() makes a copy", len(self.lost)),
        ]
        figures += [(name, count) for name, count in optional if count]
        if not self.dry_run:
            figures.append(("records read back and compared, with their chunks", self.verified))
        width = max(len(name) for name, _ in figures)
        lines += [f"{name:<{width}}  {count:>9,}" for name, count in figures]
        if self.problems:
            lines += ["", "The old place could not be read as a whole:", *(f"  {problem}" for problem in self.problems)]
        for heading, documents in (
            ("Could not be brought over", self.skipped),
            ("Came over without their chunks, whose file could not be read", self.unread_chunks),
            ("Not read back as written", self.mismatches),
            ("Left alone, because the new place has them in another form", self.kept),
            ("Changed in the new place before they were read back", self.changed_meanwhile),
            ("Left out, because they were removed from the new place (--bring-back brings them)", self.removed),
            ("Without any text", self.lost),
            ("To know", self.notes),
        ):
            lines += _listed(heading, documents)
        return "\n".join(lines)


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _listed(heading: str, documents: list[DocumentNote]) -> list[str]:
    if not documents:
        return []
    more = [f"  … and {len(documents) - _SHOWN:,} more (--json lists all)"] if len(documents) > _SHOWN else []
    return ["", f"{heading}:", *(f"  {document}" for document in documents[:_SHOWN]), *more]
