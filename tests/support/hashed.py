"""What a script says in processes whose texts hash differently."""

from __future__ import annotations

import os
import subprocess
import sys


def said_by_each(script: str) -> set[str]:
    """The output of two processes; one element: it depends on no order of a set."""
    return {
        subprocess.run(
            [sys.executable, "-c", script], env={**os.environ, "PYTHONHASHSEED": seed}, check=True,
            capture_output=True, text=True,
        ).stdout
        for seed in ("0", "1")
    }  # fmt: skip
