"""The retriever with something bound to it: a user, keywords, a configuration."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import wraps
from typing import TYPE_CHECKING, Any, cast

from langchain_core.documents import Document
from langchain_core.runnables import RunnableBinding, RunnableConfig, ensure_config

from rag_wiki.transparency.provenance import ProvenanceBlock

if TYPE_CHECKING:
    from langchain_core.tools import BaseTool

    from rag_wiki.retriever import RagWikiRetriever, RetrievalResult
    from rag_wiki.tools import ToolName, UserOfTools

__all__ = ["BoundRetriever"]


class BoundRetriever(RunnableBinding[str, list[Document]]):
    """A `RagWikiRetriever` to which `bind`, `with_config` and their kin bound something.

    LangChain's binding hands its keywords to `invoke` and what is made of it, and to nothing else: a call with
    provenance would run without its filter, and an action for the retriever's own user. Here what is bound holds for
    every method of the retriever.
    """

    @property
    def user_id(self) -> str | None:
        """Whose memory, unless a call names another user."""
        return cast("str | None", self._retriever._named_user(self.kwargs, ensure_config(self.config)))

    @property
    def last_provenance(self) -> ProvenanceBlock | None:
        """As the retriever's, for the bound user."""
        return self._retriever._latest.read(self.user_id)

    def invoke_with_provenance(
        self, query: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> RetrievalResult:
        """Answer a query, with the provenance of this very call."""
        merged = self._merge_configs(config)
        return self._retriever.invoke_with_provenance(query, merged, **{**self.kwargs, **kwargs})

    async def ainvoke_with_provenance(
        self, query: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> RetrievalResult:
        """Answer a query without blocking the event loop, with the provenance of this very call."""
        merged = self._merge_configs(config)
        return await self._retriever.ainvoke_with_provenance(query, merged, **{**self.kwargs, **kwargs})

    def for_user(self, user_id: str) -> BoundRetriever:
        """The same for another user, with whatever else is bound."""
        kwargs, config = dict(self.kwargs), dict(self.config)
        configurable = dict(self.config.get("configurable") or {})
        for named in (kwargs, config, configurable):
            named.pop("user_id", None)
        config["configurable"] = configurable
        return self.model_copy(
            update={"bound": self._retriever.for_user(user_id), "kwargs": kwargs, "config": config},
        )

    def as_tools(
        self,
        user_id: UserOfTools = None,
        *,
        include: Iterable[ToolName] | None = None,
        prefix: str = "",
        about: str | None = None,
        max_characters: int = 12_000,
    ) -> list[BaseTool]:
        """As the retriever's, with what is bound here: keywords of a call, a user, a configuration."""
        from rag_wiki.tools import make_tools

        return make_tools(
            self, self._retriever, user_id, include=include, prefix=prefix, about=about, max_characters=max_characters
        )

    @property
    def _retriever(self) -> RagWikiRetriever:
        return cast("RagWikiRetriever", self.bound)

    def __getattr__(self, name: str) -> Any:
        attribute = super().__getattr__(name)
        # Only what is the retriever's own: an `access_check` has a user too.
        if not inspect.ismethod(attribute) or attribute.__self__ is not self.bound:
            return attribute
        signature = inspect.signature(attribute)
        if "user_id" not in signature.parameters:
            return attribute

        @wraps(attribute)
        def of_the_bound_user(*args: Any, **kwargs: Any) -> Any:
            given = signature.bind(*args, **kwargs)
            if given.arguments.get("user_id") is None:
                given.arguments["user_id"] = self._bound_user()
            return attribute(*given.args, **given.kwargs)

        return of_the_bound_user

    def _user(self, user_id: object = None, config: RunnableConfig | None = None) -> str:
        """Who is named: here, by what is bound, by a run with this configuration, or by the retriever."""
        named = self.kwargs.get("user_id") if user_id is None else user_id
        return self._retriever._user(named, self._merge_configs(ensure_config(config)))

    def _bound_user(self) -> str | None:
        """Who is named here, or by the run that this is part of, checked; `None` where there is no word of a user."""
        config = ensure_config(self.config)
        if "user_id" not in self.kwargs and "user_id" not in config["configurable"]:
            return None
        return self._retriever._user(self.kwargs.get("user_id"), config)
