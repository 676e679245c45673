"""Stages in a real run: workers are killed with -9 while they work, and every row has each of its columns once."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from astraflow.config.load import config_from_json
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import WireError
from astraflow.launch.rundir import RunDirectory
from astraflow.testing.ledger import Ledger
from astraflow.testing.runs import LaunchedRun, wait_until
from astraflow.testing.services import DataflowThread

pytestmark = [pytest.mark.flow, pytest.mark.slow]
STEPS, GROUPS = 10, 4
SMALL = (
    f"--run.steps={STEPS}", "--workflow.group_size=4", f"--policies.actor.batch.groups={GROUPS}",
    "--policies.actor.warm_start.steps=20", "--evaluation.num_tasks=4", "--evaluation.every=1000",
    "--dataflow.heartbeat_s=0.5", "--rollout.nodes.0.delay_s=0.05",
)  # fmt: skip
STAGES = (
    "--stages.echo.type=astraflow.testing.stages:EchoStage", "--stages.echo.delay_s=0.3", "--stages.echo.lease_s=2",
    "--stages.echo.rows=8", "--stages.ref.type=ref_logprobs", "--stages.ref.lease_s=4",
    "--consumers.check.max_behind=64",
)  # fmt: skip


class Reader:
    """Reads everything that goes to training, over restarts of whatever restarts."""

    def __init__(self, url: str) -> None:
        self._client = DataflowClient(url, give_up_s=2.0)
        self.rows: list[dict[str, Any]] = []
        self.groups: list[str] = []

    def read(self, wait_s: float = 1.0) -> bool:
        """One request; False: there was nothing more."""
        header, table = self._client.consume("check", "actor", 8, wait_s=wait_s)
        self.groups += header.group_ids
        self.rows += table.to_pylist()
        self._client.consumer_ack("check", header)
        return bool(header.group_ids)

    def leased(self, stage: str) -> int:
        """Entries that workers of the stage have now."""
        leased: int = self._client.status()["stages"][stage]["leased"]
        return leased

    def close(self) -> None:
        self._client.close()


def worker_of(run: LaunchedRun, stage: str) -> int:
    """The pid of the worker of a stage."""
    named = {pid: Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in run.pids("stage")}
    (pid,) = (pid for pid, words in named.items() if stage.encode() in words)
    return pid


@pytest.mark.faults
def test_every_row_has_its_columns_once_though_workers_are_killed(tmp_path: Path) -> None:
    run = LaunchedRun.start(tmp_path, "quickstart", *SMALL, *STAGES)
    ledger = Ledger(run.directory)
    try:
        with ledger.watching():
            run.wait_for_step(2)
            url = json.loads(RunDirectory(run.directory).ready_file.read_text())["url"]
            reader, over = Reader(url), threading.Event()

            def follow() -> None:
                while not over.is_set():
                    try:
                        reader.read()
                    except WireError:  # the run is over
                        return

            following = threading.Thread(target=follow, daemon=True)
            following.start()
            killed = []
            for stage, step in (("echo", 3), ("ref", 4), ("echo", 5)):
                run.wait_for_step(step)
                killed.append(worker_of(run, stage))
                if stage == "echo":  # it is slow: it can be caught with rows, `ref` only by luck
                    wait_until(lambda: reader.leased("echo") > 0, "rows at a worker of echo", 300)
                os.kill(killed[-1], signal.SIGKILL)
            code = run.wait(300)
            over.set()
            following.join(60)
    finally:
        run.end()
    assert code == 0, run.words()
    assert run.words().count("starts again") >= 3 and len(set(killed)) == 3
    assert ledger.problems == []

    config = config_from_json((run.directory / "run.resolved.json").read_text())
    with DataflowThread(config, run.directory) as service:  # what the reader had not seen when the run ended
        status = service.call(lambda: service.shell.machine.state.stages)
        rest = Reader(service.url)
        while rest.read(wait_s=0.0):
            pass
        rest.close()
    groups, rows = [*reader.groups, *rest.groups], [*reader.rows, *rest.rows]
    reader.close()
    assert len(groups) == len(set(groups)) >= STEPS * GROUPS
    names = [(row["episode_id"], row["branch"]) for row in rows]
    assert len(names) == len(set(names))
    assert all(row["echo"] == [float(i) for i in row["token_ids"]] for row in rows)
    assert all(len(row["ref_logprobs"]) == len(row["token_ids"]) for row in rows)
    gaps = [
        abs(ref - behavior)
        for row in rows
        for ref, behavior, version in zip(row["ref_logprobs"], row["behavior_logprobs"], row["versions"], strict=True)
        if version == 0
    ]
    assert gaps and np.max(gaps) < 1e-3, "version 0 is its own reference"
    assert sum(stage.num_lost for stage in status.values()) > 0, "a worker was killed while it held rows"
    account = run.summary()["accounting"]
    assert account["trained"] == STEPS * GROUPS and not [r for r in account["dropped"] if r.startswith("stage_")]
