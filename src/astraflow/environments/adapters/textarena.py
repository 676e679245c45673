"""TextArena's games, for one side against a scripted opponent, or for two policies."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

from astraflow.config.rooms import required, resolve
from astraflow.contracts import Environment
from astraflow.errors import Problem
from astraflow.types import Action, Step, Task

textarena = required("textarena", "textarena")
nltk = required("nltk", "textarena")

Opponent = Callable[[str, random.Random], str]
"""`(what it was told since its last move, its chance) -> what it says`."""
_LISTED = re.compile(r"'?(\[[^\[\]]+\])'?")
_PILE = re.compile(r"pile (\d+): (\d+)")
_MOST_MOVES = 500  # of a scripted opponent in a row


class TextArena(Environment):
    """A side is told what is new since its last move, without its own words. Words without brackets are put into some.

    Rewards are the game's own, at its end: 1 won, 0 drawn, -1 lost or one wrong move too many. A scripted opponent
    plays the other side, which is side 1 for even seeds and side 0 for odd ones; without one the game has two sides.
    """

    def __init__(
        self, *, id: str, options: Mapping[str, Any] | None = None, players: int = 1, opponent: str = "",
        runs: Literal["cheap", "cpu"] = "cheap",
    ) -> None:  # fmt: skip
        """`id`: as `Nim-v0`, `options`: of its class, `players`: 1 or 2. `opponent`: "random": one of the moves that
        the game lists (or of nim); or `module:function`, as `Opponent`. `runs`: "cpu" for one that is slow.

        Raises: Problem: no such game, or it needs word lists that are not here.
        """
        if players not in (1, 2) or (opponent and players == 1):
            raise Problem("textarena.players", players, "must be 1, or 2 (also with an opponent)", "see its game")
        self._opponent: Opponent | None = None
        if opponent:
            self._opponent = random_move if opponent == "random" else resolve("environments", opponent, "opponent")
        self.sides = 2 if players == 2 and not opponent else 1
        self._players, self._me, self.runs = players, 0, runs
        self._chance = random.Random()
        self._dice: Any = None  # state of the chance that the games of a process share, as this one left it
        with _offline():
            self._game = _made(id, dict(options or {}))

    def reset(self, task: Task) -> Step:
        self._chance.seed(task.seed)
        self._me = task.seed % 2 if self._opponent else 0
        with self._own_dice(), _offline():
            random.seed(task.seed)
            self._game.reset(num_players=self._players, seed=task.seed)
        return self._next()

    def step(self, action: Action) -> Step:
        over = self._say(action.text)
        return self._ended() if over else self._next()

    def _next(self) -> Step:
        """Until it is a policy's turn, or the end."""
        for _ in range(_MOST_MOVES):
            side, told = self._told()
            if self._opponent is None or side == self._me:
                return Step(told, side=side if self.sides == 2 else 0)
            if self._say(self._opponent(told, self._chance)):
                return self._ended()
        raise RuntimeError(f"the opponent moved {_MOST_MOVES} times in a row")

    def _told(self) -> tuple[int, str]:
        side, new = self._game.get_observation()
        return int(side), "\n".join(str(text).strip() for who, text, *_ in new if who != side)

    def _say(self, text: str) -> bool:
        text = text.strip()
        with self._own_dice():
            done, _ = self._game.step(text if "[" in text or "]" in text else f"[{text}]")
        return bool(done)

    def _ended(self) -> Step:
        rewards, facts = self._game.close()
        wrong = {"invalid": float(any(bool(f.get("invalid_move")) for k, f in facts.items() if k in self._mine()))}
        scores = [float(rewards.get(side, 0)) for side in range(self._players)]
        if self.sides == 2:
            return Step("", scores, True, wrong)
        won = scores[0] >= 1 if self._players == 1 else scores[self._me] > scores[1 - self._me]
        return Step("", scores[self._me], True, {"success": float(won), **wrong})

    def _mine(self) -> tuple[int, ...]:
        return (0, 1) if self.sides == 2 else (self._me,)

    @contextlib.contextmanager
    def _own_dice(self) -> Iterator[None]:
        """Games draw from the one chance of the process: each gets it as it left it, and leaves that of others."""
        others = random.getstate()
        if self._dice is not None:
            random.setstate(self._dice)
        try:
            yield
        finally:
            self._dice = random.getstate()
            random.setstate(others)


def random_move(told: str, chance: random.Random) -> str:
    """One of the moves that a game lists, or of a pile of nim."""
    listed = [line for line in told.splitlines() if "vailable" in line]
    if listed and (moves := _LISTED.findall(listed[-1])):
        return cast(str, chance.choice(moves))
    piles = [(pile, int(size)) for pile, size in _PILE.findall(told.rpartition("Current Pile")[2]) if int(size)]
    if piles:
        pile, size = chance.choice(piles)
        return f"[{pile} {chance.randint(1, size)}]"
    raise ValueError("this game lists no moves; write an opponent of your own: opponent = 'module:function'")


def _made(name: str, options: dict[str, Any]) -> Any:
    known = textarena.envs.registration.ENV_REGISTRY
    if f"{name}-raw" not in known:
        near = [k.removesuffix("-raw") for k in known if k.endswith("-raw") and k.startswith(name.split("-")[0])]
        some = "TicTacToe-v0, KuhnPoker-v0, Nim-v0, ConnectFour-v0, GuessTheNumber-v0, TowerOfHanoi-v0"
        raise Problem("textarena.id", name, "is not registered", f"known here: {', '.join(near) or some}")
    try:
        return textarena.make(f"{name}-raw", **options)
    except LookupError as error:
        raise Problem(
            "textarena.id", name, "needs word lists that are not here",
            "fetch them once: python -m nltk.downloader words averaged_perceptron_tagger_eng",
        ) from error  # fmt: skip
    except (TypeError, ValueError, ImportError) as error:
        raise Problem("textarena.id", name, f"cannot be made ({error})", "mend its options") from error


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Some games fetch word lists when they are imported; a run never does that by itself."""
    fetch = nltk.download
    nltk.download = _refuse
    try:
        yield
    finally:
        nltk.download = fetch


def _refuse(*_: Any, **__: Any) -> bool:
    return False
