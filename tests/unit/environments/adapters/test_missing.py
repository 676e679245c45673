"""An adapter whose package is missing names it, and the command that installs it, before anything starts."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from astraflow.environments.worlds import Worlds
from astraflow.errors import Problem


@pytest.mark.parametrize(
    ("package", "spec"),
    [
        ("gymnasium", {"type": "gymnasium", "id": "FrozenLake-v1"}),
        ("textarena", {"type": "textarena", "id": "Nim-v0"}),
        ("mcp", {"type": "mcp", "command": ["x"], "reward": "exact"}),
    ],
)
def test_the_pip_command_is_told(monkeypatch: pytest.MonkeyPatch, package: str, spec: Any) -> None:
    for name in [name for name in sys.modules if name.startswith("astraflow.environments.adapters.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)  # type: ignore[arg-type]
    with pytest.raises(Problem) as caught:
        Worlds(spec)
    assert str(caught.value) == f"package={package} is not installed; run: pip install 'astraflow[{package}]'"
