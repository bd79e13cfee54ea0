"""A chat in the terminal over Chroma, with models that run on this machine in Ollama.

    python examples/chat_chroma_ollama.py

An empty collection gets the documents in `examples/documents/`. One that `ingest.py` filled is opened with
`--collection my_docs`. OLLAMA_HOST says where Ollama is, if not on this machine.

Needs: Ollama (https://ollama.com/download) with `ollama pull nomic-embed-text` and `ollama pull llama3.2`, and
pip install langchain-chroma langchain-ollama 'langchain-rag-wiki[sqlite]'
"""

from __future__ import annotations

import os
from contextlib import closing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from langchain_ollama import ChatOllama, OllamaEmbeddings

    from examples.chat import Chat, NotThereError, need, one_line, open_collection, read_arguments, remember, run
else:  # a script finds its neighbours by their bare names
    from chat import Chat, NotThereError, need, one_line, open_collection, read_arguments, remember, run


def main() -> None:
    """Chat."""
    arguments = read_arguments(
        "Chat over Chroma and Ollama.",
        "rag_wiki_ollama",
        embedding_model="nomic-embed-text",
        chat_model="llama3.2",
    )
    embeddings, model = find_models(arguments.embedding_model, arguments.chat_model)
    collection = open_collection(arguments.db, arguments.collection, embeddings)
    retriever = remember(collection, arguments.user, arguments.memory)
    with closing(retriever.state_store):
        Chat(retriever, model).talk()


def find_models(embedding_model: str, chat_model: str) -> tuple[OllamaEmbeddings, ChatOllama]:
    """Both models, after a look whether they are there.

    Raises:
        NotThereError: A package, Ollama or a model is not.
    """
    need("langchain-chroma", "langchain-ollama")
    from langchain_ollama import ChatOllama, OllamaEmbeddings
    from ollama import Client, ResponseError

    client = Client()
    for name in (embedding_model, chat_model):
        try:
            client.show(name)
        except ConnectionError as error:
            host = os.environ.get("OLLAMA_HOST") or "this machine"
            raise NotThereError(
                f"Ollama does not answer on {host}: install it from https://ollama.com/download, start it with `ollama "
                f"serve`, and get the models with `ollama pull {embedding_model}` and `ollama pull {chat_model}`"
            ) from error
        except ResponseError as error:
            if error.status_code == 404:
                sentence = f"Ollama has no model {name}: get it with `ollama pull {name}`"
            else:
                sentence = f"Ollama can't use the model {name}: {one_line(error)}"
            raise NotThereError(sentence) from error
    return OllamaEmbeddings(model=embedding_model), ChatOllama(model=chat_model)


if __name__ == "__main__":
    run(main)
