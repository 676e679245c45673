"""The gradient of a batch is one number per weight, however the batch was cut: microbatches, packed or not, ranks."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from astraflow.algorithms.aggregate import coefficients
from astraflow.algorithms.corrections import Corrected, Reject, Truncate
from astraflow.algorithms.losses.cispo import Cispo
from astraflow.algorithms.losses.decoupled_ppo import DecoupledPpo
from astraflow.algorithms.losses.gspo import Gspo
from astraflow.algorithms.losses.m2po import M2po
from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.algorithms.losses.reinforce import Reinforce
from astraflow.algorithms.losses.sapo import Sapo
from astraflow.models.scoring.forward import packed_logprobs, prepare_model
from astraflow.models.scoring.packing import TokenRows, offsets, pack_rows
from astraflow.training.step import trained_tokens
from one_step import OF_THE_CUT, VERSION, gradient_of_step, still_settings
from plain_scores import plain_gradient, plain_logprobs

AGGREGATIONS = ["token", "sequence", 32]
LOSSES = {
    "ppo_clip": PpoClip,
    "dual_clip": lambda aggregation: PpoClip(0.2, 0.3, 3.0, aggregation),
    "reinforce": Reinforce,
    "cispo": lambda aggregation: Cispo(aggregation=aggregation),
    "sapo": lambda aggregation: Sapo(aggregation=aggregation),
    "m2po": M2po,
    "gspo": lambda aggregation: Gspo(0.3, 0.4, aggregation),
    "decoupled_ppo": lambda aggregation: DecoupledPpo(aggregation=aggregation),
    "corrected": lambda aggregation: Corrected(M2po(aggregation=aggregation), [Truncate(1.5, "sequence"), Reject(0.6)]),
}


def part(rows: TokenRows, members: np.ndarray) -> TokenRows:
    """Only these rows."""
    lengths = np.diff(rows.starts)[members]
    where = np.concatenate([np.arange(rows.starts[m], rows.starts[m + 1]) for m in members])
    flat = {
        f.name: getattr(rows, f.name)[where]
        for f in fields(rows)
        if f.name not in ("starts", "weights") and getattr(rows, f.name) is not None
    }
    return replace(rows, starts=offsets(lengths), weights=rows.weights[members], **flat)


def distance(gradient: torch.Tensor, whole: torch.Tensor) -> float:
    return float((gradient - whole).norm() / whole.norm())


def same_metrics(got: dict[str, float], expected: dict[str, float]) -> None:
    for name, value in expected.items():
        if not name.startswith("perf/") and name not in OF_THE_CUT:
            assert got[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_and_metrics_do_not_depend_on_the_microbatches(make_model, batch, loss, aggregation):
    model, loss = make_model("llama"), LOSSES[loss](aggregation=aggregation)
    metrics, whole = gradient_of_step(model, loss, batch, still_settings(10_000))
    counts = {metrics["microbatches"]}
    for budget in (1, 40, 120, 200):
        other, gradient = gradient_of_step(model, loss, batch, still_settings(budget))
        assert distance(gradient, whole) < 1e-6
        counts.add(other["microbatches"])
        same_metrics(other, metrics)
    assert min(counts) == 1 and max(counts) == 16 and len(counts) == 5


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("num_parts", [1, 2, 4, 16])
def test_sixteen_rows_in_equal_parts_on_every_family(model, batch, aggregation, num_parts):
    """By hand: parts of whole rows, each packed alone, with the denominators of the batch."""
    loss, own = PpoClip(aggregation=aggregation), prepare_model(model)
    _, whole = gradient_of_step(model, loss, batch, still_settings(grad_clip=1e9))
    num_tokens = int(batch.trained.sum())
    for members in np.array_split(np.arange(16), num_parts):
        for pack in pack_rows(batch, 10_000, members):
            tokens = trained_tokens([pack], packed_logprobs(own, pack, 1.0).logprobs, VERSION)
            losses, _ = loss(tokens)
            weights, sizes = torch.from_numpy(pack.weights), tokens.lengths[tokens.sequences]
            (coefficients(aggregation, weights, sizes, num_tokens, 16) * losses).sum().backward()
    total = torch.cat([p.grad.flatten() for p in own.parameters()])
    assert distance(total, whole) < 1e-6


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_packed_gradients_are_those_of_unpacked_rows(model, batch, aggregation):
    """REINFORCE, whose loss is said in one line, over rows one by one with transformers' own attention."""
    rows = [
        (batch.token_ids[a:b], batch.trained[a:b])
        for a, b in zip(batch.starts[:-1], batch.starts[1:], strict=True)
    ]  # fmt: skip
    losses = []
    for row, logprobs in enumerate(plain_logprobs(model, rows)):
        own = slice(batch.starts[row], batch.starts[row + 1])
        advantages = torch.from_numpy(batch.advantages[own][batch.trained[own]])
        divisor = {"token": batch.trained.sum(), "sequence": 16 * len(logprobs), 32: 16 * 32}[aggregation]
        losses.append(-batch.weights[row] * (advantages * logprobs).sum() / float(divisor))
    expected = plain_gradient(model, torch.stack(losses).sum())
    for budget in (1, 90, 10_000):
        _, got = gradient_of_step(model, Reinforce(aggregation), batch, still_settings(budget, grad_clip=1e9))
        assert distance(got, expected) < 1e-6


def test_on_policy_ratios_are_one(model, batch):
    own = prepare_model(model)
    (pack,) = pack_rows(batch, 10_000)
    with torch.no_grad():
        logprobs = packed_logprobs(own, pack, 1.0).logprobs.numpy()
    flat = batch.behavior_logprobs.copy()
    for sequence, row in enumerate(pack.rows):
        own = np.arange(batch.starts[row], batch.starts[row + 1])
        flat[own[batch.trained[own]]] = logprobs[pack.target_sequence == sequence]
    for budget in (1, 64, 10_000):
        metrics, _ = gradient_of_step(model, PpoClip(), replace(batch, behavior_logprobs=flat), still_settings(budget))
        assert metrics["policy/ratio_max"] == pytest.approx(1.0, abs=1e-4)
        assert metrics["policy/clip_fraction"] == 0 and abs(metrics["policy/approx_kl"]) < 1e-7
