"""The core without its thread, so that what runs together is decided by the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow.engines.local.caches.slots import SlotCache
from astraflow.engines.local.decoder import Decoder
from astraflow.engines.local.rows import Rows
from astraflow.models.load import load_model, load_tensors, state_tensors
from astraflow.types import Generation
from decoding import ask, decoder_of, follow_up, run, start


@pytest.fixture
def decoder(endless_dir: Path) -> Decoder:
    return decoder_of(load_model(endless_dir).requires_grad_(False), 64, 512)


def test_equal_prompts_are_prefilled_once(decoder: Decoder) -> None:
    with torch.inference_mode():
        start(decoder, [ask(f"a{i}", [1, 5, 9, 3]) for i in range(8)] + [ask("b", [1, 5, 9, 7, 7]), ask("c", [4])])
    assert len(run(decoder)) == 10
    assert decoder.prefill_tokens == 3 + 4  # all but the last token of each distinct prompt


def test_rows_beside_do_not_change_a_row(endless_dir: Path) -> None:
    model = load_model(endless_dir).requires_grad_(False)
    alone, crowd = (decoder_of(model, 64, 512) for _ in range(2))
    me = [1, 5, 9, 3]
    with torch.inference_mode():
        start(alone, [ask("me", me, 40)])
        start(crowd, [ask(f"r{i}", [3] * (1 + 7 * i), 1 + 3 * i) for i in range(9)] + [ask("me", me, 40)])
    a, b = run(alone)["me"], run(crowd)["me"]
    np.testing.assert_array_equal(a.token_ids, b.token_ids)
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-5)


def test_rows_that_join_late_find_room(decoder: Decoder) -> None:
    done: dict[str, Generation] = {}
    with torch.inference_mode():
        for i in range(40):  # slots and positions grow while rows run
            start(decoder, [ask(f"r{i}", [1 + i % 30] * (1 + i), 5 + i)])
            done.update({request.request_id: generation for request, generation in decoder.step()})
    done.update(run(decoder))
    assert {name: len(g.token_ids) for name, g in done.items()} == {f"r{i}": 5 + i for i in range(40)}


def test_a_prefill_over_the_budget_is_split(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = decoder_of(decoder._passes.model, 64, 512)
    requests = [ask(f"r{i}", [1 + i] * (10 + 9 * i), 5) for i in range(12)]
    with torch.inference_mode():
        start(whole, requests)
        monkeypatch.setattr("astraflow.engines.local.decoder._PASS_TOKENS", 64)
        start(decoder, requests)
    a, b = run(whole), run(decoder)
    for name, generation in a.items():
        np.testing.assert_array_equal(generation.token_ids, b[name].token_ids)
        np.testing.assert_allclose(generation.logprobs, b[name].logprobs, atol=1e-5)


def test_a_next_turn_computes_only_what_is_new_and_samples_the_same(endless_dir: Path) -> None:
    model = load_model(endless_dir).requires_grad_(False)
    warm, cold = decoder_of(model, 64, 512, 1 << 20), decoder_of(model, 64, 512, 0)
    first = {f"r{i}": [1 + i] * (3 + 2 * i) for i in range(12)}
    with torch.inference_mode():
        for decoder in (warm, cold):
            start(decoder, [ask(name, prompt, 3 + i) for i, (name, prompt) in enumerate(first.items())])
        turns, same = run(warm), run(cold)
        second = {n: follow_up(p, turns[n], [7] * (1 + 5 * i % 11)) for i, (n, p) in enumerate(first.items())}
        strangers = [ask("new0", [31, 9, 9, 1], 6), ask("new1", [30] * 40, 6)]
        before = warm.prefill_tokens
        for decoder in (warm, cold):
            start(decoder, [*strangers, *(ask(name, prompt, 20) for name, prompt in second.items())])
        ours, fresh = run(warm), run(cold)
        # Of a known row: its last sampled token, which was never read, and the new ones but the last.
        assert warm.prefill_tokens - before == 3 + 39 + sum(1 + 5 * i % 11 for i in range(12))
    for name in first:
        np.testing.assert_array_equal(turns[name].token_ids, same[name].token_ids)
    for name in ours:
        np.testing.assert_array_equal(ours[name].token_ids, fresh[name].token_ids)
        np.testing.assert_allclose(ours[name].logprobs, fresh[name].logprobs, atol=1e-4)


def test_a_pass_keeps_to_the_budget_whatever_is_known_of_its_rows(endless_dir: Path) -> None:
    model = load_model(endless_dir).requires_grad_(False)
    decoder = decoder_of(model, 64, 512, 1 << 20, chunk_tokens=32)
    sizes: list[int] = []
    read = decoder._passes.read

    def spy(cache: SlotCache, ids: np.ndarray, *rest: Any) -> torch.Tensor:
        sizes.append(ids.size)
        return read(cache, ids, *rest)

    new = [9, 1, 40, 3, 8, 2, 16, 5]
    start(decoder, [ask(f"r{i}", [1 + i, 3, 4], 1) for i in range(8)])
    turns = run(decoder)
    start(decoder, [ask("other", [9], 60)])
    with torch.inference_mode():
        decoder.step()
    decoder._passes.read = spy  # type: ignore[method-assign, assignment]
    before = decoder.prefill_tokens
    start(decoder, [ask(n, follow_up([1 + i, 3, 4], turns[n], [7] * new[i])) for i, n in enumerate(turns)])
    run(decoder)
    assert decoder.prefill_tokens - before == sum(new)
    assert max(sizes) <= 32 + 9 and sum(size > 9 for size in sizes) > 2


def test_a_sibling_that_comes_later_finds_the_prompt(endless_dir: Path) -> None:
    decoder = decoder_of(load_model(endless_dir).requires_grad_(False), 64, 512, 1 << 20)
    with torch.inference_mode():
        for i in range(3):
            start(decoder, [ask(f"r{i}", [1, 5, 9, 3, 3], 9)])
            decoder.step()
    assert len(run(decoder)) == 3
    assert decoder.prefill_tokens == 4


@pytest.mark.parametrize("size", [32, 33, 34, 65])
def test_a_prompt_whose_last_part_is_one_token_is_known_too(endless_dir: Path, size: int) -> None:
    decoder = decoder_of(load_model(endless_dir).requires_grad_(False), 8, 512, 1 << 22, chunk_tokens=32)
    prompt = [i % 37 for i in range(size)]
    start(decoder, [ask("other", [9], 100)])
    with torch.inference_mode():
        decoder.step()
        start(decoder, [ask("first", prompt, 30)])
        for _ in range(6):
            decoder.step()
        before = decoder.prefill_tokens
        start(decoder, [ask("sibling", prompt, 3)])
        decoder.step()
    assert decoder.prefill_tokens == before


def test_a_swap_forgets_known_prefixes(endless_dir: Path) -> None:
    model = load_model(endless_dir).requires_grad_(False)
    decoder = decoder_of(model, 64, 512, 1 << 20)
    tensors = {name: t.clone() for name, t in state_tensors(model).items()}
    with torch.inference_mode():
        start(decoder, [ask("a", [1, 5, 9, 3], 4)])
        turn = run(decoder)["a"]
        load_tensors(model, tensors)
        decoder.renew(1)
        before = decoder.prefill_tokens
        start(decoder, [ask("b", follow_up([1, 5, 9, 3], turn, [4]), 4)])
        run(decoder)
        assert decoder.prefill_tokens - before == 4 + 4


def test_a_next_turn_at_the_end_of_the_context(endless_dir: Path) -> None:
    model = load_model(endless_dir).requires_grad_(False)
    warm, cold = decoder_of(model, 64, 24, 1 << 20), decoder_of(model, 64, 24, 0)
    results = []
    with torch.inference_mode():
        for decoder in (warm, cold):
            start(decoder, [ask("a", [1] * 16, 3), ask("b", [2] * 5, 3)])
            turns = run(decoder)
            # The padding of "a" reaches beyond the context: "b" has more new tokens.
            start(decoder, [ask("a2", follow_up([1] * 16, turns["a"], [3, 3]), 9), ask("b2", [2] * 5 + [4] * 12, 9)])
            results.append(run(decoder))
    for name, length in (("a2", 3), ("b2", 7)):
        assert len(results[0][name].token_ids) == length
        np.testing.assert_array_equal(results[0][name].token_ids, results[1][name].token_ids)
        np.testing.assert_allclose(results[0][name].logprobs, results[1][name].logprobs, atol=1e-4)


@given(st.lists(st.booleans(), min_size=1, max_size=20), st.data())
def test_rows_keep_their_own_columns_when_others_leave(gone: list[bool], data: st.DataObject) -> None:
    rows = Rows(20, 100, (), 50)
    for i in range(len(gone)):
        rows.add(ask(f"r{i}", [i] * (i + 1), max_tokens=5, stop_token_ids=(i,)), 0)
    ids = np.array(data.draw(st.lists(st.integers(20, 49), min_size=len(gone), max_size=len(gone))))
    rows.append(np.arange(len(gone)), ids, ids / -10, 3)
    before = {r.request_id: rows.generation(i, "length") for i, r in enumerate(rows.requests)}
    source, target = rows.remove(np.array(gone))
    assert {r.request_id for r in rows.requests} == {f"r{i}" for i, out in enumerate(gone) if not out}
    assert (source >= len(rows)).all() and (target < len(rows)).all()
    for i, request in enumerate(rows.requests):
        number = int(request.request_id[1:])
        after = rows.generation(i, "length")
        np.testing.assert_array_equal(after.token_ids, before[request.request_id].token_ids)
        np.testing.assert_array_equal(after.logprobs, before[request.request_id].logprobs)
        np.testing.assert_array_equal(rows.ids(i)[:-1], [number] * (number + 1))
    last = np.array([int(r.request_id[1:]) for r in rows.requests], np.int64)
    stopped, _ = rows.append(np.arange(len(rows)), last, np.zeros(len(rows)), 3)
    assert stopped.all()  # each row's own stop id moved with it
