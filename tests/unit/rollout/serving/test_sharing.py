"""Policies of one base are served by one engine of a node, and nothing else is."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.schema import RunConfig
from astraflow.engines.local.engine import PolicyEngine
from astraflow.models.lora.adapter import read_adapter
from astraflow.rollout.policies import PolicyOptions
from astraflow.rollout.serving.engines import Serving
from astraflow.rollout.serving.sharing import groups
from astraflow.testing.engines.effective import random_batch, write_model
from astraflow.training.learner import Learner
from astraflow.types import Sampling
from astraflow.weights.client import WeightClient

LORA = {"lora": {"rank": 2}, "optimizer": {"lr": 1e-2}}


def run_of(model: str = "tiny-char", **policies: dict[str, Any]) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 9},
            "sources": {"train": {"type": "calculator"}},
            "workflow": {"type": "single_turn"},
            "policies": {name: {"model": model, **section} for name, section in policies.items()},
            "weights": {"check": True},
        }
    )


@pytest.mark.parametrize(
    ("policies", "shared"),
    [
        ({"a": LORA, "b": LORA}, [["a", "b"]]),
        ({"a": LORA}, []),
        ({"a": LORA, "b": {}}, []),
        ({"a": LORA, "b": {"frozen": True}}, [["a", "b"]]),
        ({"a": {}, "b": {"frozen": True}, "c": {"frozen": True}}, []),
        ({"a": LORA, "past": {"copy_of": {"policy": "a", "keep": 3}}}, [["a", "past"]]),
        ({"a": {}, "past": {"copy_of": {"policy": "a", "keep": 3}}}, []),
        ({"a": LORA, "b": LORA | {"model": "tiny-char-large"}}, []),
        ({"a": LORA, "b": LORA | {"engine": {"dtype": "bfloat16"}}}, []),
        ({"a": LORA, "b": LORA | {"lora": {"rank": 4, "quantize": "nf4"}}}, []),
        ({name: LORA | {"engine": {"type": "scripted", "script": ["."]}} for name in "ab"}, []),
    ],
)
def test_who_shares(policies: dict[str, dict[str, Any]], shared: list[list[str]]) -> None:
    assert groups(run_of(**policies)) == shared


async def test_a_node_serves_adapters_their_past_and_their_base_by_one_engine(tmp_path: Path) -> None:
    model = str(write_model(tmp_path / "model", tied=True))
    policies = {
        "a": LORA, "b": LORA | {"lora": {"rank": 3, "targets": ["q_proj"]}}, "base": {"frozen": True},
        "past": {"copy_of": {"policy": "a", "every": 2, "keep": 2}},
    }  # fmt: skip
    config = run_of(model, **policies)
    client = WeightClient(None)
    serving = Serving(config, PolicyOptions(tmp_path / "cache", 0, "n", 4, 1), client, lambda: None)
    with closing(Learner(config, "a", tmp_path)) as a, closing(Learner(config, "b", tmp_path)) as b:
        for step in range(5):
            a.train(random_batch(step))
        a.flush()
        await serving.start()
        with closing(serving):
            engines = [engine for _, engine, _ in serving.pairs()]
            cores = {engine._core for engine in engines if isinstance(engine, PolicyEngine)}
            assert len(engines) == 5 and len(cores) == 1
            assert serving.engines["base"].version == 0
            serving.hear({"a": a.store.latest(), "b": b.store.latest()})
            for name, engine, weights in serving.pairs():
                if name != "base":
                    fetched = await weights.fetch_newer(-1)
                    engine.load_weights(fetched.version, fetched.tensors, read_adapter(fetched.files)).result(60)
                    assert weights.check is not None
                    await weights.check.look(engine, fetched)
                    assert weights.check.counts == {"weights_checked": 1, "weights_wrong": 0}
            assert [engine.version for engine in engines] == [5, 0, 0, 4, 2]
            said = engines[0].effective_weights().result(60)
            assert said == a.effective_weights("float32")
            assert engines[1].effective_weights().result(60) == b.effective_weights("float32")
            assert len(engines[4].submit("x", [5, 9], Sampling(max_tokens=3)).result(60).token_ids) == 3
