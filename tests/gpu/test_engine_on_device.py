"""The embedded engine on a device keeps every promise of the contract: `pytest -m gpu tests/gpu`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from astraflow.engines.local import LocalEngine
from astraflow.models.load import load_model, state_tensors
from astraflow.testing.engines.suite import EngineCase, EngineSuite
from astraflow.types import Sampling
from decoding import fresh_logprobs

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
PROMPT = [1, 5, 9, 13, 17, 21]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Without EOS: generations end by length only."""
    torch.manual_seed(0)
    made = tmp_path_factory.mktemp("model")
    Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=40, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, head_dim=8, max_position_embeddings=512, initializer_range=0.3, bos_token_id=1,
            eos_token_id=None, pad_token_id=None,
        )
    ).save_pretrained(made)  # fmt: skip
    return made


class TestLocalOnDevice(EngineSuite):
    @pytest.fixture
    def case(self, directory: Path) -> Iterator[EngineCase]:
        engine, model = LocalEngine(directory, device="cuda"), load_model(directory)
        probes = iter(range(10**6))

        def advance() -> None:
            engine.submit(f"probe{next(probes)}", PROMPT, Sampling(max_tokens=2)).result(60)

        yield EngineCase(
            engine=engine, prompt=PROMPT, long_tokens=300, tensors=state_tensors(load_model(directory)),
            advance=advance, finish=lambda: None,
            score=lambda prompt, generation, temperature: fresh_logprobs(model, prompt, generation, temperature),
        )  # fmt: skip
        engine.close()
