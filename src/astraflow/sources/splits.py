"""Held-out splits and row order of the procedural sources: fixed for ever, so train and held-out never meet."""

from __future__ import annotations

import random
from functools import lru_cache
from typing import Literal

import xxhash

from astraflow.errors import SourceError

Split = Literal["train", "heldout", "all"]
SPLITS: tuple[Split, ...] = ("train", "heldout", "all")


@lru_cache(maxsize=64)
def members(family: str, count: int, num_heldout: int, split: Split) -> tuple[int, ...]:
    """Problem numbers of `split` out of `range(count)`. Depends on the family and the count alone, never on a seed."""
    chosen = frozenset(random.Random(f"{family}/heldout/{count}").sample(range(count), num_heldout))
    if split == "all":
        return tuple(range(count))
    return tuple(i for i in range(count) if (i in chosen) == (split == "heldout"))


@lru_cache(maxsize=64)
def _order(seed: int, round_number: int, problems: tuple[int, ...]) -> tuple[int, ...]:
    shuffled = list(problems)
    random.Random(f"{seed}/{round_number}").shuffle(shuffled)
    return tuple(shuffled)


def problem_at(index: int, seed: int, problems: tuple[int, ...]) -> int:
    """The problem of row `index`: all problems once in a seeded order, then all again in another order."""
    round_number, place = divmod(index, len(problems))
    return _order(seed, round_number, problems)[place]


def check_split(where: str, split: str) -> Split:
    """Raises: SourceError: not one of train, heldout, all."""
    for known in SPLITS:
        if split == known:
            return known
    raise SourceError(f"{where}.split", split, f"must be one of {', '.join(SPLITS)}", "use 'train' to train")


def check_row(where: str, index: int, size: int) -> None:
    """Raises: SourceError: `index` outside the source."""
    if not 0 <= index < size:
        raise SourceError(f"{where}.row", index, f"must be in 0..{size - 1}", "ask len(source) for the number of rows")


def check_size(where: str, size: int) -> None:
    """Raises: SourceError: a negative size."""
    if size < 0:
        raise SourceError(f"{where}.size", size, "must be >= 0", "use 0 for each distinct problem once")


def digest(*parts: object) -> str:
    """A short stable fingerprint of what a source was made from."""
    return xxhash.xxh3_64_hexdigest("\x1f".join(map(repr, parts)).encode())
