"""Every setting: its default, and the values that it refuses."""

from __future__ import annotations

import warnings
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_text_splitters import CharacterTextSplitter

from rag_wiki import ConfigurationError, DecayConfig, RagWikiError, RagWikiRetrieverConfig

NAN, INFINITE = float("nan"), float("inf")

NOT_A_COUNT: tuple[Any, ...] = (0, -1, 1.5, NAN, INFINITE, "3", None, True, [3])
NOT_A_SIZE: tuple[Any, ...] = (-1, 1.5, NAN, INFINITE, "3", None, False)
NOT_A_WEIGHT: tuple[Any, ...] = (-0.01, NAN, INFINITE, -INFINITE, "0.4", None, True)
NOT_A_SHARE: tuple[Any, ...] = (-0.01, 1.01, NAN, INFINITE, "0.4", None, True)

BAD_DECAY: dict[str, tuple[Any, ...]] = {
    "w_recency": NOT_A_WEIGHT,
    "w_frequency": NOT_A_WEIGHT,
    "w_explicit": NOT_A_WEIGHT,
    "w_chunk_hit": NOT_A_WEIGHT,
    "max_cache_miss_streak": NOT_A_COUNT,
    "decay_lambda": NOT_A_WEIGHT,
    "freq_cap": NOT_A_COUNT,
    "pin_threshold": NOT_A_SHARE,
    "demotion_threshold": NOT_A_SHARE,
    "pin_hold_days": NOT_A_WEIGHT,
    "demotion_hold_days": NOT_A_WEIGHT,
    "max_idle_days": (0, *(value for value in NOT_A_WEIGHT if value is not None)),
}
BAD_SETTINGS: dict[str, tuple[Any, ...]] = {
    "fetch_threshold": NOT_A_COUNT,
    "reset_threshold": NOT_A_COUNT,
    "similarity_threshold": (-1.01, 1.01, NAN, INFINITE, "high", "AUTO", "", None, True, ["auto"]),
    "false_hit_rate": (0, -0.1, 0.51, 1, NAN, INFINITE, "1 %", None, True),
    "local_top_k": NOT_A_COUNT,
    "expand_neighbours": NOT_A_SIZE,
    "context": ("some", "", None, True),
    "focus_prior": NOT_A_WEIGHT,
    "focus_words": NOT_A_WEIGHT,
    "focus_margin": NOT_A_WEIGHT,
    "wiki_save_dir": ("", "  ", 3, True, ["folder"]),
    "no_resiluggest_days": NOT_A_SIZE,
    "decay": (None, 3, {"w_recency": 1}, DecayConfig),
    "auto_save": (None, 1, "yes"),
    "document_id": ("", " ", 3, True, ["doc_id"]),
    "version_key": ("", " ", 3, True),
    "document_roots": ("folder", Path("folder"), None, 3, [3], [None], [""]),
    "global_search": ("never", "", None, True),
    "text_splitter": ("splitter", 3, True, object()),
    "chunk_size": NOT_A_COUNT,
    "chunk_overlap": NOT_A_SIZE,
    "embedding_name": ("", " ", 3, True),
    "embedding_batch_size": NOT_A_COUNT,
    "index_max_bytes": NOT_A_SIZE,
}


def cases(bad: dict[str, tuple[Any, ...]]) -> list[Any]:
    """A parameter set for each bad value of each field."""
    return [
        pytest.param(name, value, id=f"{name}-{type(value).__name__}-{position}")
        for name, values in bad.items()
        for position, value in enumerate(values)
    ]


def test_decay_defaults_are_those_promised() -> None:
    """`DecayConfig()` has the promised weights, thresholds and hold days."""
    config = DecayConfig()
    assert (config.w_recency, config.w_frequency, config.w_explicit, config.w_chunk_hit) == (0.40, 0.30, 0.20, 0.15)
    assert (config.max_cache_miss_streak, config.decay_lambda, config.freq_cap) == (10, 0.05, 20)
    assert (config.pin_threshold, config.demotion_threshold) == (0.85, 0.15)
    assert (config.pin_hold_days, config.demotion_hold_days, config.max_idle_days) == (7, 3, None)


def test_retriever_defaults_are_those_promised() -> None:
    """`RagWikiRetrieverConfig()` has the promised thresholds, and leaves everything else off."""
    config = RagWikiRetrieverConfig()
    assert (config.fetch_threshold, config.reset_threshold) == (3, 3)
    assert (config.similarity_threshold, config.local_top_k) == (0.75, 3)
    assert (config.wiki_save_dir, config.no_resiluggest_days, config.decay) == (None, 30, DecayConfig())
    assert (config.auto_save, config.document_id, config.version_key) == (False, None, None)
    assert (config.global_search, tuple(config.document_roots)) == ("always", ())


@pytest.mark.parametrize(("name", "value"), cases(BAD_DECAY))
def test_a_decay_setting_refuses(name: str, value: Any) -> None:
    """NaN, negative, impossible or mistyped: an error of ours that is a ValueError and names the field."""
    with pytest.raises(ConfigurationError, match=name) as caught:
        DecayConfig(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RagWikiError)


@pytest.mark.parametrize(("name", "value"), cases(BAD_SETTINGS))
def test_a_retriever_setting_refuses(name: str, value: Any) -> None:
    """NaN, negative, impossible or mistyped: an error of ours that is a ValueError and names the field."""
    with pytest.raises(ConfigurationError, match=name) as caught:
        RagWikiRetrieverConfig(**{name: value})
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, RagWikiError)


@pytest.mark.parametrize("config", [DecayConfig, RagWikiRetrieverConfig])
def test_no_setting_goes_unchecked(config: type) -> None:
    """The tables of bad values above name every field that there is."""
    table = BAD_DECAY if config is DecayConfig else BAD_SETTINGS
    assert set(table) == {item.name for item in fields(config)}


def test_a_number_beyond_every_float_is_refused() -> None:
    """An integer that no float can hold is a ValueError like any other impossible value."""
    with pytest.raises(ConfigurationError, match="decay_lambda"):
        DecayConfig(decay_lambda=10**400)


def test_settings_that_exclude_each_other_are_refused() -> None:
    """All weights zero, thresholds the wrong way round, an overlap as long as the chunk: each names its fields."""
    with pytest.raises(ConfigurationError, match=r"w_recency.*w_frequency.*w_explicit.*w_chunk_hit"):
        DecayConfig(w_recency=0, w_frequency=0, w_explicit=0, w_chunk_hit=0)
    with pytest.raises(ConfigurationError, match=r"demotion_threshold.*pin_threshold"):
        DecayConfig(pin_threshold=0.2, demotion_threshold=0.3)
    with pytest.raises(ConfigurationError, match=r"chunk_overlap.*chunk_size"):
        RagWikiRetrieverConfig(chunk_size=100, chunk_overlap=100)


def test_values_at_the_edge_are_taken() -> None:
    """The least and the greatest possible values are no error."""
    DecayConfig(w_recency=0, pin_threshold=1, demotion_threshold=0, decay_lambda=0, pin_hold_days=0, freq_cap=1)
    RagWikiRetrieverConfig(similarity_threshold=1.0, fetch_threshold=1, reset_threshold=1, local_top_k=1)
    RagWikiRetrieverConfig(similarity_threshold=-1, chunk_size=1, chunk_overlap=0, index_max_bytes=0)
    RagWikiRetrieverConfig(document_roots=["a", Path("b")], wiki_save_dir=Path("c"), version_key="etag")
    RagWikiRetrieverConfig(document_id=_own_id, text_splitter=CharacterTextSplitter(), global_search="on_miss")


def _own_id(document: Document) -> str | None:
    return document.id


@pytest.mark.parametrize("days", [0, 7, 90])
def test_the_setting_without_effect_warns_when_set(days: int) -> None:
    """`no_resiluggest_days` is accepted, kept, and answered by a DeprecationWarning that names it."""
    with pytest.warns(DeprecationWarning, match="no_resiluggest_days") as caught:
        config = RagWikiRetrieverConfig(no_resiluggest_days=days)
    assert config.no_resiluggest_days == days
    assert caught[0].filename == __file__


def test_the_setting_without_effect_is_silent_when_not_set() -> None:
    """Nobody is warned of a setting that they left alone."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        RagWikiRetrieverConfig(fetch_threshold=5)


@pytest.mark.parametrize("config", [DecayConfig(), RagWikiRetrieverConfig()])
def test_a_checked_value_stays_checked(config: Any) -> None:
    """Settings can't be changed after the check."""
    with pytest.raises(FrozenInstanceError):
        setattr(config, fields(config)[0].name, 7)
