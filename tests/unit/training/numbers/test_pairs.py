"""Every combination of what makes a step cheaper against a step said plainly: rows one by one, all logits, merged
weights, transformers' own attention.

What is combined: a head computed in chunks, packing, prefixes computed once, LoRA, microbatches, activations computed
again.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

import astraflow.models.scoring.forward as forward
from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config.schema import LoraSection
from astraflow.errors import ModelError
from astraflow.models.lora.layers import LoraLinear, add_lora
from astraflow.models.scoring.packing import pack_rows, rows_from_table
from astraflow.models.scoring.recompute import recompute_activations
from one_step import gradient_of_step, still_settings
from plain_scores import plain_logits

ENTROPY, Z_LOSS, TEMPERATURE = 0.01, 1e-3, 0.7
SECTION = LoraSection(rank=4, alpha=6)


def siblings(generator):
    """Three groups of four: a common prompt, sometimes the first sampled tokens too; and forks are such rows."""
    rows = []
    for size in (24, 9, 15):
        prompt, begun = generator.integers(3, 61, size), generator.integers(3, 61, 5)
        for sibling in range(4):
            own = np.concatenate([begun[: 2 * sibling], generator.integers(3, 61, generator.integers(1, 20))])[:24]
            rows.append((np.concatenate([prompt, own]), np.arange(size + len(own)) >= size))
    return rows


@pytest.fixture(params=["siblings", "strangers"])
def rows(request, make_table, random_rows):
    generator = np.random.default_rng(2)
    listed = siblings(generator) if request.param == "siblings" else random_rows([33, 30, 5, 18, 12, 11, 41, 2])
    table = make_table(
        listed,
        behavior_logprobs=[generator.normal(-4, 0.6, len(ids)).astype(np.float32) for ids, _ in listed],
        advantages=[np.full(len(ids), generator.normal(), np.float32) for ids, _ in listed],
        weight=[1.0 if i % 3 else 0.5 for i in range(len(listed))],
    )
    return rows_from_table(table)


def plain_gradient_of_step(model, weights, rows):
    """PPO with an entropy bonus and a z-loss, token mean, as in the papers. `weights`: what is trained -> merged."""
    trained, merged = weights
    total = torch.zeros(())

    def called(ids):
        def logits(**inputs):
            return torch.func.functional_call(model, merged, (), inputs)

        return plain_logits(logits, ids, TEMPERATURE)

    for row, weight in enumerate(rows.weights):
        own = slice(rows.starts[row], rows.starts[row + 1])
        ids, mask = np.array(rows.token_ids[own]), np.array(rows.trained[own][1:])
        logits = called(ids)[torch.from_numpy(mask)]
        logs = logits.log_softmax(-1)
        logprobs = logs.gather(1, torch.from_numpy(ids[1:][mask]).long()[:, None])[:, 0]
        behavior, advantages = (torch.tensor(x[own][1:][mask]) for x in (rows.behavior_logprobs, rows.advantages))
        ratio = (logprobs - behavior).clamp(-20, 20).exp()
        losses = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        losses = losses + ENTROPY * (logs.exp() * logs).sum(-1) + Z_LOSS * logits.logsumexp(-1).square()
        total = total + float(weight) * losses.sum()
    gradients = torch.autograd.grad(total / float(rows.trained.sum()), trained)
    return torch.cat([g.flatten() for g in gradients])


def all_weights(model):
    named = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    return list(named.values()), named


def merged_weights(model, own):
    """Of the adapters of `own` on the weights of `model`, which has none."""
    trained, merged = [], {}
    for name, layer in own.named_modules():
        if isinstance(layer, LoraLinear):
            a, b = (x.weight.detach().clone().requires_grad_() for x in (layer.lora_A, layer.lora_B))
            trained += [a, b]
            merged[f"{name}.weight"] = model.get_parameter(f"{name}.weight").detach() + 1.5 * b @ a
    return trained, merged


@pytest.mark.parametrize("chunk", [3, 10_000])
@pytest.mark.parametrize("lora", [False, True], ids=["all", "lora"])
@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
def test_a_step_with_all_of_it_is_the_plain_step(model, family, rows, monkeypatch, chunk, lora, again):
    if lora and family == "gpt2":
        with pytest.raises(ModelError, match=r"lora.targets=all-linear is no linear layer of this model.*known: none"):
            add_lora(model, SECTION)
        return
    own = copy.deepcopy(model)
    if lora:
        add_lora(own, SECTION)
        with torch.no_grad():
            for name, parameter in own.named_parameters():
                if name.endswith("lora_B.weight"):
                    parameter.normal_(0, 0.3)
    expected = plain_gradient_of_step(model, merged_weights(model, own) if lora else all_weights(model), rows)
    if again:
        recompute_activations(own)
    monkeypatch.setattr(forward, "CHUNK_ELEMENTS", 61 * chunk)
    for budget in (1, 90, 10_000):
        settings = still_settings(budget, grad_clip=1e9, entropy=ENTROPY, z_loss=Z_LOSS, temperature=TEMPERATURE)
        _, got = gradient_of_step(own, PpoClip(), rows, settings)
        assert (got - expected).norm() / expected.norm() < 2e-6


def test_the_batches_share_what_they_should(make_table, rows, request):
    (pack,) = pack_rows(rows, 10_000)
    shared = 1 - pack.num_computed / pack.num_tokens
    assert shared > 0.3 if "siblings" in request.node.name else shared == 0
