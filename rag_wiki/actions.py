"""What a user can do and see: save, decline, vote, pin, remove, list; and what an operator can.

Mixed into `RagWikiRetriever`, which says who the user is and where things are kept. Each has a twin that does not block
the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.runnables import RunnableConfig, ensure_config, run_in_executor

from rag_wiki import events
from rag_wiki.clock import Clock, as_utc
from rag_wiki.config import RagWikiRetrieverConfig
from rag_wiki.errors import (
    ConfigurationError,
    DocumentRemovedError,
    EmbeddingError,
    InvalidDocumentError,
    UnknownDocumentError,
)
from rag_wiki.lifecycle.decay_engine import DecayEngine, DecayResult
from rag_wiki.lifecycle.fetch_counter import FetchCounter, known
from rag_wiki.observing import ProcessStats
from rag_wiki.pieces import as_id, identify
from rag_wiki.recall import Recall, embed_query
from rag_wiki.saving import SaveOrder
from rag_wiki.search.calibration import Calibration
from rag_wiki.search.embedding import check_query_vector
from rag_wiki.steps import Procedure, Step, arun, blocking, run
from rag_wiki.storage.records import (
    DocumentEvent,
    DocumentState,
    ForgottenUser,
    PurgedDocument,
    UserChange,
    UserDocRecord,
    UserView,
    check_doc_id,
    check_user_id,
)
from rag_wiki.tables import DocumentList
from rag_wiki.transparency.provenance import one_line

__all__ = ["UserActions", "UserStats"]


@dataclass(frozen=True)
class UserStats:
    """What is kept about a user, in numbers."""

    user_id: str
    states: dict[str, int]
    """Documents by state."""
    chunks: int
    """Chunks of saved documents."""
    stale: int
    """Saved documents whose source is known to have changed."""
    index_bytes: int
    """Bytes of this user's index in this process."""
    similarity_threshold: float | None
    """The cosine from which a saved chunk answers; `None` for `"auto"` before it was calibrated in this process."""
    queries: int = 0
    """Questions of this user for which the wrapped retriever was asked: kept in the store, over all processes."""
    searches: int = 0
    """Questions of this user for which saved copies were compared, kept likewise."""
    process: ProcessStats = field(default_factory=ProcessStats, compare=False)
    """What happened in this process to all users of the state store: hits, misses, saves, stage timings."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        held = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "process"}
        return {**held, "states": dict(self.states), "process": self.process.to_dict()}

    def __str__(self) -> str:
        total, states = sum(self.states.values()), [f"{count:,} {name}" for name, count in self.states.items() if count]
        documents = f"{total:,} document{'' if total == 1 else 's'}" + (f" ({', '.join(states)})" if states else "")
        threshold = "not calibrated" if self.similarity_threshold is None else f"{self.similarity_threshold:.3g}"
        return "\n".join(
            [
                f"User {one_line(self.user_id)}",
                f"  {documents}, {self.chunks:,} saved chunks, {self.stale:,} stale copies",
                f"  {self.queries:,} questions, {self.searches:,} of them compared with saved copies",
                f"  index {self.index_bytes:,} bytes in this process, similarity threshold {threshold}",
                str(self.process),
            ]
        )


class UserActions:
    """The actions of `RagWikiRetriever`, each for the user who is named, by the run or by the retriever."""

    if TYPE_CHECKING:
        # The retriever's.
        config: RagWikiRetrieverConfig
        clock: Clock
        _recall: Recall
        _engine: DecayEngine

        def _user(self, user_id: object = None, config: RunnableConfig | None = None) -> str: ...

        def _named_user(self, arguments: Mapping[str, Any], config: RunnableConfig) -> object: ...

    def accept_suggestion(
        self, doc_id: str, full_content: str | None = None, user_id: str | None = None
    ) -> UserDocRecord:
        """Save a document to the user's knowledge base; again with other content replaces the copy.

        The content is the argument; else what `document_loader` gives; else the file at its path below
        `config.document_roots`; else the chunks retrieved so far. All or nothing.

        Raises:
            UnknownDocumentError: The user never met the document.
            InvalidDocumentError: The content is blank or not a string.
            InvalidTransitionError: The document was let go; retrieve it again, or use `force_pin`.
            ContentNotFoundError: There is nothing to save.
            EmbeddingUnavailableError: There is no embedding model.
            EmbeddingError: The model's answer can't be used.
            DocumentRemovedError: The document was removed while it was being saved.
        """
        return run(self._save(SaveOrder(self._user(user_id), doc_id, "the user accepted", full_content)))

    async def aaccept_suggestion(
        self, doc_id: str, full_content: str | None = None, user_id: str | None = None
    ) -> UserDocRecord:
        """`accept_suggestion` without blocking the event loop."""
        return await arun(self._save(SaveOrder(self._user(user_id), doc_id, "the user accepted", full_content)))

    def refresh(self, doc_id: str, full_content: str | None = None, user_id: str | None = None) -> UserDocRecord:
        """Replace the saved copy by the document as it is now; its content is found as for saving.

        Raises:
            InvalidTransitionError: The document is not saved.
            RagWikiError: As `accept_suggestion`.
        """
        return run(self._save(self._refresh_order(doc_id, full_content, user_id)))

    async def arefresh(self, doc_id: str, full_content: str | None = None, user_id: str | None = None) -> UserDocRecord:
        """`refresh` without blocking the event loop."""
        return await arun(self._save(self._refresh_order(doc_id, full_content, user_id)))

    def _refresh_order(self, doc_id: str, full_content: str | None, user_id: str | None) -> SaveOrder:
        return SaveOrder(self._user(user_id), doc_id, "the user refreshed it", full_content, only_saved=True)

    def _save(self, order: SaveOrder) -> Procedure[UserDocRecord]:
        order = order._replace(doc_id=check_doc_id(order.doc_id))
        record: UserDocRecord | None = yield blocking(self._recall.store.get, order.user_id, order.doc_id)
        if record is None:
            raise UnknownDocumentError(order.user_id, order.doc_id)
        model = self._recall.needed_embeddings(f"saving document {order.doc_id!r} for user {order.user_id!r}")
        saved = yield from self._recall.saver.save(order, model)
        return saved

    def force_pin(self, doc_id: str, user_id: str | None = None) -> UserDocRecord:
        """Make a document part of every answer, until `unpin` or `force_remove`; saves it first if need be.

        Raises:
            UnknownDocumentError: The user never met the document.
            RagWikiError: It is not saved, and saving it failed (see `accept_suggestion`).
        """
        return run(self._pin(self._user(user_id), doc_id))

    async def aforce_pin(self, doc_id: str, user_id: str | None = None) -> UserDocRecord:
        """`force_pin` without blocking the event loop."""
        return await arun(self._pin(self._user(user_id), doc_id))

    def _pin(self, user_id: str, doc_id: str) -> Procedure[UserDocRecord]:
        doc_id = check_doc_id(doc_id)
        record: UserDocRecord | None = yield blocking(self._recall.store.get, user_id, doc_id)
        if record is not None and not record.saved:
            order = SaveOrder(user_id, doc_id, "saved to be pinned", pin=True, revive=True)
            saved = yield from self._save(order)
            return saved
        pinned: UserDocRecord = yield blocking(self._engine.force_pin, user_id, doc_id)
        return pinned

    def unpin(self, doc_id: str, user_id: str | None = None) -> UserDocRecord:
        """Take a pin away; the document stays saved.

        Raises:
            UnknownDocumentError: The user never met the document.
            InvalidTransitionError: It is not pinned.
        """
        return self._engine.unpin(self._user(user_id), doc_id)

    async def aunpin(self, doc_id: str, user_id: str | None = None) -> UserDocRecord:
        """`unpin` without blocking the event loop."""
        return await run_in_executor(None, self.unpin, doc_id, user_id)

    def decline_suggestion(self, doc_id: str, user_id: str | None = None) -> UserDocRecord:
        """Say no to a suggestion; the next one waits for twice as many fetches, and twice that after it.

        Without a pending suggestion (it lapsed, or was answered before) nothing happens.

        Raises:
            UnknownDocumentError: The user never met the document.
            InvalidTransitionError: The document was let go.
        """
        config = self.config
        counter = FetchCounter(
            self._recall.store, None, config.fetch_threshold, config.reset_threshold, clock=self.clock
        )
        return counter.decline_suggestion(self._user(user_id), doc_id)

    async def adecline_suggestion(self, doc_id: str, user_id: str | None = None) -> UserDocRecord:
        """`decline_suggestion` without blocking the event loop."""
        return await run_in_executor(None, self.decline_suggestion, doc_id, user_id)

    def thumbs_up(self, doc_id: str, user_id: str | None = None) -> UserDocRecord:
        """Vote for a document; the last vote counts.

        Raises:
            UnknownDocumentError: The user never met the document.
        """
        return self._engine.thumbs_up(self._user(user_id), doc_id)

    async def athumbs_up(self, doc_id: str, user_id: str | None = None) -> UserDocRecord:
        """`thumbs_up` without blocking the event loop."""
        return await run_in_executor(None, self.thumbs_up, doc_id, user_id)

    def thumbs_down(self, doc_id: str, user_id: str | None = None) -> UserDocRecord:
        """Vote against a document; the last vote counts.

        Raises:
            UnknownDocumentError: The user never met the document.
        """
        return self._engine.thumbs_down(self._user(user_id), doc_id)

    async def athumbs_down(self, doc_id: str, user_id: str | None = None) -> UserDocRecord:
        """`thumbs_down` without blocking the event loop."""
        return await run_in_executor(None, self.thumbs_down, doc_id, user_id)

    def force_remove(self, doc_id: str, user_id: str | None = None) -> UserDocRecord:
        """Remove a document from the user's knowledge base: copy, content, retrieved texts. Twice is no error.

        Raises:
            UnknownDocumentError: The user never met the document.
        """
        return self._engine.force_remove(self._user(user_id), doc_id)

    async def aforce_remove(self, doc_id: str, user_id: str | None = None) -> UserDocRecord:
        """`force_remove` without blocking the event loop."""
        return await run_in_executor(None, self.force_remove, doc_id, user_id)

    def set_always_full_doc(self, doc_id: str, enabled: bool = True, user_id: str | None = None) -> UserDocRecord:
        """Answer with the whole saved document instead of its best chunks.

        Raises:
            ConfigurationError: `enabled` is neither true nor false: the id of a user, say, which comes third here.
            UnknownDocumentError: The user never met the document.
        """
        user = self._user(user_id)
        if not isinstance(enabled, (bool, int, np.bool_)):
            msg = (
                f"whether document {doc_id!r} answers in full is True or False, not {enabled!r}; the user is user_id=…"
            )
            raise ConfigurationError(msg)

        def decide(view: UserView) -> UserChange:
            return UserChange(records=[replace(known(view, doc_id), always_full_doc=bool(enabled))])

        return self._recall.store.change(user, [doc_id], decide).records[0]

    async def aset_always_full_doc(
        self, doc_id: str, enabled: bool = True, user_id: str | None = None
    ) -> UserDocRecord:
        """`set_always_full_doc` without blocking the event loop."""
        return await run_in_executor(None, self.set_always_full_doc, doc_id, enabled, user_id)

    def run_decay(self, user_id: str | None = None) -> list[DecayResult]:
        """Score the user's saved documents now; promote and let go those whose time has come.

        What a crash left behind goes as well.
        """
        user = self._user(user_id)
        try:
            return self._engine.run_for_user(user)
        finally:
            # Also where a record can't be read back, which is raised when all others are done.
            self._engine.sweep(user)

    async def arun_decay(self, user_id: str | None = None) -> list[DecayResult]:
        """`run_decay` without blocking the event loop."""
        return await run_in_executor(None, self.run_decay, user_id)

    def reindex(self, user_id: str | None = None) -> list[str]:
        """Embed anew the saved documents whose copy is lost or of another embedding model; returns their ids.

        Raises:
            EmbeddingUnavailableError: There is no embedding model.
            EmbeddingError: When all others are done: some documents can't be embedded anew. What fails for all of
                them (the model or a store is away) is raised at once, as it is.
        """
        return run(self._reindex(self._user(user_id)))

    async def areindex(self, user_id: str | None = None) -> list[str]:
        """`reindex` without blocking the event loop."""
        return await arun(self._reindex(self._user(user_id)))

    def _reindex(self, user_id: str) -> Procedure[list[str]]:
        model = self._recall.needed_embeddings(f"re-indexing the documents of user {user_id!r}")
        width = check_query_vector((yield embed_query(model, "width"))).unit.shape[0]
        saved = yield blocking(self._saved_ids, user_id)
        done: list[str] = []
        failed: dict[str, Exception] = {}
        for doc_id in saved:
            try:
                renewed = yield from self._recall.saver.reindex(user_id, doc_id, model, width)
            except DocumentRemovedError:
                # It is not saved any more, and so has no need of it.
                continue
            except Exception as error:  # somebody else's model may raise anything
                if not (yield from self._does_others(user_id, model, error)):
                    raise
                failed[doc_id] = error
            else:
                done += [doc_id] if renewed else []
        if failed:
            why = "; ".join(f"{doc_id!r} ({type(error).__name__}: {error})" for doc_id, error in failed.items())
            msg = (
                f"{len(failed)} of {len(saved)} saved documents of user {user_id!r} can't be embedded anew: {why}. "
                f"{len(done)} were: {done}. What failed is as before; once the cause is gone, reindex() does the rest."
            )
            raise EmbeddingError(msg) from next(iter(failed.values()))
        return done

    def _does_others(self, user_id: str, model: Embeddings, error: Exception) -> Procedure[bool]:
        """Whether model and store still work, so that what failed is a matter of one document."""
        if isinstance(error, OSError) and error.errno is not None:
            # A full disk, a network that is down: the operating system knows nothing of documents.
            return False
        try:
            yield Step(partial(model.embed_documents, ["width"]), partial(model.aembed_documents, ["width"]))
            yield blocking(self._recall.store.saved_count, user_id)
        except Exception:
            return False
        return True

    def _saved_ids(self, user_id: str) -> list[str]:
        readable, unreadable = self._recall.store.list_saved(user_id)
        return [record.doc_id for record in (*readable, *unreadable)]

    def doc_id_of(self, document: Document) -> str | None:
        """The id of a document in an answer, as actions take it; `None` when nothing identifies it.

        Its metadata is the source's own, whose ids may be numbers, UUIDs or under another key.

        Raises:
            InvalidDocumentError: It is no document.
            Exception: What the function at `config.document_id` raises, if it is one.
        """
        if not isinstance(document, Document):
            msg = f"doc_id_of takes a document of an answer, got {type(document).__name__}: {document!r}"
            raise InvalidDocumentError(msg)
        if document.metadata.get("from_cache") is True:
            return as_id(document.metadata.get("doc_id"))
        return identify(document, self.config.document_id)

    def documents(
        self, states: DocumentState | str | Iterable[DocumentState | str] | None = None, user_id: str | None = None
    ) -> DocumentList:
        """The user's records in `states` (all when `None`), sorted by id, without their content.

        A list that prints as a table, in a notebook too: state, score, why, last use.
        `state_store.get(user_id, doc_id)` has the content.
        """
        wanted = None if states is None else _states(states)
        records = self._recall.store.list_by_state(self._user(user_id), wanted, content=False)
        return DocumentList(records, as_utc(self.clock()))

    async def adocuments(
        self, states: DocumentState | str | Iterable[DocumentState | str] | None = None, user_id: str | None = None
    ) -> DocumentList:
        """`documents` without blocking the event loop."""
        return await run_in_executor(None, self.documents, states, user_id)

    def history(self, doc_id: str, user_id: str | None = None) -> list[DocumentEvent]:
        """What happened to a document, oldest first: when, why, and at which count and score.

        Raises:
            UnknownDocumentError: The user never met the document.
        """
        user = self._user(user_id)
        events = self._recall.store.history(user, doc_id)
        if not events and self._recall.store.get(user, doc_id) is None:
            raise UnknownDocumentError(user, doc_id)
        return events

    async def ahistory(self, doc_id: str, user_id: str | None = None) -> list[DocumentEvent]:
        """`history` without blocking the event loop."""
        return await run_in_executor(None, self.history, doc_id, user_id)

    def stats(self, user_id: str | None = None) -> UserStats:
        """What is kept about the user, in numbers; and in `process`, what happened to all users in this process.

        Retrievers over one state store count together, copies of a retriever among them. `print` shows it.
        """
        user, recall = self._user(user_id), self._recall
        states = dict.fromkeys((state.value for state in DocumentState), 0)
        chunks = stale = 0
        start = recall.store.begin_query(user, self.config.reset_threshold, self.config.decay.max_cache_miss_streak)
        for page in recall.store.pages(user):
            for record in page:
                states[record.user_state.value] += 1
                chunks += record.chunk_count
                stale += record.stale_since is not None
        return UserStats(
            user_id=user,
            states=states,
            chunks=chunks,
            stale=stale,
            index_bytes=recall.cache.nbytes(user),
            similarity_threshold=recall.threshold_in_use(user),
            queries=start.clocks.queries,
            searches=start.clocks.searches,
            process=self.process_stats(),
        )

    def process_stats(self) -> ProcessStats:
        """What happened in this process to all users of the state store; names no user and asks no store."""
        return self._recall.observations.read()

    async def astats(self, user_id: str | None = None) -> UserStats:
        """`stats` without blocking the event loop."""
        return await run_in_executor(None, self.stats, user_id)

    def calibrate(self, user_id: str | None = None, *, anew: bool = False) -> Calibration:
        """What the cosines of the embedding model mean: how unrelated texts and how answers score, and what follows.

        Measured with 24 questions and passages once for each model and kept beside the state, so that all workers go
        by the same figures; `similarity_threshold="auto"` and `context="focused"` do it by themselves when they first
        need it. With a user (named here or by the retriever) the threshold is refined by their saved chunks.

        Args:
            user_id: Whose saved chunks; by default the retriever's own user, if it has one.
            anew: Measure although it is known: the model behind the name has changed.

        Raises:
            EmbeddingUnavailableError: There is no embedding model.
            EmbeddingError: The model's vectors can't be used.
        """
        named = self._named_user({"user_id": user_id}, ensure_config())
        user = None if named is None else check_user_id(named)
        return run(self._recall.calibrate(user, self._recall.needed_embeddings("calibrating"), anew=anew))

    async def acalibrate(self, user_id: str | None = None, *, anew: bool = False) -> Calibration:
        """`calibrate` without blocking the event loop."""
        named = self._named_user({"user_id": user_id}, ensure_config())
        user = None if named is None else check_user_id(named)
        return await arun(self._recall.calibrate(user, self._recall.needed_embeddings("calibrating"), anew=anew))

    def forget_user(self, user_id: str | None = None) -> ForgottenUser:
        """Remove every trace of the user from the state store, the chunk store and this process, and count it."""
        user, recall = self._user(user_id), self._recall
        files = recall.chunks.documents.count(user) if recall.chunks.documents is not None else 0
        beside = recall.store.forget_user(user)
        elsewhere = 0 if recall.chunks is recall.store.chunk_store else recall.chunks.delete_user(user)
        recall.cache.forget(user)
        forgotten = replace(beside, chunks=beside.chunks + elsewhere, files=files)
        # Not even at DEBUG does it say who: that nothing is left of a user should go for this line too.
        events.USER_FORGOTTEN.log("a user was forgotten: %s", forgotten, **vars(forgotten))
        return forgotten

    def purge(self, doc_id: str) -> PurgedDocument:
        """Remove a document that was withdrawn: for all users, from the state store, the chunk store and the folder.

        Records, history, copies and retrieved texts go. Take it out of its collection first: who retrieves it
        afterwards meets it as a new document. Twice is no error, and completes one that was interrupted. This is an
        operator's action, not a user's.
        """
        recall = self._recall
        purged = recall.store.purge(doc_id)
        if recall.chunks is not recall.store.chunk_store:
            elsewhere = recall.chunks.purge(doc_id)
            purged = replace(purged, copies=purged.copies + elsewhere.copies, files=purged.files + elsewhere.files)
        events.DOCUMENT_PURGED.log("document %r was removed for all users: %s", doc_id, purged, **vars(purged))
        return purged

    async def apurge(self, doc_id: str) -> PurgedDocument:
        """`purge` without blocking the event loop."""
        return await run_in_executor(None, self.purge, doc_id)

    async def aforget_user(self, user_id: str | None = None) -> ForgottenUser:
        """`forget_user` without blocking the event loop."""
        return await run_in_executor(None, self.forget_user, user_id)

    @property
    def decay_engine(self) -> DecayEngine:
        """The engine over this retriever's stores, for a `DecayScheduler`."""
        return self._engine


def _states(states: DocumentState | str | Iterable[DocumentState | str]) -> list[DocumentState]:
    try:
        listed = [states] if isinstance(states, str) else list(states)
        return [DocumentState(state) for state in listed]
    except (TypeError, ValueError) as error:
        msg = f"{error}; the states are {', '.join(DocumentState)}"
        raise ConfigurationError(msg) from error
