"""A logprob is that of its own row alone, whatever else is computed with it. fp32, each layout and microbatch size."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from astraflow.models.scoring.forward import packed_logprobs, prepare_model
from astraflow.models.scoring.packing import pack_rows, rows_from_lists
from astraflow.training.feed.tensors import microbatches
from plain_scores import plain_gradient, plain_logprobs

LENGTHS = [19, 7, 7, 30, 2, 12, 11, 7, 25, 64, 40]
EOS = 2
TOLERANCE = 1e-4


def packed(model, rows, temperature=1.0, budget=10_000, members=None):
    """Logprobs by row, from packs."""
    found = [torch.zeros(0)] * len(rows)
    for pack in pack_rows(rows_from_lists(rows), budget, members):
        logprobs = packed_logprobs(model, pack, temperature).logprobs
        for sequence, row in enumerate(pack.rows):
            found[row] = logprobs[torch.from_numpy(pack.target_sequence == sequence)]
    return found


def by_any_trainer(model, table, layout):
    """Logprobs by row, from the microbatches that a trainer of one's own is given."""
    found = [torch.zeros(0)] * table.num_rows
    for micro in microbatches(table, 10_000, layout):
        logits = model(**micro.inputs()).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, micro.input_ids[:, 1:, None])[..., 0]
        parts = logprobs[micro.loss_mask[:, 1:]]
        sizes = [sum(mask) for mask in (table.column("loss_mask")[int(row)].as_py() for row in micro.rows)]
        for row, part in zip(micro.rows.tolist(), parts.split(sizes), strict=True):
            found[row] = part
    return found


@pytest.mark.parametrize("layout", ["ours", "packed", "padded"])
@pytest.mark.parametrize("per_microbatch", [1, 2, 8])
def test_logprobs_do_not_depend_on_the_microbatch(model, make_table, random_rows, per_microbatch, layout):
    rows = random_rows(LENGTHS)
    expected = torch.cat(plain_logprobs(model, rows))
    got = []
    if layout == "ours":
        model = prepare_model(model)
    for start in range(0, len(rows), per_microbatch):
        part = rows[start : start + per_microbatch]
        got += packed(model, part) if layout == "ours" else by_any_trainer(model, make_table(part), layout)
    torch.testing.assert_close(torch.cat(got), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_packed_equals_unpacked_in_logprobs_and_gradients(model, random_rows, budget):
    rows = random_rows(LENGTHS)
    own = prepare_model(copy.deepcopy(model))
    expected, got = torch.cat(plain_logprobs(model, rows)), torch.cat(packed(own, rows, budget=budget))
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    weights = torch.linspace(-1, 1, len(got))
    wanted, actual = plain_gradient(model, (expected * weights).sum()), plain_gradient(own, (got * weights).sum())
    assert (wanted - actual).norm() / wanted.norm() < 1e-6


@pytest.mark.parametrize("layout", ["ours", "packed", "padded"])
def test_a_sequence_does_not_see_its_neighbours(model, make_table, random_rows, layout):
    first, second, other = random_rows([12, 12, 12], seed=3)
    if layout == "ours":
        model = prepare_model(model)

    def scored(*rows):
        return packed(model, rows)[-1] if layout == "ours" else by_any_trainer(model, make_table(rows), layout)[-1]

    alone = scored(second)
    with torch.no_grad():
        for neighbour in (first, other, *random_rows([11, 40], seed=4)):  # of its length, shorter, longer
            torch.testing.assert_close(scored(neighbour, second), alone, rtol=0, atol=1e-5)


def test_what_stands_in_a_pad_changes_nothing(model, make_table, random_rows):
    """Pads carry the id of EOS, as where a tokenizer has no other, or anything."""
    rows = random_rows([20, 9, 3])
    (micro,) = microbatches(make_table(rows), 10_000, "padded")
    gradients = []
    for pad in (0, EOS, 17):
        micro.input_ids[~micro.attention_mask] = pad
        logits = model(**micro.inputs()).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, micro.input_ids[:, 1:, None])[..., 0]
        gradients.append(plain_gradient(model, logprobs[micro.loss_mask[:, 1:]].sum()))
    gradients.append(plain_gradient(model, torch.cat(plain_logprobs(model, rows)).sum()))
    own = prepare_model(model)
    gradients.append(plain_gradient(own, torch.cat(packed(own, rows)).sum()))
    for other in gradients[1:]:
        assert (other - gradients[0]).norm() / gradients[0].norm() < 1e-6


@pytest.mark.parametrize("layout", ["ours", "packed", "padded"])
def test_the_sampled_eos_is_trained_and_no_other(make_table, layout):
    """One row ends with the EOS that the model said, one was cut, and one goes on after an EOS that was given."""
    rows = [
        ([1, 10, 11, EOS], [0, 0, 1, 1]),
        ([1, 10, 11, 12], [0, 0, 1, 1]),
        ([1, 10, EOS, 12, 13, 14, EOS, EOS], [0, 1, 0, 0, 1, 1, 1, 0]),
    ]
    trained = []
    if layout == "ours":
        for pack in pack_rows(rows_from_lists([(np.array(i), np.array(m, bool)) for i, m in rows]), 10_000):
            trained += pack.target_ids.tolist()
    else:
        for micro in microbatches(make_table(rows), 10_000, layout):
            trained += micro.input_ids[micro.loss_mask].tolist()
    assert sorted(trained) == [EOS, EOS, 10, 11, 11, 12, 13, 14]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_entropies_and_normalisers_are_those_of_the_scaled_logits(model, random_rows, temperature):
    (row,) = random_rows([15])
    tokens = torch.as_tensor(row[0])[None]
    logits = model(input_ids=tokens).logits[0, :-1].double()[torch.as_tensor(row[1][1:])] / temperature
    (pack,) = pack_rows(rows_from_lists([row]), 100)
    scores = packed_logprobs(prepare_model(model), pack, temperature)
    expected = torch.distributions.Categorical(logits=logits).entropy()
    torch.testing.assert_close(scores.entropies.double(), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(scores.log_norms.double(), logits.logsumexp(-1), rtol=1e-4, atol=1e-5)
    assert all(math.isfinite(x) for x in scores.logprobs.tolist())
