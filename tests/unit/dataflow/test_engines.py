"""Which engine sampled what: a node says it with a commit; kept with each trajectory, counted, told to the trainer."""

from __future__ import annotations

import msgspec

from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.records import Batch, EpisodeCommit, Part, Put, QueuedGroup, State
from astraflow.dataflow.machine.records import Entry as Scored
from astraflow.dataflow.storage.batches import batch_table
from astraflow.dataflow.storage.commits.rows import Known, episode_commits, row_facts
from astraflow.dataflow.views.status import prometheus_text, status
from astraflow.testing.dataflow import Desk, episode, small_config, trajectory
from astraflow.types import EpisodeLease, Task
from astraflow.wire.codec import read_stream, write_stream
from astraflow.wire.episodes import encode_episodes
from astraflow.wire.messages import EpisodesHeader

FAST, SLOW = "local-float32@fast", "local-bfloat16@slow"


def play(desk: Desk, engine: str, *rewards: float | None, tokens: int = 3) -> None:
    put = Put(1, 64 * len(desk._log), 64)
    episodes = [
        EpisodeCommit(
            lease.episode_id, lease.attempt, None, {},
            [Part("actor", put.key, [i], [0], 0, tokens, 0, reward, (), 1, engine)],
        )
        for i, (lease, reward) in enumerate(zip(desk.lease(len(rewards)), rewards, strict=True))
    ]  # fmt: skip
    assert set(desk.do(c.CommitEpisodes("n", put, episodes)).values()) == {"accepted"}


def desk() -> Desk:
    made = Desk(small_config())
    made.start()
    return made


def test_shares_of_the_work_are_counted_by_engine_and_node() -> None:
    at = desk()
    play(at, FAST, 1.0, 0.0, 1.0, tokens=9)
    play(at, SLOW, None, tokens=3)
    play(at, "", 1.0)
    assert status(at.machine, 0.0)["episodes"]["engines"] == {
        SLOW: {"episodes": 1, "tokens": 3, "share": 0.1, "reward": None},
        FAST: {"episodes": 3, "tokens": 27, "share": 0.9, "reward": 0.6667},
    }
    text = prometheus_text(at.machine, {}).decode()
    assert f'astraflow_engine_episodes_total{{engine="{FAST}"}} 3.0' in text
    assert f'astraflow_engine_tokens_total{{engine="{FAST}"}} 27.0' in text


def test_the_longest_unused_engine_is_forgotten() -> None:
    at = desk()
    play(at, FAST, 1.0)
    for number in range(accounts._MOST_ENGINES):
        account = accounts.EngineAccount(tokens=number)
        at.machine.state.engines[f"local-float32@spot{number}"] = account
    play(at, SLOW, 1.0)
    engines = at.machine.state.engines
    assert FAST not in engines and SLOW in engines


def test_each_row_of_a_batch_names_the_engine_of_its_policy() -> None:
    lease = EpisodeLease(
        episode_id="train/0/5/0", group_id="train/0/5", attempt=1, task=Task("train", 5, 0, {}), timeout_s=1.0,
        min_versions={}, sampling={},
    )  # fmt: skip
    actor, forked = trajectory(1.0, marker=40), trajectory(1.0, branch=1, marker=60)
    judge = trajectory(0.0, policy="judge", marker=80)
    played = [episode(lease, "n", trajectories=[actor, judge, forked])]
    said = {"actor": FAST, "judge": SLOW, "other": "x"}
    body = write_stream(*encode_episodes(played, "n", said))
    header, table = read_stream(body, EpisodesHeader)
    put = Put(1, 0, 64)
    (commit,) = episode_commits(header, row_facts(header, table, Known({"actor": 0, "judge": 0})), put)
    assert {part.policy: part.engine for part in commit.parts} == {"actor": FAST, "judge": SLOW}
    groups = [QueuedGroup("g", 1.0, 0, [Scored(part, 0.0, 0.0)]) for part in commit.parts]
    rows = batch_table(Batch(1, groups, {}), {put.key: put}, lambda _: body).to_pylist()
    assert [(row["policy"], row["branch"], row["engine"]) for row in rows] == [
        ("actor", 0, FAST), ("judge", 0, SLOW), ("actor", 1, FAST),
    ]  # fmt: skip


def test_journals_and_snapshots_without_engines_are_read() -> None:
    old = msgspec.json.encode(["actor", 64, [0], [0], 0, 3, 0, 1.0, [], 1])
    assert msgspec.json.decode(old, type=Part).engine == ""
    header = msgspec.json.encode({"node_id": "n", "episodes": []})
    assert msgspec.json.decode(header, type=EpisodesHeader).engines == {}
    state = msgspec.to_builtins(desk().machine.state)
    del state["engines"]
    assert msgspec.convert(state, State).engines == {}
