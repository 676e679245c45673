"""After each update an engine computes with exactly the trainer's weights: subclass the suite and say how to start one.

class TestMine(EffectiveWeightsSuite):
    @pytest.fixture
    def start(self): return lambda directory, dtype: MyEngine(directory, dtype=dtype)
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import Qwen3ForCausalLM

from astraflow.config.schema import RunConfig
from astraflow.contracts import Engine
from astraflow.models.lora.adapter import read_adapter
from astraflow.models.tiny_char import make_config, make_tokenizer
from astraflow.training.learner import Learner
from astraflow.types import Sampling
from astraflow.weights.client import Fetched, WeightClient
from astraflow.wire.codec import TRAINING_SCHEMA

UPDATES = 4
PROMPT = [5, 9, 13, 17, 21]
_DEADLINE_S = 60.0

POLICIES: dict[str, dict[str, Any]] = {
    "tied": {},
    "untied": {},
    "tied, published in bfloat16": {"trainer": {"dtype": "bfloat16"}, "optimizer": {"lr": 1e-5}},
    "LoRA": {"lora": {"rank": 4, "alpha": 6}, "optimizer": {"lr": 1e-3}},
    "LoRA on some layers, untied": {
        "lora": {"rank": 3, "alpha": 5, "targets": ["q_proj", "down_proj"]}, "optimizer": {"lr": 1e-3},
    },
}  # fmt: skip
"""Name -> settings of the policy. Where all weights are trained, so slowly that versions travel as deltas."""


def write_model(directory: Path, *, tied: bool) -> Path:
    """The architecture of tiny-char, random, whose replies never end by themselves."""
    config = make_config()
    config.tie_word_embeddings, config.eos_token_id = tied, None
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        Qwen3ForCausalLM(config).save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    settings = directory / "tokenizer_config.json"
    settings.write_text(json.dumps({k: v for k, v in json.loads(settings.read_text()).items() if k != "eos_token"}))
    return directory


def run_config(model: Path, policy: dict[str, Any]) -> RunConfig:
    """A run of one policy `actor`."""
    section = {"model": str(model), "optimizer": {"lr": 1e-10}, "batch": {"groups": 2}, **policy}
    section["trainer"] = {"audit_trajectories": 0, **policy.get("trainer", {})}
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": UPDATES, "seed": 4},
            "sources": {"train": {"type": "calculator"}},
            "workflow": {"type": "single_turn"},
            "policies": {"actor": section},
            "weights": {"keep": UPDATES + 2},
        }
    )


def random_batch(step: int, num_rows: int = 6, length: int = 24) -> pa.Table:
    """Rows of random ids, the second half of each sampled."""
    draw = np.random.default_rng(step)
    sampled = np.arange(length) >= length // 2
    row: dict[str, Any] = {
        "attempt": 1, "group_id": "train/0/0", "source": "train", "row": 0, "epoch": 0, "policy": "actor", "branch": 0,
        "parent_branch": -1, "fork_at": 0, "loss_mask": sampled, "reward": 1.0, "rewards_per_call": [],
        "finish_reason": "stop", "truncated": False, "weight": 1.0, "engine": "",
        "behavior_logprobs": np.where(sampled, np.float32(-4), np.float32(0)),
        "versions": np.where(sampled, step, -1).astype(np.int32),
        "call_index": np.where(sampled, 0, -1).astype(np.int16),
    }  # fmt: skip
    rows = [
        row | {
            "episode_id": f"train/0/0/{i}", "token_ids": draw.integers(3, 61, length).astype(np.int32),
            "advantages": np.where(sampled, draw.normal(), 0).astype(np.float32),
        }
        for i in range(num_rows)
    ]  # fmt: skip
    arrays = [pa.array([r[field.name] for r in rows], field.type) for field in TRAINING_SCHEMA]
    return pa.table(arrays, schema=TRAINING_SCHEMA)


class EffectiveWeightsSuite:
    """What every engine that has weights promises."""

    @pytest.fixture
    def start(self) -> Callable[[Path, str], Engine]:
        """Override: starts an engine on a model directory, with weights of a dtype ("float32" or "bfloat16")."""
        raise NotImplementedError

    @pytest.fixture(params=POLICIES)
    def learner(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Learner]:
        """A trainer at version 0."""
        model = write_model(tmp_path / "model", tied="untied" not in request.param)
        with closing(Learner(run_config(model, POLICIES[request.param]), "actor", tmp_path)) as made:
            yield made

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_its_weights_are_the_trainers_after_every_update(
        self, start: Callable[[Path, str], Engine], learner: Learner, dtype: str
    ) -> None:
        expected = [learner.effective_weights(dtype)]
        for step in range(UPDATES):
            learner.train(random_batch(step))
            expected.append(learner.effective_weights(dtype))
        learner.flush()
        if dtype == "float32":  # rounded to bfloat16, steps as small as these may change nothing
            assert len({weights.checksum for weights in expected}) == len(expected), "the updates changed nothing"
        client = WeightClient()
        held: Fetched | None = None
        with closing(start(Path(learner.section.model), dtype)) as engine, closing(client):
            # In flight over all swaps: what it runs on must not stay behind.
            future = engine.submit("long", PROMPT, Sampling(max_tokens=400))
            for version, weights in enumerate(expected):
                held = _bring(client, learner, version, held)
                _load(engine, held).result(_DEADLINE_S)
                assert engine.effective_weights().result(_DEADLINE_S) == weights
                engine.submit(f"probe{version}", PROMPT, Sampling(max_tokens=4)).result(_DEADLINE_S)
            versions = set(future.result(_DEADLINE_S).versions.tolist())
        assert versions >= set(range(UPDATES)), "the generation was not in flight over the swaps"
        if learner.section.lora is None:
            assert client.counts["deltas"] == UPDATES
        else:
            assert held is not None
            assert held.held.manifest.nbytes < 0.15 * sum(p.nbytes for p in learner.model.parameters())

    def test_weights_that_were_refused_leave_those_in_force(
        self, start: Callable[[Path, str], Engine], learner: Learner
    ) -> None:
        with closing(start(Path(learner.section.model), "float32")) as engine:
            held = _bring(WeightClient(), learner, 0, None)
            _load(engine, held).result(_DEADLINE_S)
            before = engine.effective_weights().result(_DEADLINE_S)
            missing = dict(list(held.tensors.items())[:-1])
            assert engine.load_weights(1, missing, read_adapter(held.files)).exception(_DEADLINE_S) is not None
            assert engine.effective_weights().result(_DEADLINE_S) == before == learner.effective_weights("float32")


def _load(engine: Engine, fetched: Fetched) -> Future[int]:
    """As a node does it."""
    return engine.load_weights(fetched.version, fetched.tensors, read_adapter(fetched.files))


def _bring(client: WeightClient, learner: Learner, version: int, held: Fetched | None) -> Fetched:
    """`version` as a node on this host gets it."""
    learner.flush()
    latest = learner.store.latest()
    return client.fetch(type(latest)(latest.policy, version, latest.urls), held)
