"""Files in the layout of XQuAD: articles of some paragraphs, and questions about them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from langchain_core.documents import Document


@dataclass(frozen=True)
class Question:
    """A question, its answers, and the article that holds them."""

    text: str
    answers: tuple[str, ...]
    doc_id: str


@dataclass(frozen=True)
class Article:
    """An article in one language; it is a document, and its paragraphs are the chunks of the collection."""

    language: str
    title: str
    paragraphs: tuple[str, ...]
    questions: tuple[Question, ...]

    @property
    def doc_id(self) -> str:
        """What identifies it among all languages."""
        return _doc_id(self.language, self.title)

    @property
    def text(self) -> str:
        """The whole of it."""
        return "\n\n".join(self.paragraphs)

    def chunks(self) -> list[Document]:
        """Its paragraphs as a vector store holds them."""
        shared = {"doc_id": self.doc_id, "doc_title": self.title, "total_chunks": len(self.paragraphs)}
        return [
            Document(page_content=text, metadata={**shared, "chunk_index": index})
            for index, text in enumerate(self.paragraphs)
        ]


def _doc_id(language: str, title: str) -> str:
    return f"{language}:{title}"


def language_of(path: Path) -> str:
    """The language that a file's name tells: `en` of `xquad.en.json`."""
    return path.stem.rpartition(".")[2]


def read_articles(path: Path) -> list[Article]:
    """Read a file.

    Raises:
        ValueError: It is not in the layout of XQuAD.
        OSError: It can't be read.
    """
    language = language_of(path)
    try:
        return [_article(language, item) for item in json.loads(path.read_text(encoding="utf-8"))["data"]]
    except (KeyError, TypeError, ValueError) as error:
        msg = f"{path} is not in the layout of XQuAD: {type(error).__name__}: {error}"
        raise ValueError(msg) from error


def _article(language: str, item: dict[str, object]) -> Article:
    title, paragraphs = item["title"], item["paragraphs"]
    if not isinstance(title, str) or not isinstance(paragraphs, list):
        msg = "an article needs a title and paragraphs"
        raise TypeError(msg)
    questions = [
        Question(asked["question"], tuple(answer["text"] for answer in asked["answers"]), _doc_id(language, title))
        for paragraph in paragraphs
        for asked in paragraph["qas"]
    ]
    texts = tuple(paragraph["context"] for paragraph in paragraphs)
    return Article(language, title, texts, tuple(questions))


def chunks_of(articles: Sequence[Article]) -> list[Document]:
    """All chunks of the collection."""
    return [chunk for article in articles for chunk in article.chunks()]
