"""What the wrapped retriever found of a saved document comes along in the copy's answer: saving takes nothing away."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from geometry import low
from helpers import TableEmbeddings, document
from langchain_core.documents import Document
from langchain_text_splitters import CharacterTextSplitter, RecursiveCharacterTextSplitter, TextSplitter
from scenarios import USER, Paragraphs, World, cached, direction, texts

from rag_wiki import RagWikiRetriever, StateStore
from rag_wiki.search.calibration_pairs import PAIRS

QUESTION = "the question"
GREEK = ("alpha comes first.", "beta is the second.", "gamma follows.", "delta ends it.")
COSINES = {"alpha": 0.3, "beta": 0.9, "gamma": 0.85, "delta": 0.2}
Ask = Callable[[RagWikiRetriever, str], list[Document]]


@pytest.fixture
def world(state_store: StateStore) -> World:
    """A user over each kind of store, and texts by their cosine to the question."""
    vectors = {word: direction(cosine) for word, cosine in COSINES.items()}
    return World(state_store, TableEmbeddings({"question": [1.0, 0.0], "concern": [0.0, 0.0, 1.0], **vectors}))


def saved(world: World, text: str = "\n\n".join(GREEK), **options: Any) -> RagWikiRetriever:
    """A retriever whose user has saved a text, a chunk for each paragraph, and before it another one."""
    retriever = world.retriever(**{"text_splitter": Paragraphs(), **options})
    world.save(retriever, "other", "Something of no concern.")
    world.save(retriever, "greek", text)
    return retriever


def pieces(*found: str, **metadata: Any) -> list[Document]:
    """Pieces of the saved document, as the source shows them."""
    return [document("greek", text, **metadata) for text in found]


def words(text: str) -> set[str]:
    """The words of a text."""
    return {word.strip(".,#") for word in text.split()}


def hit_counts(retriever: RagWikiRetriever) -> list[int]:
    """How often each chunk of the copy has answered."""
    return [chunk["hit_count"] for chunk in retriever.chunk_store.load_chunks(USER, "greek")]


def invoke(retriever: RagWikiRetriever, question: str) -> list[Document]:
    """Ask in the plain way."""
    return retriever.invoke(question)


def ainvoke(retriever: RagWikiRetriever, question: str) -> list[Document]:
    """Ask and await."""
    return asyncio.run(retriever.ainvoke(question))


def batch(retriever: RagWikiRetriever, question: str) -> list[Document]:
    """Ask among others."""
    return retriever.batch(["something else", question, "the question again"])[1]


def abatch(retriever: RagWikiRetriever, question: str) -> list[Document]:
    """Ask among others and await."""
    return asyncio.run(retriever.abatch(["something else", question, "the question again"]))[1]


@pytest.mark.parametrize("ask", [invoke, ainvoke, batch, abatch])
def test_a_passage_below_the_threshold_comes_along(world: World, ask: Ask) -> None:
    """It is in the copy's answer, once, in the order of the document, with number and cosine."""
    retriever = saved(world, local_top_k=2)
    world.shows(*pieces(GREEK[3], GREEK[0], GREEK[1]))
    (found,) = ask(retriever, QUESTION)
    assert found.page_content == "\n\n".join(GREEK)
    assert found.metadata["chunks_used"] == [0, 1, 2, 3]
    assert found.metadata["scores"] == [pytest.approx(cosine, abs=1e-6) for cosine in COSINES.values()]
    assert found.metadata["from_cache"] is True


def test_a_passage_beyond_local_top_k_comes_along(world: World) -> None:
    """Of two chunks above the threshold the second best is in the answer when the retriever found it, and only then."""
    retriever = saved(world, local_top_k=1)
    assert texts(retriever.invoke(QUESTION)) == [GREEK[1]]
    world.shows(*pieces(GREEK[2]))
    assert texts(retriever.invoke(QUESTION)) == ["\n\n".join(GREEK[1:3])]


def test_what_comes_along_is_no_hit(world: World) -> None:
    """A chunk that came along has not answered, and provenance lists it with those used."""
    retriever = saved(world)
    world.shows(*pieces(GREEK[0], GREEK[3]))
    before = world.record("greek").fetch_count
    (source,) = retriever.invoke_with_provenance(QUESTION).provenance.sources
    assert (source.chunks_used, source.also_global) == ((0, 1, 2, 3), True)
    assert list(source.scores) == [pytest.approx(cosine, abs=1e-6) for cosine in COSINES.values()]
    assert hit_counts(retriever) == [0, 1, 1, 0]
    assert world.record("greek").fetch_count == before + 1


def test_what_has_no_answer_stays_with_the_source(world: World) -> None:
    """A copy of which nothing matches is not served for what the retriever found of it."""
    retriever = saved(world, "\n\n".join((GREEK[0], GREEK[3])))
    world.shows(*pieces(GREEK[3]))
    (found,) = retriever.invoke(QUESTION)
    assert (found.page_content, found.metadata["from_cache"]) == (GREEK[3], False)
    assert hit_counts(retriever) == [0, 0]


def test_a_source_that_is_not_asked_adds_nothing(world: World) -> None:
    """With `global_search="on_miss"` a copy that answers does so alone."""
    retriever = saved(world, global_search="on_miss", local_top_k=1)
    world.shows(*pieces(GREEK[0]))
    assert texts(retriever.invoke(QUESTION)) == [GREEK[1]]


def test_a_stale_copy_brings_nothing(world: World) -> None:
    """When the source shows a new text beside one that the copy has, both are served as they were found."""
    retriever = saved(world)
    world.shows(*pieces(GREEK[0], "beta is now the third."))
    assert texts(retriever.invoke(QUESTION)) == [GREEK[0], "beta is now the third."]


def test_a_pinned_document_brings_what_was_found(world: World) -> None:
    """The best chunk of a pinned document that has no match is in the answer, and with it what was found of it."""
    retriever = saved(world, "\n\n".join((GREEK[3], "nothing to speak of.", GREEK[0])))
    retriever.force_pin("greek")
    world.shows(*pieces(GREEK[3]))
    assert texts(retriever.invoke(QUESTION)) == [f"{GREEK[3]}\n\n{GREEK[0]}"]
    assert hit_counts(retriever) == [0, 0, 0]


class NotCalibrated(TableEmbeddings):
    """Does not embed what it is to be calibrated with."""

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        """The vectors of texts."""
        if PAIRS[0].passage in texts:
            raise TimeoutError
        return super().embed_documents(texts)


@pytest.mark.parametrize(("question", "is_known"), [("?", True), ("beta", False)])
def test_where_nothing_is_compared_what_was_found_comes_along(question: str, is_known: bool) -> None:
    """A question without a direction, or a model of which nothing is known, gets it with pinned documents, at 0."""
    model = TableEmbeddings if is_known else NotCalibrated
    world = World(embeddings=model({"": [0.0], "alpha": [1.0], "beta": [0.5, 0.5], "Something": [0.0, 1.0]}))
    retriever = saved(world, "\n\n".join(GREEK[:2]), similarity_threshold=0.75 if is_known else "auto")
    retriever.force_pin("greek")
    world.shows(*pieces(GREEK[1]))
    documents, provenance = retriever.invoke_with_provenance(question)
    (found,) = documents
    assert provenance.mode == "none"
    assert (found.metadata["chunks_used"], found.metadata["scores"]) == ([0, 1], [0.0, 0.0])


NUMBERS = " ".join(f"Rule {number} says what number {number} may do in the yard." for number in range(40))
ABOUT = f"beta is what it is about. {NUMBERS}"


@pytest.mark.parametrize(("size", "overlap"), [(120, 0), (120, 40), (500, 100)])
@pytest.mark.parametrize(("own_size", "own_overlap"), [(200, 60), (77, 0), (1000, 0)])
def test_other_borders_lose_nothing(size: int, overlap: int, own_size: int, own_overlap: int) -> None:
    """However a copy made of the whole text is split, all of a found passage is in its answer, without a repeat."""
    world = World(embeddings=TableEmbeddings({"question": [1.0, 0.0], "beta": [1.0, 0.0]}))
    retriever = saved(world, ABOUT, text_splitter=None, chunk_size=own_size, chunk_overlap=own_overlap, local_top_k=1)
    splitter = RecursiveCharacterTextSplitter(chunk_size=size, chunk_overlap=overlap)
    for passage in splitter.split_text(ABOUT):
        world.shows(*pieces(passage))
        (found,) = retriever.invoke(QUESTION)
        answer = " ".join(found.page_content.split())
        assert found.metadata["from_cache"]
        assert passage in answer
        sentences = [sentence for sentence in answer.split(".") if sentence.startswith(" Rule")]
        assert len(set(sentences)) == len(sentences)
        # No more than what holds it, and the hit.
        assert len(answer) <= len(passage) + 3 * own_size + 2


def test_a_short_end_is_not_lost() -> None:
    """The last word of a passage, which may be what was asked for, comes along with the chunk that begins with it."""
    world = World(embeddings=TableEmbeddings({"question": [1.0, 0.0], "beta": [1.0, 0.0]}))
    retriever = saved(world, "beta.\n\nThe fee for a day in the yard is\n\n12 euros, paid at the gate.")
    world.shows(*pieces("The fee for a day in the yard is 12"))
    (found,) = retriever.invoke(QUESTION)
    assert found.metadata["chunks_used"] == [0, 1, 2]


def test_a_copy_made_of_retrieved_pieces_brings_the_piece(world: World) -> None:
    """A piece that was retrieved before the copy was made comes along with its own metadata; a gap stays one."""
    retriever = world.retriever(local_top_k=1)
    shown = [
        document("greek", GREEK[0], chunk_index=0, page=1),
        document("greek", GREEK[1], chunk_index=1, page=2),
        document("greek", GREEK[3], chunk_index=7, page=9),
    ]
    world.shows(*shown)
    retriever.invoke("an introduction")
    retriever.accept_suggestion("greek")
    world.shows(shown[2])
    (found,) = retriever.invoke(QUESTION)
    assert found.page_content == f"{GREEK[1]}\n\n{GREEK[3]}"
    assert found.metadata["chunks_used"] == [1, 7]
    assert [own["page"] for own in found.metadata["chunk_metadata"]] == [2, 9]


def test_a_part_that_the_copy_lacks_stays_beside_it(world: World) -> None:
    """Of two pieces found, the one that the copy has comes along, the other one is served beside it."""
    retriever = world.retriever(local_top_k=1)
    world.shows(document("greek", GREEK[0], chunk_index=0), document("greek", GREEK[1], chunk_index=1))
    retriever.invoke("an introduction")
    retriever.accept_suggestion("greek")
    world.shows(document("greek", GREEK[0], chunk_index=0), document("greek", GREEK[3], chunk_index=3))
    assert texts(retriever.invoke(QUESTION)) == ["\n\n".join(GREEK[:2]), GREEK[3]]


def test_a_known_version_brings_what_was_found(world: World) -> None:
    """Where `version_key` says that nothing changed, a found passage is looked for in the copy all the same.

    One that the source shows with a heading of its own is there without it; one that is not there is served beside.
    """
    retriever = world.retriever(version_key="edition", text_splitter=Paragraphs())
    world.save(retriever, "greek", "\n\n".join(GREEK), edition=3)
    world.shows(*pieces(f"Letters: {GREEK[3]}", edition=3))
    assert texts(retriever.invoke(QUESTION)) == ["\n\n".join(GREEK[1:])]
    world.shows(*pieces("Of Hebrew letters nothing is said.", edition=3))
    assert texts(retriever.invoke(QUESTION)) == ["\n\n".join(GREEK[1:3]), "Of Hebrew letters nothing is said."]


def test_what_an_incomplete_copy_lacks_is_served_beside_it_whatever_its_version(state_store: StateStore) -> None:
    """A copy made of one chunk does not have the others of the same version."""
    world = World(state_store, TableEmbeddings({"question": [1.0, 0.0], "alpha": direction(0.9)}))
    retriever = world.retriever(version_key="edition")
    world.shows(*pieces(GREEK[0], edition=3, chunk_index=0))
    retriever.invoke(QUESTION)
    retriever.accept_suggestion("greek")
    other = "Of Hebrew letters nothing is said."
    world.shows(*pieces(other, edition=3, chunk_index=5))
    assert texts(retriever.invoke(QUESTION)) == [GREEK[0], other]
    assert world.record("greek").stale_since is None


class Lowercase(Paragraphs):
    """A splitter that writes all in small letters."""

    def split_text(self, text: str) -> list[str]:
        return super().split_text(text.lower())


SPLITTERS: dict[str, TextSplitter] = {
    "headings dropped": CharacterTextSplitter(
        separator=r"\n#+ [^\n]*\n", is_separator_regex=True, chunk_size=40, chunk_overlap=0
    ),
    "small letters": Lowercase(),
    "sentences": CharacterTextSplitter(separator=". ", chunk_size=90, chunk_overlap=0),
    "separators dropped": RecursiveCharacterTextSplitter(
        separators=[". ", " "], keep_separator=False, chunk_size=90, chunk_overlap=0
    ),
    "repeated": RecursiveCharacterTextSplitter(chunk_size=120, chunk_overlap=0),
}
AGAIN = "Back to the top of the page."
RULES = (
    "The archive of all logs is in the cellar behind the heating, and its key hangs in the red box",
    "Ask Eve for the code of that box, who changes it on every Monday before nine",
    "Holiday requests go to the team lead two weeks ahead",
)


@pytest.mark.parametrize(
    ("splitter", "text", "piece"),
    [
        (
            "headings dropped",
            "# Days\nTwenty-eight a year for everybody.\n# Sick leave of children\nCall before nine.",
            "# Sick leave of children",
        ),
        ("small letters", f"{RULES[0]}.\n\n{RULES[2]}.", f"{RULES[2]}."),
        ("sentences", ". ".join(RULES), f"and its key hangs in the red box. {RULES[1]}"),
        ("separators dropped", ". ".join(RULES), f"and its key hangs in the red box. {RULES[1]}"),
        (
            "repeated",
            f"{AGAIN}\n\n{RULES[0]}.\n\n{AGAIN}\n\n{RULES[1]}.\n\n{AGAIN}\n\n{RULES[2]}.",
            f"and its key hangs in the red box.\n\n{AGAIN}\n\n{RULES[1]}.\n\n{AGAIN}\n\nHoliday requests go to",
        ),
    ],
)
def test_what_no_chunk_of_the_copy_holds_is_served(world: World, splitter: str, text: str, piece: str) -> None:
    """A splitter may drop or change what the saved content has: every word that was found is in the answer."""
    retriever = saved(world, text, text_splitter=SPLITTERS[splitter], similarity_threshold=0.0, local_top_k=1)
    world.shows(*pieces(piece))
    answer = texts(retriever.invoke(QUESTION))
    assert words(piece) <= words("\n".join(answer))
    assert world.record("greek").stale_since is None


def test_without_a_model_what_was_found_comes_along(state_store: StateStore) -> None:
    """A copy that answers by words brings what was found of it, with a score of 0."""
    world = World(state_store)
    saved(world)
    world.shows(*pieces(GREEK[3]))
    retriever = world.retriever(embedding_model=None)
    (found,) = retriever.invoke("what is beta?")
    assert found.page_content == f"{GREEK[1]}\n\n{GREEK[3]}"
    assert found.metadata["chunks_used"] == [1, 3]
    assert found.metadata["scores"][0] > 0
    assert found.metadata["scores"][1] == 0.0
    assert hit_counts(retriever) == [0, 1, 0, 0]


@pytest.mark.parametrize(("context", "chunks"), [("all", [0, 3]), ("focused", [0])])
def test_a_focused_answer_keeps_to_what_is_close(context: str, chunks: list[int]) -> None:
    """What is far from the best is brought along by a copy with `context="all"`, and left out with "focused"."""
    world = World(embeddings=low())
    retriever = world.retriever(similarity_threshold="auto", context=context, text_splitter=Paragraphs())
    world.save(retriever, "greek", "bees fly out.\n\nNight falls.\n\nNobody sees it.\n\ntaxes are due.")
    world.shows(*pieces("taxes are due."))
    (found,) = retriever.invoke("bees in general?")
    assert found.metadata["chunks_used"] == chunks


def test_a_document_that_answers_in_full_needs_nothing_along(world: World) -> None:
    """With `set_always_full_doc` the answer is the text, and the chunks used are those that matched."""
    retriever = saved(world)
    retriever.set_always_full_doc("greek")
    world.shows(*pieces(GREEK[0]))
    (found,) = retriever.invoke(QUESTION)
    assert (found.page_content, found.metadata["full_doc_injected"]) == ("\n\n".join(GREEK), True)
    assert (found.metadata["chunks_used"], len(found.metadata["scores"])) == ([1, 2], 2)


def test_neighbours_and_what_was_found_come_once(world: World) -> None:
    """A chunk that is beside a hit and was found as well is in the answer once."""
    retriever = saved(world, expand_neighbours=1, local_top_k=1)
    world.shows(*pieces(GREEK[0], GREEK[3]))
    (found,) = retriever.invoke(QUESTION)
    assert (found.page_content, found.metadata["chunks_used"]) == ("\n\n".join(GREEK), [0, 1, 2, 3])


def test_chunks_that_could_not_be_read_are_looked_for_again(tmp_path: Path) -> None:
    """A piece that was met while the copies' folder was away comes along once the folder is back."""
    world = World(embeddings=TableEmbeddings({"question": [1.0, 0.0], "beta": [1.0, 0.0], "tax": [0.0, 1.0]}))
    folder, away = tmp_path / "copies", tmp_path / "away"
    retriever = saved(world, wiki_save_dir=folder)
    retriever.invoke("what about tax?")
    world.shows(*pieces(GREEK[3]))
    folder.rename(away)
    documents, provenance = retriever.invoke_with_provenance("what about tax?")
    assert (texts(documents), provenance.degraded) == ([GREEK[3]], ())
    away.rename(folder)
    assert texts(cached(retriever.invoke(QUESTION))) == [f"{GREEK[1]}\n\n{GREEK[3]}"]
