"""A logprob at temperature T is log_softmax(logits / T), said alike by engine, policy, reference and audit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from astraflow.config.schema import RunConfig
from astraflow.engines.local import LocalEngine
from astraflow.models.load import load_model, state_tensors
from astraflow.models.scoring.forward import packed_logprobs, prepare_model
from astraflow.models.scoring.packing import pack_rows, rows_from_lists
from astraflow.training.audit import Auditor
from astraflow.training.learner import Learner
from astraflow.training.parallel.ranks import ALONE
from astraflow.training.parallel.scoring import scoring_of
from astraflow.training.reference import Reference
from astraflow.types import Sampling
from plain_scores import plain_logprobs

TOLERANCE = 1e-4
# The embedded engine serves a model with a window only up to that window.
full_attention = pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"], indirect=True)


def sampled(directory, temperature, num=6, max_tokens=12):
    """Rows (ids, trained) and the logprobs that the engine says, prompts of 2 to 7 tokens."""
    prompts = [list(range(3, 5 + i)) for i in range(num)]
    engine = LocalEngine(directory, max_concurrency=num, max_context=64)
    try:
        options = Sampling(temperature=temperature, max_tokens=max_tokens)
        futures = [engine.submit(str(i), prompt, options) for i, prompt in enumerate(prompts)]
        generations = [future.result(60) for future in futures]
    finally:
        engine.close()
    rows = [
        (np.array([*p, *g.token_ids]), np.arange(len(p) + len(g.token_ids)) >= len(p))
        for p, g in zip(prompts, generations, strict=True)
    ]
    return rows, [np.asarray(g.logprobs) for g in generations]


@full_attention
@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_engine_policy_reference_and_audit_agree(directory, temperature):
    rows, of_engine = sampled(directory, temperature)
    model = load_model(directory)
    expected = torch.cat(plain_logprobs(model, rows, temperature)).detach().numpy()
    np.testing.assert_allclose(np.concatenate(of_engine), expected, atol=TOLERANCE)

    own = prepare_model(load_model(directory))
    flat = np.zeros(sum(len(ids) for ids, _ in rows), np.float32)
    flat[np.concatenate([trained for _, trained in rows])] = np.concatenate(of_engine)
    batch = replace(rows_from_lists(rows), behavior_logprobs=flat)
    for pack in pack_rows(batch, 30):
        with torch.no_grad():
            of_policy = packed_logprobs(own, pack, temperature).logprobs.numpy()
        np.testing.assert_allclose(of_policy, pack.behavior_logprobs, atol=TOLERANCE)
        of_reference = Reference(own).logprobs(pack, temperature).numpy()
        np.testing.assert_allclose(of_reference, pack.behavior_logprobs, atol=TOLERANCE)
    auditor = Auditor(len(rows), 2, temperature, 0.5, 0)
    auditor.remember(0, state_tensors(own))
    audited = auditor.audit(scoring_of(own, ALONE), batch, 1, 30)
    assert audited["logprob_gap/max"] < TOLERANCE and audited["logprob_gap/tokens"] == batch.trained.sum()


@full_attention
@pytest.mark.parametrize("wrong", [1.0, 0.36])
def test_a_temperature_taken_once_too_often_or_not_at_all_is_seen(directory, wrong):
    rows, of_engine = sampled(directory, 0.6)
    own = prepare_model(load_model(directory))
    (pack,) = pack_rows(rows_from_lists(rows), 10_000)
    with torch.no_grad():
        far = packed_logprobs(own, pack, wrong).logprobs.numpy()
    order = np.concatenate([of_engine[row] for row in pack.rows])
    assert np.percentile(np.abs(far - order), 99) > 0.05


def test_fifty_steps_without_a_learning_rate_show_no_trend_in_the_gap(tiny_char, make_table, tmp_path):
    config = RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 50, "seed": 4},
            "sources": {"train": {"type": "calculator"}},
            "workflow": {"type": "single_turn"},
            "policies": {
                "actor": {
                    "model": str(tiny_char),
                    "sampling": {"temperature": 1.4},
                    "batch": {"tokens_per_microbatch": 64},
                    "optimizer": {"lr": 0.0},
                }
            },
        }
    )
    rows, of_engine = sampled(tiny_char, 1.4)
    logprobs = [np.zeros(len(ids), np.float32) for ids, _ in rows]
    for (_, trained), own, said in zip(rows, logprobs, of_engine, strict=True):
        own[trained] = said
    learner = Learner(config, "actor", tmp_path)
    gaps = []
    for step in range(50):
        versions = [np.where(trained, step, -1).astype(np.int32) for _, trained in rows]
        advantages = [np.where(trained, 1.0 - i % 3, 0.0).astype(np.float32) for i, (_, trained) in enumerate(rows)]
        table = make_table(rows, behavior_logprobs=logprobs, versions=versions, advantages=advantages)
        metrics = learner.train(table)
        gaps.append((metrics["logprob_gap/max"], metrics["policy/approx_kl"]))
    learner.close()
    assert np.max(gaps) < TOLERANCE and np.abs(np.polyfit(np.arange(50), gaps, 1)[0]).max() < 1e-8
