"""The retriever: gather, decide, apply.

A call begins with what the store knows of the user. Then the saved copies and the wrapped retriever are
searched at the same time, or one after the other where the wrapped one takes no time. `answer.compose` decides
what is served, `lifecycle.query` what that does to the records; one atomic change applies it, and the call's
provenance tells of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from langchain_core.callbacks import (
    AsyncCallbackManagerForRetrieverRun,
    BaseRunManager,
    CallbackManagerForRetrieverRun,
    adispatch_custom_event,
    dispatch_custom_event,
)
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableConfig, ensure_config
from langchain_core.runnables.config import get_config_list, get_executor_for_config
from pydantic import ConfigDict, InstanceOf, PrivateAttr

from rag_wiki.actions import UserActions
from rag_wiki.beside import Beside
from rag_wiki.clock import Clock, as_utc, utc_now
from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import (
    ConfigurationError,
    InvalidUserError,
    UnexpectedArgumentError,
)
from rag_wiki.forks import in_each_process
from rag_wiki.lifecycle.decay_engine import DecayEngine
from rag_wiki.recall import AccessCheck, Call, Recall, SuggestionCallback
from rag_wiki.saving import DocumentLoader, Saver
from rag_wiki.steps import arun, run
from rag_wiki.storage.base import StateStore
from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.storage.memory import MemoryStateStore
from rag_wiki.storage.records import (
    check_user_id,
)
from rag_wiki.together import Together
from rag_wiki.transparency.latest import LatestProvenance
from rag_wiki.transparency.provenance import ProvenanceBlock
from rag_wiki.users import named_around

if TYPE_CHECKING:
    from langchain_core.tools import BaseTool
    from typing_extensions import Self

    from rag_wiki.bound import BoundRetriever
    from rag_wiki.tools import ToolName, UserOfTools

__all__ = ["RagWikiRetriever", "RetrievalResult"]

PROVENANCE_EVENT = "rag_wiki_provenance"
_TOGETHER = "_rag_wiki_together"
"""The keyword by which a batch tells its calls of each other."""


class RetrievalResult(NamedTuple):
    """The documents of a call with its provenance."""

    documents: list[Document]
    provenance: ProvenanceBlock


@dataclass
class _Handed:
    """A call on its way to the hook of its retriever."""

    retriever: RagWikiRetriever
    call: Call


_handed: ContextVar[_Handed | None] = ContextVar("rag_wiki_call", default=None)
"""Not a keyword: LangChain drops those that a subclass's hook does not name, and the user with them."""
# Not on every platform: without it a call is taken to have waited for all of its time.
_thread_time: Callable[[], float] = getattr(time, "thread_time", float)
_OF_A_CALL = frozenset({"user_id", "k", "name", "tags", "metadata"})
"""Fields that are read at each call; the others are built into what lives beside them."""


class _Folders:
    """The chunk stores of folders, one per process: a retriever made for one request finds its index warm."""

    def __init__(self) -> None:
        self._stores: WeakValueDictionary[Path, ChunkStore] = WeakValueDictionary()
        in_each_process(self._make_lock)

    def _make_lock(self) -> None:
        self._lock = threading.Lock()

    def chunk_store(self, folder: str | Path) -> ChunkStore:
        """The chunk store of a folder."""
        path = Path(folder).resolve()
        with self._lock:
            store = self._stores.get(path)
            if store is None:
                store = self._stores[path] = ChunkStore(path)
            return store


_chunk_store_in = _Folders().chunk_store


def _chunk_store(given: ChunkStore | None, store: StateStore, config: RagWikiRetrieverConfig) -> ChunkStore:
    """Where chunks are kept: as given, with readable copies in the folder; else there, else beside the state."""
    folder = config.wiki_save_dir
    if given is None:
        return store.chunk_store if folder is None else _chunk_store_in(folder)
    return ChunkStore(folder, place=given.place) if folder is not None and given.documents is None else given


class RagWikiRetriever(UserActions, BaseRetriever):
    """Any retriever, with a memory of its user.

    Documents that keep coming back are suggested for saving; saved ones are answered from local copies by
    cosine similarity; every call says where each piece came from; what is no longer used fades.

    Example:
        ```python
        retriever = RagWikiRetriever(
            global_retriever=vector_store.as_retriever(),
            user_id="ada",
        )
        documents, provenance = retriever.invoke_with_provenance("how do I rotate the logs?")
        print(provenance.render())
        ```

    The user may be named per call instead: `invoke(query, user_id="bob")`, or
    `config={"configurable": {"user_id": "bob"}}`, which also reaches it inside a chain. A call's own word wins. Actions
    follow: within a run for bob, or on a retriever that he was bound to, they are his.
    A call may say `k` too. Other keyword arguments go to the wrapped retriever.

    Errors of a call: `InvalidUserError` when nobody is named; whatever the wrapped retriever raises. A store or
    query embedding that fails costs the call its personal layer, not its answer; provenance says so.

    Args:
        global_retriever: The retriever to wrap: any runnable from a string to a list of documents.
        user_id: Whose memory, unless a call names another user.
        state_store: Where it is kept; in this process's memory by default.
        config: Settings.
        embedding_model: Embeds saved documents and queries; by default the wrapped retriever's own.
        on_suggestion: Called with a `SuggestionEvent` when saving a document is suggested; plain or async.
        chunk_store: Where the chunks of saved documents are kept; by default in `config.wiki_save_dir`, else
            beside the state.
        document_loader: Gives the full text of a document that is to be saved, from its record; plain or async.
        access_check: Asked `(user_id, doc_id)` before a saved copy is served; `False` withholds it. Plain or async.
        k: Documents in the result at most.
        clock: Tells the time.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    global_retriever: Runnable[str, list[Document]]
    user_id: str | None = None
    state_store: StateStore
    config: InstanceOf[RagWikiRetrieverConfig]
    embedding_model: Embeddings | None = None
    on_suggestion: SuggestionCallback | None = None
    chunk_store: ChunkStore
    document_loader: DocumentLoader | None = None
    access_check: AccessCheck | None = None
    k: int | None = None
    clock: Clock = utc_now

    _recall: Recall = PrivateAttr()
    _latest: LatestProvenance = PrivateAttr(default_factory=LatestProvenance)
    _engine: DecayEngine = PrivateAttr()

    def __init__(
        self,
        global_retriever: Runnable[str, list[Document]],
        user_id: str | None = None,
        state_store: StateStore | None = None,
        config: RagWikiRetrieverConfig | None = None,
        embedding_model: Embeddings | None = None,
        on_suggestion: SuggestionCallback | None = None,
        chunk_store: ChunkStore | None = None,
        document_loader: DocumentLoader | None = None,
        access_check: AccessCheck | None = None,
        k: int | None = None,
        **kwargs: Any,
    ) -> None:
        if user_id is not None:
            check_user_id(user_id)
        _check_k(k)
        unknown = sorted(kwargs.keys() - type(self).model_fields.keys())
        if unknown:
            msg = f"RagWikiRetriever takes no argument {', '.join(unknown)}; its settings go into config=..."
            raise UnexpectedArgumentError(msg)
        retriever_kind = (
            "a LangChain retriever or runnable (a vector store has .as_retriever(), RunnableLambda takes a function)"
        )
        _check_kind("global_retriever", global_retriever, Runnable, retriever_kind)
        settings = RagWikiRetrieverConfig() if config is None else config
        _check_kind("config", settings, RagWikiRetrieverConfig, "a RagWikiRetrieverConfig")
        store = MemoryStateStore() if state_store is None else state_store
        _check_kind("state_store", store, StateStore, "a StateStore")
        if embedding_model is not None:
            _check_kind("embedding_model", embedding_model, Embeddings, "a LangChain Embeddings")
        for name, function in (
            ("on_suggestion", on_suggestion),
            ("document_loader", document_loader),
            ("access_check", access_check),
        ):
            if function is not None and not callable(function):
                msg = f"{name} must be a function, got {type(function).__name__}"
                raise ConfigurationError(msg)
        if chunk_store is not None:
            _check_kind("chunk_store", chunk_store, ChunkStore, "a ChunkStore")
        super().__init__(  # type: ignore[call-arg]  # pydantic makes the constructor of the fields
            global_retriever=global_retriever,
            user_id=user_id,
            state_store=store,
            config=settings,
            embedding_model=embedding_model,
            on_suggestion=on_suggestion,
            chunk_store=_chunk_store(chunk_store, store, settings),
            document_loader=document_loader,
            access_check=access_check,
            k=k,
            **kwargs,
        )

    def model_post_init(self, context: Any, /) -> None:
        """Set up what lives beside the fields."""
        super().model_post_init(context)
        self._set_up(self.chunk_store)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields changed; stores are shared, also by a deep copy."""
        copied = super().model_copy(update=update, deep=deep)
        copied._latest = LatestProvenance()
        if not _OF_A_CALL.issuperset(update or ()):
            copied._set_up((update or {}).get("chunk_store", self._given_chunk_store))
        return copied

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in type(self).model_fields or name in _OF_A_CALL:
            super().__setattr__(name, value)
            return
        given = value if name == "chunk_store" else self._given_chunk_store
        super().__setattr__(name, value)
        # What decides about access, or where things are kept, must not go on as it was.
        self._set_up(given)

    def __getstate__(self) -> dict[Any, Any]:
        state = super().__getstate__()
        # Locks and caches of ours stay here; they are set up anew where the retriever arrives.
        private = state["__pydantic_private__"] or {}
        own = RagWikiRetriever.__private_attributes__
        state["__pydantic_private__"] = {name: value for name, value in private.items() if name not in own}
        state["__dict__"] = {**state["__dict__"], "chunk_store": self._given_chunk_store}
        return state

    def __setstate__(self, state: dict[Any, Any]) -> None:
        super().__setstate__(state)
        self._latest = LatestProvenance()
        self._set_up(self.chunk_store)

    @property
    def _given_chunk_store(self) -> ChunkStore | None:
        """The chunk store, unless it is the one that follows from the other fields."""
        return None if self.chunk_store is _chunk_store(None, self.state_store, self.config) else self.chunk_store

    def _set_up(self, given: ChunkStore | None) -> None:
        """Set up what lives beside the fields, with the chunk store that was given, if one was."""
        self.__dict__["chunk_store"] = _chunk_store(given, self.state_store, self.config)
        store, chunks, config, clock = self.state_store, self.chunk_store, self.config, self.clock
        self._recall = Recall(
            store,
            chunks,
            config,
            clock,
            saver=Saver(store, chunks, config, self.document_loader, clock),
            embedding_model=self.embedding_model,
            global_retriever=self.global_retriever,
            on_suggestion=self.on_suggestion,
            access_check=self.access_check,
        )
        self._engine = DecayEngine(store, None, config.decay, chunks, clock=clock)

    # -- calls -----------------------------------------------------------------------------------

    def invoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:  # noqa: A002
        """Answer a query.

        Args:
            input: The query.
            config: LangChain's run configuration; `configurable` may name the `user_id`.
            **kwargs: `user_id` and `k` of this call; anything else goes to the wrapped retriever.

        Raises:
            InvalidUserError: Nobody is named, or not by a string.
            UnexpectedArgumentError: The wrapped retriever would drop an argument without a word.
        """
        return self._answer(input, config, kwargs).documents

    async def ainvoke(self, input: str, config: RunnableConfig | None = None, **kwargs: Any) -> list[Document]:  # noqa: A002
        """Answer a query without blocking the event loop; otherwise as `invoke`."""
        return (await self._aanswer(input, config, kwargs)).documents

    def invoke_with_provenance(
        self, query: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> RetrievalResult:
        """Answer a query, with the provenance of this very call."""
        return self._answer(query, config, kwargs)

    async def ainvoke_with_provenance(
        self, query: str, config: RunnableConfig | None = None, **kwargs: Any
    ) -> RetrievalResult:
        """Answer a query without blocking the event loop, with the provenance of this very call."""
        return await self._aanswer(query, config, kwargs)

    def _answer(self, query: str, config: RunnableConfig | None, kwargs: dict[str, Any]) -> RetrievalResult:
        config = ensure_config(config)
        base, call = self._read_call(query, config, kwargs)
        config["metadata"] = _traced_metadata(config, call.user_id)
        handed = _Handed(self, call)
        token = _handed.set(handed)
        try:
            documents = super().invoke(query, config, **base)
        finally:
            _handed.reset(token)
        return RetrievalResult(documents, handed.call.provenance or ProvenanceBlock())

    async def _aanswer(self, query: str, config: RunnableConfig | None, kwargs: dict[str, Any]) -> RetrievalResult:
        config = ensure_config(config)
        base, call = self._read_call(query, config, kwargs)
        config["metadata"] = _traced_metadata(config, call.user_id)
        handed = _Handed(self, call)
        token = _handed.set(handed)
        try:
            documents = await super().ainvoke(query, config, **base)
        finally:
            # A coroutine that nobody carried to its end is closed wherever it is collected.
            with contextlib.suppress(ValueError):
                _handed.reset(token)
        return RetrievalResult(documents, handed.call.provenance or ProvenanceBlock())

    def batch(
        self,
        inputs: list[str],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[list[Document]]:
        """Answer many queries; those of one user are compared with the saved chunks together."""
        configs = get_config_list(config, len(inputs))
        with get_executor_for_config(configs[0] if configs else None) as executor:
            kwargs[_TOGETHER] = self._together(inputs, configs, kwargs, executor.submit)
            results = self._one_by_one(inputs, configs, kwargs)
            done = len(results)
            if done < len(inputs):
                # As LangChain does it, in threads. Errors are raised below, when all have had their turn.
                results += super().batch(inputs[done:], configs[done:], return_exceptions=True, **kwargs)
        error = next((found for found in results if isinstance(found, Exception)), None)
        if error is not None and not return_exceptions:
            raise error
        return results

    def _one_by_one(
        self, inputs: Sequence[str], configs: Sequence[RunnableConfig], kwargs: Mapping[str, Any]
    ) -> list[Any]:
        """The first calls of a batch, without threads, for as long as they wait for nothing; errors as results."""
        results: list[Any] = []
        for query, config in zip(inputs, configs, strict=True):
            if not self._recall.call_pace.is_quick:
                break
            try:
                results.append(self.invoke(query, config, **kwargs))
            except Exception as error:
                results.append(error)
        return results

    async def abatch(
        self,
        inputs: list[str],
        config: RunnableConfig | list[RunnableConfig] | None = None,
        *,
        return_exceptions: bool = False,
        **kwargs: Any,
    ) -> list[list[Document]]:
        """Answer many queries without blocking the event loop; otherwise as `batch`."""
        configs = get_config_list(config, len(inputs))
        kwargs[_TOGETHER] = self._together(inputs, configs, kwargs, None)
        return await super().abatch(inputs, configs, return_exceptions=return_exceptions, **kwargs)

    def _together(
        self,
        inputs: Sequence[str],
        configs: Sequence[RunnableConfig],
        kwargs: Mapping[str, Any],
        submit: Callable[..., Future[Any]] | None,
    ) -> dict[str, Together]:
        """The questions of each user who asks more than one. What is wrong with a call, the call itself will say."""
        by_user: dict[str, list[str]] = {}
        for query, config in zip(inputs, configs, strict=True):
            user_id = self._named_user(kwargs, ensure_config(config))
            if isinstance(user_id, str) and isinstance(query, str):
                by_user.setdefault(user_id, []).append(query)
        most = configs[0].get("max_concurrency") if configs else None
        quick = self._recall.call_pace.is_quick
        return {
            user: Together(queries, submit, most, quick=quick) for user, queries in by_user.items() if len(queries) > 1
        }

    @property
    def last_provenance(self) -> ProvenanceBlock | None:
        """The provenance of this thread's or task's last call, else of the newest one for `user_id`; or `None`."""
        named = self._named_user({}, ensure_config())
        return self._latest.read(named if isinstance(named, str) else None)

    def for_user(self, user_id: str) -> RagWikiRetriever:
        """The same retriever for another user, with the same stores and caches."""
        return self.model_copy(update={"user_id": check_user_id(user_id)})

    def as_tools(
        self,
        user_id: UserOfTools = None,
        *,
        include: Iterable[ToolName] | None = None,
        prefix: str = "",
        about: str | None = None,
        max_characters: int = 12_000,
    ) -> list[BaseTool]:
        """Tools for an agent: search, save, decline, vote, pin, remove and list the user's documents.

        `search_documents` shows a model the pieces and where they came from; the artifact of its message has the
        `provenance` (as `to_dict()` gives it) and the `documents`, in plain JSON types. The other tools are the user's
        actions. The user is who the run names (`config={"configurable": {"user_id": ...}}`), else the retriever's own;
        a model can't name one. What a model can put right comes back to it as a tool message with the status `error`.
        `remove_document` can't be undone: let a person confirm it (LangChain's `HumanInTheLoopMiddleware`).

        Args:
            user_id: Whose documents, whatever the run says; or a function that finds the user in the run's
                configuration, where `langgraph.runtime.get_runtime()` has the context.
            include: The names of the tools wanted; all of them by default.
            prefix: What their names begin with, where an agent has the tools of two retrievers.
            about: What the collection holds ("the platform team's runbooks"), so that a model knows when to search.
            max_characters: How much text a search shows the model, at most; long documents share it evenly.

        Raises:
            InvalidUserError: `user_id` is blank. In a run of a tool: nobody is named.
            ConfigurationError: An argument is of the wrong kind, or names no tool.
        """
        from rag_wiki.tools import make_tools

        return make_tools(
            self, self, user_id, include=include, prefix=prefix, about=about, max_characters=max_characters
        )

    def bind(self, **kwargs: Any) -> BoundRetriever:
        """The retriever with these keywords of a call; a user among them is the user of its actions too."""
        return _bound(super().bind(**kwargs))

    def with_config(self, config: RunnableConfig | None = None, **kwargs: Any) -> BoundRetriever:
        """The retriever with this configuration; a user whom it names is the user of its actions too."""
        return _bound(super().with_config(config, **kwargs))

    def with_listeners(self, **listeners: Any) -> BoundRetriever:
        """The retriever with listeners, to which more can be bound."""
        return _bound(super().with_listeners(**listeners))

    def with_alisteners(self, **listeners: Any) -> BoundRetriever:
        """The retriever with listeners that are awaited, to which more can be bound."""
        return _bound(super().with_alisteners(**listeners))

    def with_types(self, **types: Any) -> BoundRetriever:
        """The retriever with other types of input or output, to which more can be bound."""
        return _bound(super().with_types(**types))

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        # Read once: pydantic finds a private attribute by a detour.
        call, recall = self._handed_call(query, kwargs), self._recall
        with recall.observations.watch(call):
            return self._carry_out(call, recall, run_manager)

    def _carry_out(self, call: Call, recall: Recall, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        start, worked = time.perf_counter(), _thread_time()
        run(recall.begin(call))
        if self.config.context == "focused":
            run(recall.prepare(call))
        if self._asks_on_miss(call):
            cache = run(recall.search_copies(call))
            found = None if cache.answered else self._ask_global(call, recall, run_manager)
        elif recall.global_pace.is_quick:
            found = self._ask_global(call, recall, run_manager)
            cache = run(recall.search_copies(call))
        else:
            searching = Beside(recall.search_copies(call))
            try:
                found = self._ask_global(call, recall, run_manager)
            except BaseException:
                searching.abandon()
                raise
            cache = searching.result()
        documents, provenance = run(recall.conclude(call, found, cache, start))
        recall.note_pace(call, worked_ms=(_thread_time() - worked) * 1000)
        call.provenance = provenance
        call.latest.publish(provenance)
        if run_manager.handlers:
            _trace(run_manager, provenance)
            dispatch_custom_event(PROVENANCE_EVENT, provenance.to_dict(), config={"callbacks": run_manager.get_child()})
        return documents

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun, **kwargs: Any
    ) -> list[Document]:
        call, recall = self._handed_call(query, kwargs), self._recall
        with recall.observations.watch(call):
            return await self._acarry_out(call, recall, run_manager)

    async def _acarry_out(
        self, call: Call, recall: Recall, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        start = time.perf_counter()
        await arun(recall.begin(call))
        if self.config.context == "focused":
            await arun(recall.prepare(call))
        if self._asks_on_miss(call):
            cache = await arun(recall.search_copies(call))
            found = None if cache.answered else await self._aask_global(call, run_manager)
        else:
            searching = asyncio.ensure_future(arun(recall.search_copies(call)))
            try:
                found = await self._aask_global(call, run_manager)
            except BaseException:
                searching.cancel()
                raise
            cache = await searching
        documents, provenance = await arun(recall.conclude(call, found, cache, start))
        recall.note_pace(call, worked_ms=0.0)
        call.provenance = provenance
        call.latest.publish(provenance)
        if run_manager.handlers:
            _trace(run_manager, provenance)
            await adispatch_custom_event(
                PROVENANCE_EVENT, provenance.to_dict(), config={"callbacks": run_manager.get_child()}
            )
        return documents

    def _asks_on_miss(self, call: Call) -> bool:
        # What a call tells the wrapped retriever (a filter, say) only that one can obey, so it is asked.
        return self.config.global_search == "on_miss" and not call.arguments

    # -- gather ----------------------------------------------------------------------------------

    def _handed_call(self, query: str, kwargs: dict[str, Any]) -> Call:
        """The call that a hook answers: the one under way, with the query and arguments that a subclass gave it."""
        handed = _handed.get()
        if handed is None or handed.retriever is not self:
            return self._read_call(query, ensure_config(), kwargs)[1]
        call = handed.call
        # A search that has begun has its vector and its timings; a hook may ask more than once.
        if query != call.query or kwargs or call.timings:
            named = {"user_id": call.user_id, "k": call.k, **call.arguments, **kwargs}
            handed.call = self._read_call(query, call.config, named)[1]
        return handed.call

    def _read_call(self, query: str, config: RunnableConfig, kwargs: dict[str, Any]) -> tuple[dict[str, Any], Call]:
        """Sort out a call's keyword arguments: LangChain's own, ours, and the wrapped retriever's."""
        latest = self._latest
        latest.begin()
        if not isinstance(query, str):
            msg = f"the query must be a string, got {type(query).__name__}"
            raise ConfigurationError(msg)
        arguments = dict(kwargs)
        base: dict[str, Any] = {name: arguments.pop(name) for name in ("run_id", "verbose") if name in arguments}
        together: dict[str, Together] = arguments.pop(_TOGETHER, {})
        user_id = self._user(arguments.pop("user_id", None), config)
        call = Call(
            query=query,
            user_id=user_id,
            k=_check_k(arguments.pop("k", None)) or self.k,
            config=config,
            arguments=_arguments(self.global_retriever, arguments, config) if arguments else {},
            now=as_utc(self.clock()),
            latest=latest,
            together=together.get(user_id),
        )
        return base, call

    def _named_user(self, arguments: Mapping[str, Any], config: RunnableConfig) -> object:
        """Who is named: by the call or action, else by `using_user` or the run around it, else by the retriever."""
        named = arguments.get("user_id")
        if named is None:
            named = named_around(config)
        if named is not None:
            return named
        # A run that names `None`, for somebody not logged in, say, names nobody; it is not the retriever's own user's.
        return (config.get("configurable") or {}).get("user_id", self.user_id)

    def _user(self, user_id: object = None, config: RunnableConfig | None = None) -> str:
        """Who is named, in a run with this configuration; by default in the one that this is called in."""
        named = self._named_user({"user_id": user_id}, ensure_config() if config is None else config)
        if named is None:
            msg = (
                "no user is named: pass user_id to RagWikiRetriever, to this call (user_id=...), or in "
                "config={'configurable': {'user_id': ...}}; or call it within using_user(...)"
            )
            raise InvalidUserError(msg)
        return check_user_id(named)

    def _child_config(self, call: Call, run_manager: Any) -> RunnableConfig:
        child: RunnableConfig = {"callbacks": run_manager.get_child()}
        if call.config.get("configurable"):
            child["configurable"] = call.config["configurable"]
        if call.config.get("max_concurrency") is not None:
            child["max_concurrency"] = call.config["max_concurrency"]
        return child

    def _ask_global(self, call: Call, recall: Recall, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        with call.timed("global"):
            config = self._child_config(call, run_manager)
            if call.by_vector is not None and call.asked is not None:
                found = _checked(call.by_vector.invoke(call.query, config, asked=call.asked))
            else:
                found = _checked(self.global_retriever.invoke(call.query, config, **call.arguments))
        recall.global_pace.note(call.timings["global"])
        return found

    async def _aask_global(self, call: Call, run_manager: AsyncCallbackManagerForRetrieverRun) -> list[Document]:
        with call.timed("global"):
            config = self._child_config(call, run_manager)
            if call.by_vector is not None and call.asked is not None:
                return _checked(await call.by_vector.ainvoke(call.query, config, asked=call.asked))
            return _checked(await self.global_retriever.ainvoke(call.query, config, **call.arguments))


def _traced_metadata(config: RunnableConfig, user_id: str) -> dict[str, Any]:
    """The metadata by which tracers show the user with the run; what the caller's own calls the user stands.

    Early releases of LangChain copy what is configured into it, which is not the caller's word for this call.
    """
    metadata = config.get("metadata") or {}
    named = metadata.get("user_id")
    own = named is not None and named != (config.get("configurable") or {}).get("user_id")
    return {**metadata, "user_id": named if own else user_id}


def _trace(run_manager: BaseRunManager, provenance: ProvenanceBlock) -> None:
    """Add the provenance to the metadata of this run where tracers (LangSmith's, say) keep it until it ends."""
    from langchain_core.tracers.base import BaseTracer

    for handler in run_manager.handlers:
        if not isinstance(handler, BaseTracer):
            continue
        with contextlib.suppress(Exception):  # somebody else's tracer must not cost the answer
            traced = handler.run_map.get(str(run_manager.run_id))
            if traced is not None:
                # A new dictionary: the old one is in the hands of other handlers.
                metadata = {**(traced.extra.get("metadata") or {}), PROVENANCE_EVENT: provenance.to_dict()}
                traced.extra = {**traced.extra, "metadata": metadata}


def _bound(binding: Runnable[str, list[Document]]) -> BoundRetriever:
    # Imported when it is needed: it and the next one load a good deal of LangChain.
    from rag_wiki.bound import BoundRetriever

    return BoundRetriever(**vars(binding))


def _arguments(
    retriever: Runnable[str, list[Document]], arguments: dict[str, Any], config: RunnableConfig
) -> dict[str, Any]:
    """The call-time arguments as the wrapped retriever takes them."""
    from rag_wiki.arguments import arguments_for

    return arguments_for(retriever, arguments, config)


def _checked(documents: object) -> list[Document]:
    """What the wrapped retriever returned, as a list of documents.

    Raises:
        ConfigurationError: It returned something else.
    """
    if type(documents) is not list and (
        not isinstance(documents, Iterable) or isinstance(documents, (str, dict, Document))
    ):
        msg = f"the wrapped retriever must return a list of documents, it returned {type(documents).__name__}"
        raise ConfigurationError(msg)
    found = list(documents)
    for item in found:
        if not isinstance(item, Document):
            msg = f"the wrapped retriever must return a list of documents, there is {type(item).__name__} in it"
            raise ConfigurationError(msg)
    return found


def _check_k(k: object) -> int | None:
    if k is None:
        return None
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        msg = f"k must be a whole number from 1 on, or None, got {k!r}"
        raise ConfigurationError(msg)
    return k


def _check_kind(name: str, value: object, kind: type, wanted: str) -> None:
    if not isinstance(value, kind):
        msg = f"{name} must be {wanted}, got {type(value).__name__}"
        raise ConfigurationError(msg)
