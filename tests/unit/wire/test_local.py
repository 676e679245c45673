"""Bodies through files: written once, taken by name, never left behind, never guessed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from astraflow.errors import SchemaError
from astraflow.wire import local
from astraflow.wire.local import Inbox, open_place, place_of, put


@pytest.fixture
def inbox(tmp_path: Path) -> Inbox:
    return Inbox(tmp_path / "in: bö x")


def place(inbox: Inbox) -> Path:
    found = open_place(inbox.place)
    assert found is not None
    return found


def test_a_body_is_taken_whole_and_its_name_is_gone(inbox: Inbox) -> None:
    pieces = [memoryview(b"x" * 100_000), memoryview(b""), *([memoryview(b"yz")] * 2000)]
    name = put(place(inbox), pieces)
    assert name is not None
    with inbox.take(name) as body:
        assert body.view == b"".join(pieces)
    assert not list(place(inbox).iterdir())
    with pytest.raises(SchemaError, match="send the request again"):
        inbox.take(name)


def test_the_inbox_and_its_bodies_are_private(inbox: Inbox) -> None:
    name = put(place(inbox), [memoryview(b"abc")])
    assert place(inbox).stat().st_mode & 0o777 == 0o700
    assert (place(inbox) / str(name)).stat().st_mode & 0o777 == 0o600


def test_a_file_that_was_moved_away_stays_where_it_is(inbox: Inbox, tmp_path: Path) -> None:
    name = put(place(inbox), [memoryview(b"abc")])
    with inbox.take(str(name)) as body:
        assert body.path is not None
        body.path.rename(tmp_path / "kept")
    assert (tmp_path / "kept").read_bytes() == b"abc"


def test_what_nobody_takes_is_swept(inbox: Inbox, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit in ("_LEFTOVER_S", "_SWEEP_S"):
        monkeypatch.setattr(local, limit, -1.0)
    name = put(place(inbox), [memoryview(b"abc")])
    with pytest.raises(SchemaError, match="cannot be opened"):
        inbox.take(str(name))


def test_a_new_service_starts_with_an_empty_inbox(inbox: Inbox) -> None:
    put(place(inbox), [memoryview(b"abc")])
    assert not list(place(Inbox(place(inbox))).iterdir())


@pytest.mark.parametrize("name", ["../../etc/passwd", "", "0" * 31, "G" * 32, "0" * 32 + "/x"])
def test_a_name_that_is_not_ours_is_refused(inbox: Inbox, name: str) -> None:
    with pytest.raises(SchemaError, match="32 hexadecimal digits"):
        inbox.take(name)


def test_an_unknown_name_a_link_and_a_directory_are_refused(inbox: Inbox) -> None:
    (place(inbox) / ("a" * 32)).symlink_to("/etc/passwd")
    (place(inbox) / ("b" * 32)).mkdir()
    for name in ("0" * 32, "a" * 32, "b" * 32):
        with pytest.raises(SchemaError, match="cannot be opened"):
            inbox.take(name)


def test_a_full_disk_falls_back_to_inline(tmp_path: Path) -> None:
    assert put(tmp_path / "gone", [memoryview(b"abc")]) is None


def test_a_place_is_only_the_very_directory(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    text = place_of(tmp_path / "one")
    assert open_place(text) == tmp_path / "one"
    (tmp_path / "one").rename(tmp_path / "moved")
    assert open_place(text) is None
    (tmp_path / "other").rename(tmp_path / "one")
    assert open_place(text) is None
    for strange in ("", "::", "1:2:", f"1:{os.getuid()}:/", "x"):
        assert open_place(strange) is None
