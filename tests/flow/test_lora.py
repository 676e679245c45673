"""Whole runs that train an adapter: it arrives at the engines, is checkpointed, and goes on after a resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from astraflow.launch.rundir import RunDirectory
from astraflow.weights.store import FileStore

pytestmark = [pytest.mark.flow, pytest.mark.slow]
SMALL = (
    "--workflow.group_size=4", "--policies.actor.batch.groups=6", "--policies.actor.warm_start.steps=30",
    "--policies.actor.lora.rank=8", "--policies.actor.optimizer.lr=1e-2", "--evaluation.num_tasks=8",
    "--dataflow.heartbeat_s=0.5",
)  # fmt: skip


def test_a_run_trains_an_adapter_and_goes_on_after_a_resume(tmp_path: Path, run: Callable[..., Any]) -> None:
    ended = run(tmp_path, "quickstart", *SMALL, "--run.steps=4")
    assert ended.code == 0, ended.words()
    ended = run(tmp_path, "quickstart", *SMALL, "--run.steps=7", "--resume")
    assert ended.code == 0, ended.words()
    rows = ended.steps()
    assert [row["step"] for row in rows] == list(range(1, 8))
    # The trainer scores base and adapter, the engine what it merged: an adapter that did not arrive would show here.
    assert all(row["logprob_gap/p99"] < 1e-4 and row["logprob_gap/tokens"] > 0 for row in rows)
    assert ended.summary()["versions"] == {"actor": 7}
    store = FileStore(ended.directory / "weights", "actor")
    tensors = store.fetch(7)
    assert tensors and all(name.startswith("base_model.model.") for name in tensors)
    moved = [t.abs().max() for name, t in tensors.items() if name.endswith("lora_B.weight")]
    assert min(moved) > 1e-3, "a layer did not learn"
    checkpoint = RunDirectory(ended.directory).newest_checkpoint("actor")
    assert checkpoint is not None and (checkpoint / "adapter" / "adapter_config.json").is_file()
    assert AutoModelForCausalLM.from_pretrained(checkpoint).config.vocab_size == 62
