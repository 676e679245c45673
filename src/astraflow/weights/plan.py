"""Which bytes to fetch, and which versions to keep: pure decisions over what a store says that it has."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec

from astraflow.errors import WeightError


class VersionInfo(msgspec.Struct, frozen=True):
    """How a version can travel, as in its manifest."""

    version: int
    full_nbytes: int  # of its full parts; -1: it has none
    base: int = -1  # of its delta; -1: it has none
    delta_nbytes: int = 0


def by_version(infos: Iterable[VersionInfo], where: str) -> dict[int, VersionInfo]:
    """What a store that we asked `where` says that it has. Raises: WeightError: no store can have that."""
    known = {info.version: info for info in infos}
    for info in known.values():
        if not -1 <= info.base < info.version or info.full_nbytes < -1 or info.delta_nbytes < 0:
            raise WeightError("listing", where, f"has an impossible version ({info})", "ask another store")
    return known


class Hop(NamedTuple):
    """One fetch on the way to a version: all of it, or its changes from `base`."""

    version: int
    kind: Literal["full", "delta"]
    base: int = -1


class Route(NamedTuple):
    """Hops in the order in which they are applied; none: the version is held already."""

    hops: tuple[Hop, ...]
    nbytes: int


def cheapest(infos: Mapping[int, VersionInfo], held: int, wanted: int) -> Route | None:
    """The route of fewest bytes from version `held` (-1: nothing) to `wanted`; None: the store has no route.

    Ties go to fewer hops. Each delta has one base, so the routes are the starts on one chain back from `wanted`.
    """
    best: Route | None = None
    hops: tuple[Hop, ...] = ()
    nbytes, version = 0, wanted
    while True:
        if version == held:
            return Route(hops, nbytes) if best is None or nbytes < best.nbytes else best
        info = infos.get(version)
        if info is None:
            return best
        if info.full_nbytes >= 0 and (best is None or nbytes + info.full_nbytes < best.nbytes):
            best = Route((Hop(version, "full"), *hops), nbytes + info.full_nbytes)
        if not 0 <= info.base < version or (best is not None and nbytes + info.delta_nbytes >= best.nbytes):
            return best
        hops = (Hop(version, "delta", info.base), *hops)
        nbytes, version = nbytes + info.delta_nbytes, info.base


class Pins(NamedTuple):
    """Versions that stay beside the newest ones: some for good, and a pool of past ones, evenly apart."""

    always: frozenset[int] = frozenset()
    pools: frozenset[tuple[int, int]] = frozenset()  # (every, count): the newest `count` multiples of `every`

    def of(self, versions: Collection[int]) -> set[int]:
        """Those of `versions`."""
        found = set(self.always & set(versions))
        for every, count in self.pools:
            found |= set(sorted(version for version in versions if version % every == 0)[-count:])
        return found


NO_PINS = Pins()


def retained(
    infos: Mapping[int, VersionInfo], keep: int, wanted: Collection[int] = (), pins: Pins = NO_PINS
) -> set[int]:
    """Versions that stay: the newest `keep` (0: all), those `wanted` by a reader or pinned, and what each of them rests
    on."""
    newest = sorted(infos)[-keep:]
    stay: set[int] = set()
    for version in {*newest, *wanted, *pins.of(infos)} & infos.keys():
        at = version
        while at in infos and at not in stay:
            stay.add(at)
            if infos[at].full_nbytes >= 0:
                break
            at = infos[at].base
    return stay


def full_is_due(chain: Sequence[VersionInfo], delta_nbytes: int, full_nbytes: int, every: int) -> bool:
    """Whether a version after `chain` (all since the last full one, that included) must carry all its tensors.

    It must when it would be the `every`-th since then, or when the whole chain costs a reader more than a full.
    """
    if not chain or len(chain) >= every:
        return True
    return sum(info.delta_nbytes for info in chain[1:]) + delta_nbytes >= full_nbytes
