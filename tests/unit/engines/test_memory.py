"""Bounded memory of keys and values, and long prompts beside running rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from astraflow.engines.local import LocalEngine
from astraflow.engines.local.compute.guard import prepared
from astraflow.engines.local.decoder import Decoder
from astraflow.errors import EngineError
from astraflow.models.load import load_model, load_tensors, state_tensors
from astraflow.types import Sampling
from decoding import TOLERANCE, ask, decoder_of, fresh_logprobs, other_weights, run, start

PROMPT = [1, 5, 9, 3, 17]
BYTES = 2 * 2 * 2 * 8 * 4  # of one token: layers, keys and values, heads, width, float32


def held(decoder: Decoder) -> int:
    return decoder._cache.num_bytes


def test_the_bytes_of_a_token_are_measured(endless_dir: Path) -> None:
    assert prepared(load_model(endless_dir))[1] == BYTES


@pytest.mark.parametrize("keep", [False, True])
def test_when_memory_is_full_rows_wait_and_say_the_same(endless_dir: Path, keep: bool) -> None:
    model = load_model(endless_dir).requires_grad_(False)
    limit = 400 * BYTES
    tight = decoder_of(model, kv_bytes=limit, position_bytes=BYTES, keep=keep)
    free = decoder_of(model)
    requests = [ask(f"r{i}", [1 + i] * (3 + 2 * i), 90 + 7 * i) for i in range(12)]
    again = [ask(f"r{i}", [1 + i] * (3 + 2 * i), 90 + 7 * i) for i in range(12)]
    start(tight, requests)
    results = {}
    with torch.inference_mode():
        while len(tight):
            tight.join()
            results.update({request.request_id: generation for request, generation in tight.step()})
            assert held(tight) <= limit
            assert tight.running + tight.waiting == len(tight)
    start(free, again)
    expected = run(free)
    assert tight.preempted > 0, "the memory was never full"
    for name, generation in expected.items():
        np.testing.assert_array_equal(results[name].token_ids, generation.token_ids)
        np.testing.assert_allclose(results[name].logprobs, generation.logprobs, atol=TOLERANCE)


def test_a_row_that_lost_its_place_hands_out_each_token_once(endless_dir: Path) -> None:
    decoder = decoder_of(load_model(endless_dir).requires_grad_(False), kv_bytes=192 * BYTES, position_bytes=BYTES)
    handed: list[tuple[int, float, int]] = []
    requests = [ask("a", PROMPT, 100), ask("b", PROMPT, 100)]
    requests[1].on_tokens = lambda *columns: handed.extend(zip(*columns, strict=True))
    start(decoder, requests)
    generation = run(decoder)["b"]
    assert decoder.preempted > 0
    assert handed == list(zip(generation.token_ids, generation.logprobs, generation.versions, strict=True))


def test_what_rows_that_are_gone_had_reserved_gives_way_to_a_long_one(endless_dir: Path) -> None:
    limit = 600 * BYTES
    decoder = decoder_of(load_model(endless_dir).requires_grad_(False), kv_bytes=limit, position_bytes=BYTES)
    start(decoder, [ask(f"r{i}", [1 + i] * 5, 5) for i in range(6)])
    run(decoder)
    start(decoder, [ask("long", [7] * 300, 100)])
    done = run(decoder)
    assert len(done["long"].token_ids) == 100 and held(decoder) <= limit


def test_rows_go_on_while_a_long_prompt_is_read(endless_dir: Path) -> None:
    decoder = decoder_of(load_model(endless_dir).requires_grad_(False), chunk_tokens=16)
    start(decoder, [ask("a", PROMPT, 60)])
    long = np.random.default_rng(0).integers(0, 40, 201).tolist()
    done, prefill = {}, []
    with torch.inference_mode():
        decoder.step()
        decoder.admit([ask("long", long, 9), ask("sibling", long, 9), ask("short", [4, 4], 9)])
        decoder.join()
        while len(decoder):
            before, sampled = decoder.prefill_tokens, decoder.sampled_tokens[0]
            done.update({request.request_id: generation for request, generation in decoder.step()})
            prefill.append(decoder.prefill_tokens - before)
            assert decoder.sampled_tokens[0] > sampled, "no row went on"
    assert max(prefill) <= 16 and sum(prefill) == 200 + 1, "siblings of a long prompt are read once"
    assert (next(iter(done)), list(done)[-1]) == ("short", "a"), "the short one does not wait for the long one"
    fresh = load_model(endless_dir)
    for name, prompt in {"a": PROMPT, "long": long, "sibling": long, "short": [4, 4]}.items():
        expected = fresh_logprobs(fresh, prompt, done[name], 1.0)
        np.testing.assert_allclose(done[name].logprobs, expected, atol=TOLERANCE)


def test_the_first_of_many_long_prompts_gets_half_of_each_pass(endless_dir: Path) -> None:
    decoder = decoder_of(load_model(endless_dir).requires_grad_(False), chunk_tokens=16)
    start(decoder, [ask("a", PROMPT, 200)])
    first = {}
    with torch.inference_mode():
        decoder.step()
        decoder.admit([ask("first", [7] * 81, 1), *(ask(f"r{i}", [8 + i] * 60, 1) for i in range(20))])
        decoder.join()
        for step in range(90):
            first.update({request.request_id: step for request, _ in decoder.step()})
    assert first["first"] == 10 and len(first) == 21  # 81 tokens, 8 in each pass


@pytest.mark.parametrize("keep", [False, True])
def test_a_swap_while_a_long_prompt_is_read(endless_dir: Path, keep: bool) -> None:
    model = load_model(endless_dir).requires_grad_(False)
    decoder = decoder_of(model, chunk_tokens=16, keep=keep, shelf=1 << 20)
    start(decoder, [ask("a", PROMPT, 60)])
    long, new = [7, 3] * 60, other_weights(endless_dir, 3)
    with torch.inference_mode():
        decoder.step()
        decoder.admit([ask("long", long, 9)])
        decoder.join()
        for _ in range(3):
            decoder.step()
        before = decoder.prefill_tokens
        load_tensors(model, new)
        decoder.renew(1)
        assert decoder.prefill_tokens - before == (0 if keep else 3 * 16 + len(PROMPT) + 3)
    done, fresh = run(decoder), load_model(endless_dir)
    load_tensors(fresh, new)
    gap = np.abs(done["long"].logprobs - fresh_logprobs(fresh, long, done["long"], 1.0)).max()
    assert gap < TOLERANCE if not keep else gap > 100 * TOLERANCE
    shelved = decoder._shelf.holds((0, 1), np.array(long[:-1], np.int32))
    assert shelved is not keep, "what two versions computed was shelved"


def test_a_waiting_or_half_read_request_can_be_cancelled(endless_dir: Path) -> None:
    decoder = decoder_of(load_model(endless_dir).requires_grad_(False), rows=2, chunk_tokens=16)
    start(decoder, [ask("a", PROMPT, 30)])
    requests = [ask("long", [7] * 100, 9), ask("next", [8] * 100, 9)]
    with torch.inference_mode():
        decoder.step()
        decoder.admit(requests)
        decoder.join()
        decoder.step()
        assert (decoder.waiting, decoder.running) == (1, 2)
        for request in requests:
            request.cancelled = True
        ended = decoder.drop_cancelled()
    assert [(request.request_id, g.finish_reason, len(g.token_ids)) for request, g in ended] == [
        ("next", "cancelled", 0), ("long", "cancelled", 0),
    ]  # fmt: skip
    assert (decoder.waiting, decoder.running) == (0, 1)
    assert len(run(decoder)["a"].token_ids) == 30


def test_a_row_that_lost_its_place_keeps_its_tokens_when_cancelled(endless_dir: Path) -> None:
    model = load_model(endless_dir)
    decoder = decoder_of(load_model(endless_dir).requires_grad_(False), kv_bytes=192 * BYTES, position_bytes=BYTES)
    requests = [ask("a", PROMPT, 100), ask("b", PROMPT, 100)]
    start(decoder, requests)
    with torch.inference_mode():
        while not decoder.preempted:
            decoder.step()
    requests[1].cancelled = True
    ((_, generation),) = decoder.drop_cancelled()
    assert len(generation.token_ids) > 50
    np.testing.assert_allclose(generation.logprobs, fresh_logprobs(model, PROMPT, generation, 1.0), atol=TOLERANCE)
    run(decoder)


def test_an_engine_says_what_memory_its_context_needs(endless_dir: Path, tmp_path: Path) -> None:
    engine = LocalEngine(endless_dir, kv_cache_mb=1)
    assert engine.max_context == 512
    engine.close()
    model = load_model(endless_dir)
    model.config.max_position_embeddings = 100_000
    model.save_pretrained(tmp_path)
    with pytest.raises(EngineError, match=r"engine\.kv_cache_mb=1 must be at least 2 to hold 5000 tokens"):
        LocalEngine(tmp_path, kv_cache_mb=1, max_context=5000)
    engine = LocalEngine(tmp_path, kv_cache_mb=1)
    assert engine.max_context == (1 << 20) // BYTES
    engine.close()


def test_an_engine_short_of_memory_serves_all(endless_dir: Path) -> None:
    engine = LocalEngine(endless_dir, kv_cache_mb=1)
    engine.load_weights(0, state_tensors(load_model(endless_dir))).result(60)
    futures = [engine.submit(str(i), [1 + i] * (40 + i), Sampling(max_tokens=200)) for i in range(24)]
    assert [len(future.result(60).token_ids) for future in futures] == [200] * 24
    stats = engine.stats()
    assert stats["preempted"] > 0 and stats["kv_usage"] == 0.0 and stats["waiting"] == 0
    engine.close()


def test_a_device_that_is_not_here_is_refused(endless_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(EngineError, match=r"engine\.device=cuda has no GPU here"):
        LocalEngine(endless_dir, device="cuda")
    with pytest.raises(EngineError, match=r"engine\.device=tpu must be"):
        LocalEngine(endless_dir, device="tpu")  # type: ignore[arg-type]
