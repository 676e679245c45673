"""Further readers: each at its own position, rows are kept for the slowest, holding and skipping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from astraflow.contracts import Operator
from astraflow.dataflow.machine import commands as c
from astraflow.errors import WireError
from astraflow.testing.dataflow import Desk, check_law, episode, policy_section, small_config, trajectory
from astraflow.types import Group
from astraflow.wire.codec import TRAINING_SCHEMA, check_schema

LOG: dict[str, Any] = {"log": {"max_behind": 100}}


def desk(consumers: dict[str, Any], **changes: Any) -> Desk:
    found = Desk(small_config(run__steps=50, consumers=consumers, policies__actor=policy_section(1, 1), **changes))
    found.start("n")
    return found


def rounds(found: Desk, count: int, start: int = 0) -> None:
    """`count` steps of one group each, each covered by a checkpoint."""
    for version in range(start, start + count):
        found.play(2, version=version)
        found.step(version)
        found.cover(version + 1)
        check_law(found.machine)


def position(found: Desk, name: str) -> int:
    return found.machine.state.consumers[name].positions["actor"]


def test_rows_are_kept_until_the_slowest_reader_is_past_them() -> None:
    found = desk({"log": {}, "judge": {}})
    rounds(found, 3)
    state = found.machine.state
    assert len(state.puts) == 3, "trained and covered, but not read"
    found.do(c.AckRows("log", "actor", 3))
    assert len(state.puts) == 3 and state.logs["actor"].first == 0
    found.do(c.AckRows("judge", "actor", 2))
    assert len(state.puts) == 1 and state.logs["actor"].first == 2
    check_law(found.machine)
    found.do(c.AckRows("judge", "actor", 1))  # an earlier position is a no-op
    assert position(found, "judge") == 2
    with pytest.raises(c.Refusal, match="position=4 is beyond the end of the log"):
        found.do(c.AckRows("judge", "actor", 4))
    rounds(found, 2, start=3)
    assert found.machine.consumers.behind("log", "actor") == 2


def test_one_that_holds_closes_admission_until_it_acknowledges() -> None:
    found = desk({"log": {"max_behind": 3}})
    rounds(found, 3)
    assert found.machine.consumers.holding == ["log"]
    assert found.lease(2) == []
    found.instructions.clear()
    found.do(c.AckRows("log", "actor", 1))
    assert c.Wake("leases") in found.instructions
    assert found.machine.consumers.holding == [] and len(found.lease(2)) == 2
    check_law(found.machine)


def test_one_that_skips_misses_its_oldest_and_holds_nobody() -> None:
    found = desk({"log": {"max_behind": 3, "when_behind": "skip"}, "judge": {}})
    found.do(c.AckRows("judge", "actor", 0))
    rounds(found, 5)
    assert position(found, "log") == 2 and found.machine.state.consumers["log"].missed == {"actor": 2}
    assert found.machine.state.logs["actor"].first == 0, "the other one still needs them"
    found.do(c.AckRows("log", "actor", 1))  # it had read them before they were skipped
    assert position(found, "log") == 2
    check_law(found.machine)


def test_groups_that_never_reach_the_queue_are_not_logged() -> None:
    found = desk(LOG)
    found.commit(found.lease(2), [1.0, 1.0])
    found.play(2)
    assert [g.group_id for g in found.machine.state.logs["actor"].groups] == [
        g.group_id for g in found.machine.state.policies["actor"].queue.values()
    ]


def test_a_restart_is_exact_and_a_new_consumer_starts_at_the_end() -> None:
    found = desk(LOG)
    rounds(found, 3)
    found.do(c.AckRows("log", "actor", 1))
    found.keep_snapshot()
    rounds(found, 1, start=3)
    before = found.machine.snapshot()
    found.restart()
    assert found.machine.snapshot() == before
    check_law(found.machine)
    found.config = small_config(run__steps=50, consumers={"late": {}}, policies__actor=policy_section(1, 1))
    found.keep_snapshot()
    found.restart()
    assert position(found, "late") == 4 and set(found.machine.state.consumers) == {"late"}
    assert not found.machine.state.logs["actor"].groups
    check_law(found.machine)


def test_only_the_policies_of_a_consumer_are_kept() -> None:
    policies = {"actor": policy_section(1, 1), "verifier": policy_section(1, 1)}
    found = Desk(small_config(policies=policies, consumers={"log": {"policies": ["verifier"]}}))
    found.start("n")
    found.play(2)
    assert "actor" not in found.machine.state.logs and found.machine.state.logs["verifier"].end == 1
    with pytest.raises(c.Refusal, match=r"policy=actor is not one of its policies; known: verifier"):
        found.do(c.AckRows("log", "actor", 0))
    check_law(found.machine)


def test_a_consumer_reads_what_the_trainer_reads(serve: Callable[..., Any]) -> None:
    echo = {"echo": {"type": "astraflow.testing.stages:EchoStage"}}
    config = small_config(policies__actor=policy_section(1, 1), consumers=LOG)
    service = serve(config)
    client = service.start()
    header, table = client.consume("log", "actor")
    assert header.as_trained
    assert (header.position, header.next, header.group_ids, table.num_rows) == (0, 0, [], 0) and echo
    for lease in client.lease("n", 4).leases:
        client.commit([episode(lease, "n", float(lease.episode_id[-1] == "1"))])
    header, table = client.consume("log", "actor", 1, wait_s=5)
    assert (header.position, header.next, len(header.group_ids), header.missed) == (0, 1, 1, 0)
    check_schema(table, TRAINING_SCHEMA)
    assert client.consume("log", "actor", 1)[1].equals(table), "the same again until it is acknowledged"
    client.consumer_ack("log", header)
    second, rest = client.consume("log", "actor", 16)
    assert (second.position, second.next) == (1, 2) and second.group_ids != header.group_ids
    got = client.batch("actor", "t", 0, wait_s=5)
    assert got is not None and got[1].equals(table)
    service.close()
    client = serve(config).client()
    again, same = client.consume("log", "actor", 16)
    assert again == second and same.equals(rest)
    with pytest.raises(WireError, match="consumer=lag is not a consumer of this run; known: log"):
        client.consume("lag", "actor")


class Doubles(Operator):
    """Doubles the weights of a batch."""

    phase = "weight"

    def on_batch(self, groups: Sequence[Group], step: int) -> None:
        for group in groups:
            group.weight *= 2


@pytest.mark.parametrize(
    "changes",
    [
        {"operators": ["keep_all", f"{__name__}:Doubles"]},
        {"operators": ["keep_all"], "algorithm": {"advantage": "reinforce_pp"}},
    ],
)
def test_a_consumer_is_told_when_a_batch_gets_other_advantages_or_weights(
    serve: Callable[..., Any], changes: dict[str, Any]
) -> None:
    client = serve(small_config(policies__actor=policy_section(2, 1, **changes), consumers=LOG)).start()
    for number, lease in enumerate(client.lease("n", 4).leases):
        rows = [trajectory(float(number % 2), tokens=9 if number < 2 else 3)]
        client.commit([episode(lease, "n", trajectories=rows)])
    header, seen = client.consume("log", "actor", wait_s=5)
    _, trained = client.batch("actor", "t", 0, wait_s=5)
    assert not header.as_trained and not seen.equals(trained)
    same = [name for name in seen.column_names if name not in ("advantages", "weight")]
    assert seen.select(same).equals(trained.select(same))
