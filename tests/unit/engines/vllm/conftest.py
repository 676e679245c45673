"""vLLM engines over a process that speaks as vLLM does (`tests/support/fake_vllm.py`)."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fake_vllm
from astraflow.engines.vllm.engine import VllmEngine
from played import Played, script, starts


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose environment has vLLM, as far as an engine can see."""
    found = json.dumps({"version": "0.32.0", "plugin": True})
    return script(
        tmp_path_factory.mktemp("venv") / "python",
        f"if [ \"$1\" = -c ]; then echo '{found}'; exit; fi\n"
        f'[ "$2" = astraflow.engines.vllm.inside.serve ] || exit 3\nshift 2\n'
        f'exec {sys.executable} {fake_vllm.__file__} "$@"',
    )


@pytest.fixture
def start(
    python: str, endless_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Played]]:
    """Starts engines; all are closed at the end."""
    yield from starts(VllmEngine, {"model_dir": endless_dir, "python": python}, tmp_path, monkeypatch)
