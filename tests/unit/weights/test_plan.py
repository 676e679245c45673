from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.errors import WeightError
from astraflow.weights.plan import Hop, Pins, VersionInfo, by_version, cheapest, full_is_due, retained


def chain(*kinds: str) -> dict[int, VersionInfo]:
    """One version per word: "f" full of 100 bytes, "d" delta of 10, "fd" both, "D" delta of 60."""
    infos = {}
    for version, kind in enumerate(kinds):
        full, delta = 100 if "f" in kind else -1, 60 if "D" in kind else 10
        base = version - 1 if "d" in kind.lower() else -1
        infos[version] = VersionInfo(version, full, base, delta if base >= 0 else 0)
    return infos


@pytest.mark.parametrize("base", [5, 6])
def test_a_listing_that_goes_in_circles_has_no_route(base: int) -> None:
    assert cheapest({5: VersionInfo(5, -1, base, 0), 6: VersionInfo(6, -1, 5, 0)}, 1, 5) is None


@pytest.mark.parametrize(
    "info",
    [VersionInfo(5, -1, 5, 0), VersionInfo(5, -1, 7, 0), VersionInfo(5, -2), VersionInfo(5, -1, 4, -1),
     VersionInfo(-1, 5), VersionInfo(5, 5, -2)],
)  # fmt: skip
def test_a_listing_of_what_cannot_be_is_refused(info: VersionInfo) -> None:
    with pytest.raises(WeightError, match="impossible"):
        by_version([VersionInfo(4, 9), info], "there")


def test_a_reader_that_is_one_behind_takes_the_delta() -> None:
    route = cheapest(chain("f", "d", "fd"), 1, 2)
    assert route is not None
    assert route.hops == (Hop(2, "delta", 1),)
    assert route.nbytes == 10


def test_a_reader_that_holds_nothing_takes_the_newest_full_it_can_go_on_from() -> None:
    route = cheapest(chain("f", "d", "fd", "d"), -1, 3)
    assert route is not None
    assert route.hops == (Hop(2, "full"), Hop(3, "delta", 2))
    assert route.nbytes == 110


def test_a_full_version_is_taken_when_the_chain_costs_more() -> None:
    route = cheapest(chain("f", "D", "fD"), 0, 2)
    assert route is not None
    assert route.hops == (Hop(2, "full"),)


def test_what_is_held_costs_nothing_and_what_is_gone_has_no_route() -> None:
    infos = chain("f", "d", "d")
    held = cheapest(infos, 2, 2)
    assert held is not None
    assert held.hops == ()
    del infos[1]
    assert cheapest(infos, 0, 2) is None
    assert cheapest(infos, -1, 2) is None
    assert cheapest(infos, 1, 2) is not None
    assert cheapest({}, -1, 0) is None


def test_a_held_version_that_is_newer_is_no_base() -> None:
    route = cheapest(chain("f", "d", "d"), 2, 1)
    assert route is not None
    assert route.hops == (Hop(0, "full"), Hop(1, "delta", 0))


@given(st.lists(st.sampled_from(["d", "D", "fd", "fD"]), max_size=8), st.data())
def test_the_route_is_applicable_and_no_other_start_is_cheaper(kinds: list[str], data: st.DataObject) -> None:
    infos = chain("f", *kinds)
    held = data.draw(st.integers(-1, len(kinds)))
    route = cheapest(infos, held, len(kinds))
    assert route is not None
    if route.hops:
        assert route.hops[-1].version == len(kinds)
        assert route.hops[0].kind == "full" or route.hops[0].base == held
        assert all(after.kind == "delta" and after.base == before.version for before, after in pairwise(route.hops))
    starts = [sum(infos[v].delta_nbytes for v in range(held + 1, len(kinds) + 1))] if held >= 0 else []
    for version, info in infos.items():
        if info.full_nbytes >= 0:
            starts.append(100 + sum(infos[v].delta_nbytes for v in range(version + 1, len(kinds) + 1)))
    assert route.nbytes == min(starts)


def test_the_newest_stay_with_what_they_rest_on() -> None:
    infos = chain("f", "d", "fd", "d", "d", "d")
    assert retained(infos, 2) == {2, 3, 4, 5}
    assert retained(infos, 4) == {2, 3, 4, 5}
    assert retained(infos, 0) == set(infos)
    assert retained(infos, 1, wanted={1, 17}) == {0, 1, 2, 3, 4, 5}
    assert retained(chain("f", "f", "f"), 1) == {2}


@pytest.mark.parametrize(
    ("kinds", "delta", "due"),
    [("", 10, True), ("f", 10, False), ("f", 100, True), ("fD", 39, False), ("fD", 40, True), ("fddd", 10, True)],
)
def test_a_full_version_is_due(kinds: str, delta: int, due: bool) -> None:
    assert full_is_due(list(chain(*kinds).values()), delta, 100, every=4) is due


def test_a_pool_of_past_versions_stays_with_what_it_rests_on() -> None:
    infos = chain(*("fdd" * 8)[:23])  # 0..22, every third one carries all
    assert retained(infos, 1, pins=Pins(pools=frozenset({(5, 3)}))) == {22, 21, 20, 19, 18, 15, 10, 9}
    assert retained(infos, 1, pins=Pins(frozenset({0, 99}), frozenset({(50, 2)}))) == {22, 21, 0}
    assert retained(infos, 0, pins=Pins(pools=frozenset({(5, 3)}))) == set(infos)
