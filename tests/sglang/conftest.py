"""A real SGLang, in an environment of its own, beside an accelerator: `make test-sglang`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from astraflow.config.env import cache_dir
from astraflow.models.registry import model_directory


@pytest.fixture(scope="session")
def python() -> str:
    """The interpreter that has SGLang. Without one nothing is tested, and that is said."""
    named = os.environ.get("ASTRAFLOW_TEST_SGLANG", "")
    if not named:
        pytest.skip("NOT TESTED: ASTRAFLOW_TEST_SGLANG names no interpreter that has SGLang (make test-sglang)")
    return named


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, converted once."""
    return model_directory("smollm2-135m-instruct", cache_dir(), 0)
