"""What `make` says where it cannot make an environment. Nothing is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def setup(venv: Path, path: str) -> str:
    """What `make setup` says, which must fail."""
    command = [str(shutil.which("make")), "setup", f"VENV={venv}", "PYTHON=python-of-nobody"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PATH": path}, capture_output=True, text=True)
    assert done.returncode == 2
    return done.stderr


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_an_old_python_and_a_place_that_cannot_be_written_are_named(tmp_path):
    file = tmp_path / "file"
    file.touch()
    tools = tmp_path / "tools"
    tools.mkdir()
    for tool in ("grep", "mkdir", "sh", "bash"):
        (tools / tool).symlink_to(str(shutil.which(tool)))
    said = setup(tmp_path / "venv", str(tools))
    assert "PYTHON=python-of-nobody is not Python 3.11, 3.12 or 3.13; install one of them or name it" in said
    (tools / "python3.12").write_text("#!/bin/sh\nexit 0\n")  # says that it is new enough
    (tools / "python3.12").chmod(0o755)
    said = setup(file / "venv", str(tools))
    assert f"VENV={file / 'venv'} cannot be written; name another place: make ... VENV=/path/to/environment" in said
    assert not (tmp_path / "venv").exists()
