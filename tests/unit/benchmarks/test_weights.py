"""The pure parts of `bench_weights`: what belongs to which layer type, sums, extrapolation, checks."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from benchmarks.bench_weights import checks
from benchmarks.delta_codec import Measured, entropy_bounds, measure, pooled, synthetic
from benchmarks.weights import extrapolate, layers
from benchmarks.weights.late import late_pair, learning_rate
from benchmarks.weights.training import TRAININGS


def measured(**changes: float) -> Measured:
    plain = Measured(
        elements=1000, nbytes=2000, changed=10, positions=10.0, values=5.0, known=8.0, delta=18, xor=40,
        u32=60, u64=100, encode_s=1e-6, apply_s=1e-6, merge_s=1e-6, copy_s=1e-7,
    )  # fmt: skip
    return plain._replace(**changes)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.embed_tokens.weight", "embedding"),
        ("lm_head.weight", "head"),
        ("model.layers.0.self_attn.q_proj.weight", "attention q"),
        ("model.layers.11.self_attn.k_proj.bias", "attention k"),
        ("model.layers.0.self_attn.q_norm.weight", "norm"),
        ("model.layers.0.post_attention_layernorm.weight", "norm"),
        ("model.norm.weight", "norm"),
        ("model.layers.3.mlp.down_proj.weight", "mlp down"),
        ("model.layers.3.mlp.experts.7.gate_proj.weight", "mlp gate"),
        ("scale", "other"),
    ],
)
def test_a_tensor_is_of_the_layer_type_that_its_module_says(name: str, kind: str) -> None:
    assert layers.layer_type(name) == kind


def test_types_come_in_one_order_and_hold_every_tensor_once() -> None:
    names = ["model.norm.weight", "scale", "model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"]
    found = layers.by_type(names)
    assert list(found) == ["embedding", "mlp up", "norm", "other"]
    assert sorted(name for group in found.values() for name in group) == sorted(names)


def test_bounds_are_entropies() -> None:
    old = {"a.weight": torch.zeros(4096, dtype=torch.bfloat16)}
    new = {"a.weight": old["a.weight"].clone()}
    new["a.weight"].view(torch.int16)[::64] = torch.tensor([1, 2, 3, 4] * 16, dtype=torch.int16)
    bounds = entropy_bounds(old, new)
    assert bounds.num_changed == 64
    share = 1 / 64
    bits = -4096 * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    assert bounds.positions == pytest.approx(bits / 8)
    assert bounds.values == pytest.approx(64 * 2 / 8)
    assert bounds.known == pytest.approx(bounds.positions + bounds.values)  # all have one exponent


def test_what_changes_with_the_exponent_is_cheaper_once_that_is_known() -> None:
    old = torch.cat([torch.full((512,), 1e-6), torch.full((3584,), 0.5)]).bfloat16()
    new = torch.cat([torch.full((512,), 2e-6), torch.full((3584,), 0.5)]).bfloat16()
    bounds = entropy_bounds({"a": old}, {"a": new})
    assert bounds.num_changed == 512
    assert bounds.positions > 200
    assert bounds.known == 0


def test_a_delta_of_synthetic_weights_is_near_its_bound_and_sums_add_up() -> None:
    old, new = synthetic(1 << 20, 0.01)
    pair = measure(old, new, 1)
    assert pair.elements == 1 << 20
    assert pair.changed == pytest.approx(0.01 * pair.elements, rel=0.05)
    assert pair.positions + pair.values < pair.delta < 1.25 * (pair.positions + pair.values)
    assert (pair.u32, pair.u64) == (6 * pair.changed, 10 * pair.changed)
    twice = pooled([pair, pair])
    assert (twice.changed, twice.delta) == (2 * pair.changed, 2 * pair.delta)
    assert twice.row()["bytes per change"] == pair.row()["bytes per change"]


def test_rows_are_means_of_layer_types_and_then_each_pair() -> None:
    found = {
        "all": [measured(), measured(delta=20)],
        "norm": [measured(changed=0, delta=0), measured(changed=0, delta=0)],
    }
    rows = layers.rows("run", found)
    assert [row["layer"] for row in rows] == ["all", "norm", "all, 0 to 1", "all, 1 to 2"]
    assert rows[0]["delta MB"] == pytest.approx(19e-6)
    assert rows[0]["bytes per change"] == pytest.approx(1.9)
    assert rows[0]["elements"] == 1000
    assert rows[1]["changed"] == 0


def test_larger_models_are_reckoned_at_the_share_that_upstream_published() -> None:
    rows = {row["model"]: row for row in extrapolate.rows("run", measured())}
    small, middle, large = rows["1.7B"], rows["8B"], rows["14B"]
    assert small["share"] == pytest.approx(95e6 / 6 / 1_720_574_976)
    assert large["share"] == pytest.approx(1.5e9 / 10 / 14_768_307_200)
    assert (middle["share"], middle["upstream MB (published)"]) == (0.01, None)
    assert middle["upstream's coding MB"] == pytest.approx(8_190_735_360 * 0.01 * 10 / 1e6)
    assert small["times smaller"] == pytest.approx(95 / small["ours MB"])


def test_bytes_per_change_are_those_that_were_measured_where_changes_are_spread_evenly() -> None:
    share = 0.01
    even = measured(positions=10 * extrapolate.position_bytes(share), delta=20)
    assert extrapolate.bytes_per_change(share, even) == pytest.approx(2.0)
    shares = (0.001, 0.003, 0.01, 0.03, 0.1)
    costs = [extrapolate.bytes_per_change(share, even) for share in shares]
    assert all(rare > common for rare, common in pairwise(costs))


def test_checks_pool_the_pairs_near_one_percent_and_say_what_was_not_measured() -> None:
    found = {check.name: check for check in checks({"smollm2-x": {"all": [measured(), measured(elements=9000)]}})}
    assert found["bytes per change, pairs with about 1 % of changes"].value == pytest.approx(1.8)
    assert found["smaller than u32 and value, smollm2-x"].value == pytest.approx(60 / 18)
    assert found["apply, slowest pair of SmolLM2, of model per core"].value == pytest.approx(2.0)
    assert all(check.ok for check in found.values())
    none = checks({"smollm2-x": {"all": [measured(elements=9000)]}})
    assert [check.ok for check in none[:3]] == [False] * 3
    assert none[0].value is None


def test_a_late_step_changes_elements_as_often_as_the_rate_is_a_share_of_their_unit() -> None:
    weights = {"a": torch.full((100_000,), 0.75, dtype=torch.bfloat16), "b": torch.zeros(64, dtype=torch.bfloat16)}
    unit = 2.0**-8  # of 0.75 in bfloat16
    old, new = late_pair(weights, unit / 10)
    changed = (old["a"] != new["a"]).float().mean().item()
    assert changed == pytest.approx(0.1, rel=0.05)
    assert bool((old["b"] != new["b"]).all())
    assert all(float((old[name].float() - weights[name].float()).abs().max()) <= unit for name in weights)


def test_the_learning_rate_is_read_from_the_words_of_a_run() -> None:
    assert learning_rate(TRAININGS["smollm2-lr5e-6"].words) == 5e-6
    assert learning_rate(TRAININGS["quickstart-float32"].words) is None
