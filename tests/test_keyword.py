"""Matching by words: what counts as one, what weighs more, and when nothing answers."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence

import pytest
from scenarios import Paragraphs, World, cached, doc_ids

from rag_wiki.search.keyword import KeywordIndex, words

OTHERS = (
    "The invoice is due within thirty days.",
    "Our office in Lisbon opens at nine.",
    "Migratory birds follow the coast in autumn.",
    "A violin has four strings.",
)
"""Chunks about other matters, so that a word can be rare."""


def positions(chunks: Sequence[str], query: str, top_k: int = 100) -> list[int]:
    """The positions of one document's chunks that answer, best first."""
    return [position for position, _ in scored(chunks, query, top_k)]


def scored(chunks: Sequence[str], query: str, top_k: int = 100) -> list[tuple[int, float]]:
    """What a document of these chunks answers."""
    return KeywordIndex({"doc": chunks}).search(query, top_k).get("doc", [])


def finds(text: str, query: str) -> bool:
    """Whether a query finds this text among others, and none of those."""
    found = positions([*OTHERS, text], query)
    assert set(found) <= {len(OTHERS)}
    return bool(found)


# -- scores


def test_a_chunk_that_holds_each_word_once_scores_two_thirds() -> None:
    """The score is the share of what a chunk full of the query's words could reach."""
    assert [score for _, score in scored(["apple"], "Apple!")] == pytest.approx([2 / 3])


def test_half_the_weight_is_half_the_score() -> None:
    """Of two words that are as long and as rare, either makes a third, which is enough to answer."""
    assert [score for _, score in scored(["apple", "grape"], "apple grape")] == pytest.approx([1 / 3, 1 / 3])


def test_among_many_chunks_half_the_weight_is_not_enough() -> None:
    """With hundreds of chunks, one holds half of any query by chance; the whole query is still answered."""
    many = ["other"] * 300
    assert positions(["apple", "grape", *many], "apple grape") == []
    assert positions(["apple", "grape", "apple grape", *many], "apple grape") == [2]


def test_rare_words_weigh_more() -> None:
    """Where every chunk speaks of servers, the one that also has the rare word is the only answer."""
    chunks = [*(f"server number{number}" for number in range(20)), "server and thermostat"]
    assert positions(chunks, "server thermostat") == [20]


def test_longer_words_weigh_more() -> None:
    """With one chunk saved, when nothing is rare yet, the words that every sentence needs don't make it answer."""
    chunk = "What is the tax on a car that is sold in the autumn?"
    assert positions([chunk], "what is the temperature in a reactor?") == []
    assert positions([chunk], "car tax in autumn") == [0]


def test_a_word_that_comes_again_counts_more_but_not_twice() -> None:
    """Of chunks of one length, the one that has the word more often is better, by less and less."""
    once, twice, thrice = (score for _, score in reversed(scored(["fig oil oil", "fig fig oil", "fig fig fig"], "fig")))
    assert once < twice < thrice < 1
    assert thrice - twice < twice - once


def test_a_shorter_chunk_is_better() -> None:
    """A word that fills a short chunk says more than the same word in a long one."""
    assert positions(["violin and many words beside it", "a violin"], "violin") == [1, 0]


def test_a_very_long_chunk_that_holds_every_word_answers() -> None:
    """Length alone does not silence a chunk, though it were a hundred times as long as the others."""
    chunks = ["short note"] * 100 + ["orchid " + "filling " * 500]
    assert positions(chunks, "orchid") == [100]


def test_the_order_of_the_best_is_by_score_then_position() -> None:
    """Equal chunks come in their order, after a better one."""
    chunks = ["a tulip in red", "tulip tulip", "a tulip in red", "a lily in red"]
    assert positions(chunks, "tulip") == [1, 0, 2]


def test_equal_documents_are_answered_equally() -> None:
    """The same text in two documents has the same score in both."""
    found = KeywordIndex({"one": ["red tulip", "oak"], "two": ["red tulip", "oak"]}).search("tulip", 3)
    assert found["one"] == found["two"]
    assert [position for position, _ in found["one"]] == [0]


def test_top_k_is_per_document() -> None:
    """Each document gives its best chunks, up to the limit; one that does not answer is not named."""
    texts = {"a": ["red tulip", "tulip tulip", "tulip"], "b": ["tulip bulbs"], "c": ["oak"], "d": []}
    found = {
        doc_id: [position for position, _ in own] for doc_id, own in KeywordIndex(texts).search("tulip", 2).items()
    }
    assert found == {"a": [1, 2], "b": [0]}


def test_searching_leaves_the_index_as_it_was() -> None:
    """A query of unknown words teaches the index nothing."""
    index = KeywordIndex({"doc": ["red tulip"]})
    before = (index.nbytes, index.search("tulip", 3))
    index.search("altogether unknown words", 3)
    assert (index.nbytes, index.search("tulip", 3)) == before


# -- when nothing answers


@pytest.mark.parametrize("saved", [1, 2, 3, 4])
@pytest.mark.parametrize(
    "query",
    [
        "What is the capital of Mongolia?",
        "How do I change the oil of a motorbike?",
        "Was ist die Hauptstadt der Mongolei?",
        "¿Qué es la capital de Mongolia?",
        "什么是蒙古的首都?",
        "モンゴルの首都はどこですか?",
        "เมืองหลวงของมองโกเลียคืออะไร",
    ],
)
def test_a_question_about_something_else_is_not_answered(saved: int, query: str) -> None:
    """However few chunks are saved, what they share with every question does not make them answer."""
    assert positions(OTHERS[:saved], query) == []


@pytest.mark.parametrize(
    ("saved", "query"),
    [
        ("El café es una bebida que se prepara con granos tostados.", "¿Qué es una fotosíntesis?"),
        ("Der Zoll ist eine Abgabe, die an der Grenze fällig wird.", "Was ist eine Quantenverschränkung?"),
        ("量子计算机使用量子比特进行运算。", "什么是光合作用?"),
        ("富士山は日本で最も高い山です。", "光合成とは何ですか?"),
        ("ดอยอินทนนท์เป็นภูเขาที่สูงที่สุดในประเทศไทย", "การสังเคราะห์ด้วยแสงคืออะไร"),
    ],
)
def test_question_words_are_no_match(saved: str, query: str) -> None:
    """The only saved chunk has the question's small words, and is silent."""
    assert positions([saved], query) == []


def test_one_known_word_among_unknown_ones_is_not_enough() -> None:
    """A word that nobody saved weighs most: a query full of them is about something else."""
    assert positions(["Our violin was repaired."], "violin") == [0]
    assert positions(["Our violin was repaired."], "violin marmalade thermostat glacier") == []


@pytest.mark.parametrize("query", ["", "   ", "\n\t\u3000", "?!… —", "🚀🎻", "\x00", "\ud800", "_", "'", "#", "++"])
def test_a_query_without_words_finds_nothing(query: str) -> None:
    """Blanks, punctuation, emoji and broken characters are no words."""
    assert positions([*OTHERS, query], query) == []


@pytest.mark.parametrize("texts", [{}, {"a": []}, {"a": [], "b": []}, {"a": [""]}, {"a": ["…", "🚀"], "b": ["—"]}])
def test_texts_without_words_answer_nothing(texts: dict[str, list[str]]) -> None:
    """No documents, no chunks, or none with a word: no answer, and no error."""
    assert KeywordIndex(texts).search("violin", 3) == {}


def test_texts_without_words_are_not_in_the_way() -> None:
    """Positions count chunks of punctuation and documents without chunks as well."""
    index = KeywordIndex({"none": [], "some": ["…", "violin", ""], "more": [], "last": ["violin"]})
    found = {doc_id: [position for position, _ in own] for doc_id, own in index.search("violin", 3).items()}
    assert found == {"some": [1], "last": [0]}


# -- words


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("The café is closed.", "cafe"),
        ("The cafe is closed.", "café"),
        ("The cafe\u0301 is closed.", "caf\u00e9"),
        ("Das steht über allem.", "uber"),
        ("Die Straße ist gesperrt.", "STRASSE"),
        ("A naïve façade.", "naive facade"),
        ("Łódź lies in Poland.", "lodz"),
        ("Ørsted found it.", "orsted"),
        ("İstanbul has two shores.", "istanbul"),
        ("Phở is a soup; Đà Nẵng is a town.", "pho da nang"),
        ("Всё, что растёт", "все растет"),
        ("Η Αθήνα είναι πόλη.", "αθηνα"),
        ("ΟΔΟΣ", "οδός"),
        ("efﬁcient", "efficient"),
        ("Ｆｕｌｌ ｗｉｄｔｈ", "full width"),
        ("co\u00adoper\u00adation", "cooperation"),
    ],
)
def test_case_accents_and_forms_of_letters_do_not_count(text: str, query: str) -> None:
    """Who types without accents finds what has them, and the other way round."""
    assert finds(text, query)


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("Il faut de l'eau.", "eau"),
        ("Il faut de l’eau.", "l'eau"),
        ("Il faut de l'eau.", "l’eau"),
        ("They don't.", "don't"),
        ("They don’t.", "dont"),
        ("The dog's bone", "dog"),
        ("Send an e-mail.", "email"),
        ("Send an email.", "e-mail"),
        ("call foo_bar here", "foo_bar"),
        ("call foo_bar here", "foo"),
        ("call foo_bar here", "bar"),
        ("call fooBar here", "foo_bar"),
        ("written in C++", "C++"),
        ("written in C++11", "c++"),
        ("written in C#.", "c#"),
        ("since v1.2.3", "v1.2.3"),
        ("since v1.2.3", "1.2.3"),
        ("since version 1.2.3", "version 1.2.3"),
        ("raises error-404", "error-404"),
        ("raises error-404", "error"),
        ("raises error-404", "404"),
        ("raises error 404", "error-404"),
        ("raises error404", "error 404"),
        ("GPT4 and UTF8", "gpt-4 utf-8"),
        ("on 12.5.2024", "2024"),
        ("the U.S.A.", "USA"),
        ("write to ada@example.com", "example.com"),
        ("open rag_wiki/search/keyword.py", "keyword.py"),
    ],
)
def test_names_with_joints_are_found_whole_and_by_their_pieces(text: str, query: str) -> None:
    """Apostrophes, hyphens, underscores, dots and digits join a name, however they are written."""
    assert finds(text, query)


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("vitamin C", "C++"),
        ("since v1.2.4", "v1.2.3"),
        ("in 12 steps", "1.2"),
        ("raises 4040", "404"),
        ("from 1914-1918", "19141918"),
    ],
)
def test_another_name_is_not_found(text: str, query: str) -> None:
    """Versions, numbers and signs that belong to a name tell it from others."""
    assert not finds(text, query)


def test_a_name_is_better_than_its_pieces() -> None:
    """A chunk that has the name as it is asked for comes before one that has its pieces apart."""
    assert positions(["a foo in a bar", "the foo_bar here"], "foo_bar") == [1, 0]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("the logs are kept", "log"),
        ("the log is kept", "logs"),
        ("alle Systeme laufen", "System"),
        ("las ciudades grandes", "ciudad"),
        ("she configured it", "configure"),
    ],
)
def test_another_form_of_a_word_is_found(text: str, query: str) -> None:
    """Words that begin alike for most of their length stand for each other."""
    assert finds(text, query)


def test_the_word_itself_is_better_than_another_form() -> None:
    """A form counts half."""
    assert positions(["many servers", "this server!"], "server") == [1, 0]


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("a catalogue", "cat"),
        ("an internal matter", "international"),
        ("it is there", "theremin"),
        ("an art", "as"),
    ],
)
def test_a_word_that_only_begins_alike_is_another_word(text: str, query: str) -> None:
    """A short beginning in common does not make two words one."""
    assert not finds(text, query)


def test_words_are_told_as_they_are_searched() -> None:
    """A name gives its pieces and itself without joints; a number its parts as well."""
    assert sorted(words("Don't use foo_bar v1.2")) == sorted(
        ["use", "don", "t", "dont", "foo", "bar", "foobar", "v", "1.2", "1", "2", "v1.2"]
    )
    assert words("") == []


# -- scripts


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("हिन्दी में किताबें पढ़ना अच्छा है।", "किताबें"),
        ("हिन्दी में किताबें पढ़ना अच्छा है।", "हिन्दी"),
        ("தமிழ் ஒரு மொழி.", "தமிழ்"),
        ("اللغة العربية جميلة", "العربية"),
        ("اللُّغَةُ العَرَبِيَّةُ جَمِيلَةٌ", "اللغة العربية"),
        ("العـــربية", "العربية"),
        ("كتاب عن علي", "کتاب علی"),
        ("می\u200cخواهم", "میخواهم"),
        ("שָׁלוֹם עוֹלָם", "שלום"),
        ("سنة ٢٠٢٤", "2024"),
        ("ปี ๒๕๖๗", "2567"),
    ],
)
def test_words_of_other_scripts_are_found(text: str, query: str) -> None:
    """Vowel signs hold a word together; points that people leave out, and digits of a script, do not matter."""
    assert finds(text, query)


def test_vowel_signs_are_letters() -> None:
    """In Hindi and Thai a word with another vowel is another word, and none falls apart at its signs."""
    assert words("हिन्दी में") == ["हिन्दी", "में"]
    assert not finds("यह किताब है", "कूतेब")
    assert not finds("ปลา", "ปูลี")


CHINESE = [
    "检索增强生成把检索器和语言模型结合起来,检索器先从知识库中找出相关的段落。",
    "长城是中国古代的军事防御工程,今天人们看到的城墙多是明代所建。",
    "请假超过三天的员工需要部门经理批准,未使用的年假最多可以结转五天。",
    "退货须在收到商品后三十天内提出,运费由买家承担。",
]
JAPANESE = [
    "富士山は日本で最も高い山で、最後の噴火は1707年でした。",
    "データベースの索引は検索を速くしますが、書き込みを遅くします。",
    "有給休暇は年に十五日で、使わなかった休暇は五日まで翌年に繰り越せます。",
    "モーツァルトはザルツブルクで生まれ、三十五歳でウィーンで亡くなりました。",
]
THAI = [
    "ดอยอินทนนท์เป็นภูเขาที่สูงที่สุดในประเทศไทย ตั้งอยู่ในจังหวัดเชียงใหม่",
    "กาแฟมีถิ่นกำเนิดในประเทศเอธิโอเปีย และเข้าสู่ยุโรปในศตวรรษที่สิบเจ็ด",
    "พนักงานที่ลาเกินสามวันต้องได้รับการอนุมัติจากผู้จัดการแผนก",
    "หลุมดำมีแรงโน้มถ่วงสูงมากจนแม้แต่แสงก็หนีออกมาไม่ได้",
]


@pytest.mark.parametrize(
    ("chunks", "query", "position"),
    [
        (CHINESE, "检索器从哪里找出段落?", 0),
        (CHINESE, "今天看到的长城是哪个朝代建的?", 1),
        (CHINESE, "年假可以结转几天?", 2),
        (CHINESE, "退货的运费由谁承担?", 3),
        (JAPANESE, "富士山が最後に噴火したのはいつ?", 0),
        (JAPANESE, "データベースの索引の欠点は何ですか?", 1),
        (JAPANESE, "ﾃﾞｰﾀﾍﾞｰｽ", 1),
        (JAPANESE, "有給休暇は何日まで繰り越せますか?", 2),
        (JAPANESE, "モーツァルトはどこで亡くなりましたか?", 3),
        (THAI, "ภูเขาที่สูงที่สุดในประเทศไทยคืออะไร", 0),
        (THAI, "กาแฟเข้าสู่ยุโรปเมื่อไร", 1),
        (THAI, "ลาเกินสามวันต้องให้ใครอนุมัติ", 2),
        (THAI, "หลุมดำ", 3),
    ],
)
def test_scripts_without_spaces_are_searched_within(chunks: list[str], query: str, position: int) -> None:
    """A question in Chinese, Japanese or Thai finds the chunk that is about it, and no other."""
    assert positions(chunks, query) == [position]


@pytest.mark.parametrize("chunks", [CHINESE, JAPANESE, THAI])
@pytest.mark.parametrize("saved", [1, 2, 4])
def test_scripts_without_spaces_are_silent_on_other_matters(chunks: list[str], saved: int) -> None:
    """What every sentence of a language has is no match."""
    for query in ("量子计算机擅长解决什么问题?", "地震はなぜ起こりますか?", "เบาหวานชนิดที่สองเกี่ยวข้องกับอะไร"):
        assert positions(chunks[:saved], query) == []


@pytest.mark.parametrize(
    ("text", "query"),
    [
        ("我养了一只猫。", "猫"),
        ("ปลาอยู่ในน้ำ", "น้ำ"),
        ("ปลาอยู่ในน้ำ", "ปลา"),
        ("서울은 한국의 수도이다", "서울"),
        ("서울 여행", "서울에서"),
        ("ພາສາລາວເປັນພາສາ", "ລາວ"),
        ("ភាសាខ្មែរជាភាសាផ្លូវការ", "ខ្មែរ"),
        ("မြန်မာစာသည် လှသည်", "မြန်မာစာ"),
        ("𠮷野家で食べる", "𠮷野家"),
    ],
)
def test_a_word_within_a_run_is_found(text: str, query: str) -> None:
    """A single character, a short word, a word with a particle: each is found where it stands."""
    assert finds(text, query)


@pytest.mark.parametrize(("text", "query"), [("デタラメ", "データ"), ("大学の中", "中大"), ("東の京", "東京")])
def test_characters_must_be_neighbours(text: str, query: str) -> None:
    """The long vowel of kana is a character, and characters that are there in another order are no word."""
    assert not finds(text, query)


@pytest.mark.parametrize("query", ["rag", "RAG", "检索器", "设定", "ＲＡＧ检索器", "检索器的设定"])
def test_mixed_text_parts_where_the_script_changes(query: str) -> None:
    """A Latin name within Chinese is found by itself, and so is the Chinese around it."""
    assert finds("请看RAG检索器的设定3章", query)


# -- odd texts


@pytest.mark.parametrize("odd", ["\ud800", "\x00", "🚀", "👩\u200d👧", "\u202e", "\ufeff", "\U0010ffff"])
def test_odd_characters_do_not_hide_the_words_beside_them(odd: str) -> None:
    """Broken, invisible and pictorial characters are passed over, in texts as in queries."""
    assert finds(f"{odd} harpsichord {odd}", "harpsichord")
    assert finds("harpsichord", f"{odd} harpsichord {odd}")


@pytest.mark.parametrize("part", ["a", "a1", "1.", "a-", "a'", "é", "क\u093f", "漢", "ก", "+", "a+", "_", "\u0301"])
def test_a_huge_word_is_a_word(part: str) -> None:
    """Half a million characters without a space are indexed, and the words beside them are found."""
    assert positions([part * 500_000 + " harpsichord", "violin"], "harpsichord") == [0]


def test_a_huge_query_is_answered() -> None:
    """A query of many thousand words gets an answer by what it is about."""
    assert positions(["harpsichord", "violin"], "harpsichord " * 20_000) == [0]


def test_scores_are_shares() -> None:
    """Whatever is asked of whatever, a score is a number from the threshold up to 1, best first."""
    chunks = [*OTHERS, *CHINESE, *JAPANESE, *THAI, "violin " * 1000, "猫" * 1000, "v1.2.3 " * 300, "l'eau"]
    for query in (*chunks, *(" ".join(chunks[:at]) for at in range(len(chunks)))):
        scores = [score for _, score in scored(chunks, query)]
        assert scores == sorted(scores, reverse=True)
        assert all(math.isfinite(score) and 0 < score <= 1 for score in scores)


def test_the_memory_held_is_told() -> None:
    """`nbytes` is what Python says that the index holds, to a tenth."""
    texts = {f"doc{number}": [f"{text} {number}" for text in (*OTHERS, *CHINESE, *THAI)] for number in range(100)}
    KeywordIndex(texts)
    tracemalloc.start()
    index = KeywordIndex(texts)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert index.nbytes == pytest.approx(held, rel=0.1)


# -- through the retriever


def saved_without_a_model(*texts: str) -> World:
    """A user with these documents, `doc0` and on, saved in paragraphs; the embedding model is gone since."""
    world = World()
    for number, text in enumerate(texts):
        world.save(world.retriever(text_splitter=Paragraphs()), f"doc{number}", text)
    world.embeddings = None
    return world


@pytest.mark.parametrize(
    ("question", "doc_id"),
    [
        ("Wo liegen die Schlussel?", "doc0"),
        ("年假可以结转几天?", "doc1"),
        ("ภูเขาที่สูงที่สุด", "doc2"),
        ("What does error-404 mean?", "doc3"),
    ],
)
def test_without_a_model_a_question_in_any_language_is_answered(question: str, doc_id: str) -> None:
    """The retriever finds the saved document by its words, whatever the script."""
    world = saved_without_a_model("Die Schlüssel liegen im Büro.", CHINESE[2], THAI[0], "error-404 means: not found.")
    assert doc_ids(cached(world.retriever().invoke(question))) == [doc_id]


def test_without_a_model_a_document_gives_its_best_chunks() -> None:
    """Of a document that answers in many chunks, the best `local_top_k` are given, in document order."""
    world = saved_without_a_model("tulip\n\nred tulip\n\noak\n\ntulip tulip\n\ngreen tulip")
    (found,) = world.retriever(local_top_k=2).invoke("tulip")
    assert found.page_content == "tulip\n\ntulip tulip"
    assert found.metadata["chunks_used"] == [0, 3]
    assert all(0 < score <= 1 for score in found.metadata["scores"])


def test_without_a_model_the_best_document_is_first() -> None:
    """Documents come in the order of their best scores."""
    world = saved_without_a_model("red tulip in a field of grass", "red tulip", "blue tulip")
    assert doc_ids(world.retriever().invoke("red tulip")) == ["doc1", "doc0", "doc2"]


def test_without_a_model_other_questions_are_left_to_the_source() -> None:
    """A question about something else is not answered by what is saved."""
    world = saved_without_a_model("Die Schlüssel liegen im Büro.", CHINESE[2], THAI[0])
    for question in ("Was ist eine Quantenverschränkung?", "什么是光合作用?", "What is the capital of Mongolia?"):
        assert world.retriever().invoke(question) == []
