"""What counts as relevant: calibration of the embedding model, and thresholds that mean nothing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from geometry import GeometryEmbeddings, high, low
from helpers import document
from scenarios import World, doc_ids

from rag_wiki import DecayConfig, EmbeddingUnavailableError, MemoryStateStore, RagWikiRetriever, StateStore
from rag_wiki.search.calibration_pairs import PAIRS
from rag_wiki.storage.chunk_store import ChunkStore
from rag_wiki.testing.awkward import in_threads

SUBJECTS = ("bees", "kidneys", "sonatas", "taxes", "tides", "volcanoes")
QUESTIONS = {pair.question for pair in PAIRS}
PASSAGES = {pair.passage for pair in PAIRS}


def world_of(embeddings: GeometryEmbeddings, store: StateStore | None = None) -> World:
    """A user whose texts are embedded by this model."""
    return World(store=MemoryStateStore() if store is None else store, embeddings=embeddings)


def save_subjects(world: World, retriever: RagWikiRetriever) -> None:
    """Save a document about each subject."""
    for subject in SUBJECTS:
        world.save(retriever, subject, f"{subject} are what this is about.")


@pytest.mark.parametrize(("make", "unrelated", "matching"), [(high, 0.78, 0.92), (low, 0.02, 0.4)])
def test_the_figures_are_those_of_the_model(
    make: Callable[[], GeometryEmbeddings], unrelated: float, matching: float
) -> None:
    """`calibrate()` gives the scores of unrelated and of matching texts, and a threshold between them."""
    figures = world_of(make()).retriever().calibrate()
    assert figures.unrelated.mean == pytest.approx(unrelated, abs=0.02)
    assert figures.matching.mean == pytest.approx(matching, abs=0.03)
    assert figures.gap == pytest.approx(matching - unrelated, abs=0.03)
    assert figures.unrelated.mean < figures.threshold < figures.matching.mean
    assert (figures.model, figures.false_hit_rate) == ("geometry.GeometryEmbeddings:geometry", 0.01)
    assert (figures.is_telling, figures.chunks) == (True, 0)


@pytest.mark.parametrize("make", [high, low])
def test_auto_tells_answers_from_the_rest(make: Callable[[], GeometryEmbeddings]) -> None:
    """With any model, a question is answered by the copy about its subject, and by no other one."""
    world = world_of(make())
    retriever = world.retriever(similarity_threshold="auto")
    save_subjects(world, retriever)
    for subject in SUBJECTS:
        assert doc_ids(retriever.invoke(f"{subject} in general?")) == [subject]
    assert retriever.invoke("sourdough that did not rise?") == []


@pytest.mark.parametrize(("make", "answering"), [(high, len(SUBJECTS)), (low, 0)])
def test_a_number_says_little(make: Callable[[], GeometryEmbeddings], answering: int) -> None:
    """At 0.75 one model lets everything answer and another one nothing: why there is `auto`."""
    world = world_of(make())
    retriever = world.retriever()
    save_subjects(world, retriever)
    assert len(retriever.invoke("bees in general?")) == answering


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "abatch"])
def test_all_ways_of_asking_agree(way: str) -> None:
    """Blocking, awaiting, alone and in a batch, `auto` gives the same answers and the same threshold."""
    world = world_of(low())
    retriever = world.retriever(similarity_threshold="auto")
    save_subjects(world, retriever)
    questions = [f"{subject} in general?" for subject in (*SUBJECTS, "sourdough")]
    if way == "invoke":
        answers = [retriever.invoke(question) for question in questions]
    elif way == "batch":
        answers = retriever.batch(questions)
    elif way == "abatch":
        answers = asyncio.run(retriever.abatch(questions))
    else:
        answers = [asyncio.run(retriever.ainvoke(question)) for question in questions]
    assert [doc_ids(answer) for answer in answers] == [*([subject] for subject in SUBJECTS), []]
    provenance = retriever.last_provenance
    assert provenance is not None
    assert provenance.threshold == retriever.stats().similarity_threshold == retriever.calibrate().threshold


def test_the_model_is_measured_once_for_all_workers(state_store: StateStore, tmp_path: Path) -> None:
    """The pairs are embedded by the first call that needs them, and by no other worker on the same store."""
    figures = []
    for worker, expected in (("first", len(PAIRS)), ("second", 0)):
        model = low()
        # Caches live as long as a chunk store, so another one is as good as another process.
        retriever = world_of(model, state_store).retriever(
            f"a user of the {worker} worker", chunk_store=ChunkStore(tmp_path / worker), context="focused"
        )
        for _ in range(2):
            retriever.invoke("bees in general?")
            figures.append(retriever.calibrate())
        assert len(PASSAGES.intersection(model.told)) == expected
        # Whoever did not measure it embeds one question, to see how wide its vectors are.
        assert len(QUESTIONS.intersection(model.asked)) == max(expected, 1)
    assert figures.count(figures[0]) == 4


def test_another_model_is_another_calibration() -> None:
    """Figures belong to the model's name; a new model behind an old name is measured when asked to."""
    world = world_of(low())
    before = world.retriever().calibrate()
    changed = high()
    other = world.retriever(embedding_model=changed)
    assert other.calibrate() == before
    after = other.calibrate(anew=True)
    assert after.unrelated.mean == pytest.approx(0.78, abs=0.02)
    assert world.retriever(embedding_model=changed).calibrate() == after
    named = world.retriever(embedding_name="another")
    assert named.calibrate().model == "another"
    assert named.calibrate().unrelated == before.unrelated


def test_own_chunks_refine_the_threshold() -> None:
    """A user whose texts score higher with anything than our passages do has a higher threshold than a new one."""
    world = world_of(low())
    retriever = world.retriever(similarity_threshold="auto", chunk_size=30, chunk_overlap=0)
    plain = retriever.calibrate()
    model = world.embeddings
    assert isinstance(model, GeometryEmbeddings)
    model.unrelated = 0.2
    save_subjects(world, retriever)
    refined = retriever.calibrate()
    assert (plain.chunks, refined.chunks) == (0, retriever.stats().chunks)
    assert refined.chunks >= len(SUBJECTS)
    assert refined.threshold > plain.threshold + 0.05
    assert refined.matching == plain.matching
    assert retriever.calibrate("somebody else") == plain


def test_a_stricter_rate_is_a_higher_threshold() -> None:
    """The fewer false hits are asked for, the higher the threshold."""
    world = world_of(high())
    rates = (0.5, 0.1, 0.01, 0.0001)
    thresholds = [world.retriever(false_hit_rate=rate).calibrate().threshold for rate in rates]
    assert thresholds == sorted(set(thresholds))


def test_a_note_that_is_torn_is_measured_anew(caplog: pytest.LogCaptureFixture) -> None:
    """A kept calibration that can't be read back is said in the log and measured again, for everybody."""
    world = world_of(low())
    expected = world.retriever().calibrate()
    (name,) = [key for key in world.store._notes if key.startswith("note:")]  # type: ignore[attr-defined]
    for torn in (
        '"{}"',
        '"[]"',
        '"torn"',
        '"{\\"unrelated\\": [0, 1], \\"matching\\": [1, 2, 3], \\"questions\\": \\"\\"}"',
    ):
        world.store._notes[name] = torn  # type: ignore[attr-defined]
        caplog.clear()
        assert world.retriever(chunk_store=ChunkStore()).calibrate() == expected
        assert "can't be read back" in caplog.text or "is a" in caplog.text
        assert world.store._notes[name] != torn  # type: ignore[attr-defined]


def test_a_model_that_fails_costs_the_calibration_not_the_answer() -> None:
    """Where the model can't be calibrated the source's answer comes, and it is tried again a little later."""
    world = world_of(low())
    retriever = world.retriever(similarity_threshold="auto")
    save_subjects(world, world.retriever())
    model = world.embeddings
    assert isinstance(model, GeometryEmbeddings)
    embed = model.embed_documents
    model.embed_documents = lambda texts: []  # type: ignore[method-assign]
    world.shows(document("global", "from the source"))
    before = {record.cache_miss_streak for record in retriever.documents(["CLAIMED"])}
    documents, provenance = retriever.invoke_with_provenance("bees in general?")
    assert doc_ids(documents) == ["global"]
    assert [line for line in provenance.degraded if "could not be calibrated (EmbeddingError)" in line]
    # What could not be compared has not missed.
    assert {record.cache_miss_streak for record in retriever.documents(["CLAIMED"])} == before
    asked = len(model.asked)
    assert doc_ids(retriever.invoke("bees in general?")) == ["global"]
    assert len(model.asked) == asked + 1  # the question alone: for some seconds the model is left in peace
    model.embed_documents = embed  # type: ignore[method-assign]
    world.clock.turn(minutes=1)
    assert doc_ids(retriever.invoke("bees in general?")) == ["bees", "global"]


class _Arrays(GeometryEmbeddings):
    """Answers with numpy arrays."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        return np.array(super().embed_documents(texts))  # type: ignore[return-value]  # that is the point


class _Awaited(GeometryEmbeddings):
    """Can only be awaited."""

    def embed_query(self, text: str) -> list[float]:
        raise NotImplementedError

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        raise NotImplementedError

    async def aembed_query(self, text: str) -> list[float]:
        return super().embed_query(text)

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        return super().embed_documents(texts)


@pytest.mark.parametrize("kind", [_Arrays, _Awaited])
def test_models_of_all_kinds_are_calibrated(kind: type[GeometryEmbeddings]) -> None:
    """A model that answers with arrays, or that can only be awaited, is calibrated and used as any other."""
    world = world_of(kind(0.02, 0.4))
    saving = world.retriever(embedding_model=low(), embedding_name="one")
    save_subjects(world, saving)
    retriever = world.retriever(similarity_threshold="auto", embedding_name="one")

    async def ask() -> None:
        assert (await retriever.acalibrate()).unrelated.mean == pytest.approx(0.02, abs=0.02)
        assert doc_ids(await retriever.ainvoke("bees in general?")) == ["bees"]

    asyncio.run(ask())


def test_many_that_ask_at_once_measure_once() -> None:
    """Fifty calls that are awaited together, and eight threads, wait for one measurement."""

    async def ask(retriever: RagWikiRetriever) -> None:
        await asyncio.gather(*(retriever.ainvoke(f"bees {number}") for number in range(50)))

    for together in (
        lambda retriever: asyncio.run(ask(retriever)),
        lambda retriever: in_threads(8, lambda number: retriever.invoke(f"bees {number}")),
    ):
        model = low()
        world = world_of(model)
        save_subjects(world, world.retriever())
        together(world.retriever(similarity_threshold="auto"))
        assert len([text for text in model.told if text in PASSAGES]) == len(PAIRS)


class _Forgetful(MemoryStateStore):
    """Can't read or keep notes."""

    def _read_note(self, name: str) -> str | None:
        raise PermissionError("no notes")

    def _swap_note(self, name: str, expected: str | None, text: str) -> bool:
        raise PermissionError("no notes")


def test_a_store_without_notes_costs_no_measurement() -> None:
    """Where what was measured can't be kept it counts in this process, and is not measured again for each question."""
    model = low()
    world = world_of(model, _Forgetful())
    retriever = world.retriever(similarity_threshold="auto")
    save_subjects(world, retriever)
    for _ in range(3):
        documents, provenance = retriever.invoke_with_provenance("bees in general?")
        assert (doc_ids(documents), provenance.degraded) == (["bees"], ())
    assert len([text for text in model.asked if text in QUESTIONS]) == len(PAIRS)


def test_another_width_is_another_calibration() -> None:
    """A model that is cut to other widths under one name is calibrated for each, and `reindex` is all that it takes."""

    class Cut(GeometryEmbeddings):
        width = 512

        def embed_query(self, text: str) -> list[float]:
            return super().embed_query(text)[: self.width]

        def embed_documents(self, texts: list[str]) -> list[list[float]]:
            return [vector[: self.width] for vector in super().embed_documents(texts)]

    world = world_of(Cut(0.02, 0.4))
    save_subjects(world, world.retriever(similarity_threshold="auto"))
    assert doc_ids(world.retriever(similarity_threshold="auto").invoke("bees in general?")) == ["bees"]
    Cut.width = 384
    retriever = world.retriever(similarity_threshold="auto")
    assert sorted(retriever.reindex()) == sorted(SUBJECTS)
    documents, provenance = retriever.invoke_with_provenance("bees in general?")
    assert (doc_ids(documents), provenance.degraded) == (["bees"], ())
    assert retriever.calibrate().chunks == len(SUBJECTS)


def test_measured_anew_reaches_other_workers(tmp_path: Path) -> None:
    """Another worker goes by new figures from its next `calibrate()` on."""
    world = world_of(low())
    other = world.retriever(chunk_store=ChunkStore(tmp_path))
    assert other.calibrate().unrelated.mean < 0.1
    world.retriever(embedding_model=high()).calibrate(anew=True)
    assert other.calibrate().unrelated.mean > 0.7


def test_without_a_model_there_is_nothing_to_calibrate() -> None:
    """`calibrate()` without an embedding model is an error that says how to give one; `auto` matches by words."""
    world = World(embeddings=None)
    with pytest.raises(EmbeddingUnavailableError, match="embedding_model="):
        world.retriever().calibrate()
    save_subjects(world, world.retriever(embedding_model=low()))
    answer, provenance = world.retriever(similarity_threshold="auto").invoke_with_provenance("what are volcanoes about")
    assert (doc_ids(answer), provenance.mode, provenance.threshold) == (["volcanoes"], "keyword", None)


def test_stats_say_nothing_that_is_not_known() -> None:
    """`stats()` embeds nothing: before the first question there is no threshold to show for `auto`."""
    world = world_of(low())
    retriever = world.retriever(similarity_threshold="auto")
    assert retriever.stats().similarity_threshold is None
    assert (world.embeddings.asked, world.retriever().stats().similarity_threshold) == ([], 0.75)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("make", "threshold", "word"),
    [(high, 0.75, "everything passes"), (low, 0.75, "nothing passes"), (high, 0.86, None), (low, 0.3, None)],
)
def test_calibrating_judges_a_number(
    make: Callable[[], GeometryEmbeddings], threshold: float, word: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """A numeric threshold that means nothing with the model is said once in the log, with what helps."""
    retriever = world_of(make()).retriever(similarity_threshold=threshold)
    for _ in range(2):
        retriever.calibrate()
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    if word is None:
        assert told == []
    else:
        (line,) = told
        assert word in line
        assert "similarity_threshold='auto'" in line


@pytest.mark.parametrize(("make", "word"), [(high, "most saved documents pass it"), (low, "no saved document ever")])
def test_using_it_shows_that_a_number_means_nothing(
    make: Callable[[], GeometryEmbeddings], word: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Without embedding anything for it, a session shows that everything passes or that nothing does; said once."""
    world = world_of(make())
    retriever = world.retriever()
    save_subjects(world, retriever)
    world.shows(*(document(subject, f"{subject} are what this is about.") for subject in SUBJECTS[:3]))
    caplog.clear()
    for number in range(60):
        retriever.invoke(f"{SUBJECTS[number % 6]} question {number}")
    (line,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert word in line
    assert "similarity_threshold='auto'" in line


def test_a_number_that_fits_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    """Where some pass and others don't, nothing is said."""
    world = world_of(low())
    retriever = world.retriever(similarity_threshold=0.25)
    save_subjects(world, retriever)
    caplog.clear()
    for number in range(60):
        retriever.invoke(f"{SUBJECTS[number % 6]} question {number}")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_on_miss_asks_where_the_copies_are_not_sure() -> None:
    """With `auto`, `on_miss` leaves the wrapped retriever in peace exactly where a copy about the subject is saved."""
    world = world_of(high())
    retriever = world.retriever(similarity_threshold="auto", global_search="on_miss")
    save_subjects(world, retriever)
    world.shows(document("global", "from the source"))
    asked = len(world.source.calls)
    for subject in SUBJECTS:
        assert doc_ids(retriever.invoke(f"{subject} in general?")) == [subject]
    assert len(world.source.calls) == asked
    assert doc_ids(retriever.invoke("sourdough that did not rise?")) == ["global"]
    assert len(world.source.calls) == asked + 1


def test_a_document_has_its_share_of_misses() -> None:
    """Of six saved documents one is let go after six times as many searches without a hit as a single one is."""
    world = world_of(low())
    retriever = world.retriever(similarity_threshold="auto", decay=DecayConfig(max_cache_miss_streak=4))
    save_subjects(world, retriever)
    for subject in SUBJECTS:
        retriever.invoke(f"{subject} in general?")
    for number in range(18):
        retriever.invoke(f"volcanoes {number}")
    # What was asked about first has missed 23 searches, and the search to come is the 24th.
    assert len(retriever.documents(["CLAIMED"])) == len(SUBJECTS)
    _, provenance = retriever.invoke_with_provenance("volcanoes once more")
    assert [copy.doc_id for copy in provenance.let_go] == ["bees"]
