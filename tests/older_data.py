"""Data that releases 0.2.0, 0.2.2 and 0.2.4 wrote themselves: each is installed by pip into a folder of its own."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

VERSIONS = ("0.2.0", "0.2.2", "0.2.4")
WRITER = Path(__file__).with_name("older_writer.py")


@dataclass(frozen=True)
class OldData:
    """What one release wrote."""

    version: str
    database: Path
    folder: Path
    """The chunks of what is in the database."""
    redis_folder: Path
    """The chunks of what is in Redis."""
    redis_port: int | None
    redis_number: int
    told: dict[str, Any]
    """By place: the records and chunks as that release reads them back."""

    @property
    def url(self) -> str:
        """The database's."""
        return f"sqlite:///{self.database}"

    @property
    def redis_url(self) -> str:
        """The URL of its Redis."""
        return f"redis://127.0.0.1:{self.redis_port}/{self.redis_number}"

    @property
    def chunks(self) -> Path | None:
        """The folder of chunks, if the release had chunks."""
        return None if self.version == "0.2.0" else self.folder

    def record(self, user_id: str, doc_id: str, place: str = "sqlite") -> dict[str, Any]:
        """A record as the release itself reads it."""
        return next(item["record"] for item in self.of(place) if (item["user"], item["doc"]) == (user_id, doc_id))

    def of(self, place: str) -> list[dict[str, Any]]:
        """The documents of a place."""
        found: list[dict[str, Any]] = self.told[place]["documents"]
        return found

    def fingerprint(self) -> dict[str, str]:
        """All that is in its places, to tell whether anything was changed."""
        paths = [*self.database.parent.rglob("*"), *self.folder.rglob("*"), *self.redis_folder.rglob("*")]
        found = {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths if path.is_file()}
        if self.redis_port is not None:
            import redis

            with redis.Redis(port=self.redis_port, db=self.redis_number) as client:
                for key in client.scan_iter("hkb:*"):
                    kind = client.type(key)
                    value: Any = sorted(client.smembers(key)) if kind == b"set" else client.hgetall(key)
                    found[repr(key)] = f"{kind!r} {value!r}"
        return found


def install(version: str, folder: Path) -> Path:
    """Install a release, without what it depends on: this environment has that.

    Skips the test where pip can't reach an index.
    """
    target = folder / f"package-{version}"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
    command += ["--disable-pip-version-check", "--target", str(target), f"langchain-rag-wiki=={version}"]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        pytest.skip(f"release {version} can't be installed by pip: {said[-1] if said else error}")
    return target


def write_all(folder: Path, redis_port: int | None) -> dict[str, OldData]:
    """Let each release write its data."""

    def write(version: str, package: Path) -> OldData:
        own = folder / version
        (own / "db").mkdir(parents=True)
        task: dict[str, Any] = {
            "package": str(package.resolve()),
            "database": str(own / "db" / "old.db"),
            "folder": str(own / "wiki"),
            "redis": redis_port,
            "number": VERSIONS.index(version),
            "content_file": str(own / "pods.md"),
        }
        # Before this environment's own packages, of which rag_wiki may be one.
        environment = {**os.environ, "PYTHONPATH": str(package), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(
            [sys.executable, str(WRITER), json.dumps(task)],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            cwd=own,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return OldData(
            version,
            own / "db" / "old.db",
            own / "wiki",
            own / "wiki-redis",
            redis_port,
            task["number"],
            json.loads(done.stdout.splitlines()[-1]),
        )

    with ThreadPoolExecutor(max_workers=3) as pool:
        packages = list(pool.map(lambda version: install(version, folder), VERSIONS))
        return dict(zip(VERSIONS, pool.map(write, VERSIONS, packages), strict=True))
