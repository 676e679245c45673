"""What a vLLM server says, held against the same model computed by transformers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from astraflow.engines.vllm.engine import VllmEngine
from astraflow.models.load import effective_checksum, load_model, load_tensors, state_tensors
from astraflow.testing.engines.suite import check_generation
from astraflow.types import EffectiveWeights, Generation, Sampling

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]
EOS = 2
PROMPT = [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198]
GAP = 2e-4
"""float32, the greatest of some hundred tokens: two libraries add in another order."""


@pytest.fixture(scope="module")
def engine(options: dict[str, Any], smollm2: Path) -> Iterator[VllmEngine]:
    made = VllmEngine(smollm2, dtype="float32", max_concurrency=16, **options)
    made._model = replace(made._model, stop_ids=())  # no reply ends by itself
    yield made
    made.close()


@pytest.fixture(scope="module")
def model(smollm2: Path) -> PreTrainedModel:
    return load_model(smollm2, "float32")


def other(model: PreTrainedModel, seed: int) -> dict[str, torch.Tensor]:
    """Weights near those of the model, of which each differs; the embedding, which is the output layer too, most."""
    draw = torch.Generator().manual_seed(seed)
    return {
        name: tensor * (1.1 if "embed" in name else 1.0)
        + 0.02 * tensor.abs().mean() * torch.randn(tensor.shape, generator=draw)
        for name, tensor in state_tensors(model).items()
    }


def gap(model: PreTrainedModel, prompt: list[int], generation: Generation, temperature: float) -> float:
    """The greatest difference to a pass over all tokens at once."""
    ids = torch.tensor([prompt + generation.token_ids.tolist()])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
    scored = torch.log_softmax(logits / temperature, -1).gather(1, ids[0, len(prompt) :, None])[:, 0]
    return float((scored - torch.from_numpy(generation.logprobs)).abs().max())


def test_logprobs_are_true_whatever_the_sampling(engine: VllmEngine, model: PreTrainedModel) -> None:
    engine.load_weights(0, state_tensors(model)).result(120)
    samplings = [
        Sampling(max_tokens=32), Sampling(max_tokens=24, temperature=0.6), Sampling(max_tokens=24, temperature=1.4),
        Sampling(max_tokens=24, temperature=0.0), Sampling(max_tokens=24, temperature=1.3, top_p=0.8),
        Sampling(max_tokens=24, top_k=20), Sampling(max_tokens=24, temperature=1.3, logprob_temperature=0.9),
        Sampling(max_tokens=24, temperature=0.8, top_k=40, top_p=0.9, logprob_temperature=1.2),
    ]  # fmt: skip
    futures = [engine.submit(f"r{number}", PROMPT, each) for number, each in enumerate(samplings)]
    for sampling, future in zip(samplings, futures, strict=True):
        generation = future.result(120)
        check_generation(generation)
        said_at = sampling.logprob_temperature or sampling.temperature or 1.0
        assert gap(model, PROMPT, generation, said_at) < GAP, sampling


def test_a_seed_gives_the_same_tokens_and_a_stop_id_stays(engine: VllmEngine) -> None:
    first, second, third = (
        engine.submit(f"s{number}", PROMPT, Sampling(max_tokens=20, temperature=1.5, seed=seed)).result(120)
        for number, seed in enumerate((7, 7, 8))
    )
    assert first.token_ids.tolist() == second.token_ids.tolist() != third.token_ids.tolist()
    sampling = Sampling(max_tokens=20, temperature=0.0, stop_token_ids=(EOS,))
    greedy = engine.submit("g", PROMPT, sampling).result(120)
    assert (greedy.finish_reason, greedy.token_ids[-1]) == ("stop", EOS), "it is sampled and stays"
    stop = int(greedy.token_ids[3])
    sampling = Sampling(max_tokens=20, temperature=0.0, stop_token_ids=(stop,))
    stopped = engine.submit("t", PROMPT, sampling).result(120)
    assert stopped.token_ids.tolist() == greedy.token_ids[:4].tolist() and stopped.finish_reason == "stop"


def test_weights_change_in_flight_and_each_token_is_of_its_own_version(
    engine: VllmEngine, model: PreTrainedModel
) -> None:
    engine.load_weights(1, state_tensors(model)).result(120)
    tensors, handed, news = other(model, 1), [], threading.Event()

    def receive(ids: list[int], logprobs: list[float], versions: list[int]) -> None:
        handed.extend(zip(ids, logprobs, versions, strict=True))
        if len(handed) >= 20:
            news.set()

    future = engine.submit("long", PROMPT, Sampling(max_tokens=150, temperature=1.5), receive)
    assert news.wait(120)
    engine.load_weights(2, tensors).result(120)
    generation = future.result(120)
    check_generation(generation)
    columns = (generation.token_ids, generation.logprobs, generation.versions)
    assert handed == list(zip(*(column.tolist() for column in columns), strict=True))
    assert set(generation.versions.tolist()) == {1, 2}, "it ended before the swap"
    changed = load_model(Path(model.name_or_path), "float32")
    load_tensors(changed, tensors)
    at = int((generation.versions == 1).sum())
    before = Generation(generation.token_ids[:at], generation.logprobs[:at], generation.versions[:at], "length")
    after = Generation(generation.token_ids[at:], generation.logprobs[at:], generation.versions[at:], "length")
    assert gap(model, PROMPT, before, 1.5) < GAP
    assert gap(changed, PROMPT + before.token_ids.tolist(), after, 1.5) < GAP, "caches of older weights were dropped"
    fresh = engine.submit("fresh", PROMPT, Sampling(max_tokens=16)).result(120)
    assert gap(changed, PROMPT, fresh, 1.0) < GAP, "so was the prefix cache"
    assert engine.effective_weights().result(120) == EffectiveWeights(2, "float32", effective_checksum(tensors))


def test_a_killed_server_comes_back_with_the_newest_weights(engine: VllmEngine, model: PreTrainedModel) -> None:
    tensors, news = other(model, 2), threading.Event()
    engine.load_weights(3, tensors).result(120)
    future = engine.submit("b", PROMPT, Sampling(max_tokens=60, temperature=1.5), lambda *_: news.set())
    assert news.wait(120)
    os.killpg(engine._keeper.host._process.pid, signal.SIGKILL)  # type: ignore[attr-defined]
    generation = future.result(300)
    check_generation(generation)
    assert set(generation.versions.tolist()) == {3} and engine.stats()["restarts"] == 1
    changed = load_model(Path(model.name_or_path), "float32")
    load_tensors(changed, tensors)
    assert gap(changed, PROMPT, generation, 1.5) < GAP
    assert engine.effective_weights().result(120) == EffectiveWeights(3, "float32", effective_checksum(tensors))


def test_cancelling_ends_it_at_once(engine: VllmEngine) -> None:
    news = threading.Event()
    future = engine.submit("c", PROMPT, Sampling(max_tokens=900, temperature=1.5), lambda *_: news.set())
    assert news.wait(120)
    engine.cancel("c")
    assert future.result(10).finish_reason == "cancelled"
