"""The numbers: every token's logprob is that of a fresh, plain forward pass over its whole prefix, under the weights of
its own version, at its own temperature. fp32, ragged batches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from astraflow.engines.local import LocalEngine
from astraflow.models.load import load_model
from astraflow.types import Sampling
from decoding import TOLERANCE, fresh_logprobs, other_weights


@contextmanager
def running(directory: Path, **options: Any) -> Iterator[LocalEngine]:
    engine = LocalEngine(directory, **options)
    try:
        yield engine
    finally:
        engine.close()


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 40, rng.integers(1, longest)).tolist() for _ in range(count)]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
@pytest.mark.parametrize("kind", ["endless_dir", "llama_dir"])
def test_ragged_rows_have_the_logprobs_of_a_fresh_forward(
    kind: str, temperature: float, request: pytest.FixtureRequest
) -> None:
    directory: Path = request.getfixturevalue(kind)
    model, asked = load_model(directory), prompts(40)
    with running(directory, max_concurrency=16) as engine:
        futures = [
            engine.submit(str(i), prompt, Sampling(temperature=temperature, max_tokens=3 + i % 29))
            for i, prompt in enumerate(asked)
        ]
        for prompt, future in zip(asked, futures, strict=True):
            generation = future.result(60)
            expected = fresh_logprobs(model, prompt, generation, temperature)
            np.testing.assert_allclose(generation.logprobs, expected, atol=TOLERANCE)


def test_rows_of_different_temperatures_do_not_mix(endless_dir: Path) -> None:
    model, asked = load_model(endless_dir), prompts(12)
    temperatures = [0.6, 1.0, 1.4, 0.0] * 3
    with running(endless_dir) as engine:
        futures = [
            engine.submit(str(i), p, Sampling(temperature=t, max_tokens=12))
            for i, (p, t) in enumerate(zip(asked, temperatures, strict=True))
        ]
        for prompt, temperature, future in zip(asked, temperatures, futures, strict=True):
            generation = future.result(60)
            expected = fresh_logprobs(model, prompt, generation, temperature or 1.0)
            np.testing.assert_allclose(generation.logprobs, expected, atol=TOLERANCE)


@pytest.mark.parametrize("told", [None, 1e-320, 0.7])
@pytest.mark.parametrize("temperature", [1e-320, 1e-9])
def test_a_temperature_that_no_logit_can_be_divided_by_is_greedy(
    endless_dir: Path, temperature: float, told: float | None
) -> None:
    prompt = prompts(1)[0]
    with running(endless_dir) as engine:
        greedy = Sampling(temperature=0.0, logprob_temperature=0.7 if told == 0.7 else None, max_tokens=9)
        expected = engine.submit("0", prompt, greedy).result(60)
        tiny = Sampling(temperature=temperature, logprob_temperature=told, max_tokens=9)
        found = engine.submit("1", prompt, tiny).result(60)
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        np.testing.assert_allclose(found.logprobs, expected.logprobs, atol=TOLERANCE)


@pytest.mark.parametrize("kind", ["endless_dir", "llama_dir"])
def test_greedy_takes_what_generate_takes(kind: str, request: pytest.FixtureRequest) -> None:
    directory: Path = request.getfixturevalue(kind)
    model, asked = load_model(directory), prompts(6)
    with running(directory) as engine:
        futures = [engine.submit(str(i), p, Sampling(temperature=0.0, max_tokens=20)) for i, p in enumerate(asked)]
        for prompt, future in zip(asked, futures, strict=True):
            ids = torch.tensor([prompt])
            expected = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=20, do_sample=False, pad_token_id=0
            )
            assert future.result(60).token_ids.tolist() == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", ["endless_dir", "llama_dir"])
def test_across_swaps_in_flight_each_token_has_the_logprob_of_its_own_version(
    kind: str, request: pytest.FixtureRequest
) -> None:
    directory: Path = request.getfixturevalue(kind)
    versions = {v: other_weights(directory, v) for v in (0, 1, 2)}
    models = {}
    for version, tensors in versions.items():
        models[version] = load_model(directory)
        models[version].load_state_dict(tensors, strict=False)
    # Siblings and strangers; long prompts that share a prefix, so stale keys would show.
    asked = prompts(10, 120) + [prompts(1, 120, seed=5)[0]] * 6
    with running(directory) as engine:
        engine.load_weights(0, versions[0]).result(60)
        futures = [engine.submit(str(i), p, Sampling(max_tokens=150 + 10 * i)) for i, p in enumerate(asked)]
        for version in (1, 2):
            engine.submit(f"probe{version}", [1], Sampling(max_tokens=8)).result(60)
            engine.load_weights(version, versions[version]).result(60)
        seen = set()
        for prompt, future in zip(asked, futures, strict=True):
            generation = future.result(60)
            seen |= set(generation.versions.tolist())
            for version in set(generation.versions.tolist()):
                mine = generation.versions == version
                expected = fresh_logprobs(models[version], prompt, generation, 1.0)
                np.testing.assert_allclose(generation.logprobs[mine], expected[mine], atol=TOLERANCE)
                for stale in set(models) - {version}:  # the other weights would not have passed
                    wrong = fresh_logprobs(models[stale], prompt, generation, 1.0)
                    assert np.abs(generation.logprobs[mine] - wrong[mine]).max() > 100 * TOLERANCE
    assert seen == {0, 1, 2}


def test_turns_of_an_agent_have_the_logprobs_of_a_fresh_forward_up_to_the_end_of_the_context(gpt2_dir: Path) -> None:
    model, contexts = load_model(gpt2_dir), prompts(9, 12)
    rng = np.random.default_rng(1)
    with running(gpt2_dir) as engine:
        assert engine.max_context == 64
        for turn in range(6):
            futures = [
                engine.submit(
                    f"{i}/{turn}",
                    context,
                    Sampling(max_tokens=1 + 2 * i),
                )
                for i, context in enumerate(contexts)
            ]
            for i, future in enumerate(futures):
                generation = future.result(60)
                expected = fresh_logprobs(model, contexts[i], generation, 1.0)
                np.testing.assert_allclose(generation.logprobs, expected, atol=TOLERANCE)
                observation = rng.integers(0, 40, 1 + 3 * i % 8).tolist()
                contexts[i] = (contexts[i] + generation.token_ids.tolist() + observation)[: 63 - i % 2]


def test_after_a_swap_a_long_shared_prefix_is_as_in_a_fresh_engine(endless_dir: Path) -> None:
    prompt, new = prompts(1, 400, seed=3)[0] * 3, other_weights(endless_dir, 9)
    prompt = prompt[:300]
    sampling = Sampling(max_tokens=10, seed=4)
    with running(endless_dir) as warm, running(endless_dir) as fresh:
        warm.submit("before", prompt, sampling).result(60)
        warm.load_weights(1, new).result(60)
        fresh.load_weights(1, new).result(60)
        a, b = (engine.submit("after", prompt, sampling).result(60) for engine in (warm, fresh))
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_array_equal(a.logprobs, b.logprobs)


def test_a_prompt_that_holds_the_pad_and_eos_id_is_read_in_full(eos_dir: Path) -> None:
    model = load_model(eos_dir)
    asked = [[1, 2, 2, 7, 2], [2, 2], [2] * 30 + [5], [9, 2]]
    with running(eos_dir) as engine:
        futures = [engine.submit(str(i), p, Sampling(max_tokens=25, seed=i)) for i, p in enumerate(asked)]
        for prompt, future in zip(asked, futures, strict=True):
            generation = future.result(60)
            expected = fresh_logprobs(model, prompt, generation, 1.0)
            np.testing.assert_allclose(generation.logprobs, expected, atol=TOLERANCE)


def test_eos_ends_a_row_and_stays_its_last_token(eos_dir: Path) -> None:
    with running(eos_dir) as engine:
        futures = [engine.submit(str(i), [1, 5, 9], Sampling(max_tokens=60)) for i in range(100)]
        generations = [future.result(60) for future in futures]
    reasons = {g.finish_reason for g in generations}
    assert "stop" in reasons
    for generation in generations:
        body, last = generation.token_ids[:-1], generation.token_ids[-1]
        assert 2 not in body
        assert (last == 2) == (generation.finish_reason == "stop")


def test_bfloat16_runs_and_is_close(endless_dir: Path) -> None:
    model = load_model(endless_dir)
    with running(endless_dir, dtype="bfloat16") as engine:
        generation = engine.submit("a", [1, 5, 9], Sampling(max_tokens=30)).result(60)
    gap = np.abs(generation.logprobs - fresh_logprobs(model, [1, 5, 9], generation, 1.0))
    assert np.median(gap) < 0.2
