"""A run that only clients of a door play, five of them, killed and cut off at random."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.testing.faults.swarm.drill import swarm_drill

pytestmark = pytest.mark.flow


@pytest.mark.faults
def test_clients_that_die_cost_only_their_leases(tmp_path: Path) -> None:
    result = swarm_drill(tmp_path, tmp_path / "cache", 1, clients=5, tasks=30, kill_node=False)
    assert not result.problems, result
    assert (result.trained, result.restarts) == (30, 0), result
    assert "killed" in result.faults or "stopped" in result.faults, result
