from __future__ import annotations

import uuid
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from astraflow.weights.store import FileStore

HAS_S3 = find_spec("moto") is not None and find_spec("s3fs") is not None
KINDS = ["memory", "file", *(["s3"] if HAS_S3 else [])]  # test_bucket.py says when s3 is left out


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """URL of a server that speaks as S3 does."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=KINDS)
def base(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of an empty place, once for each kind of store."""
    if request.param == "memory":
        return f"memory://{uuid.uuid4().hex}/run"
    if request.param == "file":
        return (tmp_path / "bucket" / "run").as_uri()
    for name, value in {
        "AWS_ENDPOINT_URL": request.getfixturevalue("s3_server"), "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test", "AWS_DEFAULT_REGION": "us-east-1",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    import s3fs

    bucket = f"b{uuid.uuid4().hex}"
    s3fs.S3FileSystem(use_listings_cache=False).mkdir(bucket)
    return f"s3://{bucket}/run"


@pytest.fixture
def source(tmp_path: Path) -> FileStore:
    """Where a trainer publishes."""
    return FileStore(tmp_path / "weights", "actor", keep=3, full_every=4)
