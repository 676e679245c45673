from __future__ import annotations

import pytest

from astraflow.errors import WeightError
from astraflow.testing.faults.weight_drills import _times


def test_a_fetch_that_fails_has_no_time() -> None:
    with pytest.raises(WeightError):
        _times("ftp://nowhere/weights/actor", 2)
