"""The drills of the weight plane, with processes that are forked."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from astraflow.testing.faults import weight_drills as drills

pytestmark = pytest.mark.flow
SHORT = {
    drills.publisher_killed: partial(drills.publisher_killed, kills=8),
    drills.slow_reader: partial(drills.slow_reader, readers=3),
}


@pytest.mark.parametrize("drill", drills.DRILLS, ids=lambda drill: drill.__name__)
def test_a_fault_leaves_the_weight_plane_whole(tmp_path: Path, drill: drills.Drill) -> None:
    outcome = drills.run(SHORT.get(drill, drill), tmp_path / "drill")
    assert outcome.problems == []
    assert outcome.seen
