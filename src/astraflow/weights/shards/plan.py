"""Which rank sends which block of which tensor. Pure."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence

from astraflow.errors import WeightError
from astraflow.weights.manifest import DTYPES
from astraflow.weights.shards.records import Held, Layout, Plan
from astraflow.weights.shards.regions import Region

BATCH_BYTES = 256 << 20
"""Of whole tensors; what the leader holds of other ranks' messages at once is less."""

Owners = dict[int, Held]
"""Rank -> the block that it sends of one tensor."""


def owners(layouts: Sequence[Layout]) -> dict[str, Owners]:
    """By tensor, in the order of the first rank's checkpoint. Tied tensors once; of equal blocks the lowest rank's.

    Raises: WeightError: ranks that do not publish the same version, or blocks that do not make up a tensor.
    """
    for rank, layout in enumerate(layouts):
        if layout.version != layouts[0].version:
            raise WeightError(
                f"version of rank {rank}", layout.version, f"must be that of rank 0 ({layouts[0].version})",
                "publish the same versions on all ranks",
            )  # fmt: skip
    holders: dict[str, Owners] = {}
    for rank, layout in enumerate(layouts):
        for held in layout.held:
            holders.setdefault(held.name, {})[rank] = held
    return {name: _owners_of(name, of) for name, of in holders.items() if not _is_tied(of)}


def _is_tied(holders: Owners) -> bool:
    told = {held.tied_to for held in holders.values() if held.region.num_elements}
    return len(told) == 1 and told != {""}


def _owners_of(name: str, holders: Owners) -> Owners:
    first = min(holders)
    dtype, shape = holders[first].dtype, holders[first].shape
    found: dict[Region, int] = {}
    for rank, held in sorted(holders.items()):
        if (held.dtype, held.shape) != (dtype, shape):
            raise WeightError(
                f"rank {rank}: tensor {name}", f"{held.dtype} {held.shape}",
                f"must be {dtype} {shape} as on rank {first}", "publish the same model on all ranks",
            )  # fmt: skip
        if held.region.num_elements or not math.prod(shape):
            found.setdefault(held.region, rank)
    num_elements = sum(region.num_elements for region in found)
    if num_elements != math.prod(shape):
        raise WeightError(
            f"tensor {name}: elements on ranks {sorted(found.values())}", num_elements, f"must be {math.prod(shape)}",
            "publish on every rank that holds a part of it",
        )  # fmt: skip
    if not _apart(tuple(found), shape):
        raise WeightError(
            f"tensor {name}: blocks on ranks {sorted(found.values())}", [region.spans for region in found],
            f"must lie beside each other in {shape}", "publish with one layout of the model on all ranks",
        )  # fmt: skip
    return {rank: holders[rank] for rank in found.values()}


@functools.lru_cache(maxsize=1024)  # a model has few shapes, and they are cut in the same way in each version
def _apart(regions: tuple[Region, ...], shape: tuple[int, ...]) -> bool:
    return all(region.lies_in(shape) for region in regions) and not any(
        a.overlaps(b) for a, b in itertools.combinations(regions, 2)
    )


def plans(layouts: Sequence[Layout], of: Mapping[str, Owners], *, whole: bool) -> list[Plan]:
    """What each rank is told."""
    batches: list[tuple[str, ...]] = []
    batch: list[str] = []
    size = 0
    for name, by_rank in of.items():
        held = next(iter(by_rank.values()))
        nbytes = math.prod(held.shape) * DTYPES[held.dtype][1]
        if batch and size + nbytes > BATCH_BYTES:
            batches.append(tuple(batch))
            batch, size = [], 0
        batch.append(name)
        size += nbytes
    if batch:
        batches.append(tuple(batch))
    return [
        Plan(tuple(batches), frozenset(name for name, by_rank in of.items() if rank in by_rank), whole)
        for rank in range(len(layouts))
    ]


def share_unchanged(layouts: Sequence[Layout]) -> float:
    """Of the whole model, judged by the ranks' samples; 0 to 1."""
    total = sum(layout.num_elements for layout in layouts)
    return sum(layout.unchanged * layout.num_elements for layout in layouts) / total if total else 1.0
