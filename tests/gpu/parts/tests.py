"""The tests that are marked `gpu`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from record import Facts, Place, run_part

ROOT = Path(__file__).parents[3]


def part(place: Place) -> Facts:
    """All must pass; without an accelerator they skip."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    (place.out / "tests.log").write_text(done.stdout + done.stderr)
    return {"said": done.stdout.splitlines()[-1:], "exit_code": done.returncode, "ok": done.returncode == 0}


if __name__ == "__main__":
    run_part("tests", part)
