"""Twenty clients killed, stopped, cut off and started again at random: training never stops, the books are right."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.testing.faults.swarm.drill import swarm_drill


@pytest.mark.faults
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_swarm_in_torment_and_the_death_of_its_node(tmp_path: Path, seed: int) -> None:
    result = swarm_drill(tmp_path, tmp_path / "cache", seed, clients=20, tasks=200)
    assert not result.problems, result
    assert result.restarts == 1, result  # of the node, on purpose; nothing else ever died
