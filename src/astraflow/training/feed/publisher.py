"""Published versions of one policy: a directory of them, and a process that serves it to nodes."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Hashable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from astraflow.config.schema import WeightsSection
from astraflow.errors import ConfigError, TrainingError
from astraflow.weights.objects.bucket import package_problem
from astraflow.weights.objects.mirror import Mirror
from astraflow.weights.publisher import Publisher
from astraflow.weights.server import ServerProcess, start_server
from astraflow.weights.shards.publisher import ShardedPublisher
from astraflow.weights.store import NO_PINS, FileStore, Pins
from astraflow.weights.tensors import same_memory

log = logging.getLogger(__name__)


class Versions:
    """Versions below `root/policy`, kept and served as [weights] of the run file says. `sharded`: other ranks hold
    parts of them (`Part`)."""

    def __init__(
        self, root: Path, policy: str, section: WeightsSection, dataflow: str, token: str | None,
        *, sharded: bool = False, pins: Pins = NO_PINS,
    ) -> None:  # fmt: skip
        self.store = FileStore(root, policy, keep=section.keep, full_every=section.full_every, durable=False, pins=pins)
        self._encoder = (
            Part(self.store, deltas=section.deltas) if sharded else _Whole(self.store, deltas=section.deltas)
        )
        self._given = -1  # the newest that was given here
        self._server = start_server(root, section.host, section.port, token)
        self._policy, self._section, self._dataflow = policy, section, dataflow

    @property
    def urls(self) -> tuple[str, ...]:
        """Where nodes find the versions: as files on this host, over HTTP on others."""
        return (self.store.url, announced(self._server, self._policy, self._section, self._dataflow))

    def has(self, version: int) -> bool:
        """`version` is visible, or on its way."""
        return version == self._given or version in self.store.versions()

    def publish(self, version: int, tensors: Mapping[str, Any], files: Iterable[Path] = ()) -> None:
        """See `TrainerSession.publish`."""
        self._encoder.publish(version, tensors, files)
        self._given = version
        if self._server.ensure():
            log.warning("the weights server had died and was started again at %s", self._server.url)

    def flush(self) -> None:
        """All that was given is visible. Raises: WeightError: it could not be published."""
        self._encoder.flush()

    def close(self) -> None:
        """Finish what was given; end the server and the thread."""
        self._encoder.close()
        self._server.stop()


class _Whole:
    """A model that this process holds all of."""

    def __init__(self, store: FileStore, *, deltas: bool) -> None:
        self._publisher = Publisher(store, deltas=deltas)

    def publish(self, version: int, tensors: Mapping[str, Any], files: Iterable[Path]) -> None:
        """A copy is taken, since the caller goes on with its tensors."""
        self._publisher.submit(
            version, {n: t.detach().to("cpu", copy=True) for n, t in _untied(tensors).items()}, files
        )

    def flush(self) -> None:
        """All is visible."""
        self._publisher.flush()

    def close(self) -> None:
        """Finish it."""
        self._publisher.close()


def publisher_for(
    store: FileStore, *, deltas: bool, sharded: bool = False, leads: bool = True
) -> Publisher | ShardedPublisher:
    """Versions of a trainer that gives copies. `sharded`: made on all ranks at once, of which one `leads`."""
    if sharded:
        return ShardedPublisher(store if leads else None, deltas=deltas)
    return Publisher(store, deltas=deltas)


class Part:
    """One rank's part of a sharded model. `store`: on rank 0. The ranks find each other at the first publish."""

    def __init__(self, store: FileStore | None, *, deltas: bool = True) -> None:
        self._store, self._deltas = store, deltas
        self._publisher: ShardedPublisher | None = None

    def publish(self, version: int, tensors: Mapping[str, Any], files: Iterable[Path]) -> None:
        """On every rank. A copy of this rank's part is taken."""
        if self._publisher is None:
            self._publisher = ShardedPublisher(self._store, deltas=self._deltas)
        self._publisher.submit(version, tensors, files)

    def flush(self) -> None:
        """All is visible."""
        if self._publisher is not None:
            self._publisher.flush()

    def close(self) -> None:
        """Finish it."""
        if self._publisher is not None:
            self._publisher.close()


def _untied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tied weights once, under their first name, as engines expect them."""
    found: dict[str, Any] = {}
    seen: set[Hashable] = set()
    for name, tensor in tensors.items():
        if _is_shard(tensor):
            raise TrainingError(
                f"tensor {name}",
                "DTensor",
                "is a part of a tensor",
                "give Share(sharded=True) to the session of every rank",
            )
        place = same_memory(tensor)
        if not tensor.numel() or place not in seen:
            found[name] = tensor
        seen.add(place)
    return found


def _is_shard(tensor: Any) -> bool:
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):  # so there is no DTensor, whose import takes a second
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def start_mirror(
    store: FileStore, section: WeightsSection, run_id: str, on_change: Callable[[Mirror], None]
) -> Mirror | None:
    """The versions of `store` in `weights.url` too; None: the run has no object store.

    Raises: ConfigError: a package is missing.
    """
    if not section.url:
        return None
    if problem := package_problem(section.url):
        raise ConfigError("run file", [f"weights.url={section.url!r} {problem}"])
    return Mirror(store, f"{section.url.rstrip('/')}/{run_id}", on_change)


def announced(server: ServerProcess, policy: str, section: WeightsSection, dataflow: str) -> str:
    """Where nodes reach the versions of `policy` that `server` has."""
    if section.announce:
        return f"{section.announce.rstrip('/')}/weights/{policy}"
    return outward(server.policy_url(policy), dataflow)


def outward(url: str, dataflow: str) -> str:
    """`url` as nodes can reach it: a server that listens on all addresses is named by the one that dataflow sees."""
    host = urlsplit(url).hostname or ""
    if host not in ("0.0.0.0", "::"):
        return url
    peer = urlsplit(dataflow)
    family = socket.AF_INET6 if host == "::" else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:  # a datagram socket chooses a route, it sends nothing
        probe.connect((peer.hostname, peer.port or 80))
        own = probe.getsockname()[0]
    return url.replace("//[::]:", f"//[{own}]:").replace("//0.0.0.0:", f"//{own}:")
