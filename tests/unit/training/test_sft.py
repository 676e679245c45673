"""Supervised steps on demonstrations."""

from __future__ import annotations

import pytest
import torch

from astraflow.config.schema import Component, OptimizerSection, WarmStartSection
from astraflow.errors import SourceError
from astraflow.models.chat import ChatTokenizer
from astraflow.models.load import load_model
from astraflow.sources.calculator import CalculatorSource
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


def test_run_sft_writes_a_model_directory(tiny_char, tmp_path):
    section = WarmStartSection(source="demos", steps=3, batch=8, lr=2e-3)
    results = []
    for name in ("a", "b"):
        run_sft(tiny_char, tmp_path / name, Component(type="calculator", demos=True), section, seed=5)
        results.append(load_model(tmp_path / name))
        assert ChatTokenizer(tmp_path / name).eos_ids
    assert all(torch.equal(a, b) for a, b in zip(results[0].parameters(), results[1].parameters(), strict=True))
