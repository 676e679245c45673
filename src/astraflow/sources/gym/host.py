"""reasoning-gym in a process of its own (`processes.pool`): its import takes 1.7 s, some generators take seconds, or
draw from sets, whose order the process's fixed hash seed settles, and scorers may hang.
"""

from __future__ import annotations

import difflib
import json
import time
from functools import lru_cache
from typing import Any

import xxhash

ENDLESS = 1 << 30  # size of each generator: entries are made when they are asked for
_WHOLE = frozenset({"acre", "gsm_symbolic", "list_functions", "word_ladder"})
"""Generators that make something for every entry at once, or bound their number: each entry is the first of one of its
own."""
_WHOLE_SIZE = 10  # acre needs 5
_TRIES = 96  # entries among which each row of a split is looked for
_HELDOUT_SHARE = 5  # one question in so many is held out
_SLICE_S = 0.02


class Host:
    """Every method takes a generator as JSON text of `[name, level or null, options, seed]`."""

    def __init__(self) -> None:
        import reasoning_gym
        from reasoning_gym.factory import CURRICULA, DATASETS

        from astraflow.sources.gym.guard import guard

        guard()
        self._gym: Any = reasoning_gym
        self._curricula, self._known = CURRICULA, sorted(DATASETS)
        self._generator = lru_cache(256)(self._made)
        self._entry = lru_cache(4096)(self._entry_of)

    def names(self) -> list[str]:
        """Of all generators."""
        return list(self._known)

    def check(self, generator: str) -> str:
        """What is wrong with it, or ""."""
        name, level, options, _ = json.loads(generator)
        if name not in self._known:
            near = difflib.get_close_matches(name, self._known, n=1)
            return f"is not a generator; {f'did you mean {near[0]!r}? ' if near else ''}known: {', '.join(self._known)}"
        if level is not None and name not in self._curricula:
            return "has no levels; leave `levels` out, and say how hard it is in `config`"
        try:
            self._entry(generator, 0)
        except Exception as error:
            return f"refuses level {level} and {options} ({type(error).__name__}: {error}); see its class for options"
        return ""

    def rows(self, generator: str, split: str, first: int, most: int) -> list[dict[str, Any]]:
        """Rows `first` and following of a split: as many as are made in a moment, at least one.

        A question belongs to one split for good, by its hash. Raises: LookupError: all questions near are of the other.
        """
        made, until = [self._row(generator, split, first)], time.monotonic() + _SLICE_S
        while len(made) < most and time.monotonic() < until:
            made.append(self._row(generator, split, first + len(made)))
        return made

    def score(self, generator: str, number: int, answer: str) -> float:
        """Of the generator's own scorer, from 0 to 1."""
        score = float(self._generator(generator).score_answer(answer=answer, entry=self._entry(generator, number)))
        if not 0.0 <= score <= 1.0:
            raise ValueError(f"the score {score} is not from 0 to 1")
        return score

    def _entry_of(self, generator: str, number: int) -> Any:
        name, _, _, seed = json.loads(generator)
        if name not in _WHOLE:
            return self._generator(generator)[number]
        return self._made(generator, xxhash.xxh3_64_intdigest(f"{seed}/{number}".encode()) >> 33)[0]

    def _made(self, generator: str, seed: int | None = None) -> Any:
        """`seed`: instead of its own."""
        name, level, options, own = json.loads(generator)
        size = _WHOLE_SIZE if name in _WHOLE else ENDLESS
        given = {**options, "seed": own if seed is None else seed, "size": size}
        if level is None:
            return self._gym.create_dataset(name, **given)
        curriculum = self._gym.factory.create_curriculum(name)
        curriculum.set_global_level(level)
        return self._gym.create_dataset(name, **vars(curriculum.generate_configuration(given)))

    def _row(self, generator: str, split: str, index: int) -> dict[str, Any]:
        if split == "all":
            return _fields(self._entry(generator, index), index)
        for number in range(index * _TRIES, (index + 1) * _TRIES):
            entry = self._entry(generator, number)
            heldout = xxhash.xxh3_64_intdigest(entry["question"].encode()) % _HELDOUT_SHARE == 0
            if heldout == (split == "heldout"):
                return _fields(entry, number)
        raise LookupError(f"none of {_TRIES} entries is of split {split}: it makes too few different questions")


def _fields(entry: dict[str, Any], number: int) -> dict[str, Any]:
    """With what the entry says of itself, as `expression` or `num_terms`."""
    said = {key: value for key, value in entry["metadata"].items() if isinstance(value, (str, int, float, bool))}
    said = {key: value for key, value in said.items() if not key.startswith("source_")}
    answer = entry["answer"] if isinstance(entry["answer"], str) else ""
    return {**said, "question": entry["question"], "answer": answer, "number": number}
