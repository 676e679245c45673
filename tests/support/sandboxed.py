"""A sandbox for tests, or a loud skip where there is none."""

from __future__ import annotations

import pytest

from astraflow.errors import Problem
from astraflow.sandbox.isolation import find_way


def missing() -> str:
    """Why there is no sandbox here; "" if there is one."""
    try:
        find_way("bubblewrap", "")
    except Problem as problem:
        return str(problem)
    return ""


MISSING = missing()
needs_sandbox = pytest.mark.skipif(bool(MISSING), reason=f"NO SANDBOX, model code is not tested: {MISSING}")
