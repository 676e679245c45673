"""The source `reasoning_gym`."""

from __future__ import annotations

import json
import random
import weakref
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from astraflow.errors import SourceError
from astraflow.processes.pool import ProcessPool
from astraflow.processes.records import CallFailed, Settings
from astraflow.sources.splits import check_row, check_split, digest

WHERE = "sources.reasoning_gym"
HOST = "astraflow.sources.gym.host:Host"
_AHEAD = 64  # rows that are asked for at once
_NUM_KEPT = 4096
_DEADLINE_S = 120.0


class ReasoningGymSource:
    """Rows `{question, answer, dataset, level, generator, number}` of reasoning-gym's generators, by turns, and what
    an entry says of itself.

    `answer` is one right answer, or "" where any that fits is right; the reward `reasoning_gym` makes the entry again
    from `generator` and `number` and asks the generator's own scorer. One question in five is held out for good.
    """

    def __init__(
        self, *, datasets: Sequence[str], levels: Sequence[int] = (),
        config: Mapping[str, Mapping[str, Any]] | None = None, split: str = "train", size: int = 10_000, seed: int = 0,
        question: str = "{question}", demos: bool = False, right: float = 0.25,
    ) -> None:  # fmt: skip
        """`datasets`: names of generators. `levels`: of their curricula, one after the other; the operator
        `curriculum` (`by = "level"`) opens them; none: as the generators are by default. `config`: name -> its options.
        `size`: rows. `question`: how the field is made from what an entry says, as `{expression} =`. `demos`: rows
        `{messages}` for a warm start, of train questions only; a share `right` of them has the right answer, the others
        that of another row."""
        if find_spec("reasoning_gym") is None:
            raise SourceError(
                "package", "reasoning-gym", f"is not installed and {WHERE} needs it",
                "pip install 'astraflow[reasoning-gym]'; one of its packages needs a C compiler",
            )  # fmt: skip
        self._split = "train" if demos else check_split(WHERE, split)
        self._question, self._demos, self._right, self._seed = question, demos, right, seed
        self._size, self._levels, self._names = size, list(levels), list(datasets)
        options = {name: dict(chosen) for name, chosen in (config or {}).items()}
        self._check_options(options)
        steps: Sequence[int | None] = self._levels or (None,)
        kinds = [(name, level) for level in steps for name in self._names]
        self._generators = [
            json.dumps([name, level, options.get(name, {}), seed], sort_keys=True) for name, level in kinds
        ]
        self._kinds = kinds
        self._pool = ProcessPool("reasoning_gym", HOST, settings=Settings(processes=1, deadline_s=_DEADLINE_S))
        weakref.finalize(self, self._pool.close)
        for (name, _), generator in zip(kinds, self._generators, strict=True):
            if problem := self._asked("check", generator):
                rule, _, fix = problem.partition("; ")
                raise SourceError(f"{WHERE}.datasets", name, rule, fix)
        self._kept: OrderedDict[tuple[int, int], dict[str, Any]] = OrderedDict()

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> dict[str, Any]:
        check_row(WHERE, index, self._size)
        row = self._task(index)
        if not self._demos:
            return row
        rng = random.Random(f"{self._seed}/demo/{index}")
        shown = row if rng.random() < self._right else self._task(rng.randrange(self._size))
        told = ({"role": "user", "content": row["question"]}, {"role": "assistant", "content": shown["answer"]})
        return {"messages": list(told)}

    def _task(self, index: int) -> dict[str, Any]:
        turn, kind = divmod(index, len(self._kinds))
        if (kind, turn) not in self._kept:
            most = min(_AHEAD, (self._size - 1 - kind) // len(self._kinds) + 1 - turn)
            made = self._asked("rows", self._generators[kind], self._split, turn, most)
            self._kept.update({(kind, turn + ahead): row for ahead, row in enumerate(made)})
            while len(self._kept) > max(_NUM_KEPT, len(made)):
                self._kept.popitem(last=False)
        name, level = self._kinds[kind]
        row = self._kept[kind, turn]
        try:
            row = {**row, "question": self._question.format_map(row)}
        except (LookupError, ValueError, AttributeError) as error:
            known = ", ".join(row)
            raise SourceError(
                f"{WHERE}.question", self._question, f"needs {error}", f"an entry of {name} says {known}"
            ) from error
        more = {"dataset": name, "generator": self._generators[kind]}
        return {**row, **more} if level is None else {**row, **more, "level": level}

    def fingerprint(self) -> str:
        return digest(
            "reasoning_gym", 1, self._generators, self._split, self._size, self._question, self._demos, self._right
        )

    def _check_options(self, options: Mapping[str, Any]) -> None:
        if not self._names or len(set(self._names)) != len(self._names):
            raise SourceError(f"{WHERE}.datasets", self._names, "must name one or more, each once", "try ['chain_sum']")
        if not 0.0 <= self._right <= 1.0:
            raise SourceError(f"{WHERE}.right", self._right, "must be a share from 0 to 1", "give 0.25, say")
        if self._size < 1:
            raise SourceError(f"{WHERE}.size", self._size, "must be >= 1", "use 10000")
        if any(level < 0 for level in self._levels) or len(set(self._levels)) != len(self._levels):
            raise SourceError(f"{WHERE}.levels", self._levels, "must be >= 0 and differ", "use [0, 1, 2]")
        for name in options:
            if name not in self._names:
                fix = f"known: {', '.join(self._names)}"
                raise SourceError(f"{WHERE}.config", name, "is none of the datasets of this source", fix)

    def _asked(self, method: str, *arguments: Any) -> Any:
        try:
            return self._pool.submit(method, *arguments).result()
        except CallFailed as error:
            fix = "choose another generator, level or split"
            raise SourceError(f"{WHERE}.{method}", str(arguments[0]), f"failed ({error})", fix) from error
