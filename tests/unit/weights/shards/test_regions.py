from __future__ import annotations

import sharded_models
from ranks import run_ranks


def test_blocks_lie_where_torch_puts_them(tmp_path):
    compared = run_ranks(4, sharded_models.regions_are_where_torch_puts_blocks, tmp_path)
    assert len(set(compared)) == 1
    assert compared[0] > 50
