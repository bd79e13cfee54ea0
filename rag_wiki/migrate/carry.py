"""The migration itself: list, understand, embed, write, read back; page by page, so that memory stays bounded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from langchain_core.embeddings import Embeddings

from rag_wiki.clock import Clock, utc_now
from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import ConfigurationError, InvalidDocumentError, InvalidUserError, StorageError
from rag_wiki.migrate.brought import Brought
from rag_wiki.migrate.item import Item
from rag_wiki.migrate.listing import ListedDocument, Listing
from rag_wiki.migrate.meaning import ChunkDraft, Draft, UnreadableRecordError, understand
from rag_wiki.migrate.older_chunks import OlderChunk, OlderChunks
from rag_wiki.migrate.older_state import Damaged, Listed, OlderState
from rag_wiki.migrate.places import (
    OldPlace,
    StorePlace,
    chunk_store_of,
    look_at,
    open_new,
    open_old,
    shown,
    telling,
)
from rag_wiki.migrate.report import DocumentNote, MigrationReport
from rag_wiki.migrate.vectors import Model
from rag_wiki.migrate.write import Writer
from rag_wiki.saving import split_sections, splitter_of
from rag_wiki.storage.chunk_store import ChunkCopy, ChunkHits, ChunkStore, new_copy_id
from rag_wiki.storage.records import check_doc_id, check_user_id, join_halves

__all__ = ["MismatchError", "Progress", "kept", "migrate"]

Progress: TypeAlias = Callable[[int, int], object]
"""Told how many records are done, and of how many."""

_PAGE = 100
"""Records that are read, written and read back together, with their contents and chunks."""
_MOST_TOLD = 5


class MismatchError(StorageError):
    """What was read back is not what was written."""

    def __init__(self, report: MigrationReport) -> None:
        told = "; ".join(map(str, report.mismatches[:_MOST_TOLD]))
        super().__init__(
            f"{len(report.mismatches)} documents were read back from {report.new} otherwise than written: {told}"
        )
        self.report = report
        """What was done."""


def migrate(
    old: OldPlace,
    new: StorePlace,
    *,
    old_chunks: str | Path | None = None,
    new_chunks: str | Path | ChunkStore | None = None,
    embedding_model: Embeddings | None = None,
    config: RagWikiRetrieverConfig | None = None,
    dry_run: bool = False,
    overwrite: bool = False,
    bring_back: bool = False,
    on_progress: Progress | None = None,
    clock: Clock = utc_now,
) -> MigrationReport:
    """Bring records, contents and chunks of release 0.2 over, and read all of it back.

    The old place is only read. A document comes over wholly or not at all, and what can't be read stops no other:
    the report names it. Running it again changes nothing but what was missing; what was removed from the new place
    since stays away. Who was forgotten in the new place is still in the old one: remove them there, too.

    Args:
        old: `sqlite:///old.db` or the path of the file, `redis://host:6379/0`, or a Redis client.
        new: `sqlite:///new.db`, `postgresql://…`, `redis://…`, a Redis client, or a store. It may be the old place.
        old_chunks: The folder that was `wiki_save_dir` for 0.2.2 or 0.2.4.
        new_chunks: The `wiki_save_dir` that the retriever will have, or its `chunk_store`; by default
            `config.wiki_save_dir`, else beside the state.
        embedding_model: The model that the retriever will have. Old vectors are kept where it gives the same ones;
            other chunks are embedded anew. Without it nothing is embedded: the copies are found by words, and by
            vectors after `reindex()`.
        config: The settings that the retriever will have: how texts are split, and `embedding_name`.
        dry_run: Only say what would be done, or why it could not be. Nothing is made of a URL; a store that is handed
            in may set itself up.
        overwrite: Replace records that the new place has in another form. By default they stand.
        bring_back: Bring what was removed from the new place (`forget_user`, `purge`, `delete`) since an earlier run
            brought it. By default it stays away: the new place keeps a keyed hash of the ids of what was brought.
        on_progress: Told after each page how many records are done, and of how many.
        clock: Tells the time of the entry in each document's history.

    Returns:
        What was done, counted.

    Raises:
        ConfigurationError: There is nothing of 0.2 in the old place, or no store for the new one; no message shows a
            password.
        MissingExtraError: What a place needs is not installed.
        StorageError: A place can't be read or written, or the old one is written to without a pause. What was done
            until then stays, and the next run goes on.
        MismatchError: A `StorageError`: what was read back is not what was written. It names documents, and has the
            report.
        EmbeddingError: The model's answer can't be used.
    """
    if embedding_model is not None and not isinstance(embedding_model, Embeddings):
        msg = f"embedding_model must be a LangChain Embeddings, got {type(embedding_model).__name__}"
        raise ConfigurationError(msg)
    settings = config or RagWikiRetrieverConfig()
    with ExitStack() as stack:
        target = open_new(new)
        stack.callback(target.close)
        # Closed before the new one: the last that closes an SQLite file takes its log away, and must be able to write.
        with telling(shown(old)):
            source = open_old(old, new=new, dry_run=dry_run)
        stack.callback(source.close)
        files = None if old_chunks is None else OlderChunks(old_chunks)
        chunks, where = chunk_store_of(settings.wiki_save_dir if new_chunks is None else new_chunks, target.store)
        model = None if embedding_model is None else Model(embedding_model, settings)
        report = MigrationReport(
            old=source.shown,
            new=target.shown,
            old_chunks=None if old_chunks is None else str(old_chunks),
            chunks_in=where,
            embedding=None if model is None else model.name,
            dry_run=dry_run,
        )
        listing = Listing(ignores_case=files is not None and files.ignores_case)
        stack.callback(listing.close)
        with telling(target.shown):
            there = look_at(new) or not dry_run
        listing.fill(_nameable(source, report))
        with telling(target.shown):
            brought = Brought(target.store if there else None, dry_run=dry_run)
        stack.callback(kept, brought)
        writer = Writer(
            target.store,
            chunks,
            report,
            clock,
            dry_run=dry_run,
            overwrite=overwrite,
            is_there=there,
            brought=brought,
            bring_back=bring_back,
        )
        migration = _Migration(source, files, writer, model, settings, report, clock)
        migration.run(listing, on_progress)
        brought.keep()
    if report.mismatches:
        raise MismatchError(report)
    return report


def kept(brought: Brought) -> None:
    """Keep what a run brought that broke; why it broke is what the caller must see."""
    with suppress(Exception):
        brought.keep()


def _nameable(source: OlderState, report: MigrationReport) -> Iterator[Listed]:
    """The records whose ids can be told; the others are noted."""
    for item in source.names():
        if item.problem:
            report.skipped.append(DocumentNote("?", "?", item.problem))
            report.found += 1
            continue
        try:
            user_id, doc_id = check_user_id(item.user_id), check_doc_id(item.doc_id)
            (user_id + doc_id).encode()
        except (InvalidUserError, InvalidDocumentError, UnicodeEncodeError) as error:
            report.skipped.append(DocumentNote(f"{item.user_id!s}", f"{item.doc_id!s}", f"at {item.place!r}: {error}"))
            report.found += 1
            continue
        yield item._replace(user_id=user_id, doc_id=doc_id)


def _fields_of(user_id: str, doc_id: str, found: Mapping[str, object] | Damaged | None) -> Mapping[str, object]:
    """The fields of the document that was listed.

    Raises:
        UnreadableRecordError: There are none, or another one lies there now: SQLite may number rows anew.
    """
    if isinstance(found, Damaged):
        raise UnreadableRecordError(found.why)
    if found is None or (_id(found.get("user_id")), _id(found.get("doc_id"))) != (user_id, doc_id):
        msg = "its record went while it was to be read"
        raise UnreadableRecordError(msg)
    return found


def _id(value: object) -> object:
    return join_halves(value) if isinstance(value, str) else value


class _Migration:
    """Goes through the listing."""

    def __init__(
        self,
        source: OlderState,
        files: OlderChunks | None,
        writer: Writer,
        model: Model | None,
        config: RagWikiRetrieverConfig,
        report: MigrationReport,
        clock: Clock,
    ) -> None:
        self._source = source
        self._files = files
        self._writer = writer
        self._model = model
        self._config = config
        self._report = report
        self._clock = clock

    def run(self, listing: Listing, on_progress: Progress | None) -> None:
        """Bring all of it over."""
        total, self._report.users = listing.counts()
        self._report.found += total
        listed = self._report.found
        done, progress = 0, on_progress or (lambda _done, _total: None)
        progress(0, total)
        for page in listing.pages(_PAGE):
            items = self._writer.compare(self._understood(page), self._model)
            self._make_copies(items)
            self._writer.write(page[0].user_id, items)
            done += len(page)
            progress(done, total)
        for double in listing.doubles:
            why = f"at {double.place!r}: another record is of the same user and document, and was brought over"
            self._report.skipped.append(DocumentNote(double.user_id, double.doc_id, why))
            done += 1
            progress(done, total)
        self._report.problems += self._source.problems(listed)
        for gone, instead in listing.lost(self._source.overwritten()):
            why = f"the record of user {instead.user_id!r}, document {instead.doc_id!r}, has the same key: 0.2 lost it"
            self._report.skipped.append(DocumentNote(gone.user_id, gone.doc_id, why))
            self._report.found += 1

    def _understood(self, page: Sequence[ListedDocument]) -> list[Item]:
        items: list[Item] = []
        found = self._source.read([document.place for document in page])
        for user_id, doc_id, place, shared in page:
            try:
                fields = _fields_of(user_id, doc_id, found.get(place))
                file = None if self._files is None else self._files.read(user_id, doc_id)
                draft = understand(user_id, doc_id, fields, file, shared=shared)
            except UnreadableRecordError as error:
                self._report.skipped.append(DocumentNote(user_id, doc_id, str(error)))
                continue
            if file is not None and file.unread:
                self._report.unread_chunks.append(DocumentNote(user_id, doc_id, f"{file.problem}"))
            items.append(Item(self._with_chunks(draft)))
        return items

    def _with_chunks(self, draft: Draft) -> Draft:
        """The draft with chunks of its content where it has none, or some that don't hold all of it."""
        content = draft.record.full_content
        if content is None or not draft.record.saved or (draft.copy is not None and draft.complete):
            return draft
        notes = list(draft.notes)
        if draft.copy is not None and self._model is None:
            notes.append("its chunks are not all of its content: reindex() makes new ones")
            return replace(draft, notes=tuple(notes))
        if draft.copy is not None:
            notes.append("its chunks were not all of its content: it was split anew")
        texts = [text for text in splitter_of(self._config).split_text(content) if text.strip()]
        if not texts:
            return replace(draft, copy=None, notes=(*notes, "its content gives no chunk with text"))
        sections = split_sections(content, texts)
        chunks = tuple(
            OlderChunk(number, text, section=section)
            for number, (text, section) in enumerate(zip(texts, sections, strict=True))
        )
        return replace(draft, copy=ChunkDraft(chunks), notes=tuple(notes))

    def _make_copies(self, items: Sequence[Item]) -> None:
        """Put a copy together for each document that is to be written with one, with vectors where they can be had."""
        wanted = [(item, item.draft.copy) for item in items if item.draft.copy is not None]
        model = self._model
        recognised = [False] * len(wanted) if model is None else model.recognised([copy for _, copy in wanted])
        for (item, copy), is_the_models in zip(wanted, recognised, strict=True):
            vectors, without, name = copy.vectors, copy.without_vector, ""
            item.tally = "vectors_missing" if vectors is None else "vectors_unknown"
            if model is not None and is_the_models and not without:
                name, item.tally = model.name, "vectors_kept"
            elif model is not None:
                name, without, item.tally, vectors = model.name, (), "vectors_made", None
                if not self._report.dry_run:
                    vectors = model.embed(copy.texts, f"document {item.record.doc_id!r} of {item.record.user_id!r}")
            item.copy = ChunkCopy(
                copy_id=new_copy_id(),
                indices=tuple(chunk.index for chunk in copy.chunks),
                texts=tuple(copy.texts),
                vectors=vectors,
                sections=tuple(chunk.section for chunk in copy.chunks),
                embedding=name,
                without_vector=without,
            )
            for chunk in copy.chunks:
                if chunk.hit_count:
                    last = chunk.last_hit_at or item.record.last_fetched_at or self._clock()
                    item.hits[chunk.index] = ChunkHits(chunk.hit_count, last)
