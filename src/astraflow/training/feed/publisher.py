"""Published versions of one policy: a directory of them, and a process that serves it to nodes."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from astraflow.config.schema import WeightsSection
from astraflow.errors import ConfigError
from astraflow.weights.objects.bucket import package_problem
from astraflow.weights.objects.mirror import Mirror
from astraflow.weights.publisher import Publisher
from astraflow.weights.server import ServerProcess, start_server
from astraflow.weights.store import FileStore

log = logging.getLogger(__name__)


class Versions:
    """Versions below `root/policy`, kept and served as [weights] of the run file says."""

    def __init__(self, root: Path, policy: str, section: WeightsSection, dataflow: str, token: str | None) -> None:
        self.store = FileStore(root, policy, keep=section.keep, full_every=section.full_every, durable=False)
        self._encoder = Publisher(self.store, deltas=section.deltas)
        self._server = start_server(root, section.host, section.port, token)
        self._policy, self._section, self._dataflow = policy, section, dataflow

    @property
    def urls(self) -> tuple[str, ...]:
        """Where nodes find the versions: as files on this host, over HTTP on others."""
        return (self.store.url, announced(self._server, self._policy, self._section, self._dataflow))

    def has(self, version: int) -> bool:
        """`version` is visible."""
        return version in self.store.versions()

    def publish(self, version: int, tensors: Mapping[str, Any], files: Iterable[Path] = ()) -> None:
        """See `TrainerSession.publish`."""
        # A copy, since the next version is compared with it: the caller's tensors are those that it trains.
        self._encoder.submit(version, {name: t.detach().cpu().clone() for name, t in _untied(tensors).items()}, files)
        self._encoder.flush()
        if self._server.ensure():
            log.warning("the weights server had died and was started again at %s", self._server.url)

    def close(self) -> None:
        """End the server and the thread."""
        self._encoder.close()
        self._server.stop()


def _untied(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Tied weights once, under their first name, as engines expect them."""
    found: dict[str, Any] = {}
    seen: set[tuple[int, tuple[int, ...]]] = set()
    for name, tensor in tensors.items():
        place = (tensor.data_ptr(), tuple(tensor.shape))
        if not tensor.numel() or place not in seen:
            found[name] = tensor
        seen.add(place)
    return found


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
