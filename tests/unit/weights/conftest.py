from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from astraflow.testing.weights import make_tensors
from astraflow.weights.client import WeightClient
from astraflow.weights.fetch import http as http_reader
from astraflow.weights.store import FileStore


@pytest.fixture
def store(tmp_path: Path) -> FileStore:
    return FileStore(tmp_path / "weights", "actor")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Iterator[WeightClient]:
    monkeypatch.setattr(http_reader, "_PAUSE_S", 0.0)
    made = WeightClient(timeout_s=5.0, give_up_s=0.3)
    yield made
    made.close()


@pytest.fixture
def published(store: FileStore, tmp_path: Path) -> FileStore:
    (tmp_path / "config.json").write_text('{"hidden_size": 16}')
    store.publish(3, make_tensors(), [tmp_path / "config.json"])
    return store
