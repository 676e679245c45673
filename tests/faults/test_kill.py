"""`kill -9` of each process of a real run at random moments: nothing is lost, nothing is trained twice."""

from __future__ import annotations

import random
import threading
from pathlib import Path

import pytest

from astraflow.testing.ledger import Ledger
from astraflow.testing.runs import LaunchedRun, Role, wait_until

SEED, STEPS, GROUPS = 20, 30, 6
ROLES: tuple[Role, ...] = ("node", "trainer", "dataflow")
SMALL = (
    f"--run.steps={STEPS}", "--run.checkpoint_every=5", "--workflow.group_size=4",
    f"--policies.actor.batch.groups={GROUPS}", "--policies.actor.warm_start.steps=20",
    "--evaluation.num_tasks=8", "--evaluation.every=12", "--dataflow.heartbeat_s=0.5", "--dataflow.dead_after_s=2",
    "--dataflow.batch_lease_s=4", "--rollout.nodes.0.delay_s=0.1",
)  # fmt: skip


def _moments() -> list[tuple[Role, int, float]]:
    """Role, step after which it dies (0: while it starts), and seconds after that step."""
    rng = random.Random(SEED)
    return [
        (role, rng.randrange(3 * i, 3 * i + 5), round(rng.uniform(0.0, 0.5), 3)) for role in ROLES for i in (0, 1, 3)
    ]


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("role", "step", "delay_s"), _moments())
def test_a_run_survives_kill_9_and_its_books_are_right(tmp_path: Path, role: Role, step: int, delay_s: float) -> None:
    run = LaunchedRun.start(tmp_path, "quickstart", *SMALL, f"--run.seed={step}")
    ledger = Ledger(run.directory)
    try:
        with ledger.watching():
            wait_until(lambda: bool(run.pids(role)) or run.popen.poll() is not None, f"a {role}", 60.0)
            if step:
                run.wait_for_step(step)
            threading.Event().wait(delay_s)  # the random moment itself, nothing is waited for
            assert run.popen.poll() is None, f"the run ended before the {role} could be killed: {run.words()}"
            run.kill(role)
            code = run.wait(200.0)
    finally:
        run.end()
    assert code == 0, run.words()
    assert "starts again" in run.words()
    assert ledger.problems == []
    assert sorted(ledger.batches) == [("actor", n) for n in range(1, STEPS + 1)], f"{ledger.num_looks} looks"
    assert [row["step"] for row in run.metrics() if row["kind"] == "step"] == list(range(1, STEPS + 1))
    account = run.summary()["accounting"]
    assert account["trained"] == STEPS * GROUPS
    assert account["admitted"] == account["trained"] + sum(account["dropped"].values()) + account["in_flight"]
