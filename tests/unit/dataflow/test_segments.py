"""Segment files: append, read back without a copy, crashes, deletion."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.dataflow.storage.segments import DamagedRows, SegmentGone, Segments, map_segment, segment_name
from astraflow.errors import JournalError
from astraflow.wire.local import MIN_BYTES, Body


@pytest.fixture
def segments(tmp_path: Path) -> Iterator[Segments]:
    segments = Segments(tmp_path, segment_bytes=1000)
    yield segments
    segments.close()


def files(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.glob("*.arrow"))


def test_bodies_come_back_aligned_and_whole(segments: Segments) -> None:
    puts = [segments.append(bytes([i]) * (i + 1) * 10) for i in range(20)]
    for i, put in enumerate(puts):
        assert segments.read(put).to_pybytes() == bytes([i]) * (i + 1) * 10
        assert put.offset % 64 == 0


def test_a_full_segment_is_followed_by_the_next(segments: Segments, tmp_path: Path) -> None:
    puts = [segments.append(b"x" * 600) for _ in range(5)]
    assert [p.segment for p in puts] == [1, 1, 2, 2, 3]
    assert files(tmp_path) == ["000001.arrow", "000002.arrow", "000003.arrow"]
    assert not segments.sealed  # nothing that the machine does not know of yet may be deleted
    segments.settle()
    assert segments.sealed == {1, 2}
    segments.drop(1)
    assert files(tmp_path) == ["000002.arrow", "000003.arrow"] and segments.sealed == {2}


def test_a_start_keeps_what_is_needed_and_writes_to_a_new_file(tmp_path: Path) -> None:
    first = Segments(tmp_path, segment_bytes=100)
    kept, gone = first.append(b"kept" * 50), first.append(b"gone" * 50)
    torn = first.append(b"torn" * 10)
    first.close()
    with (tmp_path / f"{torn.segment:06d}.arrow").open("r+b") as file:  # a kill in the middle of a write
        file.truncate(5)
    again = Segments(tmp_path, segment_bytes=100)
    again.keep_only([kept])
    assert files(tmp_path) == [f"{kept.segment:06d}.arrow", f"{torn.segment + 1:06d}.arrow"]
    assert again.read(kept).to_pybytes() == b"kept" * 50
    assert again.append(b"new").segment > torn.segment > gone.segment
    again.close()


@pytest.mark.parametrize("size", [499, 64, 0])
def test_bodies_that_are_cut_short_are_named_and_the_others_stay(tmp_path: Path, size: int) -> None:
    first = Segments(tmp_path)
    puts = [first.append(b"x" * 60), first.append(b"y" * 436)]
    first.close()
    with (tmp_path / "000001.arrow").open("r+b") as file:
        file.truncate(size)
    again = Segments(tmp_path)
    cut = puts if not size else puts[1:]
    assert again.keep_only(puts) == cut
    for put in cut:
        with pytest.raises(DamagedRows):
            again.read(put)
    assert all(again.read(put).to_pybytes() == b"x" * 60 for put in puts if put not in cut)
    again.close()


def test_a_segment_that_is_gone_is_asked_for_and_its_number_is_not_used_again(tmp_path: Path) -> None:
    first = Segments(tmp_path, segment_bytes=100)
    puts = [first.append(bytes([i]) * 150) for i in range(3)]
    first.close()
    kept = (tmp_path / "000003.arrow").read_bytes()
    (tmp_path / "000003.arrow").unlink()
    for _ in range(2):  # also at the second start
        again = Segments(tmp_path)
        with pytest.raises(SegmentGone, match=r"000003\.arrow is gone, .*: 1\); .*--accept-damage"):
            again.keep_only(puts)
        again.close()
    again = Segments(tmp_path)
    assert again.keep_only(puts, accept_damage=True) == puts[2:]
    with pytest.raises(DamagedRows):
        again.read(puts[2])
    assert again.append(b"new").segment > 3 and again.read(puts[0]).to_pybytes() == bytes(150)
    again.close()
    (tmp_path / "000003.arrow").write_bytes(kept)
    again = Segments(tmp_path)
    assert again.keep_only(puts) == [] and again.read(puts[2]).to_pybytes() == b"\2" * 150
    again.close()


def test_bodies_that_could_not_be_journaled_are_taken_back(segments: Segments, tmp_path: Path) -> None:
    kept = segments.append(b"kept")
    segments.undo([segments.append(b"a" * 100), segments.append(b"b" * 100)])
    again = segments.append(b"c" * 100)
    assert again.offset == 64
    assert segments.read(kept).to_pybytes() == b"kept" and segments.read(again).to_pybytes() == b"c" * 100


def test_a_full_disk_is_a_journal_error_and_leaves_nothing_behind(segments: Segments, tmp_path: Path) -> None:
    kept = segments.append(b"kept")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        with pytest.raises(JournalError, match="make room"):
            segments.append(b"x" * 500)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (tmp_path / "000001.arrow").stat().st_size == 4
    again = segments.append(b"y" * 500)
    assert segments.read(again).to_pybytes() == b"y" * 500 and segments.read(kept).to_pybytes() == b"kept"


@pytest.mark.parametrize("position", [0, 250, 499])
def test_a_flipped_byte_is_found_when_the_body_is_read(tmp_path: Path, position: int) -> None:
    first = Segments(tmp_path)
    before, put = first.append(b"a" * 100), first.append(b"x" * 500)
    with (tmp_path / "000001.arrow").open("r+b") as file:
        file.seek(put.offset + position)
        file.write(b"y")
    assert first.read(before).to_pybytes() == b"a" * 100
    with pytest.raises(DamagedRows, match=rf"000001\.arrow is damaged between byte {put.offset}") as found:
        first.read(put)
    assert found.value.put == put
    first.close()


def test_synced_bodies_are_on_the_disk_before_anybody_hears_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    monkeypatch.setattr("astraflow.dataflow.storage.segments.os.fdatasync", synced.append)
    for fsync, expected in ((False, 0), (True, 2)):
        segments = Segments(tmp_path / f"{fsync}", 100, fsync=fsync)
        for _ in range(2):  # the second goes into the next file
            segments.append(b"x" * 200)
        segments.sync()
        segments.sync()
        assert len(synced) == expected
        segments.close()


def in_file(path: Path, content: bytes) -> Body:
    path.write_bytes(content)
    return Body(memoryview(content), path)


def test_a_large_body_in_a_file_becomes_a_segment_of_its_own(segments: Segments, tmp_path: Path) -> None:
    first = segments.append(b"first")
    content = bytes(MIN_BYTES) + b"end"
    with in_file(tmp_path / "body", content) as body:
        put = segments.store(body)
    after = segments.append(b"after")
    assert put.segment not in (first.segment, after.segment) and first.segment == after.segment
    assert not (tmp_path / "body").exists()
    assert segments.read(put).to_pybytes() == content
    again = Segments(tmp_path)
    again.keep_only([put])
    assert files(tmp_path)[0] == f"{put.segment:06d}.arrow" and again.read(put).size == len(content)
    again.close()


def test_a_small_body_in_a_file_is_appended(segments: Segments, tmp_path: Path) -> None:
    first = segments.append(b"first")
    with in_file(tmp_path / "body", b"small") as body:
        put = segments.store(body)
    assert put.segment == first.segment and segments.read(put).to_pybytes() == b"small"
    assert not (tmp_path / "body").exists()


def test_a_body_that_could_not_be_journaled_is_taken_back(segments: Segments, tmp_path: Path) -> None:
    kept, appended = segments.append(b"kept"), segments.append(b"appended")
    with in_file(tmp_path / "body", bytes(MIN_BYTES)) as body:
        own = segments.store(body)
    segments.undo([appended, own])
    segments.settle()
    assert files(tmp_path) == ["000001.arrow"] and not segments.sealed
    assert segments.read(kept).to_pybytes() == b"kept" and segments.size(1) == appended.offset


def test_a_map_outlives_its_file(segments: Segments, tmp_path: Path) -> None:
    with in_file(tmp_path / "body", bytes(range(256)) * 4096) as body:
        put = segments.store(body)
    mapped = map_segment(tmp_path / segment_name(put.segment))
    segments.drop(put.segment)
    assert mapped.slice(256, 256).to_pybytes() == bytes(range(256))
    with pytest.raises(FileNotFoundError):
        map_segment(tmp_path / segment_name(put.segment))
