"""A KL penalty in the step: its gradient, its references, and that neither the cut nor a restart changes anything."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config.schema import KlSection, OptimizerSection
from astraflow.errors import ModelError, TrainingError
from astraflow.models.load import load_model
from astraflow.models.scoring.forward import prepare_model
from astraflow.models.scoring.packing import pack_rows, rows_from_table
from astraflow.stages.context import StageRun, build_stage
from astraflow.testing.engines.effective import random_batch, run_config, write_model
from astraflow.training.learner import Learner
from astraflow.training.reference import KlPenalty, Reference
from astraflow.training.step import Stepper, StepSettings
from astraflow.types import WeightVersion
from plain_scores import sampled_rows

LENGTHS = [5, 40, 12, 12, 33, 7, 9, 21, 64, 3, 17, 12]
VARIANTS = [("loss", "k2"), ("loss", "k3"), ("reward", "k1"), ("reward", "k2"), ("reward", "k3")]


@pytest.fixture
def table(make_table, random_rows):
    """12 uneven rows, the last a fork of the first but one, with logprobs near those of an untrained model."""
    draw = np.random.default_rng(1)
    listed = random_rows(LENGTHS)
    size = len(listed)
    return make_table(
        listed,
        episode_id=["e"] * size,
        branch=[*range(size)],
        parent_branch=[-1] * (size - 1) + [1],
        fork_at=[0] * (size - 1) + [25],
        behavior_logprobs=[draw.normal(-4, 0.6, len(ids)).astype(np.float32) for ids, _ in listed],
        advantages=[np.full(len(ids), draw.normal(), np.float32) for ids, _ in listed],
        weight=[1.0 if i % 4 else 0.5 for i in range(size)],
    )


@pytest.fixture
def models(make_model):
    """A policy and another model of its shape, its reference."""
    policy, reference = make_model("llama"), make_model("llama")
    return policy, prepare_model(reference)


def _stepper(model, section, reference, budget=10_000, lr=0.0):
    settings = StepSettings(OptimizerSection(lr=lr, grad_clip=1e9), total_steps=100, tokens_per_microbatch=budget)
    stepper = Stepper(copy.deepcopy(model), PpoClip(clip_low=0.9, clip_high=9.0), settings)
    stepper.penalty = KlPenalty(section, 1.0, reference)
    return stepper


def _gradient(stepper, rows):
    seen = []
    stepper.optimizer.register_step_pre_hook(
        lambda optimizer, *_: seen.append(
            torch.cat([p.grad.flatten() for group in optimizer.param_groups for p in group["params"]])
        )
    )
    return stepper.step(rows, 5), seen[0]


def _plain_logprobs(model, rows):
    """By row: places of the trained tokens and their logprobs, one whole sequence at a time, without packing."""
    for row, (start, stop) in enumerate(zip(rows.starts, rows.starts[1:], strict=False)):
        ids = torch.from_numpy(rows.token_ids[start:stop].astype(np.int64))
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        trained = torch.from_numpy(rows.trained[start:stop])
        yield row, start + trained.nonzero()[:, 0].numpy(), logprobs[trained[1:]]


@pytest.mark.parametrize(("place", "estimator"), VARIANTS)
def test_the_gradient_is_that_of_the_formula_in_float64(models, table, place, estimator):
    policy, reference = models
    rows, coef = rows_from_table(table), 0.3
    stepper = _stepper(policy, KlSection(coef=coef, place=place, estimator=estimator), Reference(reference))
    metrics, gradient = _gradient(stepper, rows)

    plain, other = (copy.deepcopy(m).double() for m in models)
    for model in (plain, other):
        model.set_attn_implementation("eager")
    k = {"k1": lambda x: x, "k2": lambda x: x**2 / 2, "k3": lambda x: (-x).exp() - 1 + x}[estimator]
    terms, to_go, kls = [], [], []
    with torch.no_grad():
        references = [values for *_, values in _plain_logprobs(other, rows)]
    for (row, places, logprobs), ref in zip(_plain_logprobs(plain, rows), references, strict=True):
        behavior = torch.from_numpy(rows.behavior_logprobs[places]).double()
        terms.append((row, (logprobs - behavior).exp(), torch.from_numpy(rows.advantages[places]).double()))
        kls.append(k(logprobs - ref))
        to_go.append(k(behavior - ref).flip(0).cumsum(0).flip(0))
    count, mean = sum(len(x) for x in to_go), torch.cat(to_go).mean()
    loss = torch.zeros((), dtype=torch.float64)
    for (row, ratio, advantage), kl, returns in zip(terms, kls, to_go, strict=True):
        if place == "reward":
            advantage = advantage - coef * (returns - mean)
        surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.1, 10.0) * advantage)
        losses = -surrogate + (coef * kl if place == "loss" else 0)
        loss = loss + rows.weights[row] * losses.sum() / count
    loss.backward()
    expected = torch.cat([p.grad.flatten() for p in _as_grouped(plain, stepper)])
    assert (gradient.double() - expected).norm() / expected.norm() < 1e-4
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    assert metrics[f"policy/kl_{estimator}"] == pytest.approx(torch.cat(kls).mean().item(), rel=1e-4)


def _as_grouped(model, stepper):
    """Parameters of `model` in the order of the optimizer's."""
    names = {id(p): name for name, p in stepper.model.named_parameters()}
    own = dict(model.named_parameters())
    return [own[names[id(p)]] for group in stepper.optimizer.param_groups for p in group["params"]]


@pytest.mark.parametrize(("place", "estimator"), VARIANTS)
def test_the_cut_into_microbatches_changes_nothing(models, table, place, estimator):
    policy, reference = models
    section, rows = KlSection(coef=0.3, place=place, estimator=estimator), rows_from_table(table)
    metrics, whole = _gradient(_stepper(policy, section, Reference(reference)), rows)
    for budget in (1, 40, 90):
        other, gradient = _gradient(_stepper(policy, section, Reference(reference), budget), rows)
        assert other["microbatches"] > 1 and (gradient - whole).norm() / whole.norm() < 1e-5
        for name in ("loss", "policy/kl_k1", "policy/kl_k2", "policy/kl_k3"):
            assert other[name] == pytest.approx(metrics[name], rel=1e-4), name


def test_a_policy_is_at_no_distance_from_itself(models, table):
    policy, _ = models
    rows = rows_from_table(table.set_column(table.column_names.index("advantages"), "advantages", _zeros(table)))
    stepper = _stepper(policy, KlSection(coef=1.0), Reference(prepare_model(copy.deepcopy(policy))))
    metrics, gradient = _gradient(stepper, rows)
    for name in ("k1", "k2", "k3"):
        assert abs(metrics[f"policy/kl_{name}"]) < 1e-6
    assert gradient.abs().max() < 1e-5


def _zeros(table):
    lists = [[0.0] * len(ids) for ids in table.column("token_ids").to_pylist()]
    return pa.array(lists, pa.list_(pa.float32()))


def test_a_column_gives_what_the_trainers_own_reference_gives(models, table):
    policy, reference = models
    own = Reference(reference)
    values = np.zeros(sum(LENGTHS), np.float32)
    rows = rows_from_table(table)
    assert rows.places is not None
    for pack in pack_rows(rows, 50):
        at = rows.starts[pack.rows[pack.target_sequence]] + pack.position_ids[pack.target_index] + 1
        values[rows.places[at]] = own.logprobs(pack, 1.0).numpy()
    column = pa.ListArray.from_arrays(pa.array(np.cumsum([0, *LENGTHS]), pa.int32()), pa.array(values))
    with_column = rows_from_table(table.append_column("ref_logprobs", column))
    section = KlSection(coef=0.3)
    expected, gradient = _gradient(_stepper(policy, section, own), rows)
    got, same = _gradient(_stepper(policy, section, None), with_column)
    assert (same - gradient).norm() / gradient.norm() < 1e-5
    assert got["policy/kl_k3"] == pytest.approx(expected["policy/kl_k3"], rel=1e-5)


@pytest.mark.parametrize("broken", ["missing", "null", "nan"])
def test_rows_without_reference_are_refused(models, table, broken):
    values = [[np.nan if broken == "nan" else -1.0] * length for length in LENGTHS]
    if broken == "null":
        values[3] = None
    if broken != "missing":
        table = table.append_column("ref_logprobs", pa.array(values, pa.list_(pa.float32())))
    stepper = _stepper(models[0], KlSection(), None)
    with pytest.raises(TrainingError, match=r"batch\.ref_logprobs=(missing|not finite) .*algorithm\.kl"):
        stepper.step(rows_from_table(table), 5)


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_a_large_coefficient_keeps_the_policy_near_the_start(make_model, make_table, place):
    """On policy: replies of three tokens to one prompt, rewarded for each low id."""
    moved, rewards = {}, {}
    for coef in (1e-9, 10.0):
        torch.manual_seed(0)
        model = make_model()
        reference = Reference(prepare_model(copy.deepcopy(model)))
        stepper = _stepper(model, KlSection(coef=coef, place=place), reference, lr=2e-3)
        for _ in range(25):
            ids, logprobs = sampled_rows(stepper.model, 64)
            reward = (ids[:, 1:] < 30).float().mean(1)
            listed = [(row, [False, True, True, True]) for row in ids.numpy()]
            advantages = [np.full(4, a, np.float32) for a in (reward - reward.mean()).tolist()]
            table = make_table(listed, behavior_logprobs=list(logprobs.numpy()), advantages=advantages)
            metrics = stepper.step(rows_from_table(table), 0)
        moved[coef], rewards[coef] = metrics["policy/kl_k1"], reward.mean().item()
    assert moved[10.0] < 0.1 * moved[1e-9] and rewards[10.0] < rewards[1e-9] - 0.1, (moved, rewards)


# The trainer's own reference and the stage's.

SHAPES = {
    "whole": {},
    "whole, warm": {"warm_start": {"source": "demos", "steps": 2, "batch": 2}},
    "bfloat16, warm": {"warm_start": {"source": "demos", "steps": 2, "batch": 2}, "trainer": {"dtype": "bfloat16"}},
    "lora": {"lora": {"rank": 4, "alpha": 6}},
    "lora, warm": {"lora": {"rank": 4, "alpha": 6}, "warm_start": {"source": "demos", "steps": 2, "batch": 2}},
}


@pytest.fixture
def start(tmp_path):
    """Learners of one directory, closed at the end."""
    model, made = write_model(tmp_path / "model", tied=True), []

    def make(where="run", kl=None, stages=None, **policy):
        kl = {"coef": 0.5} | (kl or {})
        section = {"optimizer": {"lr": 1e-2}, "algorithm": {"kl": kl}, **policy}
        config = run_config(model, section)
        raw = config.model_dump() | {"stages": stages or {}}
        raw["sources"]["demos"] = {"type": "calculator", "demos": True}
        made.append(Learner(type(config).model_validate(raw), "actor", tmp_path / where))
        return made[-1]

    yield make
    for learner in made:
        learner.close()


def _metrics(learner, step):
    return {k: v for k, v in learner.train(random_batch(step)).items() if not k.startswith("perf/")}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_restart_keeps_the_reference(start, shape):
    whole = start("whole", **SHAPES[shape])
    expected = [_metrics(whole, step) for step in range(4)]
    limit = 1e-3 if "bfloat16" in shape else 1e-9  # there version 0, as published, is rounded
    assert abs(expected[0]["policy/kl_k3"]) < limit and expected[3]["policy/kl_k3"] > 1e-3
    first = start("cut", **SHAPES[shape])
    for step in range(2):
        first.train(random_batch(step))
    first.save()
    first.finish_saving()
    again = start("cut", **SHAPES[shape])
    assert again.version == 2
    assert [_metrics(again, step) for step in (2, 3)] == expected[2:]


@pytest.mark.parametrize("shape", ["whole", "whole, warm", "lora", "lora, warm"])
def test_the_stage_and_the_trainer_have_the_same_reference(start, shape):
    learner = start(stages={"ref": {"type": "ref_logprobs"}}, **SHAPES[shape])
    assert learner.stepper.penalty.reference is None
    own = start("other", **SHAPES[shape]).stepper.penalty.reference
    run = StageRun(learner.config, "ref", threads=1)
    run.hear({"actor": WeightVersion("actor", 0, (learner.store.url,))})
    stage, table = build_stage(run), random_batch(0)
    table = table.append_column("ref_logprobs", stage.run(table).column("ref_logprobs"))
    gaps = [np.abs(own.logprobs(p, 1.0).numpy() - p.ref_logprobs) for p in pack_rows(rows_from_table(table), 100)]
    assert np.percentile(np.concatenate(gaps), 99) < 1e-4
    assert abs(learner.train(table)["policy/kl_k3"]) < 1e-6
    with pytest.raises(TrainingError, match=r"batch\.ref_logprobs=missing"):
        learner.train(random_batch(1))
    stage.close()


def test_the_reference_of_an_adapter_is_its_base_and_no_second_model(start, tmp_path):
    learner = start(**SHAPES["lora"])
    reference = learner.stepper.penalty.reference
    assert reference.model is learner.model
    for step in range(2):
        learner.train(random_batch(step))
    base = Reference(prepare_model(load_model(tmp_path / "model")))
    for pack in pack_rows(rows_from_table(random_batch(7)), 100):
        ours, theirs = reference.logprobs(pack, 1.0), base.logprobs(pack, 1.0)
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
        assert (Reference(learner.model).logprobs(pack, 1.0) - theirs).abs().max() > 1e-2


def test_a_reference_of_another_directory(start, tmp_path):
    with torch.no_grad():
        other = load_model(shutil.copytree(tmp_path / "model", tmp_path / "other"))
        for parameter in other.parameters():
            parameter.mul_(1.5)
    other.save_pretrained(tmp_path / "other")
    for shape in ("whole", "lora"):
        learner = start(shape, kl={"reference": str(tmp_path / "other")}, **SHAPES[shape])
        assert learner.train(random_batch(0))["policy/kl_k2"] > 1e-3


def test_a_reference_with_another_vocabulary_is_refused(start, tmp_path):
    other: Path = shutil.copytree(tmp_path / "model", tmp_path / "other")
    text = (other / "tokenizer.json").read_text(encoding="utf-8")
    assert '"7"' in text
    (other / "tokenizer.json").write_text(text.replace('"7"', '"é"'), encoding="utf-8")
    with pytest.raises(ModelError, match=r"algorithm\.kl\.reference=.* has another vocabulary .*'7' is None"):
        start(kl={"reference": str(other)})
