"""What holds for every test: fixed seeds, one thread, no settings of the developer's shell."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

os.environ["OMP_NUM_THREADS"] = "1"  # before torch loads; two test processes share the cores
os.environ["HF_HUB_OFFLINE"] = "1"

settings.register_profile("astraflow", deadline=None, derandomize=True)
settings.load_profile("astraflow")


@pytest.fixture(autouse=True)
def _no_token_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ASTRAFLOW_TOKEN", raising=False)
