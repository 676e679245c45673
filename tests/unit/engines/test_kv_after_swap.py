"""What becomes of keys and values when the weights change in the middle of a generation: computed afresh, or kept."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

from astraflow.engines.local import LocalEngine
from astraflow.engines.local.decoder import Decoder
from astraflow.errors import EngineError
from astraflow.models.load import load_model, load_tensors
from astraflow.types import Generation, Sampling
from decoding import TOLERANCE, ask, decoder_of, follow_up, fresh_logprobs, other_weights, run, start

PROMPT, BEFORE, AFTER = [1, 5, 9, 3, 17, 21, 4], 12, 25


@pytest.fixture
def weights(endless_dir: Path) -> dict[int, dict[str, torch.Tensor]]:
    return {version: other_weights(endless_dir, version) for version in (0, 1)}


def model_of(directory: Path, tensors: Mapping[str, torch.Tensor]) -> PreTrainedModel:
    model = load_model(directory).requires_grad_(False)
    load_tensors(model, tensors)
    return model


def swapped(decoder: Decoder, weights: dict[int, dict[str, torch.Tensor]]) -> tuple[Generation, int]:
    """Three rows, two of them siblings, go over a swap. Returns one of the two, and how many tokens the swap read."""
    count = BEFORE + AFTER
    with torch.inference_mode():
        load_tensors(decoder._passes.model, weights[0])
        decoder.renew(0)
        start(decoder, [ask("a", PROMPT, count), ask("b", PROMPT, count), ask("c", [8] * 30, count)])
        for _ in range(BEFORE):
            decoder.step()
        before = decoder.prefill_tokens
        load_tensors(decoder._passes.model, weights[1])
        decoder.renew(1)
        computed = decoder.prefill_tokens - before
    return run(decoder)["a"], computed


@torch.no_grad()
def kept_logprobs(directory: Path, weights: dict[int, dict[str, torch.Tensor]], generation: Generation) -> np.ndarray:
    """[AFTER] of what follows the swap, when all that was read before it keeps the keys and values of version 0."""
    ids = torch.tensor([PROMPT + generation.token_ids.tolist()])
    known = len(PROMPT) + BEFORE - 1  # the last token sampled before the swap is read after it
    cache = DynamicCache()
    model_of(directory, weights[0])(input_ids=ids[:, :known], cache=cache, use_cache=True)
    new = model_of(directory, weights[1])(input_ids=ids[:, known:-1], cache=cache, use_cache=True).logits[0]
    chosen: np.ndarray = torch.log_softmax(new, -1).gather(1, ids[0, known + 1 :, None])[:, 0].numpy()
    return chosen


def test_recomputed_caches_give_the_logprobs_of_a_fresh_prefill(endless_dir: Path, weights) -> None:
    decoder = decoder_of(load_model(endless_dir).requires_grad_(False), 8, 512, 1 << 20)
    generation, computed = swapped(decoder, weights)
    assert computed == 2 * (len(PROMPT) + BEFORE - 1) + 30 + BEFORE - 1
    fresh = fresh_logprobs(model_of(endless_dir, weights[1]), PROMPT, generation, 1.0)
    gap = np.abs(generation.logprobs - fresh)[BEFORE:]
    assert np.percentile(gap, 99) < TOLERANCE
    assert generation.versions.tolist() == [0] * BEFORE + [1] * AFTER


def test_kept_caches_cost_nothing_and_later_tokens_attend_to_them(endless_dir: Path, weights) -> None:
    decoder = decoder_of(load_model(endless_dir).requires_grad_(False), 8, 512, 1 << 20, keep=True)
    generation, computed = swapped(decoder, weights)
    assert computed == 0
    assert generation.versions.tolist() == [0] * BEFORE + [1] * AFTER
    np.testing.assert_allclose(generation.logprobs[BEFORE:], kept_logprobs(endless_dir, weights, generation), atol=1e-4)
    old = fresh_logprobs(model_of(endless_dir, weights[0]), PROMPT, generation, 1.0)
    np.testing.assert_allclose(generation.logprobs[:BEFORE], old[:BEFORE], atol=TOLERANCE)
    fresh = fresh_logprobs(model_of(endless_dir, weights[1]), PROMPT, generation, 1.0)
    assert np.abs(generation.logprobs - fresh)[BEFORE:].max() > 100 * TOLERANCE, "the two settings would be the same"


@pytest.mark.parametrize("keep", [False, True])
def test_a_next_turn_never_gets_what_other_weights_computed(endless_dir: Path, weights, keep: bool) -> None:
    decoder = decoder_of(load_model(endless_dir).requires_grad_(False), 8, 512, 1 << 20, keep=keep)
    turn, _ = swapped(decoder, weights)
    prompt = follow_up(PROMPT, turn, [4, 4])
    before = decoder.prefill_tokens
    with torch.inference_mode():
        start(decoder, [ask("next", prompt, 9)])
    second = run(decoder)["next"]
    # Kept caches are of two versions, so the row was not shelved and its next turn is read in full.
    assert decoder.prefill_tokens - before == (len(prompt) - 1 if keep else 2)
    fresh = fresh_logprobs(model_of(endless_dir, weights[1]), prompt, second, 1.0)
    np.testing.assert_allclose(second.logprobs, fresh, atol=TOLERANCE)
    before = decoder.prefill_tokens
    with torch.inference_mode():
        start(decoder, [ask("third", follow_up(prompt, second, [4]), 1)])
    run(decoder)
    assert decoder.prefill_tokens - before == 1


def test_the_engine_takes_the_setting_by_name(endless_dir: Path, weights) -> None:
    with pytest.raises(EngineError, match=r"engine\.kv_after_swap=drop must be recompute or keep"):
        LocalEngine(endless_dir, kv_after_swap="drop")  # type: ignore[arg-type]
    computed = {}
    for setting in ("recompute", "keep"):
        engine = LocalEngine(endless_dir, kv_after_swap=setting)  # type: ignore[arg-type]
        future = engine.submit("a", PROMPT, Sampling(max_tokens=300))
        engine.submit("probe", [1], Sampling(max_tokens=8)).result(60)
        engine.load_weights(0, weights[0]).result(60)
        generation = future.result(60)
        assert (len(generation.token_ids), set(generation.versions.tolist())) == (300, {-1, 0})
        computed[setting] = engine.stats()["prefill_tokens"]
        assert engine.stats()["swap_s"] > 0
        engine.close()
    assert computed["keep"] == len(PROMPT) - 1 < computed["recompute"]
