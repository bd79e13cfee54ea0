"""What a call says besides its query, as the wrapped retriever takes it: it arrives, or the call fails."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    RouterRunnable,
    Runnable,
    RunnableAssign,
    RunnableBranch,
    RunnableConfig,
    RunnableParallel,
    RunnablePassthrough,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import merge_configs
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.vectorstores import VectorStoreRetriever

from rag_wiki.errors import UnexpectedArgumentError

__all__ = ["arguments_for"]


_MEANS_THE_USER = frozenset({"user", "userid", "username", "uid"})
"""Who writes one of these means `user_id`, and would be answered from somebody else's memory."""


def arguments_for(source: Runnable[Any, Any], arguments: Mapping[str, Any], config: RunnableConfig) -> dict[str, Any]:
    """The call-time arguments as the wrapped retriever takes them.

    Raises:
        UnexpectedArgumentError: It, or something in it that they would reach, drops them without a word.
    """
    if not arguments:
        return {}
    for name in arguments:
        if name.replace("_", "").lower() in _MEANS_THE_USER:
            msg = (
                f"there is no argument {name}; it is user_id that names the user. If it is meant for the wrapped "
                "retriever, bind it there"
            )
            raise UnexpectedArgumentError(msg)
    takers = list(_takers(source, config))
    for taker in takers:
        if _drops(taker):
            msg = (
                f"{type(taker).__name__} takes no arguments at call time and would ignore "
                f"{', '.join(sorted(arguments))}; RagWikiRetriever itself takes user_id and k"
            )
            raise UnexpectedArgumentError(msg)
    stores = [isinstance(taker, VectorStoreRetriever) for taker in takers]
    if "search_kwargs" not in arguments or not any(stores):
        return dict(arguments)
    # At call time a vector store takes single search arguments, and would bury a dictionary of them.
    search = arguments["search_kwargs"]
    if not isinstance(search, dict):
        msg = f"search_kwargs must be a dictionary of search arguments, got {type(search).__name__}"
        raise UnexpectedArgumentError(msg)
    if not all(stores):
        others = sorted({type(taker).__name__ for taker in takers if not isinstance(taker, VectorStoreRetriever)})
        msg = f"search_kwargs is for vector stores, and would reach {', '.join(others)} too; pass its arguments singly"
        raise UnexpectedArgumentError(msg)
    return {**search, **{name: value for name, value in arguments.items() if name != "search_kwargs"}}


def _takers(runnable: Runnable[Any, Any], config: RunnableConfig) -> Iterator[Runnable[Any, Any]]:
    """Everything that gets the arguments of a call of `runnable`, in whatever it is wrapped."""
    inner: list[Runnable[Any, Any]]
    if isinstance(runnable, RunnableBindingBase):
        inner, config = [runnable.bound], merge_configs(runnable.config, config)
    elif isinstance(runnable, DynamicRunnable):
        chosen, config = runnable.prepare(config)
        inner = [chosen]
    elif isinstance(runnable, RunnableWithFallbacks):
        inner = list(runnable.runnables)
    elif isinstance(runnable, RunnableSequence):
        inner = [runnable.first]
    elif isinstance(runnable, RunnableBranch):
        inner = [*(branch for _, branch in runnable.branches), runnable.default]
    elif isinstance(runnable, BaseRetriever) and _hands_on(runnable):
        inner = [runnable.base_retriever]  # type: ignore[attr-defined]  # as `_hands_on` found
    else:
        yield runnable
        return
    for each in inner:
        yield from _takers(each, config)


def _hands_on(retriever: BaseRetriever) -> bool:
    """Whether it asks another retriever and tells it whatever it is told, as LangChain's compression retriever does."""
    if not isinstance(getattr(retriever, "base_retriever", None), Runnable):
        return False
    parameters = inspect.signature(retriever._get_relevant_documents).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _drops(runnable: Runnable[Any, Any]) -> bool:
    """Whether it accepts any argument and looks at none. What is not LangChain's own is trusted to look or to fail."""
    if isinstance(runnable, BaseRetriever):
        return not runnable._expects_other_args
    if isinstance(runnable, RunnablePassthrough):
        return runnable.func is None
    return isinstance(runnable, (RunnableParallel, RunnableAssign, RouterRunnable, BasePromptTemplate))
