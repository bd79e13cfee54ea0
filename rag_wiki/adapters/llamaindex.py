"""LlamaIndex retrievers as LangChain retrievers.

::

    from rag_wiki import RagWikiRetriever
    from rag_wiki.adapters.llamaindex import LlamaIndexRetrieverAdapter

    retriever = RagWikiRetriever(
        global_retriever=LlamaIndexRetrieverAdapter(llama_retriever=index.as_retriever()),
        user_id="alice",
    )

Importing this module needs the extra `llama`.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Mapping
from typing import Any

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from pydantic import SkipValidation

from rag_wiki.errors import ConfigurationError, MissingExtraError
from rag_wiki.pieces import as_id

try:
    from llama_index.core.base.base_retriever import BaseRetriever as LlamaIndexRetriever
    from llama_index.core.schema import MetadataMode, NodeWithScore
except ImportError as error:
    raise MissingExtraError("LlamaIndexRetrieverAdapter", "llama") from error

__all__ = ["LlamaIndexRetrieverAdapter", "node_to_document"]

# A file name is a title but no id and no path: two folders may hold the same name.
_ID_KEYS = ("doc_id", "document_id", "source", "doc_path", "file_path")
_TITLE_KEYS = ("title", "file_name")
_PATH_KEYS = ("file_path", "source", "url")

# Says in a record or a trace what kind of id this is, and keeps it apart from every id that a source gives.
_CONTENT_ID_PREFIX = "content-sha256:"


class LlamaIndexRetrieverAdapter(BaseRetriever):
    """A LangChain retriever that asks a LlamaIndex one.

    Nodes become Documents as `node_to_document` describes, in the order in which LlamaIndex ranked them. Works in
    scripts, in threads and inside a running event loop (a notebook, a web service): `ainvoke` awaits the LlamaIndex
    retriever when that one is truly asynchronous, and runs it in a thread when it is not, so the loop is never blocked.

    LlamaIndex retrievers take nothing but the query at call time. Set the number of results, filters and so on where
    the LlamaIndex retriever is made: `index.as_retriever(similarity_top_k=5)`.

    Args:
        llama_retriever: Any LlamaIndex retriever, for instance `index.as_retriever()`.
        **kwargs: What every LangChain retriever takes: `tags`, `metadata`, `name`.

    Raises:
        ConfigurationError: `llama_retriever` can't retrieve; an index or a class was passed, say.
    """

    # Checked in __init__: pydantic would hide our error inside one of its own.
    llama_retriever: SkipValidation[LlamaIndexRetriever]
    """The LlamaIndex retriever that is asked."""

    def __init__(self, llama_retriever: LlamaIndexRetriever, **kwargs: Any) -> None:
        if isinstance(llama_retriever, type) or not callable(getattr(llama_retriever, "retrieve", None)):
            raise ConfigurationError(
                "llama_retriever must be a LlamaIndex retriever, an object with a retrieve() method such as "
                f"index.as_retriever(); got {_described(llama_retriever)}"
            )
        fields = {"llama_retriever": llama_retriever, **kwargs}
        super().__init__(**fields)

    def _get_relevant_documents(
        self,
        query: str,
        *,
        run_manager: CallbackManagerForRetrieverRun,  # noqa: ARG002  # LangChain's signature; LlamaIndex has no use for it
    ) -> list[Document]:
        return [node_to_document(node) for node in self.llama_retriever.retrieve(query)]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        if not _is_truly_async(self.llama_retriever):
            return await super()._aget_relevant_documents(query, run_manager=run_manager)
        return [node_to_document(node) for node in await self.llama_retriever.aretrieve(query)]


def node_to_document(node_with_score: NodeWithScore) -> Document:
    """Translate one LlamaIndex result into a LangChain Document.

    The Document is a copy through and through: changing it changes nothing in LlamaIndex.

    - `page_content` is the node's text, without the metadata that LlamaIndex writes into prompts. It may be empty (an
      image, a reference to another index).
    - `id` is the id of the node, that is of the chunk.
    - `metadata` has every key of the node's metadata, and besides:

      - `doc_id`, the id of the document that the node was cut from: the node's SOURCE (`ref_doc_id`); else `doc_id`,
        `document_id`, `source`, `doc_path` or `file_path` of the metadata; else a hash of the text. Never the id of the
        node, which without a SOURCE is often a new random one on each call, and never a file name, which another folder
        may hold too. A node with none of these and no text has no `doc_id`.
      - `score`, when the retriever gave one. A missing score, or NaN, is no key: it is not a score of zero.
      - `doc_title` (from `title` or `file_name`) and `doc_path` (from `file_path`, `source` or `url`), when they are
        known and not there already, and `node_id`.

    `doc_id` and `score` always have this one meaning. Where the node's own metadata uses these names for something
    else, its value is kept as `original_doc_id` or `original_score`.

    Args:
        node_with_score: One element of what a LlamaIndex retriever returns. It is not changed.

    Returns:
        A new Document.
    """
    node = node_with_score.node
    text = node.get_content(metadata_mode=MetadataMode.NONE)
    metadata: dict[str, Any] = copy.deepcopy(node.metadata)

    doc_id = as_id(node.ref_doc_id) or _first_known(metadata, _ID_KEYS) or _content_id(text)
    if doc_id != metadata.get("doc_id"):
        _move_aside(metadata, "doc_id")
        if doc_id is not None:
            metadata["doc_id"] = doc_id

    _move_aside(metadata, "score")
    score = node_with_score.score
    if score is not None and not math.isnan(score):
        metadata["score"] = float(score)

    for key, known_as in (("doc_title", _TITLE_KEYS), ("doc_path", _PATH_KEYS)):
        known = _first_known(metadata, known_as)
        if known is not None:
            metadata.setdefault(key, known)
    metadata.setdefault("node_id", node.node_id)
    return Document(id=node.node_id, page_content=text, metadata=metadata)


def _is_truly_async(retriever: LlamaIndexRetriever) -> bool:
    """Whether `aretrieve` awaits: the one that every LlamaIndex retriever inherits calls `retrieve` on the loop."""
    if not isinstance(retriever, LlamaIndexRetriever):
        return hasattr(retriever, "aretrieve")
    # Static look-ups, because LlamaIndex wraps methods for tracing and a normal one gives a new wrapper each time.
    return any(
        inspect.getattr_static(type(retriever), method) is not inspect.getattr_static(LlamaIndexRetriever, method)
        for method in ("aretrieve", "_aretrieve")
    )


def _first_known(metadata: Mapping[str, Any], keys: tuple[str, ...]) -> str | None:
    return next((known for key in keys if (known := as_id(metadata.get(key))) is not None), None)


def _content_id(text: str) -> str | None:
    """An id made from the text; without text there is none, or all empty nodes would be one document."""
    if not text.strip():
        return None
    return _CONTENT_ID_PREFIX + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _move_aside(metadata: dict[str, Any], key: str) -> None:
    """Free `key` for our meaning of it, and keep the node's own value under a name that is not taken."""
    if key not in metadata:
        return
    aside = f"original_{key}"
    while aside in metadata:
        aside = f"original_{aside}"
    metadata[aside] = metadata.pop(key)


def _described(value: object) -> str:
    """The kind of thing that was passed; not its repr, which may hold keys and texts."""
    return f"the class {value.__name__}" if isinstance(value, type) else type(value).__name__
