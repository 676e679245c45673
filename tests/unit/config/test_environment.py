"""What is set for libraries that read the environment."""

from __future__ import annotations

import os

from astraflow.config.env import KEPT_KERNELS, settle_torch

NAMES = ("OMP_WAIT_POLICY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def test_threads_sleep_and_few_kernels_stay_unless_the_user_said_otherwise(monkeypatch):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    settle_torch()
    assert [os.environ[name] for name in NAMES] == ["ACTIVE", KEPT_KERNELS, KEPT_KERNELS]
