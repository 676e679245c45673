"""Packed logprobs and gradients against a plain one-by-one float32 reference."""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import astraflow.models.scoring.attention as attention
import astraflow.models.scoring.forward as forward
from astraflow.errors import ModelError
from astraflow.models.scoring.forward import HeadLogprobs, packed_logprobs, prepare_model
from astraflow.models.scoring.packing import pack_rows, rows_from_lists

LENGTHS = [19, 7, 7, 30, 2, 12, 11, 7, 25]


def _reference(model, rows, temperature):
    """Logprob of each trained token, row by row, with the model's own attention and no packing."""
    found = []
    for ids, mask in rows:
        tokens = torch.as_tensor(np.asarray(ids))[None].long()
        logits = model(input_ids=tokens).logits[0, :-1].float() / temperature
        chosen = logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
        found.append(chosen[torch.as_tensor(np.asarray(mask)[1:])])
    return found


def _packed(model, rows, temperature, budget):
    """The same from packs, back in the order of the rows."""
    found = [None] * len(rows)
    for pack in pack_rows(rows_from_lists(rows), budget):
        logprobs = packed_logprobs(model, pack, temperature).logprobs
        for sequence, row in enumerate(pack.rows):
            found[row] = logprobs[torch.from_numpy(pack.target_sequence == sequence)]
    return found


def _gradient(model, logprobs):
    weights = torch.linspace(-1, 1, sum(map(len, logprobs)))
    (torch.cat(logprobs) * weights).sum().backward()
    return torch.cat([p.grad.flatten() for p in model.parameters()])


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
@pytest.mark.parametrize("budget", [1, 40, 10_000])
def test_packed_equals_unpacked_in_logprobs_and_gradients(make_model, random_rows, family, budget):
    plain = make_model(family)
    packed = prepare_model(copy.deepcopy(plain))
    rows = random_rows(LENGTHS)
    expected, got = _reference(plain, rows, 1.0), _packed(packed, rows, 1.0, budget)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    wanted, actual = _gradient(plain, expected), _gradient(packed, got)
    assert (wanted - actual).norm() / wanted.norm() < 1e-6


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.4])
def test_logprobs_are_those_of_the_scaled_logits(make_model, random_rows, temperature):
    plain = make_model()
    rows = random_rows([9, 14])
    expected = torch.cat(_reference(plain, rows, temperature))
    got = torch.cat(_packed(prepare_model(copy.deepcopy(plain)), rows, temperature, 1000))
    torch.testing.assert_close(expected, got, rtol=1e-5, atol=1e-5)


def test_a_sequence_does_not_see_its_neighbours(make_model, random_rows):
    model = prepare_model(make_model())
    first, second, other = random_rows([12, 12, 12], seed=3)
    alone = _packed(model, [second], 1.0, 1000)[0]
    for neighbour in (first, other):
        assert torch.allclose(_packed(model, [neighbour, second], 1.0, 1000)[1], alone, atol=1e-6)
    for neighbour in random_rows([11, 40], seed=4):  # padded buckets, and another one
        assert torch.allclose(_packed(model, [neighbour, second], 1.0, 1000)[1], alone, atol=1e-6)


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_buckets_hold_every_token_once_with_little_padding(lengths):
    lengths = np.array(sorted(lengths, reverse=True))
    cu_lengths = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    layout = attention.pack_layout(cu_lengths, torch.device("cpu"), torch.float32)
    assert sum(b.tokens for b in layout.buckets) == lengths.sum()
    for bucket in layout.buckets:
        room = bucket.count * bucket.length
        assert room - bucket.tokens <= max(attention.MAX_PADDING * room, attention.SMALL_BUCKET_TOKENS)
        if bucket.gather is not None:
            assert (bucket.gather[bucket.scatter] == torch.arange(bucket.tokens)).all()


def test_no_mask_is_ever_built(make_model, random_rows, monkeypatch):
    seen = []
    original = attention.packed_attention

    def spy(module, query, key, value, attention_mask, **options):
        seen.append(attention_mask)
        return original(module, query, key, value, attention_mask, **options)

    attention.AttentionInterface.register(attention.IMPLEMENTATION, spy)
    try:
        for family in ("qwen3", "llama", "mistral"):
            _packed(prepare_model(make_model(family)), random_rows([9, 5]), 1.0, 1000)
    finally:
        attention.AttentionInterface.register(attention.IMPLEMENTATION, original)
    assert len(seen) == 6 and all(mask is None for mask in seen)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=20)
@given(chunk=st.integers(1, 40))
def test_chunks_of_the_head_change_nothing(make_model, random_rows, chunk):
    torch.manual_seed(1)
    rows = random_rows([20, 31])
    whole = prepare_model(make_model())
    parts = copy.deepcopy(whole)
    a = _packed(whole, rows, 1.3, 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "CHUNK_ELEMENTS", 61 * chunk)
        b = _packed(parts, rows, 1.3, 1000)
        right = _gradient(parts, b)
    torch.testing.assert_close(torch.cat(a), torch.cat(b), rtol=1e-6, atol=1e-6)
    left = _gradient(whole, a)
    assert (left - right).norm() / left.norm() < 1e-5


def test_the_head_passes_a_numerical_gradient_check():
    hidden, weight, bias = (
        torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((5, 4), (7, 4), (7,))
    )
    targets = torch.tensor([0, 6, 2, 3, 3])

    def plain(h, w, b):
        logits = torch.nn.functional.linear(h, w, b) / 1.4
        logs = logits.log_softmax(-1)
        return logs.gather(1, targets[:, None])[:, 0], -(logs.exp() * logs).sum(-1), logits.logsumexp(-1)

    got = HeadLogprobs.apply(hidden, weight, bias, targets, 1.4)
    want = plain(hidden, weight, bias)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-6)
    upstream = torch.randn(3, 5)
    for shares in list(itertools.product((0, 1), repeat=3))[1:]:

        def total(outputs, shares=shares):
            return sum((x * g).sum() for x, g, share in zip(outputs, upstream, shares, strict=True) if share)

        ours = torch.autograd.grad(total(got), (hidden, weight, bias), retain_graph=True)
        theirs = torch.autograd.grad(total(want), (hidden, weight, bias), retain_graph=True)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_entropy_is_that_of_the_distribution(make_model, random_rows):
    plain = make_model()
    (row,) = random_rows([15])
    (pack,) = pack_rows(rows_from_lists([row]), 100)
    entropies = packed_logprobs(prepare_model(copy.deepcopy(plain)), pack, 0.7).entropies
    logits = plain(input_ids=torch.as_tensor(row[0])[None]).logits[0, :-1] / 0.7
    expected = torch.distributions.Categorical(logits=logits).entropy()[torch.as_tensor(row[1][1:])]
    torch.testing.assert_close(entropies, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_other_weights_can_be_used_for_one_call(make_model, random_rows, family):
    torch.manual_seed(2)
    mine, other = prepare_model(make_model(family)), prepare_model(make_model(family))
    (pack,) = pack_rows(rows_from_lists(random_rows([9, 14])), 100)
    tensors = {name: p.detach().clone() for name, p in other.named_parameters()}
    with torch.no_grad():
        before, expected = packed_logprobs(mine, pack, 1.0)[0], packed_logprobs(other, pack, 1.0)[0]
        assert torch.equal(packed_logprobs(mine, pack, 1.0, tensors)[0], expected)
        assert torch.equal(packed_logprobs(mine, pack, 1.0)[0], before)
    assert not torch.equal(before, expected)


def test_a_model_that_scales_its_logits_is_refused(make_model):
    model = make_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ModelError, match="final_logit_softcapping"):
        prepare_model(model)
