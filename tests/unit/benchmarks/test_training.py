"""bench_training: what its sides share, and that they compute the same."""

from __future__ import annotations

import statistics

import pytest
import torch
from benchmarks.bench_training import checks_of_updates, checks_of_vocabulary
from benchmarks.training import ours, plain
from benchmarks.training.models import tiny
from benchmarks.training.work import Work, make_batch, plain_model

from astraflow.models.load import load_model


@pytest.mark.parametrize(("rows", "of_rows"), [(64, 0), (8, 64), (16, 64)])
def test_a_part_of_a_batch_is_as_long_on_average(rows, of_rows):
    work = Work("", "uneven", rows, 512, "", of_rows=of_rows)
    assert len(work.sizes()) == rows
    assert statistics.mean(work.sizes()) == pytest.approx(512, rel=0.02)
    assert max(work.sizes()) <= work.widest() == Work("", "uneven", 64, 512, "").widest()


def test_a_part_must_be_whole():
    with pytest.raises(AssertionError, match="of_rows=64 must be a multiple of rows=7"):
        Work("", "uneven", 7, 512, "", of_rows=64).sizes()


def test_our_step_and_the_plain_loops_have_the_same_gradient(tmp_path):
    torch.set_num_threads(1)
    work = Work(str(tiny(tmp_path)), "uneven", 6, 40, str(tmp_path / "said.safetensors"), micro=2, budget=100)
    norms = []
    for form in plain.FORMS:
        model = plain_model(work.directory)
        norms.append(plain.build(form, model, make_batch(work, model.config.vocab_size), work)())
    model = load_model(work.directory)
    batch = make_batch(work, model.config.vocab_size)
    metrics = ours.make_stepper(model, work.budget).step(ours.token_rows(batch, work.behavior), 0)
    norms.append(metrics["grad_norm"])
    assert metrics["policy/ratio_mean"] == pytest.approx(1, abs=1e-5)
    assert norms == pytest.approx([norms[0]] * 3, rel=1e-4)


def test_the_checks_compare_with_each_plain_loop_at_its_memory():
    sides = {
        "plain one_by_one": (100, 50), "plain sorted": (80, 100), "astraflow, small packs": (150, 55),
        "astraflow, large packs": (160, 130), "trl": (20, 90),
    }  # fmt: skip
    rows = [
        {"side": side, "tokens_per_s": speed, "peak_mb": memory, "grad_norm": 1.0}
        for side, (speed, memory) in sides.items()
    ]
    checks = checks_of_updates("tiny", "uneven", rows)
    assert [check.value for check in checks] == pytest.approx([0, 1.5, 1.1, 2, 1.3, 8])
    assert [check.ok for check in checks] == [True, True, True, True, False, True]
    rows[-1]["grad_norm"] = 1.1
    assert not checks_of_updates("tiny", "uneven", rows)[0].ok


def test_the_checks_of_the_vocabulary_compare_memory_and_the_norms_of_all_sides():
    rows = [
        {"side": side, "vocabulary": size, "rows": batch, "memory_mb": memory, "grad_norm": 1.0 / batch}
        for size in (50_000, 200_000)
        for batch, memory in ((8, 100), (32, 110))
        for side in ("plain one_by_one", "astraflow")
    ]
    *same, growth = checks_of_vocabulary(rows)
    assert [check.value for check in same] == [0, 0, 0, 0]
    assert growth.value == pytest.approx(1.1)
    assert growth.ok
    rows[-1]["grad_norm"] = 2e-6  # of behaviour logprobs that were not given
    assert [check.ok for check in checks_of_vocabulary(rows)] == [True, True, True, False, True]
