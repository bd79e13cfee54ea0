"""What pieces from the source say about saved copies: the same, out of date, or a part that a copy lacks."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from difflib import SequenceMatcher

from rag_wiki.answer import CopyVerdict
from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import CorruptDataError
from rag_wiki.pieces import GlobalDocument
from rag_wiki.search.index import IndexCache, IndexedDocument, UserIndex, copy_name
from rag_wiki.steps import Procedure, blocking
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_store import ChunkStore

__all__ = ["CopyJudge"]

_MOST_VERDICTS = 10_000
_ALIKE = 0.6
"""`difflib`'s own rule of thumb for a close match."""
_COMPARED_CHARS = 2_000


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
            key = (user_id, item.doc_id, document.record.copy_id or "", self._subject(item))
            verdict = self._verdict(key)
            if verdict is None:
                try:
                    verdict = yield blocking(self._judge_copy, user_id, item, document)
                except Exception as error:
                    degraded.append((f"the copy of {item.doc_id!r} could not be checked", error))
                    continue
                self._remember_verdict(key, verdict)
            verdicts[item.doc_id, item.digest] = verdict
        return verdicts

    def _subject(self, item: GlobalDocument) -> str:
        version = item.document.metadata.get(self._config.version_key) if self._config.version_key else None
        return f"{item.digest}:{item.chunk_index}:{version}"

    def _judge_copy(self, user_id: str, item: GlobalDocument, document: IndexedDocument) -> CopyVerdict:
        record = document.record
        same = CopyVerdict(copy_id=record.copy_id or "")
        key = self._config.version_key
        if key is not None and record.source_version is not None and item.document.metadata.get(key) is not None:
            version = str(item.document.metadata[key])
            if version == record.source_version:
                return same
            return replace(same, stale=f"the source's {key} is {version!r}, the copy's is {record.source_version!r}")
        if item.digest in record.retrieved:
            return same
        stored = self._store.get(user_id, record.doc_id)
        content = _flat(stored.full_content or "") if stored is not None else ""
        if _flat(item.document.page_content) in content:
            return same
        if record.content_source == "retrieved" and self._is_another_part(user_id, item, document):
            return replace(same, is_new=True)
        return replace(same, stale="the source shows a text that the copy does not contain")

    def _is_another_part(self, user_id: str, item: GlobalDocument, document: IndexedDocument) -> bool:
        """Whether a piece is of a part that an incomplete copy lacks, rather than a part of it that changed.

        The number of the chunk tells, where it has one. Else a text that is much like one in the copy is its new
        version (`difflib` ratio), and one that is like none is another part.
        """
        copy = document.copy
        if item.chunk_index is not None:
            return copy is None or item.chunk_index not in copy.indices
        name = copy_name(document.record)
        kept = self._cache.texts(self._chunks, user_id, [name]).get(name[0], ())
        if isinstance(kept, CorruptDataError):
            raise kept
        return not any(_alike(item.document.page_content, text) for text in kept)

    def _verdict(self, key: tuple[str, str, str, str]) -> CopyVerdict | None:
        with self._lock:
            return self._verdicts.get(key)

    def _remember_verdict(self, key: tuple[str, str, str, str], verdict: CopyVerdict) -> None:
        with self._lock:
            self._verdicts[key] = verdict
            while len(self._verdicts) > _MOST_VERDICTS:
                self._verdicts.popitem(last=False)


def _alike(one: str, other: str) -> bool:
    matcher = SequenceMatcher(None, one[:_COMPARED_CHARS], other[:_COMPARED_CHARS], autojunk=False)
    return matcher.real_quick_ratio() >= _ALIKE and matcher.quick_ratio() >= _ALIKE and matcher.ratio() >= _ALIKE


def _flat(text: str) -> str:
    """A text without regard to how its white space is laid out."""
    return " ".join(text.split())
