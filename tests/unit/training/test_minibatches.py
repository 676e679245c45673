"""Several updates per batch: the cut, the proximal policy, and a whole step against a plain loop in float64."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow.algorithms.corrections import Corrected, Reject, Truncate
from astraflow.algorithms.kl import ESTIMATORS as KINDS
from astraflow.algorithms.losses.decoupled_ppo import DecoupledPpo
from astraflow.algorithms.losses.m2po import M2po
from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config.schema import KlSection, OptimizerSection
from astraflow.models.scoring.packing import TokenRows, rows_from_table
from astraflow.training.optimize.minibatches import groups_of, placed_packs, selections
from astraflow.training.reference import KlPenalty
from astraflow.training.step import StepInterrupted, Stepper, StepSettings

LENGTHS = [5, 40, 12, 12, 33, 7, 9, 21]
GROUPS = np.array([0, 0, 1, 1, 2, 2, 3, 3])
OPTIMIZER = OptimizerSection(lr=3e-3, eps=1e-2, grad_clip=0.5)  # a large eps: tiny gradients make no whole step


def _settings(budget=10_000, **more):
    return StepSettings(OPTIMIZER, total_steps=10, tokens_per_microbatch=budget, seed=5, **more)


@pytest.fixture
def batch(make_table, random_rows):
    generator, listed = np.random.default_rng(1), random_rows(LENGTHS)
    return rows_from_table(
        make_table(
            listed,
            behavior_logprobs=[generator.normal(-4, 0.6, len(ids)).astype(np.float32) for ids, _ in listed],
            advantages=[np.full(len(ids), generator.normal(), np.float32) for ids, _ in listed],
            weight=[1.0 if i % 3 else 0.5 for i in range(len(listed))],
        )
    )


def _weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def _rows(sizes):
    """Rows without tokens but for `sizes` trained ones each."""
    size = sum(sizes)
    return TokenRows(
        starts=np.concatenate(([0], np.cumsum(sizes))).astype(np.int64),
        token_ids=np.zeros(size, np.int32),
        trained=np.ones(size, bool),
        behavior_logprobs=np.zeros(size, np.float32),
        advantages=np.zeros(size, np.float32),
        versions=np.zeros(size, np.int32),
        weights=np.ones(len(sizes), np.float32),
    )


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=20),
    st.integers(1, 3),
    st.integers(1, 6),
    st.integers(0, 9),
)
def test_each_epoch_deals_out_whole_groups_evenly(rows, epochs, count, seed):
    groups, sizes = np.array([g for g, _ in rows]), [n for _, n in rows]
    cut = list(selections(_rows(sizes), groups, epochs, count, (seed, 7)))
    again = list(selections(_rows(sizes), groups, epochs, count, (seed, 7)))
    assert all(np.array_equal(a, b) for a, b in zip(cut, again, strict=True))
    trained = [i for i, n in enumerate(sizes) if n]
    names = {int(groups[i]) for i in trained}
    per_epoch = min(count, len(names))
    assert len(cut) == epochs * per_epoch
    for epoch in range(epochs if names else 0):
        parts = cut[epoch * per_epoch : (epoch + 1) * per_epoch]
        assert sorted(np.concatenate(parts).tolist()) == trained
        owned = [{int(groups[i]) for i in part} for part in parts]
        assert sum(map(len, owned)) == len(names), "a group is in two minibatches"
        assert max(map(len, owned)) - min(map(len, owned)) <= 1 and min(map(len, owned)) > 0


def test_the_cut_changes_with_epoch_step_and_seed():
    groups, rows = np.arange(32), _rows([1] * 32)
    one, two = selections(rows, groups, 2, 2, (0, 0)), selections(rows, groups, 1, 2, (0, 1))
    parts = [*list(one)[::2], next(two), next(selections(rows, groups, 1, 2, (1, 0)))]
    assert len({tuple(part) for part in parts}) == 4


def test_places_lead_back_to_the_rows(batch):
    for budget in (1, 64, 10_000):
        placed = placed_packs(batch, budget, np.array([1, 4, 6]))
        assert sorted(np.concatenate(placed.places)) == [
            t for r in (1, 4, 6) for t in range(batch.starts[r], batch.starts[r + 1]) if batch.trained[t]
        ]
        for pack, places in zip(placed.packs, placed.places, strict=True):
            assert np.array_equal(batch.token_ids[places], pack.target_ids)
            assert np.array_equal(batch.behavior_logprobs[places], pack.behavior_logprobs)
            assert np.array_equal(batch.versions[places], pack.versions)


def _logprobs(model, ids):
    return (
        model(torch.as_tensor(ids)[None])
        .logits[0, :-1]
        .log_softmax(-1)
        .gather(-1, torch.as_tensor(ids)[1:, None])[:, 0]
    )


def _plain_step(model, rows, epochs, minibatches, formula):
    """The updates of a step in float64: one sequence at a time, no packing, torch's AdamW."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    decay, plain = ([p for p in model.parameters() if (p.ndim >= 2) is matrix] for matrix in (True, False))
    section = OPTIMIZER
    optimizer = torch.optim.AdamW(
        [{"params": decay}, {"params": plain}], lr=section.lr, betas=section.betas, eps=section.eps, weight_decay=0.0
    )
    sequences = []
    for r in range(len(rows.weights)):
        own = slice(rows.starts[r], rows.starts[r + 1])
        ids, trained = rows.token_ids[own].astype(np.int64), torch.tensor(rows.trained[own][1:])
        with torch.no_grad():
            proximal = _logprobs(model, ids)[trained]
        mu, a = (torch.tensor(x[own][1:]).double()[trained] for x in (rows.behavior_logprobs, rows.advantages))
        sequences.append((ids, trained, mu, a, proximal, float(rows.weights[r])))
    for selected in selections(rows, GROUPS, epochs, minibatches, (5, 0)):
        chosen = [sequences[r] for r in selected]
        total = sum(int(trained.sum()) for _, trained, *_ in chosen)
        optimizer.zero_grad()
        for ids, trained, mu, a, proximal, weight in chosen:
            losses = formula(_logprobs(model, ids)[trained], mu, a, proximal)
            (weight * losses.sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), section.grad_clip)
        optimizer.step()
    return _weights(model)


def _clipped(pi, mu, a, proximal):
    r = (pi - mu).exp()
    return -torch.minimum(r * a, r.clamp(0.8, 1.2) * a)


def _decoupled(pi, mu, a, proximal):
    return (proximal - mu).exp() * _clipped(pi, proximal, a, proximal)


@pytest.mark.parametrize(
    ("loss", "formula"),
    [
        (PpoClip(), _clipped),
        (DecoupledPpo(proximal="exact", max_weight=0), _decoupled),
        (Corrected(PpoClip(), [], anchored=True), lambda pi, mu, a, proximal: _clipped(pi, proximal, a, proximal)),
        (
            Corrected(PpoClip(), [Truncate(1.5)]),
            lambda pi, mu, a, q: (q - mu).exp().clamp(max=1.5) * _clipped(pi, q, a, q),
        ),
    ],
    ids=["behavior", "three policies", "anchored", "truncated"],
)
def test_a_step_is_that_of_a_plain_loop(make_model, batch, loss, formula):
    model = make_model("llama")
    before, expected = _weights(model), _plain_step(model, batch, 2, 2, formula)
    for budget in (10_000, 40):
        stepper = Stepper(copy.deepcopy(model), loss, _settings(budget, epochs=2, minibatches=2))
        metrics = stepper.step(batch, 0, GROUPS)
        moved, wanted = _weights(stepper.model) - before, expected.float() - before
        assert (moved - wanted).norm() / wanted.norm() < 1e-3, budget
        assert metrics["updates"] == 4 and stepper.counts.step == 1 and metrics["policy/clip_fraction"] > 0
    whole = Stepper(copy.deepcopy(model), loss, _settings(epochs=2))
    whole.step(batch, 0, GROUPS)
    assert ((_weights(whole.model) - before) - wanted).norm() / wanted.norm() > 1e-2, "the cut should matter here"


def test_the_moment_of_m2po_is_that_of_the_update(make_model, batch):
    model, seen = make_model("llama"), []
    for budget in (10_000, 1):
        stepper = Stepper(copy.deepcopy(model), M2po(0.01), _settings(budget, epochs=2, minibatches=2))
        seen.append((stepper.step(batch, 0, GROUPS), _weights(stepper.model) - _weights(model)))
    (a, moved), (b, other) = seen
    assert (moved - other).norm() / moved.norm() < 1e-4 and a["policy/clip_fraction"] == b["policy/clip_fraction"] > 0


def test_what_is_known_of_the_whole_batch_holds_for_all_updates(make_model, batch):
    """A KL in the reward is taken off once, from the whole batch, before the cut."""
    reference = np.random.default_rng(2).normal(-4, 0.5, len(batch.trained)).astype(np.float32)
    rows, model = replace(batch, ref_logprobs=reference), make_model("llama")
    penalty = KlPenalty(KlSection(coef=0.3, place="reward"), 1.0)
    stepper = Stepper(copy.deepcopy(model), PpoClip(), _settings(epochs=2, minibatches=2))
    stepper.penalty = penalty
    metrics = stepper.step(rows, 0, GROUPS)
    placed = placed_packs(rows, 10_000)
    (pack,) = penalty.prepare(placed.packs, lambda score: stepper.scored(placed, score))
    changed = batch.advantages.copy()
    changed[placed_packs(rows, 10_000).places[0]] = pack.advantages
    plain = Stepper(copy.deepcopy(model), PpoClip(), _settings(epochs=2, minibatches=2))
    plain.step(replace(batch, advantages=changed), 0, GROUPS)
    assert torch.equal(_weights(stepper.model), _weights(plain.model)) and metrics["policy/kl_k2"] > 0


def test_a_kl_in_the_loss_finds_its_reference_in_each_minibatch(make_model, batch):
    """At learning rate 0 all updates see one policy, so their mean is that of the batch in one update."""
    reference = np.random.default_rng(2).normal(-4, 0.5, len(batch.trained)).astype(np.float32)
    seen = []
    for more in ({}, {"minibatches": 3}):
        stepper = Stepper(make_model("llama"), PpoClip(), replace(_settings(**more), optimizer=OptimizerSection(lr=0)))
        stepper.penalty = KlPenalty(KlSection(coef=0.3), 1.0)
        seen.append(stepper.step(replace(batch, ref_logprobs=reference), 0, GROUPS))
        torch.manual_seed(0)
    once, cut = seen
    assert cut["updates"] == 3
    assert all(cut[f"policy/kl_{name}"] == pytest.approx(once[f"policy/kl_{name}"], rel=1e-5) for name in KINDS)


def test_once_the_weights_have_changed_a_step_is_not_interrupted(make_model, batch):
    stops = []
    stepper = Stepper(make_model(), PpoClip(), _settings(minibatches=2), lambda: bool(stops))
    stepper.optimizer.register_step_post_hook(lambda *_: stops.append(0))
    stepper.step(batch, 0, GROUPS)
    assert len(stops) == 2 and stepper.counts.step == 1
    with pytest.raises(StepInterrupted):
        stepper.step(batch, 0, GROUPS)


def test_a_step_that_skipped_an_update_is_not_interrupted_either(make_model, batch):
    """It would be done again, and the skipped update would count twice."""
    stops = []
    stepper = Stepper(make_model(), PpoClip(), _settings(minibatches=2), lambda: bool(stops))
    original = stepper._skip
    stepper._skip = lambda *args: (stops.append(0), original(*args))
    stepper.step(replace(batch, advantages=np.full_like(batch.advantages, np.nan)), 0, GROUPS)
    assert stepper.counts.skipped == 2 and stepper.counts.step == 1


def test_ratios_of_later_updates_leave_one(make_model, batch):
    """On fresh data: what clips is the distance of the updates from where the step began."""
    loss = Corrected(PpoClip(0.02, 0.02), [Reject(0.01, 99.0, 0.0)], anchored=True)
    fractions = []
    for epochs in (1, 4):
        stepper = Stepper(make_model(), loss, _settings(epochs=epochs))
        fractions.append(stepper.step(batch, 0, GROUPS)["policy/clip_fraction"])
    assert fractions[0] == 0 < fractions[1]


def test_groups_are_those_of_the_table(make_table):
    table = make_table([([1, 2], [0, 1])] * 3, group_id=["b", "a", "b"])
    assert groups_of(table).tolist() == [0, 1, 0]
