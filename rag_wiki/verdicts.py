"""What pieces from the source say about saved copies: the same, out of date, or a part that a copy lacks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from rag_wiki.answer import CopyVerdict
from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import CorruptDataError
from rag_wiki.forks import in_each_process
from rag_wiki.lifecycle.kept_texts import compare_spans, source_version
from rag_wiki.pieces import GlobalDocument
from rag_wiki.search.index import IndexCache, IndexedDocument, UserIndex, copy_name
from rag_wiki.steps import Procedure, blocking
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.texts import are_alike, flat, holds, lack, parts_with

__all__ = ["CopyJudge"]

_MOST_VERDICTS = 10_000
_MOST_BESIDE = 0.5
"""The share of a piece that its heading, or what else stands around what the copy has of it, may take."""


class CopyJudge:
    """Compares what the source shows with the saved copies, and remembers what came of it."""

    def __init__(
        self, store: StateStore, chunks: ChunkStore, cache: IndexCache, config: RagWikiRetrieverConfig
    ) -> None:
        self._store = store
        self._chunks = chunks
        self._cache = cache
        self._config = config
        self._verdicts: OrderedDict[tuple[str, str, str, str], CopyVerdict] = OrderedDict()
        in_each_process(self._make_lock)

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def judge(
        self,
        user_id: str,
        found: Sequence[GlobalDocument],
        index: UserIndex,
        degraded: list[tuple[str, Exception]],
    ) -> Procedure[dict[tuple[str, str], CopyVerdict]]:
        """Compare what the source shows with the saved copies. Almost always from memory."""
        verdicts: dict[tuple[str, str], CopyVerdict] = {}
        for item in found:
            document = index.documents.get(item.doc_id or "")
            if document is None or item.doc_id is None or document.record.stale_since is not None:
                continue
            key = (user_id, item.doc_id, document.record.copy_id or "", item.digest)
            verdict = self._verdict(key)
            if verdict is None or (verdict.positions is None and document.copy is not None):
                try:
                    verdict = yield blocking(self._judge_copy, user_id, item, document)
                except Exception as error:
                    degraded.append((f"the copy of {item.doc_id!r} could not be checked", error))
                    continue
                self._remember_verdict(key, verdict)
            verdicts[item.doc_id, item.digest] = verdict
        return verdicts

    def _judge_copy(self, user_id: str, item: GlobalDocument, document: IndexedDocument) -> CopyVerdict:
        verdict = self._compare(user_id, item, document)
        if verdict.stale is not None or verdict.is_new:
            return verdict
        try:
            parts = self._parts(user_id, document) if document.copy is not None else ()
        except CorruptDataError:  # the verdict holds without it; where the copy is to answer, the call tells of it
            parts = ()
        if not parts:
            return verdict._replace(positions=None)
        shown, parts = flat(item.document.page_content), [flat(part) for part in parts]
        positions = parts_with(shown, parts)
        # What a splitter dropped or wrote anew is in the content and in no chunk. Where the version alone says that
        # nothing changed, a piece may have a heading of its own, say.
        share = _MOST_BESIDE if self._has_same_version(item, document) else 0.0
        if lack(shown, [parts[at] for at in positions], least_share=share):
            return verdict._replace(is_new=True)
        return verdict._replace(positions=positions)

    def _has_same_version(self, item: GlobalDocument, document: IndexedDocument) -> bool:
        version = source_version(item.document.metadata, self._config.version_key)
        return version is not None and version == document.record.source_version

    def _compare(self, user_id: str, item: GlobalDocument, document: IndexedDocument) -> CopyVerdict:
        record = document.record
        same = CopyVerdict(copy_id=record.copy_id or "")
        key = self._config.version_key
        version = source_version(item.document.metadata, key)
        if version is not None and record.source_version is not None:
            if self._has_same_version(item, document):
                return same
            return same._replace(stale=f"the source's {key} is {version!r}, the copy's is {record.source_version!r}")
        shown = flat(item.document.page_content)
        # What is in the store for saving is no matter: only what the copy is made of.
        parts = self._parts(user_id, document) if record.content_source == "retrieved" else ()
        if any(flat(part) == shown for part in parts):
            return same
        stored = self._store.get(user_id, record.doc_id)
        if stored is not None and holds(flat(stored.full_content or ""), shown):
            return same
        if record.content_source == "retrieved" and self._is_another_part(user_id, item, document, parts):
            return same._replace(is_new=True)
        return same._replace(stale="the source shows a text that the copy does not contain")

    def _parts(self, user_id: str, document: IndexedDocument) -> Sequence[str]:
        """The texts of a copy's chunks."""
        name = copy_name(document.record)
        parts = self._cache.texts(self._chunks, user_id, [name]).get(name[0])
        if isinstance(parts, CorruptDataError):
            raise parts
        return () if parts is None else parts.texts

    def _is_another_part(
        self, user_id: str, item: GlobalDocument, document: IndexedDocument, parts: Sequence[str]
    ) -> bool:
        """Whether a piece is of a part that an incomplete copy lacks, rather than a part of it that changed.

        The number of the chunk tells, where it has one that the copy knows for one piece; so does where it begins,
        where it overlaps a part of the copy. Else a text that is much like one in the copy is its new version, and one
        that is like none is another part.
        """
        indices = document.copy.indices if document.copy is not None else ()
        held = [flat(part) for part in parts]
        kept = [
            text for text in self._store.retrieved_texts(user_id, document.record.doc_id) if flat(text.text) in held
        ]
        if item.chunk_index is not None:
            same = {flat(text.text) for text in kept if text.chunk_index == item.chunk_index}
            # The copy's own numbers are others where some of its pieces had none, or one stood for several.
            own = set(zip(held, indices, strict=False))
            are_theirs = all((flat(text.text), text.chunk_index) in own for text in kept)
            if len(same) <= 1 and (same or are_theirs):
                return not same and item.chunk_index not in indices
            # Several texts under one number are parts of a piece that was cut.
            return not any(are_alike(item.document.page_content, part) for part in parts)
        says_otherwise, agreeing = compare_spans(item.retrieved_text, kept)
        if says_otherwise:
            return False
        # What overlaps it and says the same there is the passage before or after it.
        beside = {flat(text.text) for text in kept if text.digest in agreeing}
        return not any(are_alike(item.document.page_content, part) for part in parts if flat(part) not in beside)

    def _verdict(self, key: tuple[str, str, str, str]) -> CopyVerdict | None:
        with self._lock:
            return self._verdicts.get(key)

    def _remember_verdict(self, key: tuple[str, str, str, str], verdict: CopyVerdict) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            while len(self._verdicts) > _MOST_VERDICTS:
                self._verdicts.popitem(last=False)
