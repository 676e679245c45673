"""A real service on port 0 in a thread, and real clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.schema import RunConfig
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.service import create_dataflow_app, serve_dataflow
from astraflow.dataflow.shell import Shell
from astraflow.testing.dataflow import sources
from astraflow.wire import messages as m


class Service:
    """One dataflow service; `error` is what it died of."""

    def __init__(self, config: RunConfig, run_dir: Path, token: str | None, rows: Any = None) -> None:
        self._ready, self._stop = threading.Event(), asyncio.Event()
        self.url, self.error, self._token = "", None, token
        self._clients: list[DataflowClient] = []
        app = create_dataflow_app(config, run_dir, token, rows or sources())
        self.shell: Shell = app.state.shell
        self._thread = threading.Thread(target=self._main, args=(app,))
        self._thread.start()
        assert self._ready.wait(60), "the service did not start"

    def _main(self, app: Any) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            await serve_dataflow(app, "127.0.0.1", 0, self._on_ready, self._stop)

        try:
            asyncio.run(main())
        except BaseException as error:
            self.error = error
        self._ready.set()

    def _on_ready(self, url: str) -> None:
        self.url = url
        self._ready.set()

    def call(self, function: Callable[[], Any]) -> Any:
        """Run a function on the loop of the service."""

        async def run() -> Any:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(60)

    def submit(self, command: Any) -> Any:
        """Put a command through the journal."""
        return asyncio.run_coroutine_threadsafe(self.shell.submit(command), self._loop).result(60)

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
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(60)
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
