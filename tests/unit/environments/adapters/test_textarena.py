"""TextArena's games by the adapter: one side against a script, two sides, chance of their own, no downloads."""

from __future__ import annotations

import random
import re
from typing import Any

import pytest

pytest.importorskip("textarena", reason="pip install 'astraflow[textarena]'")

from astraflow.environments.adapters.textarena import TextArena, nltk, random_move
from astraflow.errors import Problem
from astraflow.testing.environments.suite import check_environment, reward_of_chance
from astraflow.types import Action, Step, Task
from recorded import recorded

SEEDS = [{"seed": seed} for seed in range(4)]
LINES = [(0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6)]


def piles_of(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"pile \d+: (\d+)", text.rpartition("Current Pile")[2])]


def nim_player(task: Task, told: list[Step], chance: Any) -> str:
    """Leaves a nim-sum of 0 where it can."""
    piles = piles_of(told[-1].text)
    total = 0
    for size in piles:
        total ^= size
    for place, size in enumerate(piles):
        if size and (size ^ total) < size:
            return f"[{place} {size - (size ^ total)}]"
    place = max(range(len(piles)), key=lambda i: piles[i])
    return f"{place} 1"  # brackets are put around it


def bisect(task: Task, told: list[Step], chance: Any) -> str:
    low, high, guess = 1, 20, 0
    for step in told[1:]:
        guess = (low + high) // 2
        low, high = (guess + 1, high) if "higher" in step.text else (low, guess - 1)
    return f"[{(low + high) // 2}]"


def last_card(told: str, chance: random.Random) -> str:
    """A foreign opponent: folds or checks."""
    return "[fold]" if "fold" in told.splitlines()[-1] else "[check]"


def test_nim_against_a_random_opponent() -> None:
    spec = {"type": "textarena", "id": "Nim-v0", "players": 2, "opponent": "random"}
    report = check_environment(spec, SEEDS, oracle=nim_player, actions=["[0 1]", "[1 1]", "[2 1]"], null=-1.0)
    chance = reward_of_chance(spec, [{"seed": seed} for seed in range(100)], ["[0 1]", "[1 1]", "[2 1]"])
    what = "`textarena` Nim-v0 against chance"
    recorded(what, "100 seeds", oracle=report.oracle, null=report.null, random=chance)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("TicTacToe-v0", {"players": 2, "opponent": "random"}),
        ("KuhnPoker-v0", {"players": 2, "opponent": f"{__name__}:last_card"}),
        ("ConnectFour-v0", {"players": 2, "opponent": f"{__name__}:first_column"}),
        ("TowerOfHanoi-v0", {}),
        ("Blackjack-v0", {}),
    ],
)
def test_games_hold_what_every_environment_must(name: str, options: dict[str, Any]) -> None:
    actions = ["[4]", "[0]", "[bet]", "[check]", "[A C]", "[col 3]", "[Stand]"]
    check_environment({"type": "textarena", "id": name, **options}, SEEDS, actions=actions, null=None)


def first_column(told: str, chance: random.Random) -> str:
    return f"[col {chance.randrange(7)}]"


def test_guess_the_number_alone() -> None:
    spec = {"type": "textarena", "id": "GuessTheNumber-v0"}
    words = [f"[{number}]" for number in range(1, 21)]
    report = check_environment(spec, SEEDS, oracle=bisect, actions=words, null=None)
    chance = reward_of_chance(spec, [{"seed": seed} for seed in range(100)], words)
    what = "`textarena` GuessTheNumber-v0"
    recorded(what, "100 seeds", oracle=report.oracle, null=report.null, random=chance)


@pytest.mark.parametrize("name", ["TicTacToe-v0", "KuhnPoker-v0", "Nim-v0"])
def test_two_sides_have_rewards_of_their_own(name: str) -> None:
    spec = {"type": "textarena", "id": name, "players": 2}
    check_environment(spec, SEEDS, actions=["[0]", "[4]", "[check]", "[0 1]"], sides=2, null=None)
    game = TextArena(id="Nim-v0", players=2)
    step = game.reset(Task("t", 0, 0, {"seed": 0}))
    assert "Welcome to Nim, Player 0" in step.text and step.side == 0
    step = game.step(Action(text="[0 3]", side=0))
    assert step.side == 1 and "Welcome to Nim, Player 1" in step.text and "removes 3" in step.text
    step = game.step(Action(text="[1 4]", side=1))
    assert "[1 4]" in step.text and "[0 3]" not in step.text, "the other's words, not its own"
    step = game.step(Action(text="[2 5]", side=0))
    assert step.done and step.reward == [1.0, -1.0] and step.metrics == {"invalid": 0.0}


def test_a_second_wrong_move_loses_and_says_so() -> None:
    game = TextArena(id="Nim-v0", players=2, opponent="random")
    game.reset(Task("t", 0, 0, {"seed": 0}))
    assert "invalid move" in game.step(Action(text="please")).text
    lost = game.step(Action(text="please"))
    assert lost == Step("", -1.0, True, {"success": 0.0, "invalid": 1.0})


def test_the_chance_of_the_process_stays_as_it_was() -> None:
    random.seed(5)
    before = random.getstate()
    game = TextArena(id="KuhnPoker-v0", players=2, opponent="random")
    game.reset(Task("t", 0, 0, {"seed": 0}))
    game.step(Action(text="[check]"))
    assert random.getstate() == before


def test_word_lists_are_never_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(*_: Any, **__: Any) -> None:
        raise AssertionError("a download")

    monkeypatch.setattr(nltk, "download", fetch)
    monkeypatch.setattr(nltk.data, "path", [])
    with pytest.raises(Problem, match=r"Wordle-v0 needs word lists .*nltk\.downloader"):
        TextArena(id="Wordle-v0")


def test_a_game_that_lists_no_moves_needs_an_opponent_of_yours() -> None:
    with pytest.raises(ValueError, match="module:function"):
        random_move("Say something.", random.Random(0))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"id": "Nimm-v0"}, ["Nimm-v0", "not registered", "TicTacToe-v0"]),
        ({"id": "Nim-v1"}, ["known here: Nim-v0"]),
        ({"id": "Nim-v0", "options": {"x": 1}}, ["'x'", "mend its options"]),
        ({"id": "Nim-v0", "opponent": "random"}, ["players=1"]),
        ({"id": "Nim-v0", "players": 2, "opponent": "nobody"}, ["opponent=nobody"]),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(Problem) as caught:
        TextArena(**options)
    assert all(word in str(caught.value) for word in words), str(caught.value)
