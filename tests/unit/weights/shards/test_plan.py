"""Blocks of several ranks make up a tensor, or nothing is published."""

from __future__ import annotations

import pytest

from astraflow.errors import WeightError
from astraflow.weights.shards.plan import owners
from astraflow.weights.shards.records import Held, Layout
from astraflow.weights.shards.regions import Region


def layouts(*regions: Region) -> list[Layout]:
    return [Layout(0, held=(Held("w", "F32", (4, 4), region),)) for region in regions]


def block(rows: tuple[int, int], columns: tuple[int, int] = (0, 4)) -> Region:
    return Region(((rows,), (columns,)))


def test_blocks_that_lie_beside_each_other_are_a_tensor() -> None:
    woven = [Region((((0, 1), (2, 3)), ((0, 4),))), Region((((1, 2), (3, 4)), ((0, 4),)))]
    corners = [block((0, 2), (0, 2)), block((0, 2), (2, 4)), block((2, 4), (0, 2)), block((2, 4), (2, 4))]
    for regions in (woven, corners, [block((0, 4)), block((0, 4))], [block((0, 4)), block((4, 4))]):
        found = owners(layouts(*regions))["w"]
        assert sum(held.region.num_elements for held in found.values()) == 16


@pytest.mark.parametrize(
    "regions",
    [
        (block((0, 2)), block((1, 3))),
        (block((0, 2)), block((3, 5))),
        (block((0, 2), (0, 2)), block((2, 4), (2, 4)), block((1, 3), (0, 4))),
    ],
)
def test_as_many_elements_that_overlap_or_lie_outside_are_refused(regions: tuple[Region, ...]) -> None:
    with pytest.raises(WeightError, match=r"tensor w: blocks on ranks .* must lie beside each other in \(4, 4\)"):
        owners(layouts(*regions))
