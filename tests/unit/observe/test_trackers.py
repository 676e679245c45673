from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from astraflow.errors import Problem
from astraflow.observe.trackers import TRACKERS, open_tracker


class Recorder:
    """Stands for any tracker's module, run or writer: it records what is called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **kwargs: Any) -> Recorder:
            self.calls.append((name, args, kwargs))
            return self

        return call


@pytest.mark.parametrize("name", sorted(TRACKERS))
def test_rows_and_masked_settings_reach_the_tracker(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    module = SimpleNamespace(
        init=recorder.init, Writer=recorder.Writer, set_experiment=recorder.set_experiment,
        start_run=recorder.start_run, log_dict=recorder.log_dict, log_metrics=recorder.log_metrics,
        end_run=recorder.end_run,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, TRACKERS[name][0].partition(".")[0], SimpleNamespace())
    monkeypatch.setitem(sys.modules, TRACKERS[name][0], module)
    tracker = open_tracker(name, tmp_path, "demo", {"api_key": "sk-1", "lr": 0.1})
    tracker.log(3, {"reward/mean": 0.5, "eval/avg@8": 0.25})
    tracker.close()
    said = repr(recorder.calls)
    assert "0.5" in said and "0.25" in said and "3" in said
    assert "sk-1" not in said


def test_an_unknown_tracker_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="known: wandb, tensorboard"):
        open_tracker("wanda", tmp_path, "demo", {})


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(Problem, match=r"pip install 'astraflow\[wandb\]'"):
        open_tracker("wandb", tmp_path, "demo", {})
