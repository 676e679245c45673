"""A real service on port 0 in a thread, and real clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.schema import RunConfig
from astraflow.dataflow.client import DataflowClient
from astraflow.testing.dataflow import sources
from astraflow.testing.services import DataflowThread
from astraflow.wire import messages as m


class Service(DataflowThread):
    """With clients that end with it."""

    def __init__(self, config: RunConfig, run_dir: Path, token: str | None, rows: Any = None) -> None:
        self._clients: list[DataflowClient] = []
        super().__init__(config, run_dir, token, rows or sources())

    def client(self, token: str | None = None, *, give_up_s: float = 3.0) -> DataflowClient:
        """A new client."""
        client = DataflowClient(self.url, token or self._token, give_up_s=give_up_s)
        self._clients.append(client)
        return client

    def start(self, node_id: str = "n", version: int = 0) -> DataflowClient:
        """A client whose node has joined and whose trainer "t" has resumed every policy."""
        client = self.client()
        run = client.run()
        for name in run.config["policies"]:
            client.resume(name, m.Resume(trainer_id="t", version=version, urls=("file:///w",), run_id=run.run_id))
        client.join(m.Join(node_id=node_id, name=node_id, capacity=8, run_id=run.run_id))
        return client

    def wait_for_end(self) -> None:
        """Until the service ended by itself."""
        self._thread.join(60)
        assert not self._thread.is_alive()

    def close(self) -> None:
        """Stop the service and its clients."""
        super().close()
        for client in self._clients:
            client.close()


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    services: list[Service] = []

    def start(config: RunConfig, run_dir: Path = tmp_path, token: str | None = None, rows: Any = None) -> Service:
        services.append(Service(config, run_dir, token, rows))
        return services[-1]

    yield start
    for service in services:
        service.close()
