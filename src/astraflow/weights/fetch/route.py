"""From what a reader holds to the version it wants: the cheapest route through one store, verified at each hop."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

import msgspec

from astraflow.errors import WeightError
from astraflow.weights.delta.faults import DamagedDelta, DeltaMismatch, WrongBase
from astraflow.weights.manifest import Delta, FileEntry, Manifest, Part, TornPart
from astraflow.weights.plan import Hop, VersionInfo, cheapest
from astraflow.weights.tensors import checksum, view_part

if TYPE_CHECKING:
    import torch

R = TypeVar("R")
log = logging.getLogger(__name__)
TRIES = 4


class Lease(Protocol):
    """Keeps a version from being deleted while it is read."""

    def extend(self) -> None:
        """Still reading; cheap to call often."""


class Reader(Protocol):
    """The versions of one policy in one store."""

    def infos(self) -> Mapping[int, VersionInfo]:
        """What can be fetched."""

    def manifest(self, version: int, wait_s: float = 0.0) -> Manifest:
        """Waits up to `wait_s` for a version that is newer than all that the store has.

        Raises: WeightError: there is no such version. TornPart: it is damaged.
        """

    def read(self, version: int, entry: Part | FileEntry) -> Any:
        """The bytes of one part or file in a writable buffer that is the caller's own; not verified.

        Raises: WeightError: they are not there. TornPart: fewer bytes came.
        """

    def merged(self, version: int, base: int) -> Delta | None:
        """One delta from `base` to `version`, read like other parts of `version`; None: this store merges none."""

    def reading(self, version: int) -> contextlib.AbstractContextManager[Lease]:
        """Keep `version`, and what it rests on, while the block runs."""


@dataclass
class Held:
    """A version in host memory. The tensors are changed in place by the next delta."""

    manifest: Manifest
    tensors: dict[str, torch.Tensor]  # by Hugging Face name, in the order of the manifest

    @property
    def version(self) -> int:
        """The version they are."""
        return self.manifest.version


class Counts(msgspec.Struct):
    """What came through a store; only grows."""

    nbytes: int = 0
    deltas: int = 0
    refused_deltas: int = 0  # what was held did not lead to the content that the manifest says: fetched in full instead
    torn_parts: int = 0  # read again
    read_s: float = 0.0  # bytes came; without the wait for a version that the store does not have yet


class Leg(NamedTuple):
    """One fetch on the way to a version."""

    manifest: Manifest
    delta: Delta | None  # to apply to what is held then; None: all tensors


def way(
    reader: Reader, held: int, wanted: Manifest, *, merge: bool = True, counts: Counts | None = None
) -> Iterator[Leg]:
    """The fetches that lead from version `held` (-1: nothing) to `wanted` by the fewest bytes.

    Args: merge: several deltas may come as one, which leads past the versions between.
    Raises: WeightError: the store has no way there.
    """
    version, info = wanted.version, wanted.info
    # The wanted version alone often says the way: its delta is from what is held, or it is whole.
    if held == version or info.base == held >= 0 or (held < 0 and info.full_nbytes >= 0):
        infos: Mapping[int, VersionInfo] = {version: info}
    else:
        infos = reader.infos()
    route = cheapest(infos, held, version)
    if route is None:
        has = ", ".join(f"{v} {'full' if infos[v].full_nbytes >= 0 else 'delta'}" for v in sorted(infos))
        raise WeightError(
            "version", version, f"cannot be reached from what the store has ({has})",
            "fetch the newest version, or raise weights.keep",
        )  # fmt: skip
    chain = [hop for hop in route.hops if hop.kind == "delta"]  # always the end of a route
    for hop in route.hops:
        if merge and hop.kind == "delta" and len(chain) > 1:
            merged = retry(lambda: reader.merged(version, chain[0].base), counts)
            if merged is not None:
                yield Leg(wanted, merged)
                return
            merge = False
        manifest = wanted
        if hop.version != version:
            manifest = retry(lambda v=hop.version: reader.manifest(v), counts)  # type: ignore[misc]
        yield _leg(hop, manifest)


def _leg(hop: Hop, manifest: Manifest) -> Leg:
    """Raises: WeightError: the store has listed the version as another one than it gives."""
    delta = manifest.delta if hop.kind == "delta" else None
    if (delta is None and not manifest.parts) or (hop.kind == "delta" and (delta is None or delta.base != hop.base)):
        raise WeightError(
            "version", hop.version, "does not travel as the store has listed it", "ask another store, or publish again"
        )
    return Leg(manifest, delta)


class _Trip:
    """One way through one store."""

    def __init__(self, reader: Reader, counts: Counts) -> None:
        self._reader, self._counts = reader, counts

    def bring(self, held: Held | None, wanted: int, wait_s: float) -> Held:
        with self._reader.reading(wanted) as lease:
            manifest = self._retry(lambda: self._reader.manifest(wanted, wait_s))
            if held is not None and held.version == wanted and not held.manifest.same_content(manifest):
                self._counts.refused_deltas += 1
                log.warning("fetched in full: version %d that is held is of another past", wanted)
            elif held is not None:
                try:
                    return self._follow(held, manifest, lease)
                except (DamagedDelta, DeltaMismatch, WrongBase, TornPart) as error:
                    self._counts.refused_deltas += 1
                    log.warning("fetched in full: %s", error)
            return self._follow(None, manifest, lease)

    def _follow(self, held: Held | None, wanted: Manifest, lease: Lease) -> Held:
        version = -1 if held is None else held.version
        for manifest, delta in way(self._reader, version, wanted, counts=self._counts):
            lease.extend()
            if delta is None:
                held = self._whole(manifest, lease)
            elif held is not None:
                self._change(held, manifest, delta, lease)
        if held is None:
            raise WeightError("way", wanted.version, "has no first fetch", "fetch the newest version")
        return held

    def _whole(self, manifest: Manifest, lease: Lease) -> Held:
        entries = manifest.entries()
        tensors: dict[str, torch.Tensor] = {}
        for part in manifest.parts:
            lease.extend()
            tensors.update(self._retry(lambda p=part: view_part(self._read(manifest, p), p, entries)))  # type: ignore[misc]
        return Held(manifest, {entry.name: tensors[entry.name] for entry in manifest.tensors})

    def _change(self, held: Held, manifest: Manifest, delta: Delta, lease: Lease) -> None:
        from astraflow.weights.delta.apply import apply

        buffers = []
        for part in delta.parts:
            lease.extend()
            buffers.append(self._retry(lambda p=part: verified(self._read(manifest, p), p)))  # type: ignore[misc]
        apply(held.tensors, buffers, held.manifest, manifest)
        held.manifest = manifest
        self._counts.deltas += 1

    def _read(self, manifest: Manifest, entry: Part | FileEntry) -> Any:
        begin = time.monotonic()
        buffer = self._reader.read(manifest.version, entry)
        self._counts.read_s += time.monotonic() - begin
        self._counts.nbytes += entry.nbytes
        return buffer

    def _retry(self, action: Callable[[], R]) -> R:
        return retry(action, self._counts)


def bring(reader: Reader, held: Held | None, wanted: int, *, wait_s: float = 0.0, counts: Counts | None = None) -> Held:
    """Version `wanted` out of `held` (changed in place; None: nothing is held) and what `reader` has.

    Raises: WeightError: the store has no route to it, or its bytes are not those that were published. `held` is then
    as before, or one of the versions on the way, as its manifest says.
    """
    return _Trip(reader, counts or Counts()).bring(held, wanted, wait_s)


def retry(action: Callable[[], R], counts: Counts | None = None) -> R:
    """Bytes that do not match their checksum are read again: most often a proxy or a bad link tore them."""
    for _ in range(TRIES - 1):
        try:
            return action()
        except TornPart as error:
            if counts is not None:
                counts.torn_parts += 1
            log.warning("read again: %s", error)
    return action()


def verified(buffer: Any, entry: Part | FileEntry) -> Any:
    """`buffer`, if its checksum is that of `entry`. Raises: TornPart."""
    if (got := checksum(buffer)) != entry.xxh3:
        raise TornPart(f"checksum of {entry.name}", got, f"must be {entry.xxh3}", "fetch it again")
    return buffer
