"""Three policies, and eight, train at once; the trainer of one dies and comes back, and the others do not notice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from astraflow.observe.summary import law_holds
from astraflow.testing.runs import LaunchedRun, children_of, wait_until

TEAMS = Path(__file__).parents[2] / "examples" / "teams"
STEPS = 12
COMMON = (f"--run.steps={STEPS}", "--dataflow.heartbeat_s=0.3", "--run.checkpoint_every=4")
SIZES = ("router", "small", "large")
EIGHT = tuple(f"p{number}" for number in range(8))
TEAM_OF = {
    "sizes": (SIZES, "large", (
        "--workflow.group_size=8",
        *(f"--policies.{name}.warm_start.steps=8" for name in SIZES),
        "--policies.router.batch={groups = 2, max_staleness = 3}",
        "--policies.small.batch={groups = 2, max_staleness = 3}",
        "--policies.large.batch={groups = 1, max_staleness = 8}",
    )),
    "eight": (EIGHT, "p3", (
        "--workflow.group_size=4",
        *(f"--policies.{name}.batch={{groups = {1 + n % 3}, max_staleness = 8}}" for n, name in enumerate(EIGHT)),
    )),
}  # fmt: skip
"""Run file -> its policies, the one whose trainer is killed, and settings that make it short."""


def _trainer(run: LaunchedRun, policy: str) -> int:
    for pid in children_of(run.popen.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"trainer" in words and policy.encode() in words:
            return pid
    return 0


def _steps(run: LaunchedRun, policy: str) -> list[int]:
    return [row["step"] for row in run.metrics() if row["kind"] == "step" and row["policy"] == policy]


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("team", TEAM_OF)
def test_the_others_train_on_while_the_trainer_of_one_policy_is_dead(tmp_path: Path, team: str) -> None:
    names, victim, settings = TEAM_OF[team]
    others = [name for name in names if name != victim]
    kept = (f"--policies.{name}.operators=['keep_all']" for name in names)
    run = LaunchedRun.start(
        tmp_path, str(TEAMS / f"{team}.toml"), *COMMON, *settings, *kept, environment={"PYTHONPATH": str(TEAMS)}
    )  # fmt: skip
    try:
        wait_until(lambda: bool(_steps(run, victim)) or run.popen.poll() is not None, f"a step of {victim}", 120.0)
        before = {name: len(_steps(run, name)) for name in names}
        pid = _trainer(run, victim)
        assert pid, run.words()
        os.kill(pid, signal.SIGKILL)

        def others_went_on() -> bool:
            gone = run.popen.poll() is not None
            return gone or all(len(_steps(run, name)) > before[name] for name in others)

        wait_until(others_went_on, "a step of each of the others", 60.0)
        assert run.wait(180.0) == 0, run.words()
    finally:
        run.end()
    assert f"trainer-{victim} ended with signal 9" in run.words() and f"trainer-{victim} starts again" in run.words()
    assert not any(f"trainer-{name} starts again" in run.words() for name in others)
    for name in names:
        assert sorted(set(_steps(run, name))) == list(range(1, STEPS + 1))
    assert all(len(_steps(run, name)) == STEPS for name in others)
    sixth = {
        name: next(r["time_s"] for r in run.metrics() if r.get("policy") == name and r["step"] == 6) for name in names
    }
    assert len(set(sixth.values())) > 1, "each makes its steps when it has its own batch"
    assert law_holds(run.summary()["accounting"])


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_trainer_of_several_policies_that_dies_goes_on_with_all_of_them(tmp_path: Path) -> None:
    names = ("planner", "executor")
    settings = [f"--policies.{name}.batch={{groups = {n}, max_staleness = 6}}" for n, name in enumerate(names, 1)]
    kept = (f"--policies.{name}.operators=['keep_all']" for name in names)
    run = LaunchedRun.start(
        tmp_path, str(TEAMS / "lora.toml"), *COMMON, "--workflow.group_size=4", *settings, *kept,
        environment={"PYTHONPATH": str(TEAMS)},
    )  # fmt: skip
    try:
        started = lambda: all(_steps(run, name) for name in names)  # noqa: E731
        wait_until(lambda: started() or run.popen.poll() is not None, "a step of both", 120.0)
        pid = _trainer(run, ",".join(names))
        assert pid, run.words()
        os.kill(pid, signal.SIGKILL)
        assert run.wait(180.0) == 0, run.words()
    finally:
        run.end()
    assert "trainer-adapters ended with signal 9" in run.words() and "trainer-adapters starts again" in run.words()
    for name in names:
        assert sorted(set(_steps(run, name))) == list(range(1, STEPS + 1))
    assert law_holds(run.summary()["accounting"])
    assert run.summary()["versions"] == dict.fromkeys(names, STEPS)
