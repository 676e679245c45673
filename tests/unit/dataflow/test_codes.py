"""The version of the code that played an episode: counted, shown, told in its life, and absent from older journals."""

from __future__ import annotations

import msgspec

from astraflow.dataflow.journal.history import Life, Moment
from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.records import EpisodeCommit, Part, Put, State
from astraflow.dataflow.state import Applied
from astraflow.dataflow.views.life import life_lines, moments_of
from astraflow.dataflow.views.status import prometheus_text, status
from astraflow.testing.dataflow import Desk, small_config


def play(desk: Desk, code: str, *rewards: float | None, error: str | None = None) -> list[str]:
    """Commit so many episodes by `code`; the lines of their lives."""
    put = Put(1, 64 * len(desk._log), 64)
    episodes = [
        EpisodeCommit(lease.episode_id, lease.attempt, error, {}, [] if error else [part(put, i, reward)], code)
        for i, (lease, reward) in enumerate(zip(desk.lease(len(rewards)), rewards, strict=True))
    ]
    command = c.CommitEpisodes("n", None if error else put, episodes)
    answers = desk.do(command)
    assert set(answers.values()) == {"accepted"}
    moments = moments_of(command, Applied(answers, []), desk.machine)
    return life_lines(Life([Moment(1, 0.0, *moment) for moment in moments], 0.0))[:-1]


def part(put: Put, row: int, reward: float | None) -> Part:
    return Part("actor", put.key, [row], [0], 0, 3, 0, reward, (), 1)


def desk() -> Desk:
    made = Desk(small_config())
    made.start()
    return made


def test_episodes_and_rewards_are_counted_by_code_newest_last() -> None:
    at = desk()
    play(at, "old", 0.0, 1.0)
    play(at, "new", None, None, error="workflow: broke")
    play(at, "", 1.0)
    play(at, "old", None)
    shown = status(at.machine, 0.0)["episodes"]["codes"]
    assert list(shown.items()) == [
        ("new", {"episodes": 2, "failed": 2, "reward": None}), ("old", {"episodes": 3, "failed": 0, "reward": 0.5}),
    ]  # fmt: skip
    text = prometheus_text(at.machine, {}).decode()
    assert 'astraflow_code_episodes_total{code="old"} 3.0' in text and 'astraflow_code_reward{code="old"} 0.5' in text


def test_the_longest_unused_code_is_forgotten() -> None:
    at = desk()
    play(at, "kept", 1.0)
    for number in range(accounts._MOST_CODES):
        play(at, f"v{number}", 1.0)
        play(at, "kept", 1.0)
    codes = at.machine.state.codes
    assert len(codes) == accounts._MOST_CODES and "kept" in codes and "v0" not in codes


def test_a_life_tells_the_code_of_each_episode() -> None:
    at = desk()
    (line,) = play(at, "abc", 0.0, 1.0)
    assert "committed" in line and "code=abc" in line
    (line,) = play(at, "def", None, error="workflow: broke")
    assert "failed" in line and "code=def" in line
    (line,) = play(at, "", 1.0)
    assert "code" not in line


def test_journals_and_snapshots_without_codes_are_read() -> None:
    old = msgspec.json.encode(["train/0/0/0", 1, None, {}, []])
    assert msgspec.json.decode(old, type=EpisodeCommit).code == ""
    state = msgspec.to_builtins(desk().machine.state)
    del state["codes"]
    assert msgspec.convert(state, State).codes == {}
