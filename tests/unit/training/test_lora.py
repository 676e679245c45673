"""A policy that trains an adapter: what learns, what is published, what a checkpoint holds."""

from __future__ import annotations

import json
from contextlib import closing

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from astraflow.engines.local import LocalEngine
from astraflow.errors import ModelError, TrainingError
from astraflow.models.checkpoints import latest_checkpoint
from astraflow.models.load import content_checksum
from astraflow.models.lora.adapter import read_adapter
from astraflow.models.lora.layers import effective_tensors, lora_tensors
from astraflow.models.lora.nf4 import Nf4Linear
from astraflow.models.registry import model_directory
from astraflow.testing.engines.effective import random_batch, run_config, write_model
from astraflow.training.learner import Learner

LORA = {"lora": {"rank": 4, "alpha": 6, "targets": ["q_proj", "up_proj"]}, "optimizer": {"lr": 1e-2}}


@pytest.fixture
def model(tmp_path):
    return write_model(tmp_path / "model", tied=True)


@pytest.fixture
def start(model, tmp_path):
    """Learners of one run directory, closed at the end."""
    made = []

    def make(**policy):
        made.append(Learner(run_config(model, {**LORA, **policy}), "actor", tmp_path / "run"))
        return made[-1]

    yield make
    for learner in made:
        learner.close()


def test_only_the_adapter_learns_and_has_optimizer_state(start):
    learner = start()
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    for step in range(2):
        learner.train(random_batch(step))
    small = set(lora_tensors(learner.model))
    changed = {name for name, tensor in learner.model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert changed == small and len(small) == 2 * 2 * 2
    state = learner.stepper.optimizer.state
    assert sum(p.numel() for p in state) == sum(before[name].numel() for name in small)
    assert all(p.grad is None for p in learner.model.parameters())


def test_a_version_is_the_adapter_and_names_its_base(start, model):
    learner = start()
    learner.train(random_batch(0))
    learner.flush()
    manifest = learner.store.manifest(1)
    assert all(entry.name.endswith((".lora_A.weight", ".lora_B.weight")) for entry in manifest.tensors)
    files = {name: path.read_bytes() for name, path in learner.store.files(1).items()}
    adapter = read_adapter(files)
    assert adapter is not None and (adapter.scaling, adapter.base) == (1.5, content_checksum(model))
    assert json.loads(files["adapter_config.json"])["target_modules"] == ["q_proj", "up_proj"]
    assert "tokenizer.json" in files


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")
def test_a_checkpoint_is_a_merged_model_and_an_adapter_for_peft(start, model):
    learner = start()
    learner.train(random_batch(0))
    learner.save()
    learner.finish_saving()
    path = latest_checkpoint(learner.root)
    merged = AutoModelForCausalLM.from_pretrained(path)
    expected = effective_tensors(learner.model)
    own = dict(merged.named_parameters())
    assert own.keys() == expected.keys() and all(torch.equal(own[n], expected[n]) for n in own)
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), path / "adapter")
        torch.testing.assert_close(theirs(input_ids=ids).logits, merged(input_ids=ids).logits, atol=1e-5, rtol=0)
    assert latest_checkpoint(path.parent) == path
    (path / "adapter" / "adapter_model.safetensors").unlink()
    assert latest_checkpoint(path.parent) is None


def test_another_rank_or_no_adapter_is_refused_at_a_resume(start):
    learner = start()
    learner.train(random_batch(0))
    learner.save()
    learner.finish_saving()
    with pytest.raises(ModelError, match=r"does not fit policies\.\*\.lora"):
        start(lora={"rank": 8})
    with pytest.raises(TrainingError, match=r"checkpoint\.optimizer"):
        start(lora=None)


def test_another_scaling_or_base_is_refused_at_a_resume(start, model):
    learner = start()
    learner.train(random_batch(0))
    learner.save()
    learner.finish_saving()
    with pytest.raises(TrainingError, match=r"lora alpha / rank=16\.0 is not that of the checkpoint \(1\.5\)"):
        start(lora={**LORA["lora"], "alpha": 64})
    known = content_checksum(model)
    stored = model / "model.safetensors"
    save_file({name: tensor * 1.5 for name, tensor in load_file(stored).items()}, stored, {"format": "pt"})
    with pytest.raises(TrainingError, match=f"checkpoint adapter base={known} is not the model of the policy now"):
        start()


def test_a_checkpoint_without_adapter_is_refused(start):
    learner = start(lora=None)
    learner.train(random_batch(0))
    learner.save()
    learner.finish_saving()
    with pytest.raises(TrainingError, match="holds no adapter"):
        start()


def test_a_base_in_four_bits_is_what_engines_serve(model, tmp_path, monkeypatch):
    monkeypatch.setenv("ASTRAFLOW_CACHE", str(tmp_path / "cache"))
    policy = {**LORA, "lora": {**LORA["lora"], "quantize": "nf4"}}
    config = run_config(model, policy)
    base = model_directory(config.base_of("actor"), tmp_path / "cache", 0)
    with closing(Learner(config, "actor", tmp_path / "run")) as learner, closing(LocalEngine(base)) as engine:
        assert sum(isinstance(module, Nf4Linear) for module in learner.model.modules()) == 2 * 7
        checksums = []
        for step in range(3):
            learner.train(random_batch(step))
            learner.flush()
            version = learner.version
            adapter = read_adapter({name: path.read_bytes() for name, path in learner.store.files(version).items()})
            engine.load_weights(version, learner.store.fetch(version), adapter).result(60)
            served = engine.effective_weights().result(60)
            assert served == learner.effective_weights("float32")
            checksums.append(served.checksum)
        assert len(set(checksums)) == 3
        learner.save()
        learner.finish_saving()
        merged = AutoModelForCausalLM.from_pretrained(latest_checkpoint(learner.root))
        expected = effective_tensors(learner.model)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in merged.named_parameters())
    with closing(Learner(config, "actor", tmp_path / "run")) as resumed:
        assert resumed.version == 3 and resumed.effective_weights("float32").checksum == checksums[-1]
    with pytest.raises(TrainingError, match="is not the model of the policy now"):
        Learner(run_config(model, LORA), "actor", tmp_path / "run")
