"""The parts of the packed forward pass: buckets, chunks of the head, other weights. Its numbers: numbers/."""

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
import astraflow.models.scoring.layout as layout
from astraflow.errors import ModelError
from astraflow.models.scoring.forward import HeadLogprobs, packed_logprobs, prepare_model
from astraflow.models.scoring.packing import pack_rows, rows_from_lists


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


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=40))
def test_buckets_hold_every_token_once_with_little_padding(lengths):
    lengths = np.array(sorted(lengths, reverse=True))
    cu_lengths = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    found = layout.pack_layout(cu_lengths, None, torch.device("cpu"), torch.float32)
    rest = lengths.tolist()
    for bucket in found.buckets:
        inside, rest = rest[: bucket.sequences], rest[bucket.sequences :]
        assert inside[0] == bucket.length
        room = bucket.sequences * bucket.length
        assert room - sum(inside) <= max(layout.MAX_PADDING * room, layout.SMALL_BUCKET_TOKENS)
    assert not rest
    padded = sum(bucket.sequences * bucket.length for bucket in found.buckets) > lengths.sum()
    assert (found.spread is not None, found.collect is not None) == (padded, padded)
    if found.spread is not None:
        assert (found.spread.index[found.collect.index] == torch.arange(lengths.sum())).all()


@given(index=st.lists(st.integers(0, 9), min_size=1, max_size=60), width=st.integers(1, 9), seed=st.integers(0, 99))
def test_the_gradient_of_taken_rows_is_that_of_index_select(index, width, seed):
    torch.manual_seed(seed)
    source = torch.randn(10, 2, width, requires_grad=True)
    upstream = torch.randn(len(index), 2, width)
    index = np.array(index)
    taken = layout.Taken.apply(source, layout.Rows.of(index, 10, torch.device("cpu")))
    plain = source.index_select(0, torch.from_numpy(index))
    assert torch.equal(taken, plain)
    mine, wanted = (torch.autograd.grad((x * upstream).sum(), source)[0] for x in (taken, plain))
    torch.testing.assert_close(mine, wanted)


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
@given(chunk=st.integers(1, 40), few=st.integers(1, 9), width=st.integers(5, 70))
def test_chunks_of_the_head_change_nothing(make_model, random_rows, chunk, few, width):
    torch.manual_seed(1)
    rows = random_rows([20, 31])
    whole = prepare_model(make_model())
    parts = copy.deepcopy(whole)
    a = _packed(whole, rows, 1.3, 1000)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forward, "CHUNK_ELEMENTS", 61 * chunk)
        patch.setattr(forward, "_FEW_ELEMENTS", 61 * few)
        patch.setattr(forward, "_WIDTH", width)
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
