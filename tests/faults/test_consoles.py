"""Consoles and locales that are not UTF-8: import, answer, block, history and log work, and the disk holds any name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONSOLES: dict[str, dict[str, str]] = {
    "ASCII, warnings as errors": {"PYTHONIOENCODING": "ascii:strict", "PYTHONWARNINGS": "error"},
    "Windows": {"PYTHONIOENCODING": "cp1252:strict", "PYTHONUTF8": "0"},
    "the C locale": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"},
    "encodings watched": {"PYTHONWARNDEFAULTENCODING": "1", "PYTHONWARNINGS": "error::EncodingWarning"},
}
_PREPARE = """
import logging, sys
sys.path.insert(0, "tests")
logging.basicConfig(level=logging.WARNING)
from helpers import TableEmbeddings, document
from scenarios import World, topics
from rag_wiki.storage.sqlite import SQLiteStateStore
folder, title = sys.argv[1], "\\u00dcber \\u2192 \\U0001f99c"
doc_id = "gr\\u00f6\\u00dfe \\u6587\\u6863 \\U0001f99c \\ud800"
store = SQLiteStateStore(f"sqlite:///{folder}/state.db")
world = World(store)
retriever = world.retriever("j\\u00f6rg", wiki_save_dir=folder + "/wiki", fetch_threshold=1)
world.shows(document(doc_id, "Pods \\u2192 \\u6587\\u6863", doc_title=title))
"""
_TELL = """
documents, provenance = retriever.invoke_with_provenance("pods?")
print(provenance.render(ascii=True))
retriever.accept_suggestion(doc_id)
world.shows()
for path in sorted(__import__("pathlib").Path(folder, "wiki").rglob("*.chunks")):
    print(path.name.isascii())
(answer,), provenance = retriever.invoke_with_provenance("pods?")
assert answer.page_content == "Pods \\u2192 \\u6587\\u6863" and answer.metadata["from_cache"]
print(provenance.render(ascii=True))
# Its copies are in the folder, which this one does not know: the log names the user and the document.
again = World(SQLiteStateStore(f"sqlite:///{folder}/state.db")).retriever("j\\u00f6rg")
again.invoke_with_provenance("pods?")
try:
    retriever.accept_suggestion("\\u00fc \\U0001f99c")
except LookupError as error:
    print(ascii(str(error))[:20])
again.state_store.close(), store.close()
print("done")
"""


def run(script: str, folder: Path, console: dict[str, str]) -> subprocess.CompletedProcess[bytes]:
    """Run a script as a program on such a console."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_", "LANG"))}
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        capture_output=True,
        check=False,
        cwd=ROOT,
        env={**plain, "PYTHONPATH": str(ROOT), **console},
        timeout=120,
    )


@pytest.mark.parametrize("console", CONSOLES.values(), ids=CONSOLES)
def test_any_console_shows_the_block(tmp_path: Path, console: dict[str, str]) -> None:
    """On a console of any encoding a program with odd ids and a folder runs through, and its block is whole."""
    done = run(_PREPARE + _TELL, tmp_path, console)
    printed = done.stdout.decode("latin-1").splitlines()
    assert done.returncode == 0, done.stderr
    logged = done.stderr.decode("latin-1")
    assert "copy lost" in logged
    assert "Logging error" not in logged
    assert "Traceback" not in logged
    assert len(logged.splitlines()) == 1
    assert printed[-1] == "done"
    assert printed.count("-" * 60) == 4
    assert "  * ?ber > ? [from your KB]" in printed
    assert "True" in printed


_HISTORY = """
retriever.invoke("pods?")
retriever.accept_suggestion(doc_id)
for event in retriever.history(doc_id):
    print(event)
store.close()
"""


def test_a_history_can_be_printed_anywhere(tmp_path: Path) -> None:
    """The README's `print(event)` works on a console of any encoding."""
    done = run(_PREPARE + _HISTORY, tmp_path, CONSOLES["Windows"])
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"saved" in done.stdout
