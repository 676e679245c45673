"""The URL by which nodes reach a trainer's weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from astraflow.config.schema import WeightsSection
from astraflow.training.feed.publisher import Versions


@pytest.mark.parametrize(
    ("announce", "expected"),
    [
        ("https://weights.example:8443/", "https://weights.example:8443/weights/actor"),
        ("http://10.0.0.1/run7", "http://10.0.0.1/run7/weights/actor"),
    ],
)
def test_a_server_behind_a_proxy_is_announced_by_its_url_there(tmp_path: Path, announce: str, expected: str) -> None:
    versions = Versions(tmp_path, "actor", WeightsSection(announce=announce), "http://127.0.0.1:9", None)
    try:
        assert versions.urls[1] == expected
    finally:
        versions.close()


@pytest.mark.parametrize("wrong", ["10.0.0.1:80", "ftp://x", "http://", "http://a b", "http://a?x=1"])
def test_what_no_node_can_reach_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="must be http://host:port"):
        WeightsSection(announce=wrong)
