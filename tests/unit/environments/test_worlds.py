"""Environments at work: deadlines, failures, processes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from astraflow.contracts import Environment
from astraflow.environments.health import Health
from astraflow.environments.worlds import Worlds
from astraflow.errors import ConfigError, EpisodeError, Problem
from astraflow.types import Action, Step, Task
from world_samples import Waits

TASK = Task("train", 3, 0, {"start": 0})


def say(text: str) -> Action:
    return Action(text=text)


@pytest.fixture(scope="module")
def heavy() -> Iterator[Worlds]:
    pool = {"processes": 1, "seats": 2, "recycle_after": 0}
    worlds = Worlds({"type": "world_samples:HeavyCounter", "goal": 2}, env_timeout_s=1.0, pool=pool)
    yield worlds
    worlds.close()


async def pid(world: object) -> str:
    return (await world.step(say("pid"))).text  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["Counter", "HeavyCounter"])
async def test_an_environment_is_the_same_here_and_in_a_process(name: str) -> None:
    worlds = Worlds({"type": f"world_samples:{name}", "goal": 2})
    world = worlds.open()
    assert await world.reset(TASK) == ([{"role": "user", "content": "0?"}], 0)
    assert await world.step(say("1")) == Step("1?", 0.0, False, {"reached": 1.0})
    assert await world.step(say("2")) == Step("2?", 1.0, True, {"reached": 2.0})
    await world.close()
    worlds.close()
    assert worlds.health.line().startswith("starts 1, live 0, steps 3, failures 0, timeouts 0, p50_ms")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("hang", r"^env_timeout: .* within 1 s; see workflow\.env_timeout_s$"),
        ("hang in C", r"^env_timeout: .* within 1 s"),
        ("crash", r"^env_error: lost: .*exit 3"),
        ("raise", r"^env_error: raised: RuntimeError: no disk \(world_samples.py:\d+\)$"),
        ("garbage", r"^env_error: it gave dict, not an astraflow\.types\.Step"),
    ],
)
async def test_what_goes_wrong_in_a_process_is_an_error_and_the_next_one_is_served(
    heavy: Worlds, text: str, error: str
) -> None:
    world = heavy.open()
    await world.reset(TASK)
    with pytest.raises(EpisodeError, match=error):
        await world.step(say(text))
    await world.close()
    after = heavy.open()
    await after.reset(TASK)
    assert (await after.step(say("1"))).text == "1?"
    await after.close()


async def test_environments_share_processes_and_a_kill_takes_the_neighbours(heavy: Worlds) -> None:
    one, two = heavy.open(), heavy.open()
    await one.reset(TASK)
    await two.reset(Task("train", 4, 0, {"start": 1}))
    assert await pid(one) == await pid(two)
    assert (await two.step(say("2"))).done and (await one.step(say("1"))).text == "1?", "each has a state of its own"
    with pytest.raises(EpisodeError, match="env_error: lost"):
        await one.step(say("crash"))
    with pytest.raises(EpisodeError, match="env_error: lost"):
        await two.step(say("2"))
    await one.close()
    await two.close()
    assert heavy.health.live == 0


async def test_a_process_is_replaced_after_so_many_episodes() -> None:
    pool = {"processes": 1, "seats": 1, "recycle_after": 2}
    worlds = Worlds("world_samples:HeavyCounter", pool=pool)
    pids = []
    for _ in range(4):
        world = worlds.open()
        await world.reset(TASK)
        pids.append(await pid(world))
        await world.close()
    worlds.close()
    assert pids[0] == pids[1] != pids[2] == pids[3]


async def test_who_waits_for_others_has_a_deadline_and_is_closed() -> None:
    worlds, before = Worlds("world_samples:Waits", env_timeout_s=0.05), Waits.closed
    world = worlds.open()
    opening, _ = await world.reset(TASK)
    assert [m["role"] for m in opening] == ["system", "user"]
    with pytest.raises(EpisodeError, match=r"^env_timeout: step 1 of world_samples:Waits took longer than 0\.05 s"):
        await world.step(say("hang"))
    await world.close()
    assert (worlds.health.timeouts, Waits.closed) == (1, before + 1)


async def test_a_cancelled_episode_still_closes_its_environment() -> None:
    worlds, before = Worlds("world_samples:Waits"), Waits.closed

    async def play() -> None:
        world = worlds.open()
        try:
            await world.step(say("hang"))
        finally:
            await world.close()

    playing = asyncio.ensure_future(play())
    await asyncio.sleep(0)
    playing.cancel()
    await asyncio.gather(playing, return_exceptions=True)
    assert Waits.closed == before + 1


class Raises(Environment):
    def reset(self, task: Task) -> str:
        raise TimeoutError("its own")

    def step(self, action: Action) -> Step:
        return Step()

    def close(self) -> None:
        raise OSError("stuck")


async def test_a_timeout_of_its_own_is_no_missed_deadline_and_a_failed_close_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    world = Worlds(f"{__name__}:Raises").open()
    with pytest.raises(EpisodeError, match=r"^env_error: reset: TimeoutError: its own"):
        await world.reset(TASK)
    await world.close()
    assert "close failed: OSError: stuck" in caplog.text


def test_a_slow_step_on_the_loop_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    health = Health("mine")
    health.slow("step 1", 0.2)
    health.slow("step 2", 0.3)
    assert [r.getMessage()[:40] for r in caplog.records] == ["environment mine: step 1 took 200 ms, in"]


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        ("world_samples:Blocks", {}, ["runs='service'", "async def step"]),
        ("world_samples:Counter", {"sides": 2}, ["has 1 sides", "plays 2"]),
        ("world_samples:Counter", {"pool": {"seats": 1}}, ["workflow.pool", "no effect", "'cheap'"]),
        ("world_samples:HeavyCounter", {"pool": {"seats": 0}}, ["workflow.pool.seats=0", ">= 1"]),
        ("world_samples:HeavyCounter", {"pool": {"seets": 1}}, ["workflow.pool.seets", "known: processes"]),
        ("world_samples:HeavyCounter", {"pool": {"deadline_s": 1.0}}, ["pool.deadline_s", "env_timeout_s"]),
        ({"type": "world_samples:Counter", "gaol": 2}, {}, ["gaol", "did you mean 'goal'"]),
        ({"type": "world_samples:Waits", "goal": 2}, {}, ["environment.goal=2 is not an option", "known: none"]),
        ({"goal": 2}, {}, ["workflow.environment.type"]),
        ("frozenlake", {}, ["not a known name of environments", "calculator"]),
    ],
)
def test_what_cannot_work_is_refused_before_anything_starts(spec: object, options: dict, words: list[str]) -> None:  # type: ignore[type-arg]
    with pytest.raises((Problem, ConfigError)) as caught:
        Worlds(spec, **options)  # type: ignore[arg-type]
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_the_seed_of_a_task_is_its_own_or_made_from_its_id() -> None:
    assert Task("t", 1, 0, {"seed": 7}).seed == 7
    assert Task("t", 1, 0, {}).seed == Task("t", 1, 0, {"x": 1}).seed != Task("t", 1, 1, {}).seed
