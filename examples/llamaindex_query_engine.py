"""A LlamaIndex query engine with a memory of its users: index, retriever and response are LlamaIndex's.

    python examples/llamaindex_query_engine.py

The language model is played by a few lines that quote what they were shown, so that nothing need be running. With your
own: `Settings.llm = ...`, and no `llm=...` below.

Needs: pip install 'langchain-rag-wiki[llama,local]'
"""

from __future__ import annotations

import argparse
import asyncio
from typing import TYPE_CHECKING, Any

from langchain_core.embeddings import Embeddings

from rag_wiki import MissingExtraError, RagWikiRetriever, RagWikiRetrieverConfig

if TYPE_CHECKING:
    from examples.corpus import choose_model, describe, load_chunks
else:  # a script finds its neighbours by their bare names
    from corpus import choose_model, describe, load_chunks

try:
    from rag_wiki.adapters.llamaindex import LlamaIndexRetrieverAdapter, RagWikiLlamaIndexRetriever, using_user
except MissingExtraError as missing:
    print(f"This example needs LlamaIndex: {missing}")
    raise SystemExit(0) from None

from llama_index.core import VectorStoreIndex
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.embeddings import BaseEmbedding
from llama_index.core.llms import CompletionResponse, CompletionResponseGen, CustomLLM, LLMMetadata
from llama_index.core.postprocessor import SimilarityPostprocessor
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeRelationship, RelatedNodeInfo, TextNode

GUIDE = "docker/image-guide.md"
QUESTIONS = (
    "How do I make a Docker image smaller?",
    "How should I order a Dockerfile to use the build cache?",
    "How do I pass a secret to docker build?",
)


def main() -> None:
    """Ask three times, save, ask again; then let two users ask the same engine at the same time."""
    argparse.ArgumentParser(description="A LlamaIndex query engine with a memory of its users.").parse_args()
    embeddings, config, name = choose_model()
    index = make_index(embeddings)
    print(f"An index of LlamaIndex's, embedded with {name}.")
    retriever = remember(index, config)
    engine = RetrieverQueryEngine.from_args(
        retriever, llm=Quoting(), node_postprocessors=[SimilarityPostprocessor(similarity_cutoff=0.1)]
    )
    for question in QUESTIONS:
        show("Ada", question, engine.query(question), retriever)
    # The id is the source document's: response.source_nodes[0].node.ref_doc_id.
    saved = retriever.retriever.accept_suggestion(GUIDE)
    print(f"\nAda says yes. Saved: {saved.doc_title}, {saved.chunk_count} chunks from the {saved.content_source}.")
    show("Ada", QUESTIONS[0], engine.query(QUESTIONS[0]), retriever)

    print("\nOne engine, two users at the same time:")
    asyncio.run(together(engine, retriever))


def remember(index: VectorStoreIndex, config: RagWikiRetrieverConfig) -> RagWikiLlamaIndexRetriever:
    """The index's retriever with a memory. This is all that an application changes.

    Saved copies are embedded with the index's own model, which is found in it.
    """
    return RagWikiLlamaIndexRetriever(
        retriever=RagWikiRetriever(
            global_retriever=LlamaIndexRetrieverAdapter(llama_retriever=index.as_retriever(similarity_top_k=3)),
            user_id="ada",
            config=config,
        )
    )


async def together(engine: RetrieverQueryEngine, retriever: RagWikiLlamaIndexRetriever) -> None:
    """Ada has a copy, Bob has not: each is answered from what is theirs."""

    async def ask(user: str) -> None:
        with using_user(user):
            response = await engine.aquery(QUESTIONS[0])
            show(user.title(), QUESTIONS[0], response, retriever)

    await asyncio.gather(ask("ada"), ask("bob"))


def show(user: str, question: str, response: RESPONSE_TYPE, retriever: RagWikiLlamaIndexRetriever) -> None:
    """Show an answer, its nodes with their scores, and where they came from."""
    scores = ", ".join("none" if node.score is None else f"{node.score:.2f}" for node in response.source_nodes)
    lines = [f"\n{user} asks: {question}", f"  {response}", f"  scores: {scores}"]
    provenance = retriever.last_provenance  # this very call's
    if provenance is not None:
        lines += [f"  {line}" for line in describe(provenance)]
    print("\n".join(lines).encode("ascii", "replace").decode("ascii"))


def make_index(embeddings: Embeddings) -> VectorStoreIndex:
    """The example documents as a LlamaIndex index. With your own: `VectorStoreIndex.from_documents(documents)`."""
    nodes = [
        TextNode(
            id_=f"{chunk.metadata['doc_id']}#{chunk.metadata['chunk_index']}",
            text=chunk.page_content,
            metadata={"title": chunk.metadata["doc_title"], "file_path": chunk.metadata["doc_path"]},
            excluded_llm_metadata_keys=["file_path"],
            excluded_embed_metadata_keys=["title", "file_path"],
            relationships={NodeRelationship.SOURCE: RelatedNodeInfo(node_id=chunk.metadata["doc_id"])},
        )
        for chunk in load_chunks()
    ]
    return VectorStoreIndex(nodes, embed_model=FromLangChain(embeddings))


class FromLangChain(BaseEmbedding):
    """The embedding model of the examples for LlamaIndex; it has many of its own."""

    def __init__(self, embeddings: Embeddings) -> None:
        super().__init__(model_name=str(getattr(embeddings, "model", type(embeddings).__name__)))
        self._embeddings = embeddings

    def _get_query_embedding(self, query: str) -> list[float]:
        return self._embeddings.embed_query(query)

    async def _aget_query_embedding(self, query: str) -> list[float]:
        return await self._embeddings.aembed_query(query)

    def _get_text_embedding(self, text: str) -> list[float]:
        return self._embeddings.embed_documents([text])[0]


class Quoting(CustomLLM):
    """A language model that answers with the beginning of the first passage."""

    @property
    def metadata(self) -> LLMMetadata:
        """What LlamaIndex wants to know of a model."""
        return LLMMetadata(model_name="quoting")

    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:  # noqa: ARG002
        """Answer a prompt."""
        context = prompt.partition("---------------------\n")[2].partition("\n---------------------")[0]
        title, _, passage = context.partition("\n\n")
        return CompletionResponse(text=f'"{title.removeprefix("title: ")}" says: {" ".join(passage.split())[:80]} ...')

    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        """Answer a prompt in one part."""
        yield self.complete(prompt, formatted, **kwargs)


if __name__ == "__main__":
    main()
