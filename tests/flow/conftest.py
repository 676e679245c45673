"""`astraflow run` in this process, with its processes forked: the real launcher, without seconds of loading torch."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from astraflow.cli.app import main
from astraflow.launch.supervisor import Supervisor
from astraflow.observe.jsonl import read_jsonl
from astraflow.testing.forked import popen


@dataclass(frozen=True)
class EndedRun:
    """What a run left."""

    directory: Path
    code: int
    output: str  # what the launcher printed

    def steps(self) -> list[dict[str, Any]]:
        """The rows of steps."""
        return [dict(row) for row in read_jsonl(self.directory / "metrics.jsonl") if row["kind"] == "step"]

    def summary(self) -> Any:
        """report/summary.json."""
        return json.loads((self.directory / "report" / "summary.json").read_text())

    def words(self) -> str:
        """Everything that anybody said."""
        logs = sorted((self.directory / "logs").glob("*.log"))
        return "\n".join([self.output, *(f"--- {log.name}\n{log.read_text(errors='replace')[-3000:]}" for log in logs)])


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Callable[..., EndedRun]:
    """`run(parent, recipe, *words)` to its end, in `parent/run`."""
    monkeypatch.setattr("astraflow.launch.supervisor.Supervisor", partial(Supervisor, popen=popen))

    def play(parent: Path, recipe: str, *words: str) -> EndedRun:
        code = main(["run", recipe, *words, f"--run.directory={parent}", "--run.name=run"])
        out, err = capfd.readouterr()
        return EndedRun(parent / "run", code, out + err)

    return play
