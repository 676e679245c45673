from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from astraflow.contracts import Engine
from astraflow.engines.local import LocalEngine
from astraflow.engines.scripted import ScriptedEngine
from astraflow.models.load import effective_checksum, load_model, state_tensors
from astraflow.testing.engines.effective import EffectiveWeightsSuite


class TestLocal(EffectiveWeightsSuite):
    @pytest.fixture
    def start(self) -> Callable[[Path, str], Engine]:
        return lambda directory, dtype: LocalEngine(directory, dtype=dtype)


def test_a_scripted_engine_says_that_it_has_no_weights() -> None:
    engine = ScriptedEngine([[3]])
    engine.load_weights(2, {}).result(0)
    said = engine.effective_weights().result(0)
    assert (said.version, said.checksum) == (2, "")


def test_the_checksum_sees_every_bit_name_and_broken_tie(endless_dir: Path) -> None:
    model = load_model(endless_dir)
    tensors = state_tensors(model)
    seen = {effective_checksum(tensors)}
    assert effective_checksum(dict(reversed(tensors.items()))) in seen, "the order does not count"
    first, second, *rest = tensors
    changed = tensors[second].clone()
    changed.view(torch.int32).view(-1)[-1] ^= 1
    seen.add(effective_checksum({**tensors, second: changed}))
    seen.add(effective_checksum({**{n: tensors[n] for n in [first, *rest]}, f"{second}.": tensors[second]}))
    seen.add(effective_checksum({**tensors, first: tensors[first].T}))
    seen.add(effective_checksum(tensors, "bfloat16"))
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
    seen.add(effective_checksum(state_tensors(model)))
    assert len(seen) == 6
