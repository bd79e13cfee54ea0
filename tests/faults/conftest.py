"""A world in each place, for every test that asks for one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from places import PLACES, PlacedWorld, make_world

from rag_wiki import StateStore


@pytest.fixture(params=PLACES)
def world(request: pytest.FixtureRequest, make_store: Callable[[str], StateStore], tmp_path: Path) -> PlacedWorld:
    """An empty world in each place."""
    return make_world(request.param, make_store, tmp_path)


@pytest.fixture(params=[kind for kind in PLACES if not kind.startswith("memory")])
def lasting_world(
    request: pytest.FixtureRequest, make_store: Callable[[str], StateStore], tmp_path: Path
) -> PlacedWorld:
    """An empty world in each place that outlives a process."""
    return make_world(request.param, make_store, tmp_path)
