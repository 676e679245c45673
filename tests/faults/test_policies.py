"""Three policies train at once; the trainer of one dies and comes back, and the others do not notice."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from astraflow.observe.summary import law_holds
from astraflow.testing.runs import LaunchedRun, children_of, wait_until

TEAMS = Path(__file__).parents[2] / "examples" / "teams"
NAMES = ("router", "small", "large")
STEPS = 12
SMALL = (
    f"--run.steps={STEPS}", "--workflow.group_size=8", "--dataflow.heartbeat_s=0.3", "--run.checkpoint_every=4",
    *(f"--policies.{name}.warm_start.steps=8" for name in NAMES),
    *(f"--policies.{name}.operators=['keep_all']" for name in NAMES),
    "--policies.router.batch={groups = 2, max_staleness = 3}", "--policies.small.batch={groups = 2, max_staleness = 3}",
    "--policies.large.batch={groups = 1, max_staleness = 8}",
)  # fmt: skip


def _trainer(run: LaunchedRun, policy: str) -> int:
    for pid in children_of(run.popen.pid):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        if b"trainer" in words and policy.encode() in words:
            return pid
    return 0


def _steps(run: LaunchedRun, policy: str) -> list[int]:
    return [row["step"] for row in run.metrics() if row["kind"] == "step" and row["policy"] == policy]


@pytest.mark.faults
@pytest.mark.timeout(240)
def test_the_others_train_on_while_the_trainer_of_one_policy_is_dead(tmp_path: Path) -> None:
    run = LaunchedRun.start(
        tmp_path, str(TEAMS / "sizes.toml"), *SMALL, environment={"PYTHONPATH": str(TEAMS)}
    )  # fmt: skip
    try:
        wait_until(lambda: bool(_steps(run, "large")) or run.popen.poll() is not None, "a step of large", 120.0)
        before = {name: len(_steps(run, name)) for name in NAMES}
        pid = _trainer(run, "large")
        assert pid, run.words()
        os.kill(pid, signal.SIGKILL)

        def others_went_on() -> bool:
            gone = run.popen.poll() is not None
            return gone or all(len(_steps(run, name)) > before[name] for name in ("router", "small"))

        wait_until(others_went_on, "a step of each of the others", 60.0)
        assert run.wait(150.0) == 0, run.words()
    finally:
        run.end()
    assert "trainer-large ended with signal 9" in run.words() and "trainer-large starts again" in run.words()
    assert "trainer-router starts again" not in run.words() and "trainer-small starts again" not in run.words()
    for name in NAMES:
        assert sorted(set(_steps(run, name))) == list(range(1, STEPS + 1))
    assert len(_steps(run, "router")) == len(_steps(run, "small")) == STEPS
    first = {
        name: next(r["time_s"] for r in run.metrics() if r.get("policy") == name and r["step"] == 6) for name in NAMES
    }
    assert len(set(first.values())) == 3, "each makes its steps when it has its own batch"
    assert law_holds(run.summary()["accounting"])
