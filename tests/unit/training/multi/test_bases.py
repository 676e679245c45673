"""Adapters that are trained in one process rest on one base in memory, and become what they would have become alone."""

from __future__ import annotations

from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.config.schema import RunConfig
from astraflow.models.load import state_tensors
from astraflow.testing.engines.effective import random_batch, write_model
from astraflow.training.learner import Learner
from astraflow.training.multi.bases import Bases

STEPS = 3
POLICIES: dict[str, dict[str, Any]] = {
    "a": {"lora": {"rank": 4}},
    "b": {"lora": {"rank": 2, "targets": ["q_proj", "up_proj"]}},
}


def run_of(model: Path, quantize: str) -> RunConfig:
    common = {"model": str(model), "optimizer": {"lr": 1e-2}, "batch": {"groups": 2}}
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": STEPS, "seed": 4},
            "sources": {"train": {"type": "calculator"}},
            "workflow": {"type": "single_turn"},
            "policies": {
                name: {**common, **policy, "lora": policy["lora"] | {"quantize": quantize}}
                for name, policy in POLICIES.items()
            },
        }
    )


@pytest.mark.parametrize("quantize", ["none", "nf4"])
def test_they_train_as_they_do_alone_on_one_base(
    tmp_path: Path, quantize: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ASTRAFLOW_CACHE", str(tmp_path / "cache"))
    config = run_of(write_model(tmp_path / "model", tied=False), quantize)
    alone = {}
    for name in POLICIES:
        with closing(Learner(config, name, tmp_path / "alone")) as learner:
            for step in range(STEPS):
                learner.train(random_batch(step))
            alone[name] = learner.effective_weights("float32")
    bases = Bases()
    with ExitStack() as stack:
        together = {
            name: stack.enter_context(closing(Learner(config, name, tmp_path / "together", bases=bases)))
            for name in POLICIES
        }
        for step in range(STEPS):
            for learner in together.values():  # in turn
                learner.train(random_batch(step))
        assert {name: learner.effective_weights("float32") for name, learner in together.items()} == alone
        a, b = ({id(t): t for t in _memory(learner)} for learner in together.values())
        shared = sum(t.nbytes for key, t in a.items() if key in b)
        own = sum(t.nbytes for key, t in a.items() if key not in b)
        assert own == sum(t.nbytes for t in together["a"].trained.copy().values()), "it has its adapter for itself"
        assert shared > (1 if quantize == "nf4" else 5) * own


def _memory(learner: Learner) -> list[torch.Tensor]:
    return [*learner.model.parameters(), *learner.model.buffers()]


def test_the_base_is_the_model_of_the_directory(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", tied=True)
    bases = Bases()
    one, two = (bases.open(model, packed=False, device=torch.device("cpu")) for _ in range(2))
    assert one is not two and one.lm_head is not two.lm_head
    assert one.lm_head.weight is one.model.embed_tokens.weight is two.lm_head.weight
    ids = torch.tensor([[5, 9, 13]])
    with torch.no_grad():
        np.testing.assert_array_equal(one(input_ids=ids).logits, two(input_ids=ids).logits)
    assert not any(tensor.requires_grad for tensor in state_tensors(one).values())
