"""SGLang engines over a process that speaks as SGLang does (`tests/support/fake_sglang.py`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import fake_sglang
from astraflow.engines.sglang.engine import SglangEngine
from played import Played, script, starts


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An interpreter whose environment has SGLang, as far as an engine can see."""
    place = tmp_path_factory.mktemp("venv")
    package, about = place / "modules" / "sglang", place / "modules" / "sglang-0.5.23.dist-info"
    package.mkdir(parents=True)
    about.mkdir()
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(
        "import fake_sglang\nif __name__ == '__main__':\n    fake_sglang.main()\n"
    )
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.5.23\n")
    searched = f"{place / 'modules'}:{Path(fake_sglang.__file__).parent}"
    return script(place / "python", f'PYTHONPATH="{searched}" exec {sys.executable} "$@"')


@pytest.fixture
def start(
    python: str, endless_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Played]]:
    """Starts engines; all are closed at the end."""
    yield from starts(SglangEngine, {"model_dir": endless_dir, "python": python}, tmp_path, monkeypatch)
