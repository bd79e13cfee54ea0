"""Naming the user of everything that is called within a block."""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, NamedTuple

from langchain_core.runnables import RunnableConfig, ensure_config

from rag_wiki.errors import ConfigurationError
from rag_wiki.storage.records import check_user_id

__all__ = ["named_around", "using_user"]


class _Named(NamedTuple):
    user_id: str
    run_user: object
    """Who was named by the LangChain run in which the block began."""


_NOBODY = object()
_named: ContextVar[_Named | None] = ContextVar("rag_wiki_user", default=None)


class using_user:  # noqa: N801 - it reads as a statement, as contextlib's own do
    """Name the user of every call and action within: where there is no run configuration to put them into.

        with using_user("bob"):
            response = query_engine.query("When are logs rotated?")
            retriever.accept_suggestion("log-rotation")

    It holds for this thread or task and what it starts. What a call itself says wins, and so does a LangChain run that
    names somebody and begins within the block.

    Not around a `yield`: what is named in a generator holds for whoever drives it, until it goes on. Use
    `for_user`, or name the user per call, there.

    Raises:
        InvalidUserError: `user_id` is blank or not a string.
        ConfigurationError: On leaving: the block was left in another context, or before one that began within it. It
            stands around a `yield`.
    """

    def __init__(self, user_id: str) -> None:
        self._user_id = check_user_id(user_id)
        self._entered: list[tuple[Token[_Named | None], _Named]] = []

    def __enter__(self) -> None:
        named = _Named(self._user_id, _configurable(ensure_config()).get("user_id", _NOBODY))
        self._entered.append((_named.set(named), named))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        token, named = self._entered.pop()
        is_last = _named.get() is named
        try:
            _named.reset(token)
        except ValueError:
            is_last = False
        if not is_last and error is None:
            msg = (
                f"using_user({self._user_id!r}) was left elsewhere than it was entered: it stands around a `yield`, "
                "and other calls may have been made for this user. Use for_user(...) there, or name the user per call"
            )
            raise ConfigurationError(msg)


def named_around(config: RunnableConfig) -> str | None:
    """Who is named by the innermost `using_user`; `None` where nobody is, or a run within it names somebody else.

    Args:
        config: The configuration of the call's run.
    """
    named = _named.get()
    if named is None:
        return None
    configurable = _configurable(config)
    inherited = "user_id" not in configurable or configurable["user_id"] == named.run_user
    return named.user_id if inherited else None


def _configurable(config: RunnableConfig) -> Mapping[str, Any]:
    return config.get("configurable") or {}
