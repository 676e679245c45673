"""What is set for libraries that read the environment."""

from __future__ import annotations

import os

from astraflow.config.env import KEPT_KERNELS, settle_torch


def test_threads_sleep_and_few_kernels_stay_unless_the_user_said_otherwise(monkeypatch):
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "ACTIVE"})
    settle_torch()
    assert os.environ == {
        "OMP_WAIT_POLICY": "ACTIVE",
        "ONEDNN_PRIMITIVE_CACHE_CAPACITY": KEPT_KERNELS,
        "LRU_CACHE_CAPACITY": KEPT_KERNELS,
    }
