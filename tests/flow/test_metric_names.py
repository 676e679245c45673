"""What runs write is listed, and what is listed is written: `observe.health.names` against rows of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from astraflow.config.schema import RunConfig
from astraflow.observe.health.names import ALL, KEYS, metric_of
from astraflow.observe.jsonl import read_jsonl
from astraflow.testing.engines.effective import random_batch
from astraflow.training.learner import Learner

pytestmark = pytest.mark.flow
SMALL = (
    "--run.steps=3", "--workflow.group_size=4", "--policies.actor.batch.groups=6", "--evaluation.num_tasks=4",
    "--evaluation.every=2", "--policies.actor.warm_start=none", "--dataflow.heartbeat_s=0.2", "--weights.check=true",
    "--policies.actor.trainer.peak_tflops=1.0", "--policies.actor.algorithm.kl.coef=0.001",
    "--rollout.swarm.port=0",
)  # fmt: skip
SELDOM = {
    "groups/dropped/<reason>", "episodes/dropped/<reason>", "sources/<source>/skipped/<operator>",
    "nodes/episodes_failed/<kind>", "nodes/episodes_cancelled",
    "nodes/swarm/clients/<version>", "nodes/swarm/episodes_<ending>",
    "nodes/server_running", "nodes/server_waiting", "nodes/restarts",
    "nodes/remote_tokens", "nodes/remote_known", "nodes/remote_retries",
    "nodes/far_requests", "nodes/far_tokens", "nodes/far_lost",
}  # fmt: skip
"""Counters that are there once they are above 0, and what only some engines say (tests/unit/engines)."""
VARIANTS: list[dict[str, Any]] = [
    {"algorithm": {"loss": "m2po", "z_loss": 1e-4}},
    {"algorithm": {"loss": {"type": "m2po", "tokens": "all"}, "mask_truncated": True}},
    {"algorithm": {"loss": "sapo", "corrections": ["truncate", "mask", "reject"]}},
    {"algorithm": {"loss": "decoupled_ppo", "advantage": "gae"}, "critic": {"lr": 1e-3}},
    {"algorithm": {"loss": "cispo"}, "trainer": {"dtype": "float16"}, "lora": {"rank": 2}},
    {"algorithm": {"loss": "gspo"}, "batch": {"minibatches": 2}},
]


def names_of(rows: list[dict[str, Any]]) -> set[str]:
    return {name for row in rows for name in row} - set(KEYS)


@pytest.fixture
def of_variants(tmp_path: Path) -> set[str]:
    """What trainers say with losses, corrections, critics and adapters."""
    found: set[str] = set()
    for number, policy in enumerate(VARIANTS):
        config = RunConfig.model_validate(
            {
                "run": {"name": "r", "steps": 4},
                "sources": {"train": {"type": "calculator"}},
                "workflow": {"type": "single_turn"},
                "policies": {"actor": {"model": "tiny-char", "operators": ["keep_all"], **policy}},
            }
        )
        learner = Learner(config, "actor", tmp_path / str(number))
        table = random_batch(0)
        table = table.set_column(
            table.schema.get_field_index("truncated"), "truncated", pa.array(np.arange(table.num_rows) % 2 == 0)
        )
        found |= learner.train(table).keys()
        learner.close()
    return found


def test_every_number_of_a_row_is_listed_and_every_listed_one_is_written(
    run: Callable[..., Any], of_variants: set[str], tmp_path: Path
) -> None:
    ended = run(tmp_path / "runs", "quickstart", *SMALL, f"--weights.url=file://{tmp_path}/store")
    assert ended.code == 0, ended.words()
    found = of_variants | names_of(read_jsonl(ended.directory / "metrics.jsonl"))
    unknown = sorted(name for name in found if metric_of(name) is None)
    assert not unknown, f"list them in observe/health/names.py and docs/metrics.md: {unknown}"
    written = {metric.name for name in found if (metric := metric_of(name)) is not None}
    unwritten = {metric.name for metric in ALL} - written - SELDOM
    assert not unwritten, "nothing writes them any more"
