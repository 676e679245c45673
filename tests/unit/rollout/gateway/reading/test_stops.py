"""Stop strings, piece by piece."""

from __future__ import annotations

import pytest

from astraflow.rollout.gateway.reading.stops import StopScanner


@pytest.mark.parametrize("stops", [("ab", "abc", "bc"), ("bc", "abc", "ab")])
def test_of_several_stops_the_first_that_is_there_counts_and_of_those_at_one_place_the_longest(
    stops: tuple[str, ...],
) -> None:
    scanner = StopScanner(stops)
    assert (scanner.feed("xabcd"), scanner.found) == ("x", "abc")


def test_what_may_be_the_start_of_a_stop_is_held_back_until_it_is_none() -> None:
    scanner = StopScanner(["aab"])
    assert [scanner.feed(piece) for piece in ("xa", "a", "a", "b")] == ["x", "", "a", ""]
    assert scanner.found == "aab" and scanner.end() == ""
    scanner = StopScanner(["aab"])
    assert (scanner.feed("xaa"), scanner.end(), scanner.found) == ("x", "aa", None)
