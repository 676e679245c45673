"""The short form of `make soak`."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.testing.faults.soak import GROWTH, Sample, field_of, soak


@pytest.mark.flow
def test_large_rollouts_leave_memory_files_and_disk_flat(tmp_path: Path) -> None:
    seen: list[tuple[int, Sample]] = []
    result = soak(tmp_path, 60, 1.0, lambda step, sample: seen.append((step, sample)))
    assert result.grown == []
    assert [step for step, _ in seen] == list(range(1, 61, 6))
    assert result.second.disk_mb < 200 and result.second.memory_mb < 200, "240 MB went through"
    assert all(field_of(result.first, name) > 0 for name in GROWTH)
