"""Small problems with tests, made by a generator: short enough for a tiny model to learn, judged as MBPP's are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, NamedTuple

from astraflow.errors import SourceError
from astraflow.sources.splits import check_row, check_size, check_split, digest, members, problem_at

FORMS = ("function", "program")
_PAIRS = ((2, 3), (7, 4), (0, 5), (9, 1), (6, 6))
_LISTS = ([3, 1, 2], [5, 5, 9, 0], [7], [4, 8, 6, 2, 1], [10, -3])


class _Problem(NamedTuple):
    """In words, as an expression, and as what it gives for the arguments."""

    words: str
    code: str
    value: Callable[..., Any]


_Term = tuple[str, str, Callable[[int, int], int]]


def _terms() -> list[_Term]:
    named: list[_Term] = [
        ("a", "a", lambda a, b: a), ("b", "b", lambda a, b: b),
        ("twice a", "2*a", lambda a, b: 2 * a), ("twice b", "2*b", lambda a, b: 2 * b),
        ("a squared", "a*a", lambda a, b: a * a), ("b squared", "b*b", lambda a, b: b * b),
    ]  # fmt: skip
    return named + [(str(n), str(n), _constant(n)) for n in range(1, 6)]


def _constant(n: int) -> Callable[[int, int], int]:
    return lambda a, b: n


def _sums() -> list[_Problem]:
    """Two terms that are not both numbers, with an operator between them."""

    def joined(left: _Term, right: _Term, how: Callable[[int, int], Any]) -> Callable[..., Any]:
        return lambda a, b: how(left[2](a, b), right[2](a, b))

    joins: list[tuple[str, str, Callable[[int, int], Any]]] = [
        ("plus", "+", lambda x, y: x + y), ("minus", "-", lambda x, y: x - y),
        ("times", "*", lambda x, y: x * y),
    ]  # fmt: skip
    return [
        _Problem(f"{left[0]} {word} {right[0]}", f"{left[1]}{sign}{right[1]}", joined(left, right, how))
        for left in _terms()
        for right in _terms()
        if not (left[1].isdigit() and right[1].isdigit())
        for word, sign, how in joins
    ]


def _lists() -> list[_Problem]:
    """A number made of a list made of the list x, and a little more."""
    inner: list[tuple[str, str, Callable[[list[int]], list[int]]]] = [
        ("x", "x", lambda x: x), ("x reversed", "x[::-1]", lambda x: x[::-1]), ("x twice", "x*2", lambda x: x * 2),
        ("sorted x", "sorted(x)", sorted), ("x without its first", "x[1:]", lambda x: x[1:]),
    ]  # fmt: skip
    outer: list[tuple[str, str, Callable[[list[int]], int]]] = [
        ("sum of", "sum({})", sum),
        ("length of", "len({})", len),
        ("sum of squares of", "sum(i*i for i in {})", lambda x: sum(i * i for i in x)),
    ]

    def applied(how: Any, what: Any, plus: int) -> Callable[..., Any]:
        return lambda x: how(what(x)) + plus

    return [
        _Problem(
            f"{word} {what}" + (f" plus {plus}" if plus else ""),
            form.format(code) + (f"+{plus}" if plus else ""),
            applied(how, make, plus),
        )
        for word, form, how in outer
        for what, code, make in inner
        for plus in range(10)
    ]


_KINDS = {"sums": _sums, "lists": _lists}


class SnippetsSource:
    """Rows as `sources.code` says, and `brief`: the task in a few words. A fifth of the problems is held out for good.

    `form = "function"`: `f` is to be written; an answer may also be what follows `return` (`stub`). `"program"`: the
    same from standard input to standard output.
    """

    def __init__(
        self, *, kind: str = "sums", form: str = "function", split: str = "train", size: int = 0, seed: int = 0,
        demos: bool = False, right: float = 0.2,
    ) -> None:  # fmt: skip
        """`kind`: sums (288 problems of two numbers) or lists (150 of a list). `size`: rows; 0: each problem of the
        split once. `demos`: rows `{messages}` from train problems; a share `right` of them shows its own problem's
        expression, the others that of another one."""
        check_size("sources.snippets", size)
        for name, value, known in (("kind", kind, tuple(_KINDS)), ("form", form, FORMS)):
            if value not in known:
                raise SourceError(f"sources.snippets.{name}", value, "is not known", f"use one of: {', '.join(known)}")
        if not 0.0 <= right <= 1.0:
            raise SourceError("sources.snippets.right", right, "must be a share from 0 to 1", "give 0.2, say")
        self._all, self._kind, self._form = _KINDS[kind](), kind, form
        self._split = check_split("sources.snippets", split)
        num = len(self._all)
        self._problems = members(f"snippets/{kind}", num, num // 5, "train" if demos else self._split)
        self._size = size or len(self._problems)
        self._seed, self._demos, self._right = seed, demos, right

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> dict[str, Any]:
        check_row("sources.snippets", index, self._size)
        problem = self._all[problem_at(index, self._seed, self._problems)]
        if self._demos:
            return self._demo(index, problem)
        args: tuple[Any, ...] = _PAIRS if self._kind == "sums" else tuple((x,) for x in _LISTS)
        return (_function if self._form == "function" else _program)(problem, self._kind == "sums", args)

    def fingerprint(self) -> str:
        return digest(
            "snippets", 1, self._kind, self._form, self._split, self._size, self._seed, self._demos, self._right
        )

    def _demo(self, index: int, problem: _Problem) -> dict[str, Any]:
        rng = random.Random(f"{self._seed}/demo/{index}")
        shown = problem if rng.random() < self._right else self._all[rng.choice(self._problems)]
        asked = {"role": "user", "content": f"{problem.words}?"}
        return {"messages": [asked, {"role": "assistant", "content": shown.code}]}


def _function(problem: _Problem, pair: bool, args: tuple[Any, ...]) -> dict[str, Any]:
    names = "a, b" if pair else "x"
    stub = f"def f({names}):\n    return "
    tests = [f"assert f({', '.join(map(repr, given))}) == {problem.value(*given)!r}" for given in args]
    what = "two whole numbers a and b" if pair else "a list x of whole numbers"
    return {
        "brief": problem.words,
        "question": f"Write a Python function f({names}) that takes {what} and returns {problem.words}.\n{tests[0]}",
        "entries": ["f"], "header": "", "stub": stub, "setup": "", "given": "", "tests": tests,
        "test_stub": tests[0].partition("==")[0] + "== ",
        "solution": f"{stub}{problem.code}\n",
    }  # fmt: skip


def _program(problem: _Problem, pair: bool, args: tuple[Any, ...]) -> dict[str, Any]:
    reads = "a, b = map(int, input().split())" if pair else "x = list(map(int, input().split()))"
    what = "two whole numbers a and b" if pair else "the whole numbers of a list x"
    given = [" ".join(map(str, one if pair else one[0])) + "\n" for one in args]
    wanted = [f"{problem.value(*one)}\n" for one in args]
    return {
        "brief": problem.words,
        "question": f"Read {what} from one line of standard input and print {problem.words}.\n"
        f"Input: {given[0]}Output: {wanted[0]}",
        "entries": [], "header": "", "stub": "", "setup": "", "given": "", "tests": [],
        "cases": [list(pair) for pair in zip(given, wanted, strict=True)],
        "solution": f"{reads}\nprint({problem.code})\n",
    }  # fmt: skip
