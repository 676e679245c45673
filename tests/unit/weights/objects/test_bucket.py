from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem

from astraflow.errors import WeightError
from astraflow.weights.objects import bucket as bucket_module
from astraflow.weights.objects.bucket import Bucket, MissingObject, package_problem


def test_objects_come_back_whole_and_in_ranges(base: str, tmp_path: Path) -> None:
    bucket = Bucket(base)
    (tmp_path / "part").write_bytes(bytes(range(100)))
    bucket.put("a/index.json", b"one")
    bucket.put("a/index.json", b"second")
    bucket.put_file("a/7/part", tmp_path / "part")
    bucket.copy("a/7/part", "a/8/part")
    assert bucket.get("a/index.json") == b"second"
    assert bucket.ranges("a/8/part", [(0, 10), (95, 100), (90, 200)]) == [
        bytes(range(10)), bytes(range(95, 100)), bytes(range(90, 100)),
    ]  # fmt: skip
    assert bucket.names() == ["a/7/part", "a/8/part", "a/index.json"]
    assert bucket.names("a/8") == ["a/8/part"]
    assert bucket.names("nothing") == []


def test_what_is_not_there_is_said_and_deleting_it_is_no_error(base: str) -> None:
    bucket = Bucket(base)
    bucket.put("x", b"x")
    with pytest.raises(MissingObject, match="is not there"):
        bucket.get("absent")
    assert all(isinstance(found, MissingObject) for found in bucket.ranges("absent", [(0, 1), (1, 2)]))
    bucket.remove("absent")
    bucket.remove_folder("absent")
    bucket.remove("x")
    assert bucket.names() == []


def test_a_folder_is_deleted_with_all_in_it(base: str) -> None:
    bucket = Bucket(base)
    for name in ("7/a", "7/b", "71/a"):
        bucket.put(name, b"-")
    bucket.remove_folder("7")
    assert bucket.names() == ["71/a"]


def test_a_missing_package_is_one_sentence_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    package_problem("memory://x")  # loads fsspec
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # an earlier test loaded it
    with pytest.raises(WeightError, match=r"s3://b/p needs a package .*; pip install 'astraflow\[s3\]'"):
        Bucket("s3://b/p")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert "pip install fsspec" in package_problem("file:///x")


def test_a_scheme_that_nobody_knows_is_refused() -> None:
    assert "that fsspec does not know" in package_problem("nosuch://x")
    assert package_problem("memory://x") == ""


def test_credentials_in_a_url_are_refused_and_not_shown() -> None:
    with pytest.raises(WeightError) as caught:
        Bucket("s3://key:hunter2@bucket/prefix")
    assert "must not hold credentials" in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_store_that_does_not_answer_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    bucket = Bucket((tmp_path / "file" / "below").as_uri())
    with pytest.raises(WeightError, match="could not be written"):
        bucket.put("x", b"")
    with pytest.raises(WeightError, match="could not be written"):
        bucket.put_file("7/x", tmp_path / "file")


class Hanging(AsyncFileSystem):  # type: ignore[misc]
    """Takes every request and never answers; its library would try for ever."""

    protocol = "hanging"
    ended = 0

    async def _hang(self, *words: Any, **options: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            Hanging.ended += 1

    _cat_file = _pipe_file = _put_file = _cp_file = _rm_file = _rm = _find = _makedirs = _hang


ASKED: dict[str, Callable[[Bucket], object]] = {
    "get": lambda bucket: bucket.get("x"),
    "put": lambda bucket: bucket.put("x", b""),
    "put_file": lambda bucket: bucket.put_file("x", Path(__file__)),
    "copy": lambda bucket: bucket.copy("x", "y"),
    "remove": lambda bucket: bucket.remove("x"),
    "remove_folder": lambda bucket: bucket.remove_folder("x"),
    "names": lambda bucket: bucket.names(),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_a_store_does_not_answer_in_time_is_cancelled(monkeypatch: pytest.MonkeyPatch, asked: str) -> None:
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    monkeypatch.setattr(bucket_module, "ANSWER_S", 0.05)
    monkeypatch.setattr(bucket_module, "_UPLOAD_BYTES_PER_S", 1e6)
    bucket, before = Bucket("hanging://bucket/actor"), Hanging.ended
    with pytest.raises(WeightError, match=r"object=hanging://bucket/actor\S* could not be .*; 0.05 s are allowed"):
        ASKED[asked](bucket)
    assert Hanging.ended == before + 1, "nothing goes on in its loop"


def test_of_several_ranges_those_that_came_in_time_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    class Partly(Hanging):
        async def _cat_file(self, path: str, start: int, end: int) -> bytes:
            if start == 1:
                await self._hang()
            return bytes(range(start, end))

    fsspec.register_implementation("hanging", Partly, clobber=True)
    monkeypatch.setattr(bucket_module, "ANSWER_S", 0.05)
    before = Hanging.ended
    first, second, third = Bucket("hanging://bucket/actor").ranges("x", [(0, 1), (1, 2), (2, 3)])
    assert (first, third) == (b"\0", b"\2") and "0.05 s are allowed" in str(second)
    assert Hanging.ended == before + 1, "what did not come in time is not read on"


@pytest.mark.skipif(
    find_spec("moto") is None or find_spec("s3fs") is None,
    reason="NOT TESTED: object stores over s3 need `pip install 'moto[server]' s3fs`",
)
def test_s3_is_among_the_stores(request: pytest.FixtureRequest) -> None:
    assert request.getfixturevalue("s3_server").startswith("http://127.0.0.1:")
