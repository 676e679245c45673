"""An optimizer makes of equal gradients the same bits, whoever holds which rows; fused AdamW rounds by the place."""

from __future__ import annotations

import pytest

import ranked_optimizers
from ranks import run_ranks


@pytest.mark.parametrize("num_ranks", [2, 5])
@pytest.mark.parametrize("kind", ["adamw_8bit", "sgd"])
def test_the_same_bits_for_any_number_of_ranks(tmp_path, num_ranks, kind):
    assert run_ranks(num_ranks, ranked_optimizers.updated, tmp_path, kind) == [[]] * num_ranks
