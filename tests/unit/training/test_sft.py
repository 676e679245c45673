"""Supervised steps on demonstrations."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import ranked_sft
from astraflow.config.schema import RunConfig
from astraflow.errors import SourceError, TrainingError
from astraflow.models.chat import ChatTokenizer
from astraflow.models.load import load_model, state_tensors
from astraflow.models.lora.layers import effective_tensors
from astraflow.sources.calculator import CalculatorSource
from astraflow.training.learner import Learner
from astraflow.training.sft import Demonstrations, run_sft, warm_start
from astraflow.training.step import Stepper
from ranks import run_ranks


def _demonstrations(directory, size=40, batch=16, seed=0):
    source = CalculatorSource(demos=True, size=size)
    return Demonstrations(source, "demos", ChatTokenizer(directory), batch, seed)


def _config(directory, **policy):
    return RunConfig.model_validate(
        {
            "run": {"name": "r", "steps": 6, "seed": 4},
            "sources": {"train": {"type": "calculator"}, "demos": {"type": "calculator", "demos": True}},
            "workflow": {"type": "single_turn"},
            "policies": {"actor": {"model": str(directory), "trainer": {"device": "cpu"}, **policy}},
        }
    )


def test_supervised_steps_lower_the_loss(tiny_char):
    loss = {}
    for steps in (1, 20):
        config = _config(tiny_char, warm_start={"source": "demos", "steps": steps, "batch": 16, "lr": 2e-3})
        metrics = warm_start(load_model(tiny_char), tiny_char, config, "actor")
        loss[steps] = metrics["loss"]
    assert loss[20] < loss[1] - 0.5
    assert not any(name.startswith("staleness/") for name in metrics)


def test_the_rate_of_the_warm_start_is_its_own_and_flat(tiny_char, monkeypatch):
    rates, step = [], Stepper.step

    def note(self, *args):
        metrics = step(self, *args)
        rates.append(metrics["lr"])
        return metrics

    monkeypatch.setattr(Stepper, "step", note)
    optimizer = {"lr": 1.0, "schedule": "linear", "warmup_steps": 2}
    section = {"source": "demos", "steps": 4, "batch": 2, "lr": 2e-3}
    warm_start(load_model(tiny_char), tiny_char, _config(tiny_char, warm_start=section, optimizer=optimizer), "actor")
    assert rates == [2e-3] * 4


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


@pytest.mark.parametrize(
    "more",
    [{}, {"lora": {"rank": 4}}, {"trainer": {"dtype": "bfloat16"}}, {"trainer": {"dtype": "float16"}}],
    ids=["whole", "lora", "bfloat16", "float16"],
)
def test_sft_gives_the_weights_that_the_run_starts_from(tiny_char, tmp_path, more):
    policy = {
        "batch": {"tokens_per_microbatch": 64},
        "optimizer": {"betas": [0.5, 0.6], "weight_decay": 0.5, "grad_clip": 0.1},
        "warm_start": {"source": "demos", "steps": 3, "batch": 8, "lr": 2e-3},
    }
    run_sft(tiny_char, tmp_path / "sft", _config(tiny_char, **policy | more), "actor")
    assert ChatTokenizer(tmp_path / "sft").eos_ids
    learner = Learner(_config(tiny_char, **policy | more), "actor", tmp_path / "run")
    learner.close()
    ours, base = state_tensors(load_model(tmp_path / "sft")), state_tensors(load_model(tiny_char))
    started = effective_tensors(learner.model)
    assert ours.keys() == started.keys() and all(torch.equal(ours[name], started[name]) for name in ours)
    embeddings = "model.embed_tokens.weight"
    assert torch.equal(ours[embeddings], base[embeddings]) == ("lora" in more)
    run_sft(tiny_char, tmp_path / "plain", _config(tiny_char, **policy), "actor")
    plain = state_tensors(load_model(tmp_path / "plain"))
    assert torch.equal(plain[embeddings], ours[embeddings]) is (more == {}), "the arithmetic is that of trainer.dtype"


@pytest.mark.parametrize(
    ("more", "layout"), [({}, {"tensor_parallel": 2}), ({}, {"frozen": ["embed_tokens"]}), ({"lora": {"rank": 4}}, {})]
)
def test_ranks_do_it_together_and_the_first_one_saves_it_all(tiny_char, tmp_path, more, layout):
    more = {"warm_start": {"source": "demos", "steps": 3, "batch": 8, "lr": 2e-3}, **more}
    trainer = {"device": "cpu", "frozen": layout.get("frozen", [])}
    one, many = (_config(tiny_char, **more, trainer=t) for t in (trainer, {**trainer, **layout, "ranks": 2}))
    loss = run_sft(tiny_char, tmp_path / "alone", one, "actor")["loss"]
    losses = run_ranks(2, ranked_sft.saved, tmp_path, tiny_char, many)
    assert losses == pytest.approx([loss] * 2, rel=1e-4)
    alone, together = (state_tensors(load_model(tmp_path / name)) for name in ("alone", "sft"))
    assert alone.keys() == together.keys()
    assert max(float((alone[name] - together[name]).abs().max()) for name in alone) < 1e-4


def test_it_runs_where_the_trainer_would(tiny_char, tmp_path):
    config = _config(tiny_char, warm_start={"source": "demos"}, trainer={"device": "cuda"})
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    with pytest.raises(TrainingError, match=r"trainer\.device=cuda is not here"):
        run_sft(tiny_char, tmp_path / "sft", config, "actor")


def test_what_does_not_fit_into_memory_is_said_with_its_setting(tiny_char, monkeypatch):
    def too_much(*_):
        raise MemoryError

    monkeypatch.setattr(Stepper, "step", too_much)
    config = _config(tiny_char, warm_start={"source": "demos", "batch": 4})
    with pytest.raises(TrainingError, match=r"policies\.actor\.batch\.tokens_per_microbatch=8192"):
        warm_start(load_model(tiny_char), tiny_char, config, "actor")


def test_a_demonstration_beyond_the_learned_positions_is_refused(tiny_char):
    source = CalculatorSource(demos=True, size=4)
    rows = Demonstrations(source, "demos", ChatTokenizer(tiny_char), 4, 0).rows(0)
    longest = int(np.diff(rows.starts).max())
    model = GPT2LMHeadModel(GPT2Config(vocab_size=62, n_positions=longest - 1, n_embd=8, n_layer=1, n_head=1))
    with pytest.raises(TrainingError, match=r"beyond the \d+ positions.*longer demonstrations"):
        warm_start(model, tiny_char, _config(tiny_char, warm_start={"source": "demos", "batch": 32}), "actor")
