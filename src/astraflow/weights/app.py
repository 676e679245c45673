"""The HTTP side of a run's weights: every policy below one root, read-only, in large pieces.

| request                                       | reply                                        |
|-----------------------------------------------|----------------------------------------------|
| GET /weights/{policy}                         | `Listing`                                    |
| GET /weights/{policy}/{version}/manifest.json | the manifest; starts a reader's lease        |
| GET /weights/{policy}/{version}/delta?base=B  | `Delta`: one, merged of all since B          |
| GET /weights/{policy}/{version}/{name}        | a part or file; one Range is honoured (206)  |

Versions are immutable, so readers share nothing but the page cache: a slow one holds a file descriptor, one piece of
memory and a lease that it extends only while it takes bytes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import re
import stat
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from astraflow.errors import WeightError
from astraflow.weights.files.leases import ReaderLease, reading
from astraflow.weights.manifest import MANIFEST, Delta, Manifest, is_file_name, is_policy_name
from astraflow.weights.plan import VersionInfo
from astraflow.weights.store import FileStore
from astraflow.wire.app import HttpError, create_app, json_reply
from astraflow.wire.bulk import Client, client_of
from astraflow.wire.describe.openapi import Operation, document

T = TypeVar("T")
log = logging.getLogger("astraflow.weights")
PIECE_BYTES = 4 << 20
STALL_S = 120.0
"""A reader that takes not one byte for this long is cut; it resumes by Range. A slow one is not."""

LOOK_S = 5.0
"""Between two looks whether a reader that has not taken a piece yet took a part of it."""

_FIRST_LOOK_S = 0.02
_MOST_KEPT = 64  # versions that were asked for lately
LONGEST_WAIT_S = 60.0
ARRIVAL_S = 0.02  # between two looks for a version that has not come yet

_RANGE = re.compile(r"bytes=([0-9]*)-([0-9]*)")
_MOST_DIGITS = 18  # no file has more bytes


class Listing(msgspec.Struct):
    """Visible versions of a policy."""

    policy: str
    latest: int  # -1: none
    infos: list[VersionInfo] = []  # how each can travel, oldest first


OPERATIONS = (
    Operation(
        method="GET", path="/weights/{policy}", name="versions", sender="reader", reply=Listing,
        about="Visible versions of a policy", refusals=(404,),
    ),
    Operation(
        method="GET", path="/weights/{policy}/{version:int}/manifest.json", name="manifest", sender="reader",
        reply=Manifest, refusals=(404, 422),
        about="What a version is made of; it is not deleted while it is being read. `?wait_s=N`: wait for the next one",
    ),
    Operation(
        method="GET", path="/weights/{policy}/{version:int}/delta", name="merged", sender="reader", reply=Delta,
        about="One delta from version `?base=N`, merged of those between; its parts are read as those of this version",
        refusals=(404, 422),
    ),
    Operation(
        method="GET", path="/weights/{policy}/{version:int}/{name}", name="part", sender="reader",
        reply="application/octet-stream", partial=True, refusals=(404, 416),
        about="A part or file of the manifest; a header `Range: bytes=N-` goes on where a cut download ended",
    ),
    Operation(
        method="GET", path="/health", name="health", sender="anyone", reply="application/json",
        about="It answers; needs no token",
    ),
)  # fmt: skip


@cache
def weights_document() -> dict[str, Any]:
    """OpenAPI of the weight interface."""
    return document(
        "AstraFlow weight interface",
        "Immutable, numbered versions of a policy's weights. A version is visible when its manifest is. Readers verify "
        "the checksum (xxh3-128, hex) of each tensor.",
        OPERATIONS,
    )


class _Stalled(Exception):
    """A reader took nothing for STALL_S."""


class _Progress:
    """One reader of a part: keeps its lease while it takes bytes, however few, and no longer."""

    def __init__(self, lease: ReaderLease, client: Client, finishing: set[asyncio.Task[None]]) -> None:
        """`finishing`: holds the tasks of readers that take what the kernel has."""
        self._lease, self._client, self._finishing = lease, client, finishing

    async def takes(self, sending: asyncio.Future[None]) -> None:
        """Until `sending` is done. Raises: _Stalled: the reader was cut."""
        try:
            await self._until(sending.done, sending)
        except _Stalled:
            self._client.cut()
            await sending  # ends with the connection
            raise
        finally:
            sending.cancel()
        sending.result()

    def finish(self) -> None:
        """All was given to the kernel, or the reader is gone; the lease ends when it has taken that, too."""
        if not self._client.unsent():
            self._lease.release()
            return
        task = asyncio.create_task(self._rest(), name="rest of a part")
        self._finishing.add(task)
        task.add_done_callback(self._finishing.discard)

    async def _rest(self) -> None:
        never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            await self._until(lambda: not self._client.unsent(), never)
        except _Stalled:
            self._client.cut()
        finally:
            self._lease.release()

    async def _until(self, over: Callable[[], bool], sign: asyncio.Future[None]) -> None:
        """Until `over`; looks when `sign` is done, soon, then ever more rarely, but all LOOK_S."""
        left, since, pause_s = math.inf, time.monotonic(), _FIRST_LOOK_S
        while True:
            await asyncio.wait({sign}, timeout=pause_s)
            pause_s = min(2 * pause_s, LOOK_S)
            if over():
                self._lease.extend()
                return
            before, left = left, self._client.unsent()
            if left < before:
                since = time.monotonic()
                self._lease.extend()
            elif time.monotonic() - since > STALL_S:
                log.warning("cut a reader that took nothing for %g s", STALL_S)
                raise _Stalled


class _PartReply(StreamingResponse):
    """Bytes of an open file in pieces. Owns the file and the lease; gives up on a reader that takes nothing."""

    def __init__(self, fd: int, span: tuple[int, int], reader: _Progress, status: int, headers: dict[str, str]) -> None:
        super().__init__(self._pieces(), status, headers, media_type="application/octet-stream")
        self._fd, self._span, self._reader = fd, span, reader

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with contextlib.suppress(_Stalled):
                await super().__call__(scope, receive, send)
        finally:
            os.close(self._fd)
            self._reader.finish()

    async def stream_response(self, send: Send) -> None:
        async def send_in_time(message: Message) -> None:
            await self._reader.takes(asyncio.ensure_future(send(message)))

        await super().stream_response(send_in_time)

    async def _pieces(self) -> AsyncIterator[bytes]:
        position, stop = self._span
        while position < stop:
            piece = await asyncio.to_thread(os.pread, self._fd, min(PIECE_BYTES, stop - position), position)
            if not piece:
                raise HttpError(500, "part=cut is shorter than it was; the disk lost bytes", "WeightError")
            yield piece
            position += len(piece)


def create_weights_app(root: Path, token: str | None) -> Starlette:
    """The app over `<root>/<policy>/<version>/...`."""
    serving = _Serving(Path(root).absolute())
    routes = [
        Route("/weights/{policy}", serving.listing),
        Route("/weights/{policy}/{version:int}/delta", serving.delta),
        Route("/weights/{policy}/{version:int}/{name}", serving.file),
    ]
    return create_app(routes, token=token, lifespan=serving.lifespan)


class _Shared:
    """What many readers ask for at once is done once, and goes on when one of them is gone."""

    def __init__(self) -> None:
        self._running: dict[tuple[object, ...], asyncio.Task[Any]] = {}

    def task(self, work: Callable[..., Coroutine[Any, Any, T]], *words: object) -> asyncio.Task[T]:
        """The one that does `work(*words)`."""
        key = (work, *words)
        task = self._running.get(key)
        if task is None:
            task = self._running[key] = asyncio.create_task(work(*words), name=work.__name__)
            task.add_done_callback(lambda done: self._end(key, done))
        return task

    async def close(self) -> None:
        """End all."""
        for task in self._running.values():
            task.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    def _end(self, key: tuple[object, ...], done: asyncio.Task[Any]) -> None:
        del self._running[key]
        if not done.cancelled():
            done.exception()  # whoever waits raises it; perhaps nobody waits any more


class _Serving:
    """The replies."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._stores: dict[str, FileStore] = {}
        self._finishing: set[asyncio.Task[None]] = set()
        self._kept: dict[tuple[str, int], ReaderLease] = {}
        self._shared = _Shared()
        self._waiting = Counter[tuple[str, int]]()  # readers, for a version that has not come yet

    @contextlib.asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        """Leases end with the server."""
        yield
        await self._shared.close()
        for task in self._finishing:
            task.cancel()
        await asyncio.gather(*self._finishing, return_exceptions=True)

    async def listing(self, request: Request) -> Response:
        policy = _policy(request)
        infos = await asyncio.to_thread(self._store(policy).infos)
        return json_reply(Listing(policy, max(infos, default=-1), list(infos.values())))

    async def delta(self, request: Request) -> Response:
        policy, version = _policy(request), request.path_params["version"]
        base = _number(request, "base", -1.0)
        if not base.is_integer() or not 0 <= base < version:
            raise HttpError(422, f"base={base:g} must be an earlier version than {version}; give one", "WeightError")
        with reading(self._root / policy, version):
            try:
                merged = await asyncio.shield(self._shared.task(self._merge, policy, version, int(base)))
            except WeightError as error:
                raise HttpError(404, str(error), "WeightError") from error
            if merged is None:
                raise _not_found("delta", f"{int(base)} to {version}", "has no chain of deltas here")
            self._keep(policy, version)
        return json_reply(merged)

    async def file(self, request: Request) -> Response:
        policy, name = _policy(request), request.path_params["name"]
        version: int = request.path_params["version"]
        directory = self._root / policy
        if not is_file_name(name):
            raise _not_found("file", name, "must be a plain name that the manifest gives")
        if name == MANIFEST:
            await self._arrival(policy, version, min(_number(request, "wait_s", 0.0), LONGEST_WAIT_S))
        lease = ReaderLease(directory, version)
        lease.extend()
        try:
            fd = _open(directory / str(version) / name)
        except HttpError:
            lease.release()
            raise
        try:
            size = os.fstat(fd).st_size
            if name == MANIFEST:
                self._keep(policy, version)
                lease.release()
                reply = Response(os.pread(fd, size, 0), media_type="application/json")
                os.close(fd)
                return reply
            return _part_reply(request, fd, size, _Progress(lease, client_of(request.scope), self._finishing))
        except BaseException:
            os.close(fd)
            raise

    async def _merge(self, policy: str, version: int, base: int) -> Delta | None:
        return await asyncio.to_thread(self._store(policy).merged, version, base)

    async def _arrival(self, policy: str, version: int, wait_s: float) -> None:
        """Wait for a version that is newer than all others; one that is gone will not come."""
        if not (self._root / policy).is_dir():
            raise _not_found("policy", policy, "is not here")
        deadline = time.monotonic() + wait_s
        self._waiting[policy, version] += 1
        try:
            while (left := deadline - time.monotonic()) > 0 and not self._is_decided(policy, version):
                await asyncio.wait({self._shared.task(self._decision, policy, version)}, timeout=left)
        finally:
            self._waiting[policy, version] -= 1
            if not self._waiting[policy, version]:
                del self._waiting[policy, version]

    async def _decision(self, policy: str, version: int) -> None:
        """The look at the disk of all who wait for it; ends when the last of them has left."""
        while self._waiting[policy, version] and not self._is_decided(policy, version):
            await asyncio.sleep(ARRIVAL_S)

    def _is_decided(self, policy: str, version: int) -> bool:
        store = self._store(policy)
        return (store.directory / str(version)).exists() or version < max(store.versions(), default=-1)

    def _keep(self, policy: str, version: int) -> None:
        """Until those who were told of it ask for the first part: one lease for all of them, that is never released."""
        if (policy, version) not in self._kept and len(self._kept) >= _MOST_KEPT:
            del self._kept[next(iter(self._kept))]  # its file stays until its time
        self._kept.setdefault((policy, version), ReaderLease(self._root / policy, version)).extend()

    def _store(self, policy: str) -> FileStore:
        if policy not in self._stores and not (self._root / policy).is_dir():
            return FileStore(self._root, policy)  # any name may be asked for; only what exists is remembered
        return self._stores.setdefault(policy, FileStore(self._root, policy))


def _number(request: Request, name: str, otherwise: float) -> float:
    given = request.query_params.get(name, str(otherwise))
    try:
        number = float(given)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise HttpError(422, f"{name}={given} must be a number; give ?{name}=N", "WeightError")
    return number


def _part_reply(request: Request, fd: int, size: int, reader: _Progress) -> Response:
    start, stop, status = _range(request.headers.get("range"), size)
    headers = {"accept-ranges": "bytes", "content-length": str(stop - start)}
    if status == 206:
        headers["content-range"] = f"bytes {start}-{stop - 1}/{size}"
    return _PartReply(fd, (start, stop), reader, status, headers)


def _range(header: str | None, size: int) -> tuple[int, int, int]:
    """First byte, end (exclusive) and status. Of a range that we do not know: the whole file, as HTTP allows."""
    found = _RANGE.fullmatch(header or "")
    if found is None or found.groups() == ("", ""):
        return 0, size, 200
    first, last = found.groups()
    if max(len(first), len(last)) > _MOST_DIGITS:
        raise HttpError(416, f"range={found[0][:60]}... must lie within {size} bytes; ask for less", "WeightError")
    if first:
        start, stop = int(first), min(int(last) + 1, size) if last else size
    else:
        start, stop = max(0, size - int(last)), size
    if start >= stop:
        raise HttpError(416, f"range={header} must lie within {size} bytes; ask for less", "WeightError")
    return start, stop, 206


def _policy(request: Request) -> str:
    policy: str = request.path_params["policy"]
    if not is_policy_name(policy):
        raise _not_found("policy", policy, "is not a policy name")
    return policy


def _open(path: Path) -> int:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _not_found("version", "/".join(path.parts[-3:]), f"cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise _not_found("version", "/".join(path.parts[-3:]), "is not a file")
    return fd


def _not_found(thing: str, value: str, rule: str) -> HttpError:
    return HttpError(404, f"{thing}={value} {rule}; fetch the newest version, or raise weights.keep", "WeightError")
