"""Fetch a weight version from the stores that hold it: the file store when it is on this host, else over HTTP or from
an object store.

Every byte that is used was verified. A part that is cut is resumed by Range, a torn one is fetched again, and a store
that keeps failing is left for the next; only when all failed is there an error, and it names them all.
"""

from __future__ import annotations

import logging
import math
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec

from astraflow.config.env import shared_memory_allowed
from astraflow.config.secrets import has_credentials, masked_url
from astraflow.errors import ProtocolMismatch, Unauthorized, Unreachable, WeightError, WireError
from astraflow.types import WeightVersion
from astraflow.weights.fetch.choose import PROBE_S, Chooser
from astraflow.weights.fetch.copy import add_tensors, copy_version
from astraflow.weights.fetch.http import HttpReader
from astraflow.weights.fetch.pace import FAILING_S, SILENT_S, Pace, SlowStore
from astraflow.weights.fetch.route import Counts, Held, Reader, bring, retry, verified
from astraflow.weights.fetch.spool import LEFT_S, sweep
from astraflow.weights.manifest import Manifest
from astraflow.weights.objects.layout import is_object_store
from astraflow.weights.objects.reader import ObjectReader
from astraflow.weights.store import FileStore
from astraflow.wire.client import HttpClient

if TYPE_CHECKING:
    import torch

R = TypeVar("R")
_Failures = list[tuple[str, BaseException]]
_plain = re.compile(r"[!-~]+").fullmatch  # what can be sent in the head of a request
logger = logging.getLogger(__name__)
_MAX_HEALTH_BYTES = 1 << 20
ANNOUNCED_WAIT_S = 30.0
"""For a version that was announced: its trainer may still be encoding it."""


class Fetched(NamedTuple):
    """A verified version. The tensors belong to the caller until it gives this as `held`."""

    held: Held
    files: dict[str, bytes]  # config and tokenizer files by name

    @property
    def version(self) -> int:
        """The version they are."""
        return self.held.version

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By Hugging Face name, in the order of the manifest."""
        return self.held.tensors

    def save_files(self, directory: Path) -> None:
        """Write the config and tokenizer files, so that a node without the model directory can build the model."""
        directory.mkdir(parents=True, exist_ok=True)
        for name, content in self.files.items():
            (directory / name).write_bytes(content)


class WeightClient:
    """Thread-safe. `counts` only grow: fetches, bytes, retries, torn_parts, deltas, refused_deltas, failed_stores."""

    def __init__(
        self, token: str | None = None, *, timeout_s: float = SILENT_S, give_up_s: float = 5.0, wait_s: float = 0.0,
        spool: Path | None = None,
    ) -> None:  # fmt: skip
        """`wait_s`: how long a store may let us wait for a version that was announced and is not there yet. `spool`:
        directory for large parts while they come over HTTP; a process that starts again goes on with them."""
        self._spool = spool
        if spool is not None:
            sweep(spool)
        self._token, self._timeout_s, self._give_up_s, self._wait_s = token, timeout_s, give_up_s, wait_s
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._http: dict[str, HttpClient] = {}
        self._chooser = Chooser(self._probe)
        self._served: dict[str, str] = {}  # policy -> object store that gave the version before
        self._files: dict[str, bytes] = {}  # by checksum: equal in nearly every version
        self.counts = {
            "fetches": 0, "bytes": 0, "retries": 0, "torn_parts": 0, "deltas": 0, "refused_deltas": 0,
            "failed_stores": 0,
        }  # fmt: skip

    def fetch(self, wanted: WeightVersion, held: Fetched | None = None) -> Fetched:
        """The tensors and files of `wanted`, from the fastest of its stores that has them (this host's disk first).

        Args: held: an earlier version of the same policy; where a store has the changes since, they are made in place.
        After an error it can be given again.
        Raises: Unauthorized: a store refused the token and no other had the version. WeightError: no store had it.
        """
        if wanted.version < 0 or not wanted.urls:
            raise WeightError(
                f"{wanted.policy} version", wanted.version, "has not been published", "wait until the trainer publishes"
            )
        earlier = None if held is None else held.held
        good, bad = _sorted_out(wanted.urls)
        fetched = self._from_one(
            wanted, self._chooser.order(good), lambda url, leave: self._fetch_from(url, wanted, earlier, leave), bad
        )
        self._count("fetches")
        return fetched

    def copy(self, wanted: WeightVersion, store: FileStore, on_compared: Callable[[], None] | None = None) -> str:
        """Make `wanted` visible in `store` too, as it travels, from the first of its stores that has it; its URL.
        `on_compared`: see `copy_version`; then only stores that were announced count.

        Raises: Unauthorized, WeightError: no store had it.
        """

        def attempt(url: str, leave: bool) -> str | None:
            if urlsplit(url).scheme == "file" and not is_object_store(url):
                return None  # a relay serves those who cannot see the trainer's disk
            if on_compared is not None and url not in wanted.urls:
                raise WeightError(
                    "store", masked_url(url), "may be of the trainer before", "wait until it is announced"
                )
            reader = self._reader(url, wanted, leave)
            if reader is None:
                return None
            copy_version(reader, store, wanted.version, self._wait_s, on_compared)
            return url

        good, bad = _sorted_out(wanted.urls)
        return self._from_one(wanted, good, attempt, bad)

    def complete(self, wanted: WeightVersion, url: str, store: FileStore) -> None:
        """Give `wanted`, which `store` has as a delta only, its tensors from the store at `url`."""
        reader = self._reader(url, wanted)
        if reader is not None:
            add_tensors(reader, store, wanted.version)

    def close(self) -> None:
        """Drop connections and end waits."""
        self._closed.set()
        with self._lock:
            for client in self._http.values():
                client.close()
            self._http.clear()

    def _from_one(
        self, wanted: WeightVersion, urls: Sequence[str], attempt: Callable[[str, bool], R | None], failures: _Failures
    ) -> R:
        """What `attempt(url, leave)` gives for the first store where it works; None: not from here. `leave`: others
        were not tried yet, so the store may be left because it is slow; when all failed it is asked once more."""
        waiting, slow, since = deque(self._candidates(wanted.policy, urls)), dict[str, SlowStore](), math.inf
        silent = {url for url in waiting if self._chooser.is_broken(url)}  # the last of them
        while waiting and time.monotonic() - since < FAILING_S:
            url = waiting.popleft()
            try:
                found = attempt(url, bool(waiting) and url not in slow)
            except (WeightError, WireError, OSError, MemoryError) as error:  # of this store, or of its bytes here
                since = min(since, time.monotonic())
                self._note_failure(wanted.policy, url)
                _log_left(wanted, url, error)
                if isinstance(error, SlowStore):
                    slow[url] = error
                    at = next((at for at, other in enumerate(waiting) if other in silent), len(waiting))
                    waiting.insert(at, url)
                else:
                    failures.append((url, error))
                continue
            if found is not None:
                self._note_success(wanted.policy, url)
                if self._spool is not None:
                    sweep(self._spool, LEFT_S)
                return found
            failures.append((url, _elsewhere(url)))
        failures += [(url, slow.get(url) or _not_asked(url)) for url in waiting]
        for _, failure in failures:
            if isinstance(failure, Unauthorized | ProtocolMismatch):
                raise failure
        tried = "; ".join(f"{masked_url(url)}: {failure}" for url, failure in failures)
        raise WeightError(
            f"{wanted.policy} version", wanted.version, f"could not be fetched from any store ({tried})",
            "check that the trainer runs and that [weights] host is reachable from here",
        )  # fmt: skip

    def _candidates(self, policy: str, urls: Sequence[str]) -> list[str]:
        """`urls`, those that failed lately at the end. Before these the object store that gave the version before, also
        when it does not have this one yet: who reaches only that waits there, and not for servers that never answer."""
        broken = [url for url in urls if self._chooser.is_broken(url)]
        served = self._served.get(policy, "")
        late = [served] if served and served not in urls else []
        return [*(url for url in urls if url not in broken), *late, *broken]

    def _note_success(self, policy: str, url: str) -> None:
        if is_object_store(url):
            self._served[policy] = url
        else:
            self._served.pop(policy, None)

    def _note_failure(self, policy: str, url: str) -> None:
        self._chooser.failed(url)
        self._count("failed_stores")
        if self._served.get(policy) == url:
            self._served.pop(policy, None)

    def _fetch_from(self, url: str, wanted: WeightVersion, held: Held | None, leave: bool) -> Fetched | None:
        reader = self._reader(url, wanted, leave)
        if reader is None:
            return None
        counts = Counts()
        try:
            brought = bring(reader, held, wanted.version, wait_s=self._wait_s, counts=counts)
        finally:
            amounts = msgspec.structs.asdict(counts)
            read_s = amounts.pop("read_s")
            for name, amount in amounts.items():
                self._count("bytes" if name == "nbytes" else name, amount)
        self._chooser.fetched(url, counts.nbytes, read_s)
        return Fetched(brought, self._fetch_files(reader, brought.manifest))

    def _probe(self, base_url: str) -> float:
        begin = time.monotonic()
        try:
            if is_object_store(base_url):
                if not self._objects(base_url, base_url.partition("?")[0].rpartition("/")[2]).is_meant():
                    raise ConnectionError(f"{base_url} is another store")
                return time.monotonic() - begin
            limit_s = min(self._timeout_s, PROBE_S)
            asking = HttpClient(base_url, self._token, timeout_s=limit_s, give_up_s=0.0)
            pace = Pace("answer", limit_s, leave=True, most=_MAX_HEALTH_BYTES)
            try:
                asking.get_bytes("GET", "/health", on_bytes=pace.came)
            finally:
                asking.close()
        except Unreachable as error:  # any other answer is one
            raise ConnectionError(str(error)) from error
        except WeightError as error:
            raise ConnectionError(str(error)) from error
        except WireError as error:
            logger.debug("%s: %s", base_url, error)
        return time.monotonic() - begin

    def _reader(self, url: str, wanted: WeightVersion, leave: bool = False) -> Reader | None:
        """The store that `url` means; None: a directory of another host, or not to be used. `leave`: if slow."""
        if is_object_store(url):
            objects = self._objects(url, wanted.policy)
            return objects if objects.is_meant() else None
        parts = urlsplit(url)
        if parts.scheme == "file":
            store_id = parse_qs(parts.query).get("store", [""])[0]
            if store_id and not shared_memory_allowed():
                return None
            return _local_store(unquote(parts.path), store_id, wanted)
        if parts.scheme in ("http", "https"):
            client = self._client(f"{parts.scheme}://{parts.netloc}")
            return HttpReader(
                client, parts.path.rstrip("/"), wanted.policy, spool=self._spool, closed=self._closed,
                on_retry=self._count_retry, leave=leave,
            )  # fmt: skip
        raise WeightError("url", url, "must start with a scheme", "give the URL that the trainer announced")

    def _objects(self, url: str, policy: str) -> ObjectReader:
        return ObjectReader(url, policy, spool=self._spool, closed=self._closed, on_retry=self._count_retry)

    def _fetch_files(self, reader: Reader, manifest: Manifest) -> dict[str, bytes]:
        found: dict[str, bytes] = {}
        for entry in manifest.files:
            content = self._files.get(entry.xxh3)
            if content is None:
                content = bytes(retry(lambda e=entry: verified(reader.read(manifest.version, e), e)))  # type: ignore[misc]
                self._files[entry.xxh3] = content
            found[entry.name] = content
        return found

    def _client(self, base_url: str) -> HttpClient:
        with self._lock:
            if base_url not in self._http:
                self._http[base_url] = HttpClient(
                    base_url, self._token, timeout_s=self._timeout_s, give_up_s=self._give_up_s
                )
            return self._http[base_url]

    def _count_retry(self) -> None:
        self._count("retries")

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


def _sorted_out(urls: Iterable[str]) -> tuple[list[str], _Failures]:
    """(URLs that can be asked, those that cannot and why): one bad URL costs only its store."""
    good, bad = list[str](), _Failures()
    for url in urls:
        try:
            parts = urlsplit(url)
            is_http = parts.scheme in ("http", "https")
            if is_http and (not parts.hostname or parts.port == 0 or _plain(url) is None or has_credentials(url)):
                raise ValueError("no http://host:port")
        except ValueError as error:
            bad.append((url, WeightError("url", masked_url(url), f"is none ({error})", "announce it anew")))
        else:
            good.append(url)
    return good, bad


def _log_left(wanted: WeightVersion, url: str, error: BaseException) -> None:
    logger.warning("weights of %s %d: %s failed: %s", wanted.policy, wanted.version, masked_url(url), error)


def _not_asked(url: str) -> WeightError:
    rule = f"was not asked, as stores had failed for {FAILING_S:g} s"
    return WeightError("store", masked_url(url), rule, "check the connection")


def _elsewhere(url: str) -> WeightError:
    reason = "is not on this host" if shared_memory_allowed() else "is not used, since ASTRAFLOW_SHARED_MEMORY=0"
    return WeightError("directory", url, reason, "use an http:// store")
