from __future__ import annotations

import pytest

from astraflow.dataflow.endpoints.urls import check_base, check_stores
from astraflow.wire.app import HttpError


@pytest.mark.parametrize("url", ["http://10.0.0.1:7800", "https://relay.example", "http://[::1]:7800/prefix"])
def test_a_relay_is_at_a_plain_address(url: str) -> None:
    check_base(url)


@pytest.mark.parametrize(
    "url",
    ["http://user:hunter2@h:1", "http://user:hun@hunter2@h:1", "http://hunter2@h:1", "http://h:1/?token=1", "http://h:1?",
     "http://h:1#f", "ftp://user:hunter2@h", "http://user:hunter2/@h:1", f"http://{'u' * 300}:hunter2@h:1"],
)  # fmt: skip
def test_a_relay_gives_no_password_and_no_more_than_its_address(url: str) -> None:
    with pytest.raises(HttpError, match="http://host:port") as caught:
        check_base(url)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("url", ["http://user:hunter2@h/weights/actor", "s3://key:hunter2@bucket/actor"])
def test_nodes_are_told_of_no_password(url: str) -> None:
    with pytest.raises(HttpError, match="no password") as caught:
        check_stores(["file:///run/weights/actor", url])
    assert "hunter2" not in str(caught.value)
    check_stores(["http://h:1/weights/actor", "abfs://container@account.host/actor"])
