"""A rank of a trainer is killed: all end, it is named, and the launcher starts them again."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from astraflow.testing.runs import LaunchedRun, children_of, wait_until

STEPS, GROUPS = 16, 4
SMALL = (
    f"--run.steps={STEPS}", "--run.checkpoint_every=4", "--workflow.group_size=4",
    f"--policies.actor.batch.groups={GROUPS}", "--policies.actor.warm_start.steps=10", "--evaluation.num_tasks=4",
    "--policies.actor.trainer.ranks=2", "--dataflow.heartbeat_s=0.5", "--rollout.nodes.0.delay_s=0.1",
)  # fmt: skip


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_and_the_run_goes_on(tmp_path: Path, rank: int) -> None:
    run = LaunchedRun.start(tmp_path, "quickstart", *SMALL)
    try:
        wait_until(lambda: bool(run.pids("trainer")) or run.popen.poll() is not None, "a trainer", 60.0)
        run.wait_for_step(6)
        ranks = [pid for pid in children_of(run.pids("trainer")[0]) if _rank(pid) == rank]
        os.kill(ranks[0], signal.SIGKILL)
        code = run.wait(240.0)
    finally:
        run.end()
    assert code == 0, run.words()
    assert "trainer-actor ended with exit code 1" in run.words() and "starts again" in run.words()
    log = (run.directory / "logs" / "trainer-actor.log").read_text()
    assert f"trainer of actor: rank {rank} of 2=signal 9 ended it, so all ranks were ended" in log
    assert f"rank {1 - rank}: another rank of 2=gone" in log
    assert [row["step"] for row in run.metrics() if row["kind"] == "step"] == list(range(1, STEPS + 1))
    account = run.summary()["accounting"]
    assert account["trained"] == STEPS * GROUPS
    assert account["admitted"] == account["trained"] + sum(account["dropped"].values()) + account["in_flight"]


def _rank(pid: int) -> int:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return int(words[words.index(b"--rank") + 1]) if b"--rank" in words else -1
