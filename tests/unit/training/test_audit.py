"""The logprob gap: zero for the right weights, loud for the wrong ones."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from astraflow.models.scoring.forward import prepare_model
from astraflow.models.scoring.packing import rows_from_table
from astraflow.training.audit import Auditor
from astraflow.training.parallel.ranks import ALONE
from astraflow.training.parallel.scoring import scoring_of


@pytest.fixture
def versions(make_model):
    """Three weight versions of one model."""
    model = make_model()
    found = {}
    for version in (4, 5, 6):
        torch.manual_seed(version)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        found[version] = copy.deepcopy(model)
    return found


def _tensors(model):
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.fixture
def sampled(make_table, random_rows, versions):
    """Rows whose tokens were sampled under versions 4 and 5, the version rising inside two of four rows."""
    listed = random_rows([20, 33, 9, 26])
    logprobs, labels = [], []
    for i, (ids, mask) in enumerate(listed):
        label = np.where(np.arange(len(ids)) < len(ids) // 2, 4, 5) if i < 2 else np.full(len(ids), 4 + i % 2)
        row = np.zeros(len(ids), np.float32)
        for version in (4, 5):
            with torch.no_grad():
                logits = versions[version](input_ids=torch.as_tensor(ids)[None]).logits[0, :-1] / 0.8
            chosen = logits.log_softmax(-1).gather(1, torch.as_tensor(ids)[1:, None])[:, 0].numpy()
            here = (label == version)[1:]
            row[1:][here] = chosen[here]
        logprobs.append(row)
        labels.append(np.where(mask, label, -1).astype(np.int32))
    return rows_from_table(make_table(listed, behavior_logprobs=logprobs, versions=labels))


def _scoring(model):
    return scoring_of(prepare_model(model), ALONE)


def _auditor(versions, **changes):
    settings = {"num_rows": 4, "keep": 3, "temperature": 0.8, "max_gap": 1e-3, "seed": 0} | changes
    auditor = Auditor(**settings)
    for version, model in versions.items():
        auditor.remember(version, _tensors(model))
    return auditor


def test_tokens_of_mixed_versions_agree_with_the_weights_that_sampled_them(versions, sampled):
    live = prepare_model(versions[6])
    before = _tensors(live)
    metrics = _auditor(versions).audit(scoring_of(live, ALONE), sampled, 7, 10_000)
    assert metrics["logprob_gap/p99"] < 1e-4 and metrics["logprob_gap/max"] < 1e-4
    assert metrics["logprob_gap/tokens"] == sampled.trained.sum()
    assert metrics["logprob_gap/alarm"] == 0 and metrics["logprob_gap/unknown_tokens"] == 0
    assert all(torch.equal(p, before[name]) for name, p in live.named_parameters())


@pytest.mark.parametrize("fault", ["temperature", "version", "nan"])
def test_a_wrong_engine_raises_the_alarm(versions, sampled, fault):
    changes, rows = {}, sampled
    if fault == "temperature":
        changes = {"temperature": 1.0}
    elif fault == "version":
        rows = replace(sampled, versions=np.where(sampled.versions == 4, 5, sampled.versions))
    else:
        rows = replace(sampled, behavior_logprobs=np.full_like(sampled.behavior_logprobs, np.nan))
    assert _auditor(versions, **changes).audit(_scoring(versions[6]), rows, 7, 10_000)["logprob_gap/alarm"] == 1


def test_versions_that_are_no_longer_held_are_counted(versions, sampled):
    metrics = _auditor(versions, keep=2).audit(_scoring(versions[6]), sampled, 7, 10_000)
    assert metrics["logprob_gap/unknown_tokens"] == (sampled.versions[sampled.trained] == 4).sum()
    assert metrics["logprob_gap/tokens"] == (sampled.versions[sampled.trained] == 5).sum()


def test_the_choice_is_a_function_of_the_step_and_prefers_rows_of_mixed_versions(versions, sampled):
    auditor = _auditor(versions, num_rows=2)
    first = [auditor._choose(sampled, step).tolist() for step in range(20)]
    assert first == [auditor._choose(sampled, step).tolist() for step in range(20)]
    assert len({tuple(c) for c in first}) > 1 and all(set(c) & {0, 1} for c in first)


def test_no_rows_no_metrics_and_nothing_is_kept(versions, sampled):
    auditor = _auditor(versions, num_rows=0)
    assert auditor.audit(_scoring(versions[6]), sampled, 7, 10_000) == {} and not auditor.versions


def test_the_gap_of_each_engine_by_itself_and_the_worst_one_alarms(versions, sampled):
    noise = np.zeros_like(sampled.behavior_logprobs)
    noise[sampled.starts[1] : sampled.starts[2]] = 0.01
    noisy = sampled.behavior_logprobs - noise
    rows = replace(sampled, behavior_logprobs=noisy, engines=np.array(["full", "half", "full", ""]))
    metrics = _auditor(versions, num_rows=4).audit(_scoring(versions[6]), rows, 7, 10_000)
    assert metrics["logprob_gap/full/max"] < 1e-4 and metrics["logprob_gap/alarm"] == 1
    assert metrics["logprob_gap/half/p50"] == pytest.approx(0.01, abs=1e-4)
    counts = [int(rows.trained[rows.starts[i] : rows.starts[i + 1]].sum()) for i in range(4)]
    assert metrics["logprob_gap/half/tokens"] == counts[1]
    assert metrics["logprob_gap/full/tokens"] == counts[0] + counts[2]
    assert metrics["logprob_gap/tokens"] == sum(counts) and not [name for name in metrics if "//" in name]


def test_an_engine_of_few_rows_is_looked_at_too(versions, sampled):
    rows = replace(sampled, engines=np.array(["a", "a", "a", "b"]))
    assert all(3 in _auditor(versions, num_rows=2)._choose(rows, step) for step in range(20))
    each = replace(sampled, engines=np.array(["a", "b", "c", "d"]))
    in_turn = [_auditor(versions, num_rows=1)._choose(each, step).tolist() for step in range(4)]
    assert sorted(in_turn) == [[0], [1], [2], [3]]
