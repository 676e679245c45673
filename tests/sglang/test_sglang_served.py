"""What an SGLang server says, held against the same model computed by transformers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from astraflow.engines.sglang.engine import SglangEngine
from astraflow.models.load import load_model, state_tensors
from astraflow.testing.engines.suite import check_generation
from astraflow.types import Generation, Sampling

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
GAP = 2e-3
"""float32, the greatest of some hundred tokens: kernels of a GPU add in another order."""


@pytest.fixture(scope="module")
def engine(python: str, smollm2: Path) -> Iterator[SglangEngine]:
    made = SglangEngine(
        smollm2, python=python, dtype="float32", max_concurrency=16, max_context=1024, deterministic=True,
        args={"mem_fraction_static": 0.5},
    )  # fmt: skip
    made._model = replace(made._model, stop_ids=(2,))  # the server ends replies at it in any case
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(smollm2: Path) -> PreTrainedModel:
    return load_model(smollm2, "float32")


def other(model: PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
    """Weights near those of the model, of which each differs."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: tensor + 0.02 * tensor.abs().mean() * torch.randn(tensor.shape, generator=draw)
        for name, tensor in state_tensors(model).items()
    }


def gaps(model: PreTrainedModel, prompt: list[int], generation: Generation, temperature: float) -> torch.Tensor:
    """The differences to a pass over all tokens at once."""
    ids = torch.tensor([prompt + generation.token_ids.tolist()])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    scored = torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    return (scored - torch.from_numpy(generation.logprobs)).abs()


def test_logprobs_are_true_whatever_the_sampling(engine: SglangEngine, model: PreTrainedModel) -> None:
    engine.load_weights(0, state_tensors(model)).result(300)
    samplings = [
        Sampling(max_tokens=32), Sampling(max_tokens=24, temperature=0.6), Sampling(max_tokens=24, temperature=1.4),
        Sampling(max_tokens=24, temperature=0.0), Sampling(max_tokens=24, temperature=1.3, top_p=0.8),
        Sampling(max_tokens=24, top_k=20), Sampling(max_tokens=24, temperature=0.8, min_p=0.1),
    ]  # fmt: skip
    futures = [engine.submit(f"r{number}", PROMPT, each) for number, each in enumerate(samplings)]
    for sampling, future in zip(samplings, futures, strict=True):
        generation = future.result(120)
        check_generation(generation)
        assert gaps(model, PROMPT, generation, sampling.temperature or 1.0).max() < GAP, sampling


def test_a_seed_gives_the_same_tokens_and_none_gives_others(engine: SglangEngine) -> None:
    seeds = (7, 7, 8, None, None)
    said = [
        engine.submit(f"s{number}", PROMPT, Sampling(max_tokens=20, temperature=1.5, seed=seed)).result(120)
        for number, seed in enumerate(seeds)
    ]
    texts = [tuple(each.token_ids.tolist()) for each in said]
    assert texts[0] == texts[1] and len(set(texts)) == 4


def test_weights_change_in_the_middle_of_a_generation(engine: SglangEngine, model: PreTrainedModel) -> None:
    engine.load_weights(10, state_tensors(model)).result(300)
    begun = threading.Event()
    future = engine.submit(
        "swapped", PROMPT, Sampling(max_tokens=400, temperature=1.5), lambda *columns: begun.set()
    )  # fmt: skip
    assert begun.wait(60)
    changed = other(model, 1)
    engine.load_weights(11, changed).result(300)
    generation = future.result(120)
    versions = generation.versions.tolist()
    assert set(versions) == {10, 11}, "the reply ended too early; raise max_tokens"
    second = load_model(Path(engine._shadow.directory), "float32")
    first = versions.count(10)
    assert gaps(model, PROMPT, generation, 1.5)[:first].max() < GAP
    assert gaps(second, PROMPT, generation, 1.5)[first:].max() < GAP


def test_a_killed_server_comes_back_with_the_newest_weights(engine: SglangEngine, model: PreTrainedModel) -> None:
    engine.load_weights(20, other(model, 2)).result(300)
    begun = threading.Event()
    future = engine.submit("killed", PROMPT, Sampling(max_tokens=300, temperature=1.5), lambda *columns: begun.set())
    assert begun.wait(60)
    os.killpg(engine._keeper.host._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    generation = future.result(600)
    second = load_model(Path(engine._shadow.directory), "float32")
    assert set(generation.versions.tolist()) == {20}
    assert gaps(second, PROMPT, generation, 1.5).max() < GAP
    assert engine.stats()["restarts"] == 1
