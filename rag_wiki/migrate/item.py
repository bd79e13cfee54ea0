"""A document on its way from the old place to the new one."""

from __future__ import annotations

from dataclasses import dataclass, field

from rag_wiki.migrate.meaning import Draft
from rag_wiki.migrate.report import DocumentNote
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkHits
from rag_wiki.storage.records import UserDocRecord

__all__ = ["Item"]


@dataclass
class Item:
    """One document of one user, as far as it has come."""

    draft: Draft
    existing: UserDocRecord | None = None
    """Its record in the new place."""
    gives_way: bool = False
    """There is a record in the new place that can't be read back, and is to be replaced."""
    completes: bool = False
    """The record in the new place is as an earlier run brought it, but lacks what there is now."""
    copy: ChunkCopy | None = None
    """The copy to be written."""
    hits: dict[int, ChunkHits] = field(default_factory=dict)
    """What is known of its chunks' answers."""
    tally: str = "vectors_missing"
    """The figure of the report that its chunks count towards."""

    @property
    def record(self) -> UserDocRecord:
        """What is known of it, but for the copy."""
        return self.draft.record

    @property
    def after(self) -> UserDocRecord:
        """The record that is to be written, with its content."""
        if self.copy is None:
            return self.record
        return self.record.changed(copy_id=self.copy.copy_id, chunk_count=len(self.copy.indices))

    def note(self, text: str) -> DocumentNote:
        """Something to know about it."""
        return DocumentNote(self.record.user_id, self.record.doc_id, text)
