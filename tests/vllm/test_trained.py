"""The whole system with a real vLLM: SmolLM2 served, trained, updated in flight; its server killed in the middle."""

from __future__ import annotations

import json
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from astraflow.testing.runs import LaunchedRun, children_of, wait_until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
STEPS, KILL_AT = 8, 3
RUN_FILE = """
[run]
name = "smollm2-vllm"
steps = {steps}
seed = 3
[sources.train]
type = "sums"
largest = 20
[workflow]
type = "single_turn"
reward = "sums"
group_size = 8
timeout_s = 300
[policies.actor]
model = "smollm2-135m-instruct"
engine = {engine}
batch = {{ groups = 4, max_staleness = 1, tokens_per_microbatch = 2048 }}
sampling = {{ max_tokens = 24 }}
optimizer = {{ lr = 3e-5 }}
trainer = {{ threads = 1 }}
[weights]
check = true
[[rollout.nodes]]
name = "node0"
concurrency = 32
threads = 1
"""


def inline(value: Any) -> str:
    """A value of TOML in one line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def server_of(run: LaunchedRun) -> int:
    """The vLLM server that the node of a run has started."""
    for node in run.pids("node"):
        for pid in children_of(node):
            with suppress(OSError):
                if b"astraflow.engines.vllm.inside.serve" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return pid
    raise AssertionError("the node has no server")


def test_a_run_learns_with_vllm_and_outlives_its_server(options: dict[str, Any], tmp_path: Path) -> None:
    recipe = tmp_path / "smollm2-vllm.toml"
    recipe.write_text(RUN_FILE.format(steps=STEPS, engine=inline({"type": "vllm", "dtype": "float32", **options})))
    run = LaunchedRun.start(tmp_path / "runs", str(recipe))
    try:
        wait_until(lambda: run.popen.poll() is not None or any(r.get("step", 0) >= KILL_AT for r in run.metrics()),
                   f"step {KILL_AT}", 400)  # fmt: skip
        assert run.popen.poll() is None, run.words()
        os.killpg(server_of(run), signal.SIGKILL)
        assert run.wait(500) == 0, run.words()
    finally:
        run.end()
    summary, rows = run.summary(), run.metrics()
    accounting = summary["accounting"]
    assert summary["steps"] == STEPS
    dropped = sum(accounting["dropped"].values())
    assert accounting["admitted"] == accounting["trained"] + dropped + accounting["in_flight"]
    assert summary["versions"]["actor"] == STEPS
    assert summary["logprob_gap"]["p99"] < 1e-3, "the engine computes with the trainer's weights, in float32"
    last = {key: row[key] for row in rows for key in row if key.startswith("nodes/")}
    assert last["nodes/weights_checked"] >= 3 and last.get("nodes/weights_wrong", 0) == 0
    assert last["nodes/restarts"] == 1
    assert summary["reward"]["end"] >= summary["reward"]["start"] - 0.05
