"""Supervised steps on demonstrations."""

from __future__ import annotations

import pytest
import torch

from astraflow.config.schema import OptimizerSection, RunConfig, WarmStartSection
from astraflow.errors import SourceError
from astraflow.models.chat import ChatTokenizer
from astraflow.models.load import load_model, state_tensors
from astraflow.models.lora.layers import effective_tensors
from astraflow.sources.calculator import CalculatorSource
from astraflow.training.learner import Learner
from astraflow.training.sft import Demonstrations, run_sft, supervised_steps


def _demonstrations(directory, size=40, batch=16, seed=0):
    source = CalculatorSource(demos=True, size=size)
    return Demonstrations(source, "demos", ChatTokenizer(directory), batch, seed)


def test_supervised_steps_lower_the_loss(tiny_char):
    section = WarmStartSection(source="demos", steps=1, batch=16, lr=2e-3)
    model, demonstrations = load_model(tiny_char), _demonstrations(tiny_char)
    first = supervised_steps(model, demonstrations, section, OptimizerSection(), 4096)
    last = supervised_steps(model, demonstrations, section.model_copy(update={"steps": 20}), OptimizerSection(), 4096)
    assert last["loss"] < first["loss"] - 0.5
    assert not any(name.startswith("staleness/") for name in last)


def test_only_what_the_assistant_wrote_is_trained(tiny_char):
    rows = _demonstrations(tiny_char).rows(0)
    tokenizer = ChatTokenizer(tiny_char)
    for row in range(4):
        own = slice(rows.starts[row], rows.starts[row + 1])
        ids, trained = rows.token_ids[own], rows.trained[own]
        text, context = (tokenizer.decode(part, skip_special_tokens=False) for part in (ids[trained], ids[~trained]))
        assert text.startswith("[") and text.endswith(".<eos>") and text.count("<eos>") == 2
        assert context.startswith("<bos>") and "?" in context and "<eos>" not in context


def test_a_batch_is_a_function_of_seed_and_step_and_an_epoch_has_each_row_once(tiny_char):
    one, two = _demonstrations(tiny_char), _demonstrations(tiny_char)
    late = two.rows(4).token_ids.tolist()
    assert [one.rows(step).token_ids.tolist() for step in range(5)][4] == late
    assert sorted(one._index(p) for p in range(40, 80)) == list(range(40))
    assert _demonstrations(tiny_char, seed=1).rows(4).token_ids.tolist() != late


def test_a_row_that_is_no_demonstration_is_named(tiny_char):
    source = CalculatorSource(size=3)
    with pytest.raises(SourceError, match=r"sources.demos row \d.*messages"):
        Demonstrations(source, "demos", ChatTokenizer(tiny_char), 2, 0).rows(0)


@pytest.mark.parametrize("lora", [None, {"rank": 4}], ids=["whole", "lora"])
def test_sft_gives_the_weights_that_the_run_starts_from(tiny_char, tmp_path, lora):
    policy = {
        "model": str(tiny_char),
        "batch": {"tokens_per_microbatch": 64},
        "optimizer": {"betas": [0.5, 0.6], "weight_decay": 0.5, "grad_clip": 0.1},
        "warm_start": {"source": "demos", "steps": 3, "batch": 8, "lr": 2e-3},
        "lora": lora,
    }
    config = RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 6, "seed": 4},
            "sources": {"train": {"type": "calculator"}, "demos": {"type": "calculator", "demos": True}},
            "workflow": {"type": "single_turn"},
            "policies": {"actor": policy},
        }
    )
    run_sft(tiny_char, tmp_path / "sft", config, "actor")
    assert ChatTokenizer(tmp_path / "sft").eos_ids
    learner = Learner(config, "actor", tmp_path / "run")
    learner.close()
    ours, base = state_tensors(load_model(tmp_path / "sft")), state_tensors(load_model(tiny_char))
    started = effective_tensors(learner.model)
    assert ours.keys() == started.keys() and all(torch.equal(ours[name], started[name]) for name in ours)
    embeddings = "model.embed_tokens.weight"
    assert torch.equal(ours[embeddings], base[embeddings]) == (lora is not None)
