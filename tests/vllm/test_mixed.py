"""One policy on three kinds of engine (`make mixed-pool`), with a real vLLM: who did what, and how far each is off."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from astraflow.testing.runs import LaunchedRun

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
EXAMPLE = Path(__file__).parents[2] / "examples" / "mixed-pool" / "mixed-pool.toml"
STEPS = 160
ENGINES = {"local-float32@full", "local-bfloat16@half", "vllm-float32@vllm"}


def last(rows: list[dict[str, Any]], name: str) -> list[float]:
    return [row[name] for row in rows if name in row]


def test_three_engines_train_one_policy(options: dict[str, Any], tmp_path: Path) -> None:
    server = "--rollout.nodes.2.engines.actor"
    run = LaunchedRun.start(
        tmp_path / "runs", str(EXAMPLE), f"--run.steps={STEPS}", f"{server}.python={options['python']}",
        "--weights.check=true",
    )  # fmt: skip
    try:
        assert run.wait(500) == 0, run.words()
    finally:
        run.end()
    status = json.loads((run.directory / "report" / "status.json").read_text())
    sampled, rows = status["episodes"]["engines"], run.metrics()
    assert set(sampled) == ENGINES and all(each["tokens"] > 0 for each in sampled.values())
    assert sampled["local-float32@full"]["share"] > sampled["local-bfloat16@half"]["share"]
    for engine, bound in (("local-float32", 1e-4), ("vllm-float32", 1e-3), ("local-bfloat16", 0.5)):
        assert 0 <= max(last(rows, f"logprob_gap/{engine}/p50")) < bound, engine
    assert max(last(rows, "logprob_gap/local-bfloat16/p50")) > 1e-4, "rounding is seen"
    assert last(rows, "correction/weight"), "what was rounded is corrected"
    assert last(rows, "nodes/weights_wrong")[-1] == 0
    summary = run.summary()
    assert summary["reward"]["end"] > summary["reward"]["start"]
