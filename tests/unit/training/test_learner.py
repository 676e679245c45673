"""What a trainer owns: versions, checkpoints, and that a crash changes nothing."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config.schema import RunConfig
from astraflow.errors import ConfigError
from astraflow.training.learner import Learner
from astraflow.training.step import StepInterrupted


@pytest.fixture
def make_config(tiny_char):
    """A run of the character model; keyword arguments replace policy settings."""

    def make(**policy):
        section = {
            "model": str(tiny_char),
            "batch": {"groups": 2, "max_staleness": 1, "tokens_per_microbatch": 64},
            "optimizer": {"lr": 1e-2, "schedule": "cosine", "warmup_steps": 1},
            **policy,
        }
        return RunConfig.model_validate(
            {
                "run": {"name": "r", "steps": 6, "seed": 4},
                "sources": {"train": {"type": "calculator"}, "demos": {"type": "calculator", "demos": True}},
                "workflow": {"type": "single_turn"},
                "policies": {"actor": section},
            }
        )

    return make


@pytest.fixture
def batches(make_table, random_rows):
    """Six batches; batch i was sampled at versions i and, for some tokens, i - 1."""
    tables = []
    for i in range(6):
        rows = random_rows([20, 9, 14, 33], seed=i)
        versions = [
            np.where(mask, np.maximum(0, i - (np.arange(len(ids)) < 8)), -1).astype(np.int32) for ids, mask in rows
        ]
        draw = np.random.default_rng(i)
        logprobs = [np.where(mask, draw.normal(-4, 0.1, len(ids)), 0).astype(np.float32) for ids, mask in rows]
        advantages = [np.full(len(ids), draw.normal(), np.float32) for ids, _ in rows]
        groups = ["train/0/0", "train/0/0", "train/0/1", "train/0/1"]
        tables.append(
            make_table(rows, versions=versions, behavior_logprobs=logprobs, advantages=advantages, group_id=groups)
        )
    return tables


def _weights(learner):
    return torch.cat([p.detach().flatten() for p in learner.model.parameters()])


def _stable(metrics):
    return {k: v for k, v in metrics.items() if not k.startswith("perf/")}


@pytest.mark.parametrize("warm", [True, False])
def test_version_0_stays_where_a_warm_start_made_it(make_config, batches, tmp_path, warm):
    """It is the reference of stages, and nowhere else."""
    policy = {"warm_start": {"source": "demos", "steps": 1, "batch": 2}} if warm else {}
    config = make_config(**policy)
    config = config.model_copy(update={"weights": config.weights.model_copy(update={"keep": 2, "deltas": False})})
    learner = Learner(config, "actor", tmp_path)
    for table in batches:
        learner.train(table)
    learner.close()
    assert (0 in learner.store.versions()) is warm


@pytest.mark.parametrize(
    "policy",
    [
        {},
        {"algorithm": {"loss": "m2po"}},
        {"algorithm": {"loss": "gspo", "corrections": ["truncate", {"type": "reject", "low": 0.1}]}},
        {"trainer": {"dtype": "bfloat16"}},
        {"trainer": {"dtype": "float16"}},
        {"lora": {"rank": 4, "alpha": 6}},
        {
            "batch": {"groups": 2, "tokens_per_microbatch": 64, "epochs": 2, "minibatches": 2},
            "algorithm": {"anchor": "proximal"},
        },
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(make_config, batches, tmp_path, policy):
    config = make_config(**policy)
    whole = Learner(config, "actor", tmp_path / "whole")
    expected = [_stable(whole.train(table)) for table in batches]

    first = Learner(config, "actor", tmp_path / "cut")
    for i, table in enumerate(batches[:4]):
        assert _stable(first.train(table)) == expected[i]
        if i == 1:
            first.save()
    first.close()  # killed: versions 3 and 4 were published, only version 2 was saved
    again = Learner(config, "actor", tmp_path / "cut")
    assert again.version == 2
    got = [_stable(again.train(table)) for table in batches[2:]]
    whole.flush()
    again.flush()
    assert [{k: (v, e[k]) for k, v in g.items() if v != e[k]} for g, e in zip(got, expected[2:], strict=True)] == [
        {}
    ] * 4
    assert torch.equal(_weights(whole), _weights(again))
    for version in (4, 5, 6):
        ours, theirs = again.store.fetch(version), whole.store.fetch(version)
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    assert again.store.num_kept_existing == 0, "the same versions were published again"
    whole.close(), again.close()


def test_other_content_under_a_known_version_is_kept_and_counted(make_config, batches, tmp_path):
    first = Learner(make_config(), "actor", tmp_path)
    first.save()
    first.train(batches[0])
    first.close()
    again = Learner(make_config(), "actor", tmp_path)
    metrics = again.train(batches[1])
    assert metrics["weights/kept_existing"] == 1
    again.close()


def test_every_version_is_published_with_the_files_an_engine_needs(make_config, batches, tmp_path):
    learner = Learner(make_config(), "actor", tmp_path)
    learner.train(batches[0])
    learner.flush()
    assert learner.store.versions() == [0, 1]
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} <= set(learner.store.files(1))
    tensors = learner.store.fetch(1)
    assert all(torch.equal(p, tensors[n]) for n, p in learner.model.named_parameters())
    learner.close()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_policy_of_half_precision_publishes_it_and_trains_float32(make_config, batches, tmp_path, dtype):
    learner = Learner(make_config(trainer={"dtype": dtype}), "actor", tmp_path)
    metrics = learner.train(batches[0])
    learner.flush()
    assert all(t.dtype == getattr(torch, dtype) for t in learner.store.fetch(1).values())
    assert all(p.dtype == torch.float32 for p in learner.model.parameters())
    assert np.isfinite(metrics["logprob_gap/p99"])
    learner.close()


def test_a_warm_start_is_done_once(make_config, tmp_path):
    config = make_config(warm_start={"source": "demos", "steps": 3, "batch": 4})
    cold = Learner(make_config(), "actor", tmp_path / "cold")
    first = Learner(config, "actor", tmp_path / "warm")
    assert not torch.equal(_weights(cold), _weights(first)) and first.version == 0
    first.finish_saving()
    again = Learner(config, "actor", tmp_path / "warm", should_stop=lambda: True)  # a supervised step would raise
    assert torch.equal(_weights(first), _weights(again)) and not again.stepper.optimizer.state
    for learner in (cold, first, again):
        learner.close()


def test_an_interrupted_step_keeps_the_version(make_config, batches, tmp_path):
    stop = []
    learner = Learner(make_config(), "actor", tmp_path, should_stop=lambda: bool(stop))
    stop.append(1)
    with pytest.raises(StepInterrupted):
        learner.train(batches[0])
    assert learner.version == 0 and learner.store.versions() == [0]
    learner.close()


class Uncorrected(PpoClip):
    """A loss of a user."""


class Corrected(PpoClip):
    """One that says it corrects off-policy data."""

    corrects_off_policy = True


def test_replay_of_old_data_asks_the_loss_of_a_user_whether_it_corrects_them(make_config, tmp_path):
    operators = [{"type": "replay", "max_age": 5}]
    config = make_config(operators=operators, algorithm={"loss": f"{__name__}:Uncorrected"})
    with pytest.raises(ConfigError, match=r"operators.0.max_age=5 must be <= policies.actor.batch.max_staleness=1"):
        Learner(config, "actor", tmp_path / "a")
    config = make_config(operators=operators, algorithm={"loss": f"{__name__}:Corrected"})
    Learner(config, "actor", tmp_path / "b").close()


def test_corrections_of_the_run_file_reach_the_loss(make_config, batches, tmp_path):
    reached = {"correction/truncated", "correction/rejected", "policy/ess", "policy/ess_sequences"}
    corrections = ["truncate", {"type": "reject", "high": 4.0}]
    learner = Learner(make_config(algorithm={"corrections": corrections}), "actor", tmp_path / "a")
    assert reached <= set(learner.train(batches[0])) and learner.stepper.loss.corrections[1].high == 4.0
    learner.close()
    config = make_config(algorithm={"corrections": [{"type": "truncate", "hi": 3}]})
    with pytest.raises(ConfigError, match=r"policies.actor.algorithm.corrections.0.hi.*did you mean 'high'"):
        Learner(config, "actor", tmp_path / "b")


def test_a_wrong_loss_option_is_named(make_config, tmp_path):
    config = make_config(algorithm={"loss": {"type": "ppo_clip", "clip_hi": 0.3}})
    with pytest.raises(ConfigError, match=r"policies.actor.algorithm.loss.clip_hi.*did you mean 'clip_high'"):
        Learner(config, "actor", tmp_path)


def test_truncated_trajectories_are_left_out_of_the_loss_where_that_is_wanted(make_config, batches, tmp_path):
    cut = [False, True, False, True]
    table = batches[0].set_column(batches[0].column_names.index("truncated"), "truncated", pa.array(cut))
    whole = Learner(make_config(), "actor", tmp_path / "whole")
    masked = Learner(make_config(algorithm={"mask_truncated": True}), "actor", tmp_path / "masked")
    only = Learner(make_config(), "actor", tmp_path / "only")
    a, b, c = whole.train(table), masked.train(table), only.train(table.filter(pa.array([not x for x in cut])))
    assert b["masked/truncated"] == 0.5 and b["sequences"] == 2 < a["sequences"] and "masked/truncated" not in a
    assert b["loss"] == c["loss"] and torch.equal(_weights(masked), _weights(only))
    for learner in (whole, masked, only):
        learner.close()
