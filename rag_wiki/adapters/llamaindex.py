"""LlamaIndex on either side: its retrievers below ours, and ours inside its query engines.

::

    from rag_wiki import RagWikiRetriever
    from rag_wiki.adapters.llamaindex import LlamaIndexRetrieverAdapter, RagWikiLlamaIndexRetriever

    retriever = RagWikiRetriever(
        global_retriever=LlamaIndexRetrieverAdapter(llama_retriever=index.as_retriever()),
        user_id="alice",
    )
    query_engine = RetrieverQueryEngine.from_args(RagWikiLlamaIndexRetriever(retriever=retriever))

Importing this module needs the extra `llama`.
"""

from __future__ import annotations

import copy
import hashlib
import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID, uuid4, uuid5

from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from pydantic import SkipValidation

from rag_wiki.bound import BoundRetriever
from rag_wiki.errors import ConfigurationError, InvalidUserError, MissingExtraError
from rag_wiki.pieces import IDENTIFYING_KEYS, as_id, as_number, identify
from rag_wiki.retriever import RagWikiRetriever, RetrievalResult
from rag_wiki.storage.records import check_user_id
from rag_wiki.transparency.provenance import ProvenanceBlock
from rag_wiki.users import using_user

try:
    from llama_index.core.base.base_retriever import BaseRetriever as LlamaIndexRetriever
    from llama_index.core.base.embeddings.base import BaseEmbedding
    from llama_index.core.callbacks import CallbackManager
    from llama_index.core.indices.base import BaseIndex
    from llama_index.core.instrumentation import get_dispatcher  # type: ignore[attr-defined]  # exported as documented
    from llama_index.core.instrumentation.events import BaseEvent
    from llama_index.core.schema import (
        BaseNode,
        IndexNode,
        MetadataMode,
        NodeRelationship,
        NodeWithScore,
        ObjectType,
        QueryBundle,
        QueryType,
        RelatedNodeInfo,
        TextNode,
    )
except ImportError as error:
    raise MissingExtraError("LlamaIndexRetrieverAdapter", "llama") from error

__all__ = [
    "LlamaIndexEmbeddings",
    "LlamaIndexRetrieverAdapter",
    "RagWikiLlamaIndexRetriever",
    "RagWikiProvenanceEvent",
    "node_to_document",
    "using_user",
]

# A file name is a title but no id and no path: two folders may hold the same name.
_ID_KEYS = ("doc_id", "document_id", "source", "doc_path", "file_path")
_TITLE_KEYS = ("title", "file_name")
_PATH_KEYS = ("file_path", "source", "url")

# Says in a record or a trace what kind of id this is, and keeps it apart from every id that a source gives.
_CONTENT_ID_PREFIX = "content-sha256:"

_EXCLUDED_KEYS = ("excluded_llm_metadata_keys", "excluded_embed_metadata_keys")
"""Fields of a node that say which metadata stay out of prompts; a Document carries them in its metadata."""
_INTERNAL_KEYS = (
    "doc_id",
    "doc_path",
    "from_cache",
    "user_state",
    "chunks_used",
    "chunk_index",
    "total_chunks",
    "full_doc_injected",
)
"""What we add and no language model needs; a title of the source's own is for reading."""
_OF_ONE_QUERY = ("score", "scores")
"""They become the node's score. In the metadata, which LlamaIndex tells nodes by, they would make one piece two."""

# Names the ids that pieces get which have none.
_NODE_IDS = UUID("3a1d6f0e-7b0a-5c5e-9d6c-1f1f2a64c0de")

# No public attributes: LlamaIndex's retrievers offer none for what they embed with and ask.
_EMBED_MODEL = "_embed_model"
_INNER = ("_index", "_retriever", "_retrievers", "_retriever_dict", "_vector_retriever", "sub_retrievers")
_MOST_HOLDERS = 200
_UNNAMED = "unknown"
"""The name of a LlamaIndex embedding model to which nobody gave one."""

dispatcher = get_dispatcher(__name__)


@dataclass
class _Asking:
    """A question of LlamaIndex's that is on its way to a LlamaIndex retriever, through LangChain's strings."""

    bundle: QueryBundle
    nodes: dict[str, BaseNode] = field(default_factory=dict)
    """The nodes that it found, by id: a Document can't carry all that is in them."""

    def query_for(self, query: str) -> QueryType:
        """The whole of the question, where it is still the same one. A copy: who embeds it notes the vector in it."""
        return replace(self.bundle) if query == self.bundle.query_str else query


_asking: ContextVar[_Asking | None] = ContextVar("rag_wiki_llamaindex_question", default=None)


class LlamaIndexRetrieverAdapter(BaseRetriever):
    """A LangChain retriever that asks a LlamaIndex one.

    Nodes become Documents as `node_to_document` describes, in the order in which LlamaIndex ranked them. Works in
    scripts, in threads and inside a running event loop (a notebook, a web service): `ainvoke` awaits the LlamaIndex
    retriever when that one is truly asynchronous, and runs it in a thread when it is not, so the loop is never blocked.

    LlamaIndex retrievers take nothing but the query at call time. Set the number of results, filters and so on where
    the LlamaIndex retriever is made: `index.as_retriever(similarity_top_k=5)`.

    A `RagWikiRetriever` around it embeds saved copies with the model that the LlamaIndex retriever embeds with, unless
    it is given another one.

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
        return _documents(self.llama_retriever.retrieve(_whole(query)))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        if not _is_truly_async(self.llama_retriever):
            return await super()._aget_relevant_documents(query, run_manager=run_manager)
        return _documents(await self.llama_retriever.aretrieve(_whole(query)))

    @property
    def embed_models(self) -> list[LlamaIndexEmbeddings]:
        """The embedding models of the LlamaIndex retriever and of those that it asks, each once."""
        found: dict[object, BaseEmbedding] = {}
        for model in _embed_models(self.llama_retriever):
            # Without a name of its own, a model is the same as another one only if it is that one.
            found.setdefault((type(model), model.model_name) if model.model_name != _UNNAMED else id(model), model)
        models = [LlamaIndexEmbeddings(model) for model in found.values()]
        if len({model.model for model in models}) < len(models):
            # Several that nothing tells apart: nobody can choose one, and a number says that they are several.
            return [LlamaIndexEmbeddings(model.embed_model, number) for number, model in enumerate(models, start=1)]
        return models


class LlamaIndexEmbeddings(Embeddings):
    """A LlamaIndex embedding model as a LangChain one.

    Questions are embedded as LlamaIndex embeds them (`get_query_embedding`), texts as it embeds texts. The `a…` methods
    run it in a thread: many LlamaIndex models have async methods that block.

    Args:
        embed_model: The LlamaIndex model.
        number: Tells it from another one of the same class without a name.
    """

    def __init__(self, embed_model: BaseEmbedding, number: int | None = None) -> None:
        if not isinstance(embed_model, BaseEmbedding):
            raise ConfigurationError(
                f"embed_model must be a LlamaIndex embedding model (a BaseEmbedding), got {_described(embed_model)}"
            )
        self.embed_model = embed_model
        self._number = number

    @property
    def model(self) -> str:
        """What the model is called: its class and its name."""
        kind = type(self.embed_model)
        parts = [f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}"]
        parts += [self.embed_model.model_name] if self.embed_model.model_name != _UNNAMED else []
        parts += [f"no. {self._number}"] if self._number is not None else []
        return ":".join(parts)

    def embed_query(self, text: str) -> list[float]:
        """Embed a question; one that LlamaIndex asks with other texts to embed (`custom_embedding_strs`), by those."""
        asking = _asking.get()
        if asking is not None and text == asking.bundle.query_str and asking.bundle.custom_embedding_strs:
            return self.embed_model.get_agg_embedding_from_queries(asking.bundle.custom_embedding_strs)
        return self.embed_model.get_query_embedding(text)

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """Embed texts that questions will be compared with."""
        return self.embed_model.get_text_embedding_batch(texts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.model})"


class RagWikiProvenanceEvent(BaseEvent):
    """Where the pieces of one retrieval came from, for LlamaIndex's instrumentation.

    Sent by `RagWikiLlamaIndexRetriever` within the span of the retrieval: `span_id` and `tags` say which one it is.
    """

    provenance: dict[str, Any]
    """As `ProvenanceBlock.to_dict()`."""

    @classmethod
    def class_name(cls) -> str:
        """The event's name."""
        return "RagWikiProvenanceEvent"


class RagWikiLlamaIndexRetriever(LlamaIndexRetriever):
    """A `RagWikiRetriever` as a LlamaIndex retriever: for query engines, chat engines, routers and fusion.

    What it returns:

    - **Ids.** Around a LlamaIndex retriever (through `LlamaIndexRetrieverAdapter`) a piece is the very node that was
      found there, with its id, relationships and kind, an image say. Another retriever's piece has the id of its
      Document, or one that follows from document and text, as saved copies have: the same text has the same id again.
    - **Scores.** A saved copy's is the cosine of its best chunk (its share of words, without an embedding model); any
      other piece's the one that the wrapped retriever gave; `None` where it gave none. LlamaIndex's
      `SimilarityPostprocessor` drops nodes without a score.
    - **Metadata.** The source's own, and `doc_id`, `doc_title`, `doc_path`, `from_cache`, and on saved copies
      `user_state`, `chunks_used`, `total_chunks` and `full_doc_injected`. None of ours goes into prompts, but for a
      `doc_title` that the source gave; a node that LlamaIndex found goes into them as it did.
    - **SOURCE.** The document, by the id that `accept_suggestion` takes: `node.ref_doc_id`.

    The provenance of a call is `last_provenance`, and a `RagWikiProvenanceEvent` for LlamaIndex's event handlers.
    A query bundle reaches a wrapped LlamaIndex retriever whole; saved copies are searched by its query, or by
    its `custom_embedding_strs` where the index's own model embeds. A vector in it is for the wrapped retriever alone:
    nobody knows which model made it.

    LlamaIndex has no run configuration. The user is the one of `using_user` or of a LangChain run around the call,
    whichever is nearer; else the retriever's own: `user_id`, or `for_user("bob")`. For actions as well.

    Args:
        retriever: The retriever, or what its `bind` or `with_config` made of it.
        user_id: Whose memory; by default the retriever's own user's.
        callback_manager: As for every LlamaIndex retriever; so are the others.
        object_map: Objects that index nodes refer to.
        objects: The same as nodes.
        verbose: Tell of nodes that are followed.

    Raises:
        ConfigurationError: `retriever` is something else.
        InvalidUserError: `user_id` is blank or not a string.
    """

    def __init__(
        self,
        retriever: RagWikiRetriever | BoundRetriever,
        user_id: str | None = None,
        callback_manager: CallbackManager | None = None,
        object_map: dict[str, Any] | None = None,
        objects: list[IndexNode] | None = None,
        verbose: bool = False,
    ) -> None:
        if not isinstance(retriever, (RagWikiRetriever, BoundRetriever)):
            raise ConfigurationError(f"retriever must be a RagWikiRetriever, got {_described(retriever)}")
        super().__init__(callback_manager, object_map, objects, verbose)
        self.retriever = retriever if user_id is None else retriever.for_user(user_id)
        """The retriever that is asked. Actions are its own: `retriever.retriever.accept_suggestion(doc_id)`."""

    def for_user(self, user_id: str) -> RagWikiLlamaIndexRetriever:
        """The same retriever for another user, with the same stores and caches.

        Raises:
            InvalidUserError: `user_id` is blank or not a string.
        """
        kind = type(self)
        return kind(self.retriever, check_user_id(user_id), self.callback_manager, self.object_map, None, self._verbose)

    @property
    def last_provenance(self) -> ProvenanceBlock | None:
        """The provenance of this thread's or task's last call, else of the newest one for its user; or `None`."""
        return self.retriever.last_provenance

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        with self._asked(query_bundle) as asking:
            return self._told(self.retriever.invoke_with_provenance(query_bundle.query_str), asking)

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        with self._asked(query_bundle) as asking:
            return self._told(await self.retriever.ainvoke_with_provenance(query_bundle.query_str), asking)

    @contextmanager
    def _asked(self, bundle: QueryBundle) -> Iterator[_Asking]:
        """The question, where the adapters below find it."""
        asking = _Asking(bundle)
        token = _asking.set(asking)
        try:
            yield asking
        except InvalidUserError as error:
            raise InvalidUserError(
                f"{error}. In LlamaIndex: RagWikiLlamaIndexRetriever(..., user_id=...), its for_user(...), "
                "or 'with using_user(...):' around the call"
            ) from error
        finally:
            _asking.reset(token)

    def _told(self, result: RetrievalResult, asking: _Asking) -> list[NodeWithScore]:
        """What was found as nodes, and LlamaIndex told where it came from."""
        documents, provenance = result
        dispatcher.event(RagWikiProvenanceEvent(provenance=provenance.to_dict()))
        bound = self.retriever.bound if isinstance(self.retriever, BoundRetriever) else self.retriever
        document_id = bound.config.document_id if isinstance(bound, RagWikiRetriever) else None
        nodes: list[NodeWithScore] = []
        texts: dict[str, str] = {}
        for document, known_score in zip(documents, _known_scores(documents, provenance), strict=True):
            # A copy says itself whose it is; its source's metadata may name something else.
            from_cache = document.metadata.get("from_cache") is True
            doc_id = identify(document, None if from_cache else document_id)
            node_id = document.id or _stable_id(document, doc_id)
            # LlamaIndex drops all but the first node of an id; two texts are two nodes, whatever the store calls them.
            if texts.setdefault(node_id, document.page_content) != document.page_content:
                node_id = _stable_id(document, doc_id)
            original = asking.nodes.get(node_id)
            if original is not None and original.get_content(MetadataMode.NONE) == document.page_content:
                node = _as_it_was(original, document, doc_id)
            else:
                node = _text_node(node_id, document, doc_id)
            nodes.append(NodeWithScore(node=node, score=known_score))
        return nodes


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
        Nor has a reference (an `IndexNode`), in whose place LlamaIndex reads what it refers to: a saved copy of it
        would be words about that, and hide it. It has no other key that identifies, so it passes through untracked,
        unless `RagWikiRetrieverConfig(document_id=...)` names one.
      - `score`, when the retriever gave one. A missing score, or NaN, is no key: it is not a score of zero.
      - `doc_title` (from `title` or `file_name`) and `doc_path` (from `file_path`, `source` or `url`), when they are
        known and not there already, and `node_id`.
      - `excluded_llm_metadata_keys` and `excluded_embed_metadata_keys`, where the node has some: a saved copy that
        goes back to LlamaIndex keeps out of prompts what the node kept out.

    `doc_id` and `score` always have this one meaning. Where the node's own metadata uses these names for something
    else, its value is kept as `original_doc_id` or `original_score`; so are `source` and `doc_path` of a reference.

    Args:
        node_with_score: One element of what a LlamaIndex retriever returns. It is not changed.

    Returns:
        A new Document.
    """
    node = node_with_score.node
    text = node.get_content(metadata_mode=MetadataMode.NONE)
    metadata: dict[str, Any] = copy.deepcopy(node.metadata)

    refers = isinstance(node, IndexNode)
    doc_id = None if refers else as_id(node.ref_doc_id) or _first_known(metadata, _ID_KEYS) or _content_id(text)
    if doc_id != metadata.get("doc_id"):
        _move_aside(metadata, "doc_id")
        if doc_id is not None:
            metadata["doc_id"] = doc_id

    _move_aside(metadata, "score")
    score = node_with_score.score
    if score is not None and not math.isnan(score):
        metadata["score"] = float(score)

    if refers:
        for key in IDENTIFYING_KEYS:
            _move_aside(metadata, key)
    known_keys = {"doc_title": _TITLE_KEYS} if refers else {"doc_title": _TITLE_KEYS, "doc_path": _PATH_KEYS}
    for key, known_as in known_keys.items():
        known = _first_known(metadata, known_as)
        if known is not None:
            metadata.setdefault(key, known)
    metadata.setdefault("node_id", node.node_id)
    for name in _EXCLUDED_KEYS:
        excluded = getattr(node, name)
        if excluded:
            metadata.setdefault(name, list(excluded))
    return Document(id=node.node_id, page_content=text, metadata=metadata)


def _whole(query: str) -> QueryType:
    """A query as LlamaIndex asked it, if it did."""
    asking = _asking.get()
    return query if asking is None else asking.query_for(query)


def _documents(nodes: Sequence[NodeWithScore]) -> list[Document]:
    asking = _asking.get()
    if asking is not None:
        asking.nodes.update((found.node.node_id, found.node) for found in nodes)
    return [node_to_document(node) for node in nodes]


def _embed_models(retriever: object) -> Iterator[BaseEmbedding]:
    """The models that a LlamaIndex retriever embeds with, and those of the retrievers that it asks."""
    seen: dict[int, object] = {}
    waiting = [retriever]
    while waiting and len(seen) < _MOST_HOLDERS:
        holder = waiting.pop(0)
        if id(holder) in seen:
            continue
        # Kept, so that no other object gets the same id meanwhile.
        seen[id(holder)] = holder
        if isinstance(holder, (list, tuple)):
            waiting += holder
        elif isinstance(holder, Mapping):
            waiting += holder.values()
        elif isinstance(holder, (LlamaIndexRetriever, BaseIndex)):
            model = getattr(holder, _EMBED_MODEL, None)
            if isinstance(model, BaseEmbedding):
                # Its index may have another one, which it does not use.
                yield model
            else:
                waiting += [getattr(holder, name, None) for name in _INNER]


def _known_scores(documents: Sequence[Document], provenance: ProvenanceBlock) -> Iterator[float | None]:
    """The score of each document: a copy's best, else the one that it came with, else what provenance knows of it."""
    told: dict[str | None, list[float | None]] = {}
    for source in provenance.sources:
        if not source.from_cache:
            pieces = source.passages or 0
            told.setdefault(source.doc_id, []).extend(
                source.scores if len(source.scores) == pieces else [None] * pieces
            )
    for document in documents:
        metadata = document.metadata
        if metadata.get("from_cache") is True:
            yield max(metadata.get("scores") or (), default=None)
            continue
        of_document = told.get(as_id(metadata.get("doc_id")), [])
        known = of_document.pop(0) if of_document else None
        own = metadata.get("score")
        is_score = isinstance(own, (int, float)) and not isinstance(own, bool) and math.isfinite(own)
        yield float(own) if is_score and own is not None else known


def _stable_id(document: Document, doc_id: str | None) -> str:
    """The id of a piece that has none: the same for the same text of the same document."""
    text = document.page_content
    if doc_id is None and not text.strip():
        return str(uuid4())
    told_by = f"{doc_id} {as_number(document.metadata.get('chunk_index'))} {text}"
    return str(uuid5(_NODE_IDS, hashlib.sha256(told_by.encode("utf-8", "surrogatepass")).hexdigest()))


def _node_metadata(document: Document) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """A Document's metadata as a node's, and the keys that stay out of prompts."""
    metadata = copy.deepcopy(document.metadata)
    for name in _OF_ONE_QUERY:
        metadata.pop(name, None)
    if metadata.get("from_cache") is True or metadata.get("node_id") == document.id:
        # The node says it itself; a copy made of one node is not that node.
        metadata.pop("node_id", None)
    excluded = {
        name: [key for key in metadata.pop(name, None) or () if isinstance(key, str)] for name in _EXCLUDED_KEYS
    }
    return metadata, excluded


def _as_it_was(original: BaseNode, document: Document, doc_id: str | None) -> BaseNode:
    """A copy of a node that LlamaIndex found, with our metadata, none of which goes where its own did not."""
    ours, _ = _node_metadata(document)
    for key in (*IDENTIFYING_KEYS, "score"):
        if key in original.metadata:
            # Moved aside in the Document; here it is back.
            ours.pop(f"original_{key}", None)
    added = [key for key in ours if key not in original.metadata]
    return original.model_copy(
        update={
            # Its own first: prompts show them in their order.
            "metadata": {**copy.deepcopy(original.metadata), **{key: ours[key] for key in added}},
            "relationships": {**_source(doc_id), **original.relationships},
            **{name: [*getattr(original, name), *added] for name in _EXCLUDED_KEYS},
        }
    )


def _text_node(node_id: str, document: Document, doc_id: str | None) -> TextNode:
    metadata, excluded = _node_metadata(document)
    internal = [key for key in _INTERNAL_KEYS if key in metadata]
    if _is_filled_in(metadata):
        internal.append("doc_title")
    return TextNode(
        id_=node_id,
        text=document.page_content,
        metadata=metadata,
        relationships=_source(doc_id),
        excluded_llm_metadata_keys=[*excluded["excluded_llm_metadata_keys"], *internal],
        excluded_embed_metadata_keys=[*excluded["excluded_embed_metadata_keys"], *internal],
    )


def _is_filled_in(metadata: Mapping[str, Any]) -> bool:
    """Whether the title only repeats another key, as it does where the source gave none."""
    title, paths = metadata.get("doc_title"), [str(metadata.get(key) or "") for key in ("doc_path", "doc_id")]
    return title in (*(metadata.get(key) for key in _TITLE_KEYS), *paths, *(PurePosixPath(path).name for path in paths))


def _source(doc_id: str | None) -> dict[NodeRelationship, RelatedNodeInfo]:
    if doc_id is None:
        return {}
    return {NodeRelationship.SOURCE: RelatedNodeInfo(node_id=doc_id, node_type=ObjectType.DOCUMENT)}


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
