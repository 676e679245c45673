from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from astraflow.engines.local.caches.shelf import Prefix, Shelf

ids = st.lists(st.integers(0, 2), min_size=1, max_size=8)


def prefix(tokens: int) -> Prefix:
    return Prefix(tokens, [torch.zeros(1, tokens, 2)], [torch.zeros(1, tokens, 2)])  # 16 bytes a token


def array(numbers: list[int]) -> np.ndarray:
    return np.array(numbers, np.int32)


@given(stored=st.lists(ids, max_size=20), asked=ids)
def test_the_longest_stored_prefix_is_found_and_never_all_of_what_is_asked(
    stored: list[list[int]], asked: list[int]
) -> None:
    shelf = Shelf(1 << 20)
    for numbers in stored:
        shelf.put(0, array(numbers), prefix(len(numbers)))
    lengths = [len(s) for s in stored if len(s) < len(asked) and asked[: len(s)] == s]
    found = shelf.find(0, array(asked))
    assert (found.tokens if found else 0) == max(lengths, default=0)


@given(st.lists(st.tuples(st.booleans(), ids), max_size=60))
def test_it_keeps_the_most_recently_used_that_fit(events: list[tuple[bool, list[int]]]) -> None:
    shelf, model = Shelf(16 * 20), []  # room for 20 tokens; model: oldest first
    for is_put, numbers in events:
        if is_put:
            shelf.put(0, array(numbers), prefix(len(numbers)))
            model = [m for m in model if m != numbers] + [numbers]
            while sum(map(len, model)) > 20:
                model.pop(0)
        else:
            shelf.find(0, array(numbers))
            fits = [m for m in model if len(m) < len(numbers) and numbers[: len(m)] == m]
            if fits:
                used = max(fits, key=len)
                model = [m for m in model if m != used] + [used]
        assert all(shelf.holds(0, array(m)) for m in model)
        assert shelf._bytes == 16 * sum(map(len, model))
    shelf.drop(0)
    assert shelf._bytes == 0
    assert all(shelf.find(0, array([*m, 0])) is None for m in model)


def test_what_is_larger_than_all_room_is_not_kept() -> None:
    shelf = Shelf(100)
    shelf.put(0, array([1]), prefix(1))
    shelf.put(0, array([2] * 9), prefix(9))
    assert shelf.holds(0, array([1]))
    assert not shelf.holds(0, array([2] * 9))


def test_what_one_version_computed_is_not_found_under_another() -> None:
    shelf = Shelf(1 << 20)
    shelf.put(3, array([1, 2, 3]), prefix(3))
    shelf.put(4, array([1]), prefix(1))
    found = {version: shelf.find(version, array([1, 2, 3, 4])) for version in (2, 3, 4)}
    assert {version: p.tokens if p else 0 for version, p in found.items()} == {2: 0, 3: 3, 4: 1}
