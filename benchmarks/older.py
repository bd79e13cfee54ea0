"""The older releases of the package, each in a throw-away environment, asked to do the same work."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import venv
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.results import Failed

WORKER = Path(__file__).with_name("worker_older.py")
MARK = "@@"
"""What a worker's lines begin with; the package may print others."""
_INSTALL_SECONDS = 600
_TOLD = ("langchain-rag-wiki", "langchain-core", "langchain-text-splitters", "numpy", "sqlalchemy", "redis")


@dataclass(frozen=True)
class Environment:
    """A virtual environment with one older release."""

    version: str
    folder: Path
    packages: dict[str, str] = field(default_factory=dict)

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def install_all(versions: Sequence[str], root: Path) -> dict[str, Environment | Failed]:
    """An environment for each release, side by side; those that are there already are taken as they are."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return dict(zip(versions, pool.map(lambda version: _install(version, root), versions), strict=True))


def _install(version: str, root: Path) -> Environment | Failed:
    environment = Environment(version, root / version)
    finished = environment.folder / "installed.json"
    if not finished.exists():
        # A plain install lacks SQLAlchemy, which 0.2.4 imports, and the splitters, without which neither splits.
        needed = [f"langchain-rag-wiki[sqlite,redis]=={version}", "langchain-text-splitters"]
        try:
            venv.create(environment.folder, with_pip=False, clear=True)
            _pip(environment, "install", "--quiet", *needed)
            listed = json.loads(_pip(environment, "list", "--format", "json"))
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            return Failed(f"not installed: {_last_line(getattr(error, 'stderr', None) or str(error))}")
        packages = {item["name"].lower(): item["version"] for item in listed}
        finished.write_text(json.dumps({name: packages[name] for name in _TOLD if name in packages}), encoding="utf-8")
    return Environment(version, environment.folder, json.loads(finished.read_text(encoding="utf-8")))


def _pip(environment: Environment, *arguments: str) -> str:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", str(environment.python)]
    done = subprocess.run(
        [*command, *arguments], check=True, capture_output=True, text=True, timeout=_INSTALL_SECONDS, env=clean_env()
    )
    return done.stdout


def clean_env() -> dict[str, str]:
    """This process's environment without what would lead an interpreter to other packages."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


@dataclass(frozen=True)
class Answer:
    """What a worker said: its lines, and why there are no more, if it did not finish."""

    lines: list[dict[str, Any]]
    failed: Failed | None = None

    def of(self, kind: str) -> list[float] | Failed:
        """The samples of a kind, as far as they came; or why there are none."""
        samples: list[float] = []
        for line in self.lines:
            if line.get("kind") == kind:
                samples += line["samples"]
        return samples or self.failed or Failed("no answer")


def ask(
    environment: Environment | Failed, task: Mapping[str, Any], limit: float, folder: Path, worker: Path = WORKER
) -> Answer:
    """Let an older release do a task, for `limit` seconds at most, by a worker that prints lines of JSON."""
    if isinstance(environment, Failed):
        return Answer([], environment)
    command = [str(environment.python), str(worker), json.dumps({**task, "seconds": limit})]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=folder, env=clean_env()
    )
    try:
        output, errors = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
        return Answer(_lines(output), Failed(f"over {limit:.0f} s"))
    if process.returncode:
        return Answer(_lines(output), Failed(_last_line(errors) or f"exit code {process.returncode}"))
    return Answer(_lines(output))


def _lines(output: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix(MARK)) for line in output.splitlines() if line.startswith(MARK)]


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else ""
