"""Encode, apply and merge: what is sent how, and what happens when it does not fit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from astraflow.errors import WeightError
from astraflow.weights.delta.apply import apply
from astraflow.weights.delta.encode import device_changes, encode, host_changes
from astraflow.weights.delta.faults import DamagedDelta, DeltaMismatch, WrongBase
from astraflow.weights.delta.merge import merge, sum_runs
from astraflow.weights.delta.order import ELEMENTS, add, flat_bits
from astraflow.weights.delta.reader import DeltaReader, Run

Tensors = dict[str, torch.Tensor]


def model(seed: int = 0) -> Tensors:
    rng = torch.Generator().manual_seed(seed)
    return {
        "embed": (torch.randn(300, 40, generator=rng) * 0.02).bfloat16(),
        "norm": torch.ones(40),
        "ids": torch.arange(500, dtype=torch.int32),
        "scale": torch.tensor(0.5, dtype=torch.float16),
    }


def moved(tensors: Tensors, by: int = 1, every: int = 97) -> Tensors:
    """Every n-th element of each tensor some units in the last place further."""
    new = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in new.values():
        flat_bits(tensor)[::every] += by
    return new


def delta_of(old: Tensors, new: Tensors, base: int = 0, **options: Any) -> list[bytes]:
    return list(encode(old, new, base=base, version=base + 1, **options))


def test_unchanged_tensors_are_not_mentioned_and_few_changes_are_sparse() -> None:
    old = model()
    new = moved(old) | {"ids": old["ids"].clone()}
    delta = DeltaReader(delta_of(old, new))
    assert list(delta.names) == ["embed", "norm", "scale"]
    assert not delta.is_full("embed")
    assert sum(len(run.positions) for run in delta.runs("embed")) == 124


@pytest.mark.parametrize("count", [1000, 300_000])
def test_a_tensor_whose_changes_are_no_fewer_bytes_travels_whole(count: int) -> None:
    rng = np.random.default_rng(0)
    noise = [torch.from_numpy(rng.integers(0, 1 << 16, count, dtype=np.uint16).view(np.int16)) for _ in range(2)]
    delta = DeltaReader(delta_of({"a": noise[0]}, {"a": noise[1]}))
    assert delta.is_full("a")
    all_by_one = delta_of({"a": noise[0]}, {"a": noise[0] + 1})
    assert not DeltaReader(all_by_one).is_full("a")
    assert sum(map(len, all_by_one)) < 1000


def test_few_changes_take_few_bytes() -> None:
    rng = np.random.default_rng(0)
    old = (torch.from_numpy(rng.standard_normal(2_000_000)) * 0.02).bfloat16()
    bits = flat_bits(old).numpy().copy()
    changed = np.flatnonzero(rng.random(len(bits)) < 0.01)
    bits[changed] += (rng.geometric(0.8, len(changed)) * rng.choice([-1, 1], len(changed))).astype(np.int16)
    parts = delta_of({"a": old}, {"a": torch.from_numpy(bits).view(torch.bfloat16)})
    assert sum(map(len, parts)) / len(changed) < 1.5


def test_new_resized_and_retyped_tensors_travel_whole_and_renamed_ones_go_and_come(codec: Any) -> None:
    old = model()
    new = {
        "fresh": torch.arange(3.0),
        "embed": torch.cat([old["embed"], old["embed"][:1]]),
        "ids": old["ids"].long(),
        "norm": old["norm"].view(8, 5),
        "factor": old["scale"],
    }
    parts = delta_of(old, new)
    delta = DeltaReader(parts)
    assert all(map(delta.is_full, delta.names))
    assert (set(delta.names), delta.removed) == (set(new), {"scale"})
    own = codec.copy(old)
    assert apply(own, parts, codec.manifest(0, old), codec.manifest(1, new)) == list(new)
    assert codec.content(own) == codec.content(new)


def test_the_reader_keeps_its_memory(codec: Any) -> None:
    old = model()
    noise = torch.from_numpy(np.random.default_rng(0).integers(0, 1 << 31, 500, dtype=np.int32))
    new = moved(old) | {"ids": noise}
    own = codec.copy(old)
    places = {name: tensor.data_ptr() for name, tensor in own.items()}
    apply(own, delta_of(old, new), codec.manifest(0, old), codec.manifest(1, new))
    assert codec.content(own) == codec.content(new)
    assert {name: tensor.data_ptr() for name, tensor in own.items()} == places


def test_names_that_share_memory_are_changed_once(codec: Any) -> None:
    old, new = model(), moved(model())
    old["lm_head"], new["lm_head"] = old["embed"], new["embed"]
    own = codec.copy(model())
    own["lm_head"] = own["embed"]
    apply(own, delta_of(old, new), codec.manifest(0, old), codec.manifest(1, new))
    assert codec.content(own) == codec.content(new)
    assert own["lm_head"].data_ptr() == own["embed"].data_ptr()


@pytest.mark.parametrize("mention_both", [True, False])
def test_names_that_share_memory_but_part_ways_are_a_mismatch(codec: Any, mention_both: bool) -> None:
    old, new = model(), moved(model())
    old["lm_head"] = old["embed"].clone()
    new["lm_head"] = moved({"x": old["embed"]}, every=5)["x"] if mention_both else old["embed"].clone()
    own = codec.copy(model())
    own["lm_head"] = own["embed"]
    before = codec.content(own)
    with pytest.raises(DeltaMismatch, match="checksum of lm_head"):
        apply(own, delta_of(old, new), codec.manifest(0, old), codec.manifest(1, new))
    assert codec.content(own) == before


def everything(seed: int = 0) -> tuple[Tensors, Tensors]:
    """A change of every kind: sparse, whole in place, new, resized, removed."""
    old = model(seed)
    new = moved(old)
    del new["scale"]
    rng = np.random.default_rng(0)
    old["noise"], new["noise"] = (torch.from_numpy(rng.standard_normal(3000)).float() for _ in range(2))
    new["fresh"] = torch.arange(3.0)
    new["norm"] = torch.ones(41)
    new["tail"] = new.pop("ids")
    old["tail"] = old.pop("ids")
    return old, new


@pytest.mark.parametrize("name", ["embed", "noise", "fresh", "norm", "tail"])
def test_a_wrong_checksum_takes_everything_back(codec: Any, name: str) -> None:
    old, new = everything()
    target = codec.manifest(1, new)
    entries = tuple(msgspec.structs.replace(e, xxh3="0" * 32) if e.name == name else e for e in target.tensors)
    own = codec.copy(old)
    before, places = codec.content(own), dict(own)
    with pytest.raises(DeltaMismatch, match=f"checksum of {name}"):
        apply(own, delta_of(old, new), codec.manifest(0, old), msgspec.structs.replace(target, tensors=entries))
    assert codec.content(own) == before
    assert all(own[name] is tensor for name, tensor in places.items())


def test_what_was_not_done_yet_is_not_taken_back(codec: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    old = {"w": torch.arange(5000.0)}
    new = {"w": old["w"].clone()}
    new["w"][::3] += 1
    parts, own, num_calls = delta_of(old, new, part_bytes=4000), codec.copy(old), 0
    assert len(list(DeltaReader(parts).runs("w"))) > 1

    def fail_once(*given: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise MemoryError
        add(*given)

    monkeypatch.setattr("astraflow.weights.delta.apply.add", fail_once)
    with pytest.raises(MemoryError):
        apply(own, parts, codec.manifest(0, old), codec.manifest(1, new))
    assert num_calls == 3
    assert codec.content(own) == codec.content(old)


def test_a_base_that_was_tampered_with_is_noticed_and_kept(codec: Any) -> None:
    old, new = everything()
    own = codec.copy(old)
    flat_bits(own["tail"])[3] ^= 0x55
    before = codec.content(own)
    with pytest.raises(DeltaMismatch, match="checksum of tail"):
        apply(own, delta_of(old, new), codec.manifest(0, old), codec.manifest(1, new))
    assert codec.content(own) == before


def test_any_flipped_byte_of_a_part_leaves_the_reader_as_it_was(codec: Any) -> None:
    old, new = everything()
    parts = delta_of(old, new, part_bytes=1 << 12)
    assert len(parts) > 1
    held, target = codec.manifest(0, old), codec.manifest(1, new)
    own = codec.copy(old)
    before = codec.content(own)
    harmless = 0
    for number, part in enumerate(parts):
        step = max(1, len(part) // 150)
        for at in range(0, len(part), step):
            damaged = codec.flip(part, at, 0x10, seal=False)
            with pytest.raises(DamagedDelta):
                apply(own, [*parts[:number], damaged, *parts[number + 1 :]], held, target)
        for at in range(codec.payload_at(part), len(part) - 16, step):
            sealed = codec.flip(part, at, 0x10, seal=True)
            try:
                apply(own, [*parts[:number], sealed, *parts[number + 1 :]], held, target)
            except (DamagedDelta, DeltaMismatch):
                assert codec.content(own) == before
            else:  # a bit that says nothing of the content, such as the window that a zstd frame asks for
                harmless += 1
                assert codec.content(own) == codec.content(new)
                own = codec.copy(old)
    assert harmless < 50
    apply(own, parts, held, target)
    assert codec.content(own) == codec.content(new)


@pytest.mark.parametrize(("held", "target"), [(1, 1), (0, 2), (-1, 1)])
def test_another_base_or_target_is_refused(codec: Any, held: int, target: int) -> None:
    old, new = model(), moved(model())
    own = codec.copy(old)
    with pytest.raises(WrongBase, match=f"must be {held} -> {target}"):
        apply(own, delta_of(old, new), codec.manifest(held, old), codec.manifest(target, new))
    assert codec.content(own) == codec.content(old)


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {other: tensor for other, tensor in tensors.items() if other != name}


def test_a_delta_that_says_other_than_the_manifests_is_refused(codec: Any) -> None:
    old, new = model(), moved(model())
    parts, extra, other = delta_of(old, new), {"extra": torch.zeros(2)}, {"extra": torch.ones(2)}
    cases = [
        ("is not mentioned but differs", parts, old, new | extra),
        ("is not mentioned but differs", parts, old | extra, new | other),
        ("is not in the target version", parts, without(old, "embed"), without(new, "embed")),
        ("must be F32", parts, old, new | {"embed": new["embed"].float()}),
        ("needs a tensor of that shape", parts, old | {"embed": old["embed"].float()}, new),
        (r"removed=\[\] must be \['extra'\]", parts, old | extra, new),
        (r"removed=\['extra'\] must be \[\]", delta_of(old | extra, new), old | extra, new | extra),
    ]
    for rule, parts, held, target in cases:
        own = codec.copy(held)
        with pytest.raises(WeightError, match=rule):
            apply(own, parts, codec.manifest(0, held), codec.manifest(1, target))
        assert codec.content(own) == codec.content(held), rule


@pytest.mark.parametrize(
    ("wrong", "rule"),
    [
        (lambda tensor: tensor.float(), "must be BF16"),
        (lambda tensor: tensor[:-1], "must be BF16"),
        (lambda tensor: tensor.t().contiguous().t(), "must be contiguous"),
        (lambda tensor: tensor.to("meta"), "must be contiguous in host memory"),
    ],
)
def test_tensors_that_are_not_what_the_reader_says_are_refused(codec: Any, wrong: Any, rule: str) -> None:
    old, new = model(), moved(model())
    own = codec.copy(old) | {"embed": wrong(old["embed"])}
    with pytest.raises(WrongBase, match=rule):
        apply(own, delta_of(old, new), codec.manifest(0, old), codec.manifest(1, new))
    own = codec.copy(old)
    del own["scale"]
    with pytest.raises(WrongBase, match="tensor=scale is not held"):
        apply(own, delta_of(old, new), codec.manifest(0, old), codec.manifest(1, new))


def test_there_and_back_vanishes() -> None:
    old = model()
    new = moved(old)
    del old["scale"], new["scale"]  # of a single element no form is fewer bytes, so it travels whole
    merged = list(merge([delta_of(old, new), delta_of(new, old, base=1)]))
    delta = DeltaReader(merged)
    assert (delta.base, delta.version, list(delta.names)) == (0, 2, [])


def test_changes_of_a_whole_tensor_are_made_in_it(codec: Any) -> None:
    versions = [model(), model() | {"fresh": torch.arange(400.0)}]
    versions.append(moved(versions[1]))
    versions.append(moved(versions[2], by=3, every=50))
    deltas = [delta_of(old, new, base) for base, (old, new) in enumerate(pairwise(versions))]
    merged = list(merge(deltas))
    delta = DeltaReader(merged)
    assert delta.is_full("fresh") and not delta.is_full("embed")
    own = codec.copy(versions[0])
    apply(own, merged, codec.manifest(0, versions[0]), codec.manifest(3, versions[3]))
    assert codec.content(own) == codec.content(versions[3])


def test_a_merge_of_one_is_the_same_delta() -> None:
    old, new = everything()
    parts = delta_of(old, new, part_bytes=1 << 12)
    assert list(merge([parts], part_bytes=1 << 12)) == parts


def test_deltas_that_do_not_follow_each_other_are_not_merged() -> None:
    old = model()
    new = moved(old)
    with pytest.raises(WrongBase, match="must be 1"):
        list(merge([delta_of(old, new), delta_of(new, old, base=2)]))
    with pytest.raises(DamagedDelta, match="delta embed"):
        other = {name: tensor.repeat(*[2] * max(1, tensor.dim())) for name, tensor in new.items()}
        list(merge([delta_of(old, new), delta_of(other, moved(other), base=1)]))


def test_sums_of_long_streams_need_no_more_than_their_heads() -> None:
    rng = np.random.default_rng(0)
    total = np.zeros(50_000, np.int16)
    streams, read = [], []
    for _ in range(5):
        positions = np.flatnonzero(rng.random(50_000) < 0.3)
        differences = rng.integers(-2, 3, len(positions)).astype(np.int16)
        total[positions] += differences
        cuts = sorted(rng.integers(0, len(positions), 20))
        pieces = zip(np.split(positions, cuts), np.split(differences, cuts), strict=True)
        streams.append(iter([Run(*piece) for piece in pieces]))
    for run in sum_runs(streams):
        assert not read or run.positions[0] > read[-1].positions[-1]
        read.append(run)
    np.testing.assert_array_equal(np.concatenate([run.positions for run in read]), np.flatnonzero(total))
    np.testing.assert_array_equal(np.concatenate([run.differences for run in read]), total[total != 0])


@pytest.mark.parametrize("code", ["I8", "BF16", "F32", "F64"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.6, 1.0])
@pytest.mark.parametrize("offset", [0, 1])
def test_host_and_device_see_the_same_changes(code: str, share: float, offset: int) -> None:
    element, rng = ELEMENTS[code], np.random.default_rng(0)
    old = rng.integers(0, 256, (5003, element.nbytes), dtype=np.uint8).view(element.signed).reshape(-1)
    new = old.copy()
    chosen = np.flatnonzero(rng.random(len(old)) < share)
    new[chosen] ^= rng.integers(1, 100, len(chosen)).astype(new.dtype)
    before, after = torch.from_numpy(old)[offset:], torch.from_numpy(new)[offset:]
    by_host = list(host_changes(before.numpy(), after.numpy(), element, chunk_bytes=4096))
    by_device = list(device_changes(before, after, element, chunk=777))
    for runs in (by_host, by_device):
        positions = np.concatenate([run.positions for run in runs])
        np.testing.assert_array_equal(
            positions, np.flatnonzero(old != new)[np.flatnonzero(old != new) >= offset] - offset
        )
    same = [np.concatenate([run.differences for run in runs]) for runs in (by_host, by_device)]
    np.testing.assert_array_equal(*same)


def test_views_and_tensors_with_gradients_are_encoded_too(codec: Any) -> None:
    old = {"a": torch.randn(40, 30).t(), "b": torch.nn.Parameter(torch.randn(10))}
    new = {"a": (old["a"] + 1), "b": torch.nn.Parameter(old["b"].detach() * 1.001)}
    plain = {name: tensor.detach().contiguous().clone() for name, tensor in old.items()}
    apply(plain, delta_of(old, new), codec.manifest(0, old), codec.manifest(1, new))
    assert codec.content(plain) == codec.content(new)


def test_a_dtype_that_cannot_be_published_is_named() -> None:
    with pytest.raises(WeightError, match=r"tensor a\.dtype"):
        delta_of({}, {"a": torch.zeros(1, dtype=torch.complex64)})
