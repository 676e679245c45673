"""A real dataflow service in a thread, a node that plays made-up episodes, a trainer that trains nothing. Torch-free.

with DataflowThread(config, run_dir) as service, PlayingNode(service.url): ...
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import uuid
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from astraflow.config.schema import RunConfig
from astraflow.contracts import Source
from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.service import create_dataflow_app, serve_dataflow
from astraflow.dataflow.shell import Shell
from astraflow.errors import LaunchError, WireError
from astraflow.testing.faults.fake_trainer import publish as publish_zeros
from astraflow.types import Episode, EpisodeLease, Trajectory
from astraflow.weights.app import create_weights_app
from astraflow.wire.app import bind, serve
from astraflow.wire.messages import Join, Resume

T = TypeVar("T")
Play = Callable[[EpisodeLease, str], Episode]
_LIMIT_S = 60.0


class DataflowThread:
    """The service of `run_dir`. `restart` ends it and starts it again on the same port, from its journal.

    Args: wrap: gets each new app before it serves, to watch or disturb its requests.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        token: str | None = None,
        sources: Mapping[str, Source] | None = None,
        wrap: Callable[[Any], None] = lambda app: None,
    ) -> None:
        self._config, self._run_dir, self._token, self._sources, self._wrap = config, run_dir, token, sources, wrap
        self.url = ""
        self.error: BaseException | None = None  # what it died of
        self._port = 0
        self._start()

    def restart(self, pause_s: float = 0.0) -> None:
        """As after a crash of the service: whoever asks in between finds nobody for at least `pause_s`."""
        self.close()
        threading.Event().wait(pause_s)
        self._start()

    def call(self, function: Callable[[], T]) -> T:
        """Run a function on the loop of the service, where machine and shell may be touched."""

        async def run() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(_LIMIT_S)

    def submit(self, command: Any) -> Any:
        """Put a command of the machine through the journal, as a request would."""
        return asyncio.run_coroutine_threadsafe(self.shell.submit(command), self._loop).result(_LIMIT_S)

    def close(self) -> None:
        """End the service."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join(_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _start(self) -> None:
        self._ready, self._stop = threading.Event(), asyncio.Event()
        app = create_dataflow_app(self._config, self._run_dir, self._token, self._sources)
        self.shell: Shell = app.state.shell
        self._wrap(app)
        self._thread = threading.Thread(target=self._main, args=(app,), name="dataflow", daemon=True)
        self._thread.start()
        if not self._ready.wait(_LIMIT_S) or not self.url:
            raise LaunchError("dataflow", str(self._run_dir), "did not start", str(self.error)) from self.error

    def _main(self, app: Any) -> None:
        async def main() -> None:
            self._loop = asyncio.get_running_loop()
            await serve_dataflow(app, "127.0.0.1", self._port, self._on_ready, self._stop)

        try:
            asyncio.run(main())
        except BaseException as error:
            self.error = error
        self._ready.set()

    def _on_ready(self, url: str) -> None:
        self.url, self._port = url, int(url.rpartition(":")[2])
        self._ready.set()


class PlayingNode:
    """A node in a thread that answers every lease with `play`, one by one, in order, until the run is over."""

    def __init__(self, url: str, token: str | None = None, *, play: Play | None = None, name: str = "node") -> None:
        self._client = DataflowClient(url, token, give_up_s=10.0)
        self._play, self._name = play or made_up_episode, name
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave."""
        self._ended.set()
        self._client.close()
        self._thread.join(_LIMIT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _main(self) -> None:
        while not self._ended.is_set():
            with contextlib.suppress(WireError):  # the service went away, or forgot this node: join again
                run = self._client.run()
                self._client.join(Join(node_id=self._name, name=self._name, capacity=8, run_id=run.run_id))
                while not self._ended.is_set():
                    reply = self._client.lease(self._name, 8, wait_s=0.2)
                    for lease in reply.leases:
                        self._client.commit([self._play(lease, self._name)])
                    if reply.finished:
                        return
            self._ended.wait(0.05)


class PublishingTrainer:
    """A trainer in a thread that publishes a version for each batch, without a change, until the run is over.

    Args: model: a model directory or built-in name whose weights and files are published (loads torch); "": a tensor
    of zeros.
    """

    def __init__(
        self, url: str, root: Path, token: str | None = None, *, policy: str = "actor", model: str = ""
    ) -> None:
        self._client = DataflowClient(url, token, give_up_s=10.0)
        self._root, self._policy = root, policy
        self._publish = _publisher_of(model, root, policy) if model else partial(publish_zeros, root, policy)
        self._publish(0)
        self._serving = contextlib.ExitStack()
        self._url = self._serving.enter_context(serving_weights(root, token))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._main, name="trainer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Leave."""
        self._ended.set()
        self._client.close()
        self._thread.join(_LIMIT_S)
        self._serving.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _main(self) -> None:
        trainer_id, version = uuid.uuid4().hex, 0
        urls = (f"file://{(self._root / self._policy).absolute()}", f"{self._url}/weights/{self._policy}")
        resumed = False
        while not self._ended.is_set():
            try:
                if not resumed:
                    run_id = self._client.run().run_id
                    resume = Resume(trainer_id=trainer_id, version=version, urls=urls, run_id=run_id)
                    self._client.resume(self._policy, resume)
                    resumed = True
                got = self._client.batch(self._policy, trainer_id, version, wait_s=0.5)
                if got is not None:
                    self._publish(got[0].step)
                    self._client.ack(got[0], trainer_id)
                    version = got[0].step
                    self._client.checkpoint(self._policy, trainer_id, version)
            except WireError as error:
                if error.status == 410:
                    return
                self._ended.wait(0.1)


def _publisher_of(model: str, root: Path, policy: str) -> Callable[[int], object]:
    from safetensors.torch import load_file

    from astraflow.config.env import cache_dir
    from astraflow.models.registry import model_directory
    from astraflow.training.checkpoint import model_files
    from astraflow.weights.store import FileStore

    directory, store = model_directory(model, cache_dir(), 0), FileStore(root, policy, durable=False)
    tensors = {name: tensor for path in directory.glob("*.safetensors") for name, tensor in load_file(path).items()}
    return lambda version: store.publish(version, tensors, model_files(directory))


@contextlib.contextmanager
def serving_weights(root: Path, token: str | None = None) -> Iterator[str]:
    """The weights app over `root` on a free port, in a thread of this process; yields its URL."""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    ready: list[str] = []
    answered = threading.Event()
    sock = bind("127.0.0.1", 0, "weights.port")

    def on_ready(url: str) -> None:
        ready.append(url)
        answered.set()

    def run() -> None:
        loop.run_until_complete(serve(create_weights_app(root, token), sock, on_ready, stop, grace_s=0.1))
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        if not answered.wait(10):
            raise LaunchError("weights server", str(root), "gave no answer in 10 s", "see the log")
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        sock.close()


def made_up_episode(lease: EpisodeLease, node_id: str) -> Episode:
    """Tokens and logprobs are functions of the episode's id; siblings are rewarded with 0 and 1 in turn."""
    draw = np.random.default_rng(zlib.crc32(lease.episode_id.encode()))
    size = int(draw.integers(6, 20))
    mask = np.arange(size) >= 3
    rows = [
        Trajectory(
            policy=policy,
            branch=0,
            parent_branch=-1,
            fork_at=0,
            token_ids=draw.integers(3, 61, size).astype(np.int32),
            loss_mask=mask,
            behavior_logprobs=np.where(mask, -4.0, 0.0).astype(np.float32),
            versions=np.where(mask, version, -1).astype(np.int32),
            call_index=np.where(mask, 0, -1).astype(np.int16),
            reward=float(int(lease.episode_id.rpartition("/")[2]) % 2),
        )
        for policy, version in lease.min_versions.items()
    ]
    return Episode(
        episode_id=lease.episode_id, attempt=lease.attempt, node_id=node_id, task=lease.task, trajectories=rows
    )
