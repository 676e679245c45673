"""Checkpoints: whole or invisible, loadable by anybody, and a continuation bit for bit."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer

from astraflow.algorithms.losses.ppo_clip import PpoClip
from astraflow.config.schema import OptimizerSection
from astraflow.errors import ModelError, TrainingError
from astraflow.models.checkpoints import latest_checkpoint
from astraflow.models.load import load_model, state_tensors
from astraflow.models.scoring.packing import rows_from_table
from astraflow.training import checkpoint, saver
from astraflow.training.checkpoint import (
    STATE,
    TrainingState,
    load_optimizer_tensors,
    load_state,
    optimizer_tensors,
    save_checkpoint,
    save_model,
    write_model,
)
from astraflow.training.parallel.ranks import ALONE
from astraflow.training.step import Stepper, StepSettings


def _stepper(directory):
    return Stepper(load_model(directory), PpoClip(), StepSettings(OptimizerSection(lr=1e-2), 10, 64))


def _save(root, stepper, source, version, **more):
    tensors = optimizer_tensors(stepper.model, stepper.optimizer)
    state = TrainingState(version, stepper.counts.step, 0, 0, tensors, **more)
    own = state_tensors(stepper.model)
    if state.master is not None:
        own = {name: tensor.to(torch.bfloat16) for name, tensor in own.items()}
    return save_checkpoint(root, state, lambda place: write_model(place, stepper.model, own, source))


@pytest.fixture
def stepped(tiny_char, make_table, random_rows):
    stepper = _stepper(tiny_char)
    rows = rows_from_table(make_table(random_rows([9, 12, 30])))
    stepper.step(rows, 0)
    return stepper, rows


def test_training_goes_on_bit_for_bit(stepped, tiny_char, tmp_path):
    stepper, rows = stepped
    path = _save(tmp_path, stepper, tiny_char, 1)
    again = _stepper(path)
    state = load_state(path)
    load_optimizer_tensors(again.model, again.optimizer, state.optimizer)
    for one in (stepper, again):
        one.step(rows, 1)
        one.step(rows, 2)
    assert all(torch.equal(a, b) for a, b in zip(stepper.model.parameters(), again.model.parameters(), strict=True))


def test_any_tool_can_load_it(stepped, tiny_char, tmp_path):
    path = _save(tmp_path, stepped[0], tiny_char, 1)
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert tokenizer.decode(tokenizer("3*4?", add_special_tokens=False)["input_ids"]) == "3*4?"
    assert tokenizer.chat_template and (path / "generation_config.json").is_file()
    mine = dict(stepped[0].model.named_parameters())
    assert all(torch.equal(p, mine[name]) for name, p in model.named_parameters())
    assert {p.suffix for p in path.rglob("*") if p.is_file()} <= {".json", ".safetensors", ".jinja"}, "no pickle"


def test_all_of_it_is_on_the_disk_before_it_gets_its_name(stepped, tiny_char, tmp_path, monkeypatch):
    synced, renamed, sync, rename = [], [], os.fsync, os.rename

    def note_sync(descriptor):
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        sync(descriptor)

    def note_rename(one, other):
        renamed.append((str(one), {path.rpartition("/")[2] for path in synced}))
        rename(one, other)

    monkeypatch.setattr(checkpoint.os, "fsync", note_sync)
    monkeypatch.setattr(checkpoint.os, "rename", note_rename)
    path = _save(tmp_path, stepped[0], tiny_char, 1)
    ((building, before),) = renamed
    assert before >= {p.name for p in path.rglob("*")} and Path(building).name in before
    assert synced[-1] == str(tmp_path), "the new name too"


def test_what_is_saved_is_of_the_moment_of_the_save(stepped, tmp_path, monkeypatch):
    """The thread may write late: steps go on meanwhile."""
    stepper, _ = stepped
    late, original = threading.Event(), saver.save_checkpoint

    def save_late(*args, **kwargs):
        assert late.wait(60)
        return original(*args, **kwargs)

    monkeypatch.setattr(saver, "save_checkpoint", save_late)
    own = optimizer_tensors(stepper.model, stepper.optimizer)
    kept = {name: tensor.clone() for name, tensor in own.items()}
    writing = saver.Saver(tmp_path, ALONE, 2)
    writing.submit(TrainingState(1, 1, 0, 0, own, master=own, critic=own), lambda place: None)
    for tensor in own.values():
        tensor.add_(1)
    late.set()
    writing.close()
    state = load_state(tmp_path / "step-000001")
    for found in (state.optimizer, state.master, state.critic):
        assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())


def test_the_newest_two_stay(stepped, tiny_char, tmp_path):
    for version in (1, 5, 1000000):
        newest = _save(tmp_path, stepped[0], tiny_char, version)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000005", "step-1000000"]
    assert latest_checkpoint(tmp_path) == newest


@pytest.mark.parametrize("damage", ["state.json", "optimizer.safetensors", "short", "tmp", "no state"])
def test_what_is_half_written_is_not_seen(stepped, tiny_char, tmp_path, damage):
    good = _save(tmp_path, stepped[0], tiny_char, 1)
    bad = _save(tmp_path, stepped[0], tiny_char, 2)
    if damage == "short":
        (bad / "model.safetensors").write_bytes(b"short")
    elif damage == "tmp":
        bad.rename(tmp_path / ".tmp-step-000002")
    elif damage == "no state":
        shutil.rmtree(bad / STATE)
    else:
        (bad / STATE / damage).unlink()
    assert latest_checkpoint(tmp_path) == good
    assert latest_checkpoint(tmp_path / "nothing") is None


def test_a_step_saved_again_replaces_the_old_one(stepped, tiny_char, tmp_path):
    path = _save(tmp_path, stepped[0], tiny_char, 1)
    (path / "model.safetensors").write_bytes(b"torn")
    assert latest_checkpoint(tmp_path) is None
    _save(tmp_path, stepped[0], path, 1)
    assert latest_checkpoint(tmp_path) == path and (path / "tokenizer.json").is_file()


def test_random_state_and_audited_versions_come_back(stepped, tiny_char, tmp_path):
    earlier = {"w": torch.randn(3)}
    torch.manual_seed(7)
    path = _save(tmp_path, stepped[0], tiny_char, 3, audit_versions={1: earlier, 2: earlier})
    expected = torch.randn(4)
    torch.manual_seed(8)
    state = load_state(path)
    assert torch.equal(torch.randn(4), expected)
    assert sorted(state.audit_versions) == [1, 2] and torch.equal(state.audit_versions[2]["w"], earlier["w"])


def test_a_bfloat16_checkpoint_keeps_the_exact_weights_beside_it(stepped, tiny_char, tmp_path):
    model = stepped[0].model
    master = {name: tensor.detach() for name, tensor in model.named_parameters()}
    path = _save(tmp_path, stepped[0], tiny_char, 1, master=master)
    saved = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert all(p.dtype == torch.bfloat16 for p in saved.parameters())
    assert all(p.dtype == torch.float32 for p in model.parameters())
    loaded = load_state(path).master
    assert loaded is not None and all(torch.equal(loaded[name], tensor) for name, tensor in master.items())


def test_a_full_disk_is_named_and_leaves_the_older_checkpoint(stepped, tiny_char, tmp_path, monkeypatch):
    import errno

    import astraflow.training.checkpoint as checkpoint

    good = _save(tmp_path, stepped[0], tiny_char, 1)

    def full(*_args, **_options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(TrainingError, match="No space left on device"):
        _save(tmp_path, stepped[0], tiny_char, 2)
    assert latest_checkpoint(tmp_path) == good


@pytest.mark.parametrize("part", ["model", "state"])
def test_a_full_disk_that_safetensors_wraps_is_named_too(stepped, tiny_char, tmp_path, monkeypatch, part):
    import astraflow.training.checkpoint as checkpoint

    good = _save(tmp_path, stepped[0], tiny_char, 1)

    def full(*_args, **_options):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    if part == "model":
        monkeypatch.setattr(type(stepped[0].model), "save_pretrained", full)
    else:
        monkeypatch.setattr(checkpoint, "save_file", full)
    with pytest.raises(TrainingError, match="No space left on device"):
        _save(tmp_path, stepped[0], tiny_char, 2)
    assert latest_checkpoint(tmp_path) == good
    assert [p.name for p in tmp_path.iterdir()] == [good.name], "what was half written does not fill the disk"
    if part == "model":
        with pytest.raises(TrainingError, match="No space left on device"):
            save_model(tmp_path / "plain", stepped[0].model, tiny_char)


def test_a_cut_weights_file_is_a_model_error(stepped, tiny_char, tmp_path):
    path = _save(tmp_path, stepped[0], tiny_char, 1)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[: weights.stat().st_size // 2])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(path)


def test_damaged_newer_checkpoints_are_named_in_the_log(stepped, tiny_char, tmp_path, caplog):
    good = _save(tmp_path, stepped[0], tiny_char, 1)
    bad = _save(tmp_path, stepped[0], tiny_char, 2)
    (bad / "model.safetensors").write_bytes(b"short")
    worse = tmp_path / "step-000003"
    worse.mkdir()
    assert latest_checkpoint(tmp_path) == good
    assert f"checkpoint={bad} is damaged (model.safetensors has 5 of " in caplog.text
    assert f"checkpoint={worse} is damaged ({STATE}/state.json is missing)" in caplog.text
    caplog.clear()
    assert latest_checkpoint(tmp_path, 2) is None
    shutil.rmtree(bad)
    shutil.rmtree(worse)
    caplog.clear()
    assert latest_checkpoint(tmp_path) == good and not caplog.text


def test_a_checkpoint_of_another_model_is_refused(stepped, tiny_char, tmp_path, make_model):
    state = load_state(_save(tmp_path, stepped[0], tiny_char, 1))
    other = Stepper(make_model("llama"), PpoClip(), StepSettings(OptimizerSection(), 10, 64))
    with pytest.raises(TrainingError, match="model that was checkpointed"):
        load_optimizer_tensors(other.model, other.optimizer, state.optimizer)
