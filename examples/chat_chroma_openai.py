"""A chat in the terminal over Chroma, with OpenAI's models.

    python examples/chat_chroma_openai.py

An empty collection gets the documents in `examples/documents/`. OPENAI_BASE_URL names another server that speaks
OpenAI's protocol (vLLM, LM Studio, a gateway); then say which models it has: `--embedding-model` and `--chat-model`.

Needs: a key in OPENAI_API_KEY (https://platform.openai.com/api-keys), and
pip install langchain-chroma langchain-openai 'langchain-rag-wiki[sqlite]'
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    from examples.chat import Chat, NotThereError, need, one_line, open_collection, read_arguments, remember, run
else:  # a script finds its neighbours by their bare names
    from chat import Chat, NotThereError, need, one_line, open_collection, read_arguments, remember, run


def main() -> None:
    """Chat."""
    arguments = read_arguments(
        "Chat over Chroma and OpenAI.",
        "rag_wiki_openai",
        embedding_model="text-embedding-3-small",
        chat_model="gpt-4o-mini",
    )
    embeddings, model = find_models(arguments.embedding_model, arguments.chat_model)
    collection = open_collection(arguments.db, arguments.collection, embeddings)
    retriever = remember(collection, arguments.user, arguments.memory)
    with closing(retriever.state_store):
        Chat(retriever, model).talk()


def find_models(embedding_model: str, chat_model: str) -> tuple[OpenAIEmbeddings, ChatOpenAI]:
    """Both models, after one short text was embedded.

    Raises:
        NotThereError: A package, the key, the server or the model is not there.
    """
    need("langchain-chroma", "langchain-openai")
    if not os.environ.get("OPENAI_API_KEY"):
        raise NotThereError(
            "There is no key in OPENAI_API_KEY: make one on https://platform.openai.com/api-keys and export it"
        )
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings
    from openai import OpenAIError

    # The chunks are far shorter than what the model takes: nothing need be counted, nor a tokenizer be fetched for it.
    embeddings = OpenAIEmbeddings(model=embedding_model, check_embedding_ctx_length=False)
    try:
        embeddings.embed_query("Is anybody there?")
    except OpenAIError as error:
        where = os.environ.get("OPENAI_BASE_URL") or "OpenAI"
        raise NotThereError(f"{where} can't embed with {embedding_model}: {one_line(error)}") from error
    return embeddings, ChatOpenAI(model=chat_model)


if __name__ == "__main__":
    run(main)
