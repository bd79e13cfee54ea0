"""The pieces that an answer is made of: what the wrapped retriever returned, and what the saved copies say."""

from __future__ import annotations

import contextlib
import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from operator import itemgetter
from pathlib import PurePath, PurePosixPath
from typing import Any, NamedTuple
from uuid import UUID

import numpy as np
from langchain_core.documents import Document

from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.lifecycle.kept_texts import source_version
from rag_wiki.search.index import ChunkHit, DocumentHits
from rag_wiki.storage.codec import plain
from rag_wiki.storage.records import RetrievedText, UserDocRecord, join_halves
from rag_wiki.texts import flat, join_texts, shared_length

__all__ = [
    "IDENTIFYING_KEYS",
    "CachedDocument",
    "GlobalDocument",
    "as_id",
    "as_number",
    "common_metadata",
    "copy_metadata",
    "identify",
    "label",
    "read_global",
]

IDENTIFYING_KEYS = ("doc_id", "source", "doc_path")
"""The metadata that identifies a document, the first first, where no other is named."""
_POSITION = itemgetter(0)
_ATOMS = (str, int, float, bool, type(None))
_ATOM_SET = frozenset(_ATOMS)
_BEYOND_ANY_ID = 10**100
"""Python refuses to write out numbers of some thousand digits."""
_EXACT_IN_A_FLOAT = 2**53
"""Beyond it a float may stand for several whole numbers."""


class GlobalDocument(NamedTuple):
    """A piece that the wrapped retriever returned, and the source document that it belongs to."""

    document: Document
    doc_id: str | None
    """`None` when nothing identifies it."""
    doc_title: str = ""
    doc_path: str = ""
    chunk_index: int | None = None
    digest: str = ""
    score: float | None = None
    """Its cosine to the query, where the wrapped retriever's results carry scores that can be compared."""

    @property
    def length(self) -> int:
        """Its characters."""
        return len(self.document.page_content)

    @property
    def retrieved_text(self) -> RetrievedText:
        """The piece as it is kept for saving."""
        metadata = plain(self.document.metadata)
        return RetrievedText(self.doc_id or "", self.digest, self.document.page_content, self.chunk_index, metadata)


class CachedDocument(NamedTuple):
    """A saved document that may answer, with the text to answer with."""

    found: DocumentHits
    parts: Sequence[str]
    """The texts of all its chunks; or the one text of a document that answers with all of it."""
    full_document: bool = False
    reach: int = 0
    """How many chunks beside one that matched are wanted."""
    own: Sequence[Mapping[str, Any]] = ()
    """What the source says of each chunk alone; empty where it says nothing."""

    @property
    def record(self) -> UserDocRecord:
        """Its record, as the index has it."""
        return self.found.document.record

    @property
    def chunks(self) -> tuple[int, ...]:
        """The numbers of the chunks used, in document order."""
        return tuple([hit.chunk_index for hit in _in_document_order(self.found)])

    @property
    def hit_chunks(self) -> tuple[int, ...]:
        """The numbers of those that matched, in document order."""
        return tuple([hit.chunk_index for hit in _in_document_order(self.found) if not hit.is_neighbour])

    @property
    def scores(self) -> tuple[float, ...]:
        """Their cosines, in the same order."""
        return tuple([hit.score for hit in _in_document_order(self.found)])

    @property
    def text(self) -> str:
        """What it answers with: its chunks in document order, neighbours without repeating what they share."""
        if self.full_document:
            return self.parts[0]
        hits = _in_document_order(self.found)
        if len(hits) == 1:
            return self.parts[hits[0].position]
        runs: list[list[str]] = []
        for before, hit in zip([None, *hits], hits, strict=False):
            if before is None or (hit.position, hit.chunk_index) != (before.position + 1, before.chunk_index + 1):
                runs.append([])
            runs[-1].append(self.parts[hit.position])
        return "\n\n".join([join_texts(run) for run in runs])

    @property
    def own_metadata(self) -> dict[str, Any]:
        """What the source says of the chunks used: what they share, and `chunk_metadata` where they differ."""
        if self.full_document or not self.own:
            return {}
        own = [self.own[hit.position] for hit in _in_document_order(self.found)]
        shared = common_metadata(own)
        return shared if all(len(values) == len(shared) for values in own) else {**shared, "chunk_metadata": own}

    @property
    def hits(self) -> list[ChunkHit]:
        """The chunks that matched."""
        return [hit for hit in self.found.hits if not hit.is_neighbour]

    def text_of(self, hit: ChunkHit) -> str:
        """The text that a chunk answers with."""
        return self.parts[0 if self.full_document else hit.position]

    def keeping(self, kept: Sequence[ChunkHit]) -> CachedDocument:
        """It with some of its hits, and what is beside them: neighbours that are wanted, the rest of a cut passage."""
        # A document that answers with all of its text has everything along already.
        beside = (
            []
            if self.full_document
            else [
                hit._replace(is_neighbour=True)
                for hit in self.found.hits
                if hit not in kept and any(self._belongs_to(hit, other) for other in kept)
            ]
        )
        return self._replace(found=self.found._replace(hits=(*kept, *beside)))

    def _belongs_to(self, hit: ChunkHit, other: ChunkHit) -> bool:
        """Whether a chunk comes along with another: it is a wanted neighbour, or both are of one passage."""
        if not hit.is_beside(other, max(self.reach, 1)):
            return False
        first, second = sorted((hit.position, other.position))
        return self.reach > 0 or shared_length(self.parts[first], self.parts[second]) > 0


def identify(document: Document, document_id: str | Callable[[Document], str | None] | None) -> str | None:
    """The id of the source document, or `None` when nothing identifies it."""
    if callable(document_id):
        try:
            return as_id(document_id(document))
        except LookupError:
            # The usual function looks into the metadata; a document without the key has no id.
            return None
    return _first_id(document.metadata, IDENTIFYING_KEYS if document_id is None else (document_id,))


def _first_id(metadata: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    for key in keys:
        found = as_id(metadata.get(key))
        if found is not None:
            return found
    return None


def as_id(value: object) -> str | None:
    """An id of a kind that identifies: text, a whole number, a UUID, a path. `nan`, say, would be everybody's.

    So would the text "None", which LlamaIndex writes into vector stores where a node has no source.
    """
    text = ""
    if value is None:
        return None
    if type(value) is str:
        text = value
    elif isinstance(value, (str, UUID, PurePath)):
        text = str(value)
    else:
        number = _whole(value)
        text = str(number) if number is not None and abs(number) < _BEYOND_ANY_ID else ""
    return None if text.strip() in ("", "None") else join_halves(text)


def label(metadata: Mapping[str, Any], *keys: str) -> str:
    """The first of these values that can name something, as text; other types name nothing."""
    for key in keys:
        value = metadata.get(key)
        if value is None:
            continue
        # Nearly always a text: eleven labels are read for a question.
        named = (value if value.strip() else None) if type(value) is str else as_id(value)
        if named is not None:
            return named
    return ""


def as_number(value: object) -> int | None:
    """A whole number, Python's or numpy's, of a size that every database holds; `None` for anything else."""
    number = _whole(value)
    return number if number is not None and -(2**63) <= number < 2**63 else None


def _whole(value: object) -> int | None:
    """A whole number of any type. Some stores, Pinecone's among them, keep all numbers as floats."""
    if type(value) is int:
        return value
    if isinstance(value, (Integral, np.integer)) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, (float, np.floating)) and float(value).is_integer() and abs(value) <= _EXACT_IN_A_FLOAT:
        return int(value)
    return None


def read_global(document: Document, config: RagWikiRetrieverConfig, score: float | None = None) -> GlobalDocument:
    """A copy of a document that the wrapped retriever returned, with the missing metadata filled in.

    A document that nothing identifies is copied as it is.
    """
    doc_id = identify(document, config.document_id)
    metadata = copy_metadata(document.metadata)
    if "from_cache" in metadata:
        # Whatever the source says: no copy of ours is what it returned.
        metadata["from_cache"] = False
    if doc_id is None:
        return GlobalDocument(_copied(document, metadata), None, score=score)
    path = label(metadata, "doc_path", "source", "file_path")
    title = label(metadata, "doc_title", "title") or PurePosixPath(path or doc_id).name or doc_id
    for key, value in (("doc_id", doc_id), ("doc_title", title), ("doc_path", path)):
        if metadata.get(key) is None:
            metadata[key] = value
    metadata["from_cache"] = False
    number = as_number(metadata.get("chunk_index"))
    version = source_version(metadata, config.version_key)
    return GlobalDocument(
        document=_copied(document, metadata),
        doc_id=doc_id,
        doc_title=title,
        doc_path=path,
        chunk_index=number,
        digest=_digest_of(document.page_content, number, version),
        score=score,
    )


def _digest_of(text: str, number: int | None, version: str | None) -> str:
    """What tells a piece from others. Most were shown before, and their digests are known."""
    # By its hash: of the text itself, which may be long and is the caller's, nothing is kept.
    key = hash(text), len(text), number, version
    digest = _digests.get(key)
    if digest is None:
        # Laid out in another way it is the same text; under another number or version it says something else of a copy.
        told_by = f"{number} {version} {flat(text)}"
        digest = hashlib.sha256(told_by.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        if len(_digests) >= _MOST_DIGESTS:
            _digests.clear()
        _digests[key] = digest
    return digest


_MOST_DIGESTS = 8192
_digests: dict[tuple[int, int, int | None, str | None], str] = {}
"""Threads may write the same one twice; a dictionary is whole at any moment."""


def _copied(document: Document, metadata: dict[str, Any]) -> Document:
    """A copy with this metadata; what a class of the caller's own adds is copied like metadata."""
    added: dict[str, Any] = {}
    if type(document) is not Document:
        own = {**document.__dict__, **(document.model_extra or {})}
        added = copy_metadata({name: value for name, value in own.items() if name != "metadata"})
    return document.model_copy(update={**added, "metadata": metadata})


def common_metadata(all_metadata: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all of some metadata say alike."""
    if not all_metadata:
        return {}
    first, *others = all_metadata
    return {
        name: value for name, value in first.items() if all(name in other and other[name] == value for other in others)
    }


def copy_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A copy that shares nothing that can be copied; a value that can't (a handle, a lock) stays the caller's."""
    copied = dict(metadata)
    for name, value in metadata.items():
        if type(value) not in _ATOMS:
            # What deepcopy raises is up to the value's class.
            with contextlib.suppress(Exception):
                copied[name] = _deep_copy(value)
    return copied


def _deep_copy(value: Any) -> Any:
    """`copy.deepcopy`, which takes many times as long for the vectors that LangChain's filters leave."""
    if type(value) is dict:
        return {name: _deep_copy(own) if type(own) is list else copy.deepcopy(own) for name, own in value.items()}
    return value.copy() if type(value) is list and _ATOM_SET.issuperset(map(type, value)) else copy.deepcopy(value)


def _in_document_order(found: DocumentHits) -> list[ChunkHit]:
    # A hit begins with its position, and no two have the same.
    return sorted(found.hits, key=_POSITION) if len(found.hits) > 1 else list(found.hits)
