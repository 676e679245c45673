"""Agents through the gateway to branches: ids, masks and forks as written in `golden/`, of three families.

A line of a golden file is a branch: its parent, the text that it shares, and its own text; `⟦...⟧` was sampled, `·`
parts tokens that the tokenizer would not have chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from chat_families import FAMILIES, Scene
from context_agents import PLAYS

GOLDEN = Path(__file__).parent / "golden"


def golden(family: str) -> dict[str, list[tuple[int, str, str]]]:
    """The branches of each play."""
    plays: dict[str, list[tuple[int, str, str]]] = {}
    for line in (GOLDEN / f"{family}.txt").read_text().splitlines():
        if line.startswith("== "):
            branches = plays.setdefault(line[3:], [])
        else:
            parent, shared, own = line.replace("\\n", "\n").split(" | ")
            branches.append((int(parent), shared, own))
    return plays


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("play", PLAYS)
async def test_an_agent_leaves_exactly_these_branches(
    make_scene: Callable[[str], Scene], family: str, play: str
) -> None:
    scene = make_scene(family)
    await PLAYS[play](scene)
    scene.check(golden(family)[play])


def test_every_play_is_written_down_for_every_family() -> None:
    assert [set(golden(family)) for family in FAMILIES] == [set(PLAYS)] * len(FAMILIES)


async def test_a_linear_episode_in_ids(make_scene: Callable[[str], Scene]) -> None:
    scene = make_scene("moving")
    await PLAYS["linear"](scene)
    eos, begin, user, end = (scene.ids(text)[0] for text in ("</s>", "<s>", "[INST]", "[/INST]"))
    (he,), (llo,), (hello,) = (scene.ids(text) for text in ("he", "llo", "hello"))
    h, i, b, c = (scene.ids(text)[0] for text in "hibc")
    more = [user, *scene.ids("more"), end]
    (branch,) = scene.check(golden("moving")["linear"])
    assert branch.token_ids.tolist() == [begin, user, h, i, end, he, llo, eos, *more, b, eos, *more, c, eos]
    assert np.flatnonzero(branch.loss_mask).tolist() == [5, 6, 7, 14, 15, 22, 23]
    assert branch.call_index[branch.loss_mask].tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert hello not in branch.token_ids


@pytest.mark.parametrize(("family", "forks"), [("chatml", 0), ("llama3", 0), ("moving", 1)])
async def test_a_template_that_rewrites_what_was_said_counts_as_a_fork(
    make_scene: Callable[[str], Scene], family: str, forks: int
) -> None:
    scene = make_scene(family)
    await PLAYS["system"](scene)
    assert scene.gateway.stats()["gateway/forks"] == forks
    assert [call.forked for call in scene.close()] == [False, bool(forks)]
