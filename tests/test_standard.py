"""LangChain's published standard tests for retrievers, all of them, on ours."""

from __future__ import annotations

from typing import Any

from helpers import ListRetriever, document
from langchain_core.retrievers import BaseRetriever
from langchain_tests.integration_tests import RetrieversIntegrationTests

from rag_wiki import RagWikiRetriever


class TestRagWikiRetriever(RetrieversIntegrationTests):
    """A retriever of five documents, for one user, with everything else by default."""

    @property
    def retriever_constructor(self) -> type[BaseRetriever]:
        """What is tested."""
        return RagWikiRetriever

    @property
    def retriever_constructor_params(self) -> dict[str, Any]:
        """The least that it needs."""
        documents = [document(f"doc-{number}", f"text {number}") for number in range(5)]
        return {"global_retriever": ListRetriever(documents=documents), "user_id": "ada"}

    @property
    def retriever_query_example(self) -> str:
        """A query."""
        return "what are pods?"
