"""Every run file of examples/teams trains two steps as real processes, each with its kinds of policies."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.load import load_run
from astraflow.launch.checks import check_start
from astraflow.observe.summary import law_holds
from astraflow.weights.store import FileStore
from sandboxed import needs_sandbox

pytestmark = [pytest.mark.flow, pytest.mark.slow]
TEAMS = Path(__file__).parents[2] / "examples" / "teams"
FILES = sorted(TEAMS.glob("*.toml"))
SANDBOX = ("coder", "by_example", "by_example_alone")
CODE = [pytest.param(path, marks=needs_sandbox) if path.stem in SANDBOX else path for path in FILES]
SMALL = ("--run.steps=2", "--dataflow.heartbeat_s=0.2", "--workflow.group_size=8")


@pytest.fixture(autouse=True)
def _in_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(TEAMS)
    monkeypatch.syspath_prepend(str(TEAMS))
    monkeypatch.setenv("PYTHONPATH", str(TEAMS))


@pytest.mark.parametrize("path", CODE, ids=lambda path: path.stem)
def test_a_team_trains_two_steps(path: Path, tmp_path: Path, run: Callable[..., Any]) -> None:
    config = load_run(path)
    assert check_start(config, here=True)[0]["train"] >= 100
    small = [f"--policies.{name}.batch.groups=2" for name in config.trained]
    small += [f"--policies.{name}.operators=['keep_all']" for name in config.trained]
    small += [f"--policies.{name}.warm_start.steps=8" for name, p in config.trained.items() if p.warm_start is not None]
    small += [f"--policies.{name}.optimizer.lr=1e-3" for name, p in config.trained.items() if p.lora is not None][:1]
    small += ["--evaluation.num_tasks=2"] if config.evaluation is not None else []
    ended = run(tmp_path, str(path), *SMALL, *small)
    assert ended.code == 0, ended.words()
    made = {name: [row["step"] for row in ended.steps() if row["policy"] == name] for name in config.trained}
    assert made == {name: [1, 2] for name in config.trained}
    summary = ended.summary()
    assert law_holds(summary["accounting"]) and summary["versions"] == dict.fromkeys(config.trained, 2)
    assert set(summary["policies"]) == (set(config.trained) if len(config.trained) > 1 else set())
    assert {log.name for log in (ended.directory / "logs").glob("trainer-*.log")} == {
        f"trainer-{name}.log" for name in config.trainers
    }
    of_adapters = [FileStore(ended.directory / "weights", n).fetch(2) for n, p in config.trained.items() if p.lora]
    assert all(name.startswith("base_model.model.") for own in of_adapters for name in own), "nothing but adapters"
    if path.stem == "lora":
        first, second = of_adapters
        assert any((first[name] != second[name]).any() for name in first)


def test_the_files_are_short() -> None:
    assert len(FILES) == 8
    assert {path.name: lines for path in FILES if (lines := len(path.read_text().splitlines())) > 45} == {}
