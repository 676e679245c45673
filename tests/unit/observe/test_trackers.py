from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar, get_args

import pytest

from astraflow.config.schema import ObserveSection
from astraflow.errors import Problem
from astraflow.observe import trackers
from astraflow.observe.trackers import TRACKERS, Tracked, TrackerFeed, open_tracker


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
    tracker = open_tracker(name, Tracked(tmp_path, "demo", "f00d", {"api_key": "sk-1", "lr": 0.1}))
    tracker.log(3, {"reward/mean": 0.5, "eval/avg@8": 0.25})
    tracker.close()
    said = repr(recorder.calls)
    assert "0.5" in said and "0.25" in said and "3" in said
    assert "sk-1" not in said


def test_an_unknown_tracker_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(Problem, match="known: wandb, tensorboard"):
        open_tracker("wanda", Tracked(tmp_path, "demo", "f00d", {}))


def test_a_missing_package_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(Problem, match=r"pip install 'astraflow\[wandb\]'"):
        open_tracker("wandb", Tracked(tmp_path, "demo", "f00d", {}))


def test_the_setting_names_the_trackers_that_there_are() -> None:
    (names,) = get_args(ObserveSection.model_fields["trackers"].annotation)
    assert get_args(names) == tuple(TRACKERS)


class Writer:
    """A `tensorboard.summary.Writer` that remembers; `broken` fails at its second number."""

    logged: ClassVar[list[tuple[str, float, int]]] = []
    broken = False

    def __init__(self, place: str) -> None:
        if "unwritable" in place:
            raise OSError("no place")

    def add_scalar(self, name: str, value: float, step: int) -> None:
        if self.broken and self.logged:
            raise ConnectionError("gone")
        self.logged.append((name, value, step))

    def close(self) -> None:
        self.logged.append(("closed", 0.0, 0))


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> type[Writer]:
    """tensorboard as a fake; rows are looked for often."""
    module = ModuleType("tensorboard.summary")
    module.Writer = Writer  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tensorboard", ModuleType("tensorboard"))
    monkeypatch.setitem(sys.modules, "tensorboard.summary", module)
    monkeypatch.setattr(trackers, "EVERY_S", 0.001)
    monkeypatch.setattr(Writer, "logged", [])
    return Writer


def rows(place: Path, *steps: int) -> None:
    with (place / "metrics.jsonl").open("a") as file:
        for step in steps:
            row = {"kind": "step", "policy": "actor", "step": step, "reward/mean": step / 2, "nothing": None}
            file.write(json.dumps(row) + "\n")


def test_rows_are_sent_once_over_two_lives_of_a_run(writer: type[Writer], tmp_path: Path) -> None:
    rows(tmp_path, 1)
    with TrackerFeed(["tensorboard"], tmp_path, "demo", {}):
        rows(tmp_path, 2)
    first = json.loads((tmp_path / "trackers.json").read_text())
    rows(tmp_path, 3)
    with TrackerFeed(["tensorboard"], tmp_path, "demo", {"policies": {"actor": {}, "critic": {}}}):
        pass
    assert json.loads((tmp_path / "trackers.json").read_text())["id"] == first["id"]
    assert writer.logged == [
        ("reward/mean", 0.5, 1), ("reward/mean", 1.0, 2), ("closed", 0.0, 0),
        ("actor/reward/mean", 1.5, 3), ("closed", 0.0, 0),
    ]  # fmt: skip


def test_a_tracker_that_fails_is_left_out_and_the_run_goes_on(
    writer: type[Writer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer, "broken", True)
    rows(tmp_path, 1, 2, 3)
    with TrackerFeed(["tensorboard"], tmp_path, "demo", {}):
        pass
    assert writer.logged == [("reward/mean", 0.5, 1)]
    assert [r.getMessage() for r in caplog.records] == [
        "tracker tensorboard failed and is left out from now on (ConnectionError: gone)"
    ]


def test_a_tracker_that_does_not_open_is_one_sentence(writer: type[Writer], tmp_path: Path) -> None:
    place = tmp_path / "unwritable"
    place.mkdir()
    with pytest.raises(Problem, match=r"tracker=tensorboard cannot be opened \(no place\)"):
        TrackerFeed(["tensorboard"], place, "demo", {})
