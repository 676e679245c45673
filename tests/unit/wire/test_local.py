"""Bodies through shared memory: taken once, never left behind, never guessed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from astraflow.errors import SchemaError
from astraflow.wire import local
from astraflow.wire.local import SharedBodies, host_identity, take

pytestmark = pytest.mark.skipif(not host_identity(), reason="no /dev/shm on this system")


def names() -> set[str]:
    return {p.name for p in Path("/dev/shm").glob(f"astraflow-{os.getuid()}-*")}


def test_a_body_is_taken_whole_and_its_name_is_gone() -> None:
    before = names()
    name = SharedBodies().put(memoryview(b"x" * 100_000))
    assert name is not None
    assert take(name) == b"x" * 100_000
    assert names() <= before
    with pytest.raises(SchemaError, match="send the request again"):
        take(name)


def test_what_nobody_takes_is_swept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_LEFTOVER_S", -1.0)
    bodies = SharedBodies()
    name = bodies.put(memoryview(b"abc"))
    assert name is not None
    bodies.sweep()
    with pytest.raises(SchemaError):
        take(name)


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "0" * 31, "G" * 32, "0" * 32 + "/x"])
def test_a_name_that_is_not_ours_is_refused(name: str) -> None:
    with pytest.raises(SchemaError, match="32 hexadecimal digits"):
        take(name)


def test_an_unknown_name_is_refused() -> None:
    with pytest.raises(SchemaError, match="cannot be opened"):
        take("0" * 32)


def test_a_full_memory_falls_back_to_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "_ROOT", Path("/dev/shm/does-not-exist"))
    assert SharedBodies().put(memoryview(b"abc")) is None
