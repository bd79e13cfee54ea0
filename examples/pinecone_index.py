"""A Pinecone index, and the memory of one user over it: asked three times, saved, and answered from the saved copy.

    python examples/pinecone_index.py --create

`--create` makes a serverless index, if there is none of that name; `--index` names one that is there. The example
documents go into a namespace of their own, embedded on this machine, so that no other key is needed.

Needs: a key in PINECONE_API_KEY (https://app.pinecone.io), and
pip install langchain-pinecone 'langchain-rag-wiki[local]'
"""

from __future__ import annotations

import argparse
import os
import time
from typing import TYPE_CHECKING, Any

from langchain_core.embeddings import Embeddings
from langchain_core.vectorstores import VectorStore

from rag_wiki import RagWikiRetriever

if TYPE_CHECKING:
    from examples.chat import NotThereError, need, one_line, run, say, utf8
    from examples.corpus import choose_model, load_chunks
else:  # a script finds its neighbours by their bare names
    from chat import NotThereError, need, one_line, run, say, utf8
    from corpus import choose_model, load_chunks

NAMESPACE = "rag-wiki-example"
GUIDE = "docker/image-guide.md"
QUESTIONS = (
    "How do I make a Docker image smaller?",
    "How should I order a Dockerfile to use the build cache?",
    "How do I pass a secret to docker build?",
)
PATIENCE = 60
"""Seconds to wait until what was written can be found; Pinecone says no more than "soon"."""


def main() -> None:
    """Fill the index if need be, ask, save, and ask again."""
    parser = argparse.ArgumentParser(description="A user's memory over a Pinecone index.")
    parser.add_argument("--index", default="rag-wiki-example", help="its name")
    parser.add_argument("--create", action="store_true", help="make it, if there is none of that name")
    parser.add_argument("--cloud", default="aws")
    parser.add_argument("--region", default="us-east-1")
    arguments = parser.parse_args()

    embeddings, config, name = choose_model()
    vector_store = open_index(embeddings, arguments)
    say(f"The index {arguments.index!r} holds the example documents, embedded with {name}.")
    retriever = RagWikiRetriever(
        global_retriever=vector_store.as_retriever(search_kwargs={"k": 3}), user_id="ada", config=config
    )
    for question in QUESTIONS:
        ask(retriever, question)
    saved = retriever.accept_suggestion(GUIDE)
    say(f"\nSaved: {saved.doc_title}, {saved.chunk_count} chunks from the {saved.content_source}.")
    ask(retriever, QUESTIONS[0])


def open_index(embeddings: Embeddings, arguments: argparse.Namespace) -> VectorStore:
    """The index as a LangChain vector store, with the example documents in it.

    Raises:
        NotThereError: A package, the key, Pinecone or the index is not there, or it is of another width.
    """
    need("langchain-pinecone")
    if not os.environ.get("PINECONE_API_KEY"):
        raise NotThereError("There is no key in PINECONE_API_KEY: make one on https://app.pinecone.io and export it")
    from langchain_pinecone import PineconeVectorStore  # type: ignore[import-not-found]  # not needed to develop
    from pinecone import Pinecone, ServerlessSpec  # type: ignore[import-not-found]  # the same
    from pinecone.exceptions import PineconeException  # type: ignore[import-not-found]  # the same
    from urllib3.exceptions import HTTPError

    width = len(embeddings.embed_query("How wide?"))
    try:
        client = Pinecone()
        if not client.has_index(arguments.index):
            if not arguments.create:
                raise NotThereError(
                    f"Pinecone has no index {arguments.index!r}: make it with --create, or name another with --index"
                )
            place = ServerlessSpec(cloud=arguments.cloud, region=arguments.region)
            client.create_index(arguments.index, dimension=width, metric="cosine", spec=place)
        found = client.describe_index(arguments.index)
        if found.dimension != width:
            raise NotThereError(
                f"The index {arguments.index!r} holds vectors {found.dimension} wide and the model makes {width}: "
                "name another index with --index"
            )
        index = client.Index(host=found.host)
        vector_store: VectorStore = PineconeVectorStore(index=index, embedding=embeddings, namespace=NAMESPACE)
        fill(index, vector_store)
    except PineconeException as error:
        raise NotThereError(f"Pinecone refused: {one_line(error)}") from error
    except HTTPError as error:
        raise NotThereError(f"Pinecone can't be reached: {one_line(error)}") from error
    return vector_store


def fill(index: Any, vector_store: VectorStore) -> None:
    """Put the example documents into their namespace, unless they are there, and wait until they can be found."""
    chunks = load_chunks()
    if count(index) >= len(chunks):
        return
    say(f"Writing {len(chunks)} chunks ...")
    vector_store.add_documents(
        chunks, ids=[f"{chunk.metadata['doc_id']}#{chunk.metadata['chunk_index']}" for chunk in chunks]
    )
    deadline = time.monotonic() + PATIENCE
    while count(index) < len(chunks) and time.monotonic() < deadline:
        time.sleep(1)


def count(index: Any) -> int:
    """How many chunks can be found."""
    namespace = index.describe_index_stats().namespaces.get(NAMESPACE)
    return 0 if namespace is None else int(namespace.vector_count)


def ask(retriever: RagWikiRetriever, question: str) -> None:
    """Ask, and show where the answer's pieces came from."""
    documents, provenance = retriever.invoke_with_provenance(question)
    best = " ".join(documents[0].page_content.split())[:90] if documents else "(nothing)"
    say(f"\nAda asks: {question}\nThe best passage begins: {best} ...\n{provenance.render(ascii=not utf8())}")


if __name__ == "__main__":
    run(main)
