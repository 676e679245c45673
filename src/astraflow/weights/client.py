"""Fetch a weight version from the stores that hold it: the file store when it is on this host, else over HTTP.

Every byte that is used was verified. A part that is cut is resumed by Range, a torn one is fetched again, and a store
that keeps failing is left for the next; only when all failed is there an error, and it names them all.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import numpy as np

from astraflow.errors import AstraFlowError, ProtocolMismatch, Unauthorized, Unreachable, WeightError, WireError
from astraflow.types import WeightVersion
from astraflow.weights.manifest import MANIFEST, FileEntry, Manifest, Part, TornPart, read_manifest
from astraflow.weights.store import FileStore
from astraflow.weights.tensors import checksum, view_part
from astraflow.wire.client import HttpClient

if TYPE_CHECKING:
    import torch

R = TypeVar("R")
logger = logging.getLogger(__name__)

_TRIES = 4
_PAUSE_S = 0.2


class Fetched(NamedTuple):
    """A verified version. The tensors are views of one buffer per part and belong to the caller."""

    version: int
    tensors: dict[str, torch.Tensor]  # by Hugging Face name, in the order of the manifest
    files: dict[str, bytes]  # config and tokenizer files by name

    def save_files(self, directory: Path) -> None:
        """Write the config and tokenizer files, so that a node without the model directory can build the model."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)


class WeightClient:
    """Thread-safe. `counts` are monotonic: fetches, bytes, retries, torn_parts, failed_stores."""

    def __init__(self, token: str | None = None, *, timeout_s: float = 30.0, give_up_s: float = 5.0) -> None:
        self._token, self._timeout_s, self._give_up_s = token, timeout_s, give_up_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._http: dict[str, HttpClient] = {}
        self._files: dict[str, bytes] = {}  # by checksum: equal in nearly every version
        self.counts = {"fetches": 0, "bytes": 0, "retries": 0, "torn_parts": 0, "failed_stores": 0}

    def fetch(self, wanted: WeightVersion) -> Fetched:
        """The tensors and files of `wanted`, from the first of its stores that has them.

        Raises: Unauthorized: a store refused the token and no other had the version. WeightError: no store had it.
        """
        if wanted.version < 0 or not wanted.urls:
            raise WeightError(
                f"{wanted.policy} version", wanted.version, "has not been published", "wait until the trainer publishes"
            )
        failures: list[tuple[str, AstraFlowError]] = []
        for url in wanted.urls:
            try:
                fetched = self._fetch_from(url, wanted)
            except (WeightError, WireError) as error:
                self._count("failed_stores")
                logger.warning("weights of %s %d: %s failed: %s", wanted.policy, wanted.version, url, error)
                failures.append((url, error))
                continue
            if fetched is not None:
                self._count("fetches")
                return fetched
            failures.append((url, WeightError("directory", url, "is not on this host", "use an http:// store")))
        for _, failure in failures:
            if isinstance(failure, Unauthorized | ProtocolMismatch):
                raise failure
        tried = "; ".join(f"{url}: {failure}" for url, failure in failures)
        raise WeightError(
            f"{wanted.policy} version", wanted.version, f"could not be fetched from any store ({tried})",
            "check that the trainer runs and that [weights] host is reachable from here",
        )  # fmt: skip

    def close(self) -> None:
        """Drop connections and end waits."""
        self._closed.set()
        with self._lock:
            for client in self._http.values():
                client.close()
            self._http.clear()

    def _fetch_from(self, url: str, wanted: WeightVersion) -> Fetched | None:
        parts = urlsplit(url)
        if parts.scheme == "file":
            store = _local_store(unquote(parts.path), parse_qs(parts.query).get("store", [""])[0], wanted)
            return None if store is None else self._fetch_file(store, wanted.version)
        if parts.scheme in ("http", "https"):
            client = self._client(f"{parts.scheme}://{parts.netloc}")
            return self._fetch_http(client, f"{parts.path.rstrip('/')}/{wanted.version}", wanted)
        raise WeightError("url", url, "must start with file:// or http://", "give the URL that the trainer announced")

    def _fetch_file(self, store: FileStore, version: int) -> Fetched:
        manifest = store.manifest(version)
        files = self._fetch_files(manifest, lambda entry: store.read_file(version, entry))
        tensors = store.fetch(version)
        self._count("bytes", manifest.nbytes)
        return Fetched(version, tensors, files)

    def _fetch_http(self, client: HttpClient, path: str, wanted: WeightVersion) -> Fetched:
        where = f"{client.base_url}{path}/{MANIFEST}"

        def get_manifest() -> Manifest:
            _, payload, _ = client.get_bytes("GET", f"{path}/{MANIFEST}")
            return read_manifest(payload, wanted.policy, wanted.version, where)

        manifest = self._retry(get_manifest)
        entries = manifest.entries()
        tensors: dict[str, torch.Tensor] = {}
        for part in manifest.parts:
            tensors.update(self._retry(lambda p=part: view_part(self._download(client, path, p), p, entries)))  # type: ignore[misc]
        files = self._fetch_files(manifest, lambda entry: self._download(client, path, entry))
        return Fetched(wanted.version, {entry.name: tensors[entry.name] for entry in manifest.tensors}, files)

    def _download(self, client: HttpClient, path: str, part: Part | FileEntry) -> memoryview:
        """All bytes of a part in one buffer, going on where a cut download ended."""
        target = np.empty(part.nbytes, np.uint8).data  # not zeroed: saves a pass over all bytes
        filled, tries = 0, 0
        while filled < part.nbytes:
            before = filled
            try:
                filled = client.download(f"{path}/{part.name}", target, filled)
            except Unreachable:
                if tries + 1 >= _TRIES:
                    raise
            if filled < part.nbytes:
                self._count("retries")
                tries = 0 if filled > before else tries + 1
                if tries >= _TRIES:
                    raise WeightError(
                        f"part {part.name}", f"{filled} bytes", f"must have {part.nbytes} and no more came",
                        "check the connection and the disk of the store",
                    )  # fmt: skip
                self._closed.wait(_PAUSE_S * tries)
        self._count("bytes", part.nbytes)
        return target

    def _fetch_files(self, manifest: Manifest, read: Callable[[FileEntry], bytes | memoryview]) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for entry in manifest.files:
            content = self._files.get(entry.xxh3)
            if content is None:
                content = self._retry(lambda e=entry: _verified(bytes(read(e)), e))  # type: ignore[misc]
                self._files[entry.xxh3] = content
            found[entry.name] = content
        return found

    def _retry(self, action: Callable[[], R]) -> R:
        """Bytes that do not match their checksum are fetched again: most often a proxy or a bad link tore them."""
        for _ in range(_TRIES - 1):
            try:
                return action()
            except TornPart as error:
                self._count("torn_parts")
                logger.warning("fetched again: %s", error)
        return action()

    def _client(self, base_url: str) -> HttpClient:
        with self._lock:
            if base_url not in self._http:
                self._http[base_url] = HttpClient(
                    base_url, self._token, timeout_s=self._timeout_s, give_up_s=self._give_up_s
                )
            return self._http[base_url]

    def _count(self, name: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[name] += amount


def _local_store(path: str, store_id: str, wanted: WeightVersion) -> FileStore | None:
    """The store at `path` if it is on this host: the directory exists and is the one that the URL means."""
    directory = Path(path)
    if directory.name != wanted.policy:
        raise WeightError("url", path, f"must end with /{wanted.policy}", "give the URL that the trainer announced")
    store = FileStore(directory.parent, wanted.policy)
    if not store.versions() or (store_id and store.store_id != store_id):
        return None
    return store


def _verified(content: bytes, entry: FileEntry) -> bytes:
    if checksum(content) != entry.xxh3:
        raise TornPart(f"checksum of {entry.name}", checksum(content), f"must be {entry.xxh3}", "fetch it again")
    return content
