"""A batch that cannot be trained: what is said, what is kept, what goes on."""

from __future__ import annotations

import errno

import numpy as np
import pyarrow.parquet
import pytest
import torch

import astraflow.training.guards.batches as batches
from astraflow.config.schema import PolicySection, RunConfig
from astraflow.errors import TrainingError
from astraflow.models.scoring.packing import rows_from_lists, rows_from_table
from astraflow.training.guards.batches import check_rows
from astraflow.training.guards.memory import naming_memory
from astraflow.training.learner import Learner


@pytest.fixture
def learner(tiny_char, tmp_path):
    config = RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 9},
            "sources": {"train": {"type": "calculator"}},
            "workflow": {"type": "single_turn"},
            "policies": {"actor": {"model": str(tiny_char), "optimizer": {"lr": 1e-3}}},
        }
    )
    made = Learner(config, "actor", tmp_path)
    yield made
    made.close()


@pytest.fixture
def broken(make_table, random_rows):
    """A batch with an advantage of its second row that is no number."""
    rows = random_rows([9, 14, 5])
    advantages = [np.where(mask, 1.0, 0.0).astype(np.float32) for _, mask in rows]
    advantages[1][-1] = np.nan
    return make_table(rows, advantages=advantages)


def weights(learner):
    return torch.cat([p.detach().flatten().clone() for p in learner.model.parameters()])


def test_a_step_that_is_not_finite_is_skipped_and_its_batch_kept(
    tmp_path, learner, broken, make_table, random_rows, caplog
):
    before = weights(learner)
    metrics = learner.train(broken)
    assert metrics["skipped_steps"] == 1 and torch.equal(weights(learner), before) and learner.version == 1
    (path,) = (tmp_path / "skipped_batches" / "actor").iterdir()
    assert path.name == "step-000001.parquet"
    kept = pyarrow.parquet.read_table(path)
    assert kept.num_rows == 3 and np.isnan(kept.column("advantages")[1].as_py()[-1])
    assert rows_from_table(kept).token_ids.tolist() == rows_from_table(broken).token_ids.tolist()
    assert f"not finite in the batch: advantages of row 1; the batch is {path}" in caplog.text
    learner.train(make_table(random_rows([9, 14, 5])))
    assert not torch.equal(weights(learner), before)
    assert list((tmp_path / "skipped_batches" / "actor").iterdir()) == [path]


def test_the_limit_ends_the_trainer_and_every_batch_was_kept(tmp_path, learner, broken):
    learner.train(broken)
    learner.train(broken)
    with pytest.raises(TrainingError, match=r"3 steps in a row; lower optimizer.lr .* skipped_batches/ of the run"):
        learner.train(broken)
    folder = tmp_path / "skipped_batches" / "actor"
    assert sorted(p.name for p in folder.iterdir()) == [f"step-{i:06d}.parquet" for i in (1, 2, 3)]


def test_weights_that_are_not_finite_are_told_apart_from_the_batch(learner, make_table, random_rows, caplog):
    with torch.no_grad():
        next(iter(learner.model.parameters()))[5, 5] = torch.nan
    learner.train(make_table([(np.full(9, 5), np.arange(9) > 2)]))
    assert "the batch itself is finite: look at policy/ratio_max" in caplog.text


def test_a_full_disk_does_not_end_the_trainer(learner, broken, monkeypatch, caplog):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pyarrow.parquet, "write_table", full)
    assert learner.train(broken)["skipped_steps"] == 1
    assert "cannot be written (No space left on device); make room" in caplog.text


def test_only_so_many_batches_are_kept(tmp_path, learner, broken, make_table, random_rows, monkeypatch):
    monkeypatch.setattr(batches, "MAX_KEPT", 2)
    good = make_table(random_rows([9, 14, 5]))
    for table in (broken, good, broken, good, broken):
        learner.train(table)
    assert len(list((tmp_path / "skipped_batches" / "actor").iterdir())) == 2


def test_a_trajectory_longer_than_a_microbatch_is_trained_in_one_of_its_own(
    make_table, random_rows, tiny_char, tmp_path
):
    config = RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 2},
            "sources": {"train": {"type": "calculator"}},
            "workflow": {"type": "single_turn"},
            "policies": {"actor": {"model": str(tiny_char), "batch": {"tokens_per_microbatch": 16}}},
        }
    )
    learner = Learner(config, "actor", tmp_path)
    metrics = learner.train(make_table(random_rows([40, 8, 7])))
    learner.close()
    assert metrics["microbatch_tokens/max"] == 39 and metrics["microbatches"] == 2 and metrics["sequences"] == 3


@pytest.mark.parametrize(("token", "value"), [(62, "62"), (-1, "-1")])
def test_a_token_that_the_model_does_not_have_is_named(learner, make_table, token, value):
    table = make_table([([1, 5, 6], [0, 1, 1]), ([1, token, 6], [0, 1, 1])])
    with pytest.raises(TrainingError, match=rf"batch.rows\[1\].token_ids={value} must be ids of the model, 0 to 61"):
        learner.train(table)


def test_a_row_beyond_learned_positions_is_named_and_beyond_rotary_ones_trained(make_model):
    rows = rows_from_lists([(np.full(20, 5), np.arange(20) > 2), (np.full(513, 5), np.arange(513) > 2)])
    with pytest.raises(TrainingError, match=r"batch.rows\[1\]=513 tokens is beyond the 512 positions"):
        check_rows(rows, make_model("gpt2"))
    check_rows(rows, make_model("llama"))


SECTION = PolicySection(model="tiny-char", batch={"tokens_per_microbatch": 8192})


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nGPU 0 has ..."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate(handle)"),
        MemoryError(),
    ],
)
def test_out_of_memory_names_the_setting_to_lower(error):
    with (
        pytest.raises(
            TrainingError, match=r"policies.actor.batch.tokens_per_microbatch=8192; lower it to 4096"
        ) as caught,
        naming_memory("actor", SECTION, longest=900),
    ):
        raise error
    assert "policies.actor.lora" in caught.value.fix and "\n" not in str(caught.value)


def test_out_of_memory_on_a_long_trajectory_says_that_a_smaller_microbatch_would_not_help():
    with (
        pytest.raises(TrainingError, match=r"longest trajectory has 9000 tokens.*sampling.max_tokens"),
        naming_memory("actor", SECTION, longest=9000),
    ):
        raise MemoryError


def test_out_of_memory_in_a_step_is_named(learner, make_table, random_rows, monkeypatch):
    def exhausted(*_):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(learner.stepper, "step", exhausted)
    with pytest.raises(TrainingError, match=r"memory=out of memory ran out in a step"):
        learner.train(make_table(random_rows([9])))


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match="mat1 and mat2"), naming_memory("actor", SECTION, longest=9):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
