"""Retrievers of other libraries as LangChain retrievers.

Each adapter is imported from its own module, which asks for the library that it adapts:
`rag_wiki.adapters.llamaindex` for LlamaIndex.
"""
