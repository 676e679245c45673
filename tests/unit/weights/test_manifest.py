from __future__ import annotations

from typing import Any

import msgspec
import pytest

from astraflow.errors import WeightError
from astraflow.weights.manifest import (
    Delta,
    FileEntry,
    Manifest,
    Part,
    Placement,
    TensorEntry,
    TornPart,
    is_file_name,
    is_policy_name,
    read_delta,
    read_manifest,
)


def example(**changes: Any) -> Manifest:
    entries = (TensorEntry("a", "BF16", (2, 3), "00" * 16), TensorEntry("b", "F32", (), "01" * 16))
    part = Part("model.safetensors", 100, "02" * 16, (Placement("a", 64, 12), Placement("b", 76, 4)))
    manifest = Manifest(
        policy="actor",
        version=3,
        parent=2,
        tensors=entries,
        parts=(part,),
        files=(FileEntry("config.json", 5, "03" * 16),),
    )
    return msgspec.structs.replace(manifest, **changes)


def read(manifest: Manifest) -> Manifest:
    return read_manifest(msgspec.json.encode(manifest), "actor", 3, "there")


def test_a_manifest_survives_the_wire() -> None:
    assert read(example()) == example()


def test_another_format_is_refused_by_name_and_none_is_the_first() -> None:
    old = msgspec.to_builtins(example())
    assert old.pop("format") == 1
    assert read_manifest(msgspec.json.encode(old), "actor", 3, "there") == example()
    for later in (example(format=2), {"format": 2, "shards": []}):  # whatever else it holds then
        with pytest.raises(WeightError, match=r"manifest\.format=2 must be 1; use the AstraFlow version") as refused:
            read_manifest(msgspec.json.encode(later), "actor", 3, "there")
        assert not isinstance(refused.value, TornPart)  # to fetch it again does not help


@pytest.mark.parametrize("changes", [{"policy": "critic"}, {"version": 4}])
def test_a_manifest_of_another_policy_or_version_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WeightError, match="must be actor/3"):
        read(example(**changes))


@pytest.mark.parametrize("length", [0, 1, 40, 150])
def test_a_half_written_manifest_is_torn(length: int) -> None:
    with pytest.raises(TornPart):
        read_manifest(msgspec.json.encode(example())[:length], "actor", 3, "there")


@pytest.mark.parametrize(
    "changes",
    [
        {"files": (FileEntry("../config.json", 5, "03" * 16),)},
        {"files": (FileEntry("/etc/passwd", 5, "03" * 16),)},
        {"files": (FileEntry(".lock", 5, "03" * 16),)},
        {"files": (FileEntry("model.safetensors", 5, "03" * 16),)},
        {"delta": Delta(2, (FileEntry("model.safetensors", 5, "03" * 16),))},
        {"delta": Delta(2, (FileEntry("../delta.bin", 5, "03" * 16),))},
        {"tensors": example().tensors * 2},
        {"files": (FileEntry("config.json", 5, "../03"),)},
        {"files": (FileEntry("config.json", 5, "03"),)},
        {"files": (FileEntry("config.json", 5, "A3" * 16),)},
        {"files": (FileEntry("config.json", -5, "03" * 16),)},
        {"files": (FileEntry("config.json", 1 << 50, "03" * 16),)},
        {"parts": (), "delta": Delta(2, (FileEntry("delta.bin", 5, "/tmp/victim"),))},
        {"parts": (), "delta": Delta(2, ()), "tensors": (TensorEntry("a", "BF16", (1 << 43, 8), "00" * 16),)},
        {"parts": (), "delta": Delta(2, ()), "tensors": (TensorEntry("a", "BF16", (0,) * 99, "00" * 16),)},
        {"parts": ()},
        {"parts": (Part("m.safetensors", 70, "02" * 16, (Placement("a", 64, 12), Placement("b", 76, 4))),)},
        {"parts": (Part("m.safetensors", 100, "02" * 16, (Placement("a", -4, 12), Placement("b", 76, 4))),)},
        {"parts": (Part("m.safetensors", 100, "02" * 16, (Placement("a", 64, 10), Placement("b", 76, 4))),)},
        {"parts": (Part("m.safetensors", 100, "02" * 16, (Placement("a", 64, 12), Placement("a", 64, 12))),)},
        {"tensors": (TensorEntry("a", "BF17", (2, 3), "00" * 16), TensorEntry("b", "F32", (), "01" * 16))},
        {"tensors": (TensorEntry("a", "BF16", (-2, -3), "00" * 16), TensorEntry("b", "F32", (), "01" * 16))},
    ],
)
def test_a_manifest_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TornPart):
        read(example(**changes))


@pytest.mark.parametrize(
    "places",
    [
        (Placement("a", 64, 12), Placement("b", 75, 4)),
        (Placement("a", 64, 12), Placement("b", 64, 4)),
        (Placement("a", 64, 12), Placement("b", 97, 4)),
        (Placement("a", 64, 12), Placement("b", -4, 4)),
        (Placement("a", 64, 8), Placement("b", 76, 4)),
    ],
)
def test_tensors_that_share_bytes_or_leave_their_part_are_refused(places: tuple[Placement, ...]) -> None:
    with pytest.raises(TornPart, match="places"):
        read(example(parts=(Part("model.safetensors", 100, "02" * 16, places),)))
    beside = (Placement("b", 96, 4), Placement("a", 84, 12))
    read(example(parts=(Part("model.safetensors", 100, "02" * 16, beside),)))


def test_a_version_may_travel_as_a_delta_only() -> None:
    delta = Delta(2, (FileEntry("delta-00001-of-00001.bin", 9, "09" * 16),))
    assert read(example(parts=(), delta=delta)).delta == delta
    assert read(example(delta=delta)).nbytes == 100


def test_a_merged_delta_is_checked_like_a_manifest() -> None:
    good = Delta(1, (FileEntry("merged.bin", 9, "09" * 16),))
    assert read_delta(msgspec.json.encode(good), 3, 1, "there") == good
    lies = [Delta(1, (FileEntry("merged.bin", 9, text),)) for text in ("/tmp/victim", "../victim", "09" * 15, "")]
    lies += [Delta(1, (FileEntry("merged.bin", nbytes, "09" * 16),)) for nbytes in (-1, 1 << 60)]
    lies += [Delta(1, (FileEntry("../x", 9, "09" * 16),)), Delta(2, good.parts), Delta(3, good.parts)]
    for payload in (*map(msgspec.json.encode, lies), b"<html>", b'"\xff"', b'{"a":' + b"[" * 10_000, b"null"):
        with pytest.raises(TornPart):
            read_delta(payload, 3, 1, "there")
    with pytest.raises(TornPart):
        read_delta(msgspec.json.encode(Delta(3, good.parts)), 3, 3, "there")


@pytest.mark.parametrize("base", [-1, 3, 4])
def test_a_delta_from_a_later_version_is_refused(base: int) -> None:
    with pytest.raises(TornPart, match=f"has a delta from version {base}"):
        read(example(delta=Delta(base, ())))


def test_content_is_the_same_whatever_the_packing() -> None:
    other = example(
        parts=(), parent=-1, files=(*example().files, FileEntry("model.safetensors.index.json", 9, "09" * 16))
    )
    assert example().same_content(other)
    assert not example().same_content(example(files=()))
    assert not example().same_content(example(tensors=example().tensors[:1]))


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "../a", "a\0", ".hidden", "a\n"])
def test_names_that_lead_elsewhere_are_no_names(name: str) -> None:
    assert not is_file_name(name)
    assert not is_policy_name(name)


def test_ordinary_names_are_names() -> None:
    assert is_file_name("model-00001-of-00002.safetensors")
    assert is_policy_name("actor-2.b")
