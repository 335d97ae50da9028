"""Fixtures of the lab: three hosts for all tests, and a record of each outcome."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Lab, three_hosts
from outcomes import Outcome


@pytest.fixture(scope="session")
def bare_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """Three hosts, maybe with Ray nodes of earlier tests."""
    with three_hosts(tmp_path_factory.mktemp("hosts")) as made:
        yield made


@pytest.fixture
def lab(bare_lab: Lab) -> Lab:
    """Three hosts with a fast network, all in the cluster."""
    bare_lab.switch.restore()
    for path in bare_lab.gate.parent.glob("gate*"):
        path.unlink()
    bare_lab.start_ray()
    return bare_lab


@pytest.fixture
def outcome(lab: Lab, tmp_path: Path) -> Outcome:
    """Outcome of the test's fault."""
    return Outcome(lab, tmp_path / "run")


@pytest.fixture(autouse=True)
def leaves_nothing_behind() -> None:
    """Ray nodes outlive a single test."""
