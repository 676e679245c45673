"""A real vLLM on this machine's CPU, in an environment of its own: `make test-vllm`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.env import cache_dir
from astraflow.models.registry import model_directory


@pytest.fixture(scope="session")
def options() -> dict[str, Any]:
    """Of a server of a small model that starts fast and stays small."""
    python = os.environ.get("ASTRAFLOW_TEST_VLLM", "")
    if not python:
        pytest.fail("ASTRAFLOW_TEST_VLLM names no interpreter that has vLLM; run: make test-vllm", pytrace=False)
    return {
        "python": python, "args": {"enforce_eager": True}, "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}, "max_context": 1024,
    }  # fmt: skip


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, converted once."""
    return model_directory("smollm2-135m-instruct", cache_dir(), 0)
