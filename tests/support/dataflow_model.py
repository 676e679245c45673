"""The model of the dataflow machine: rules for everything that can happen, crashes included, and what always holds."""

from __future__ import annotations

import json
import unittest

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.records import Batch
from astraflow.dataflow.views.law import imbalance
from astraflow.testing.dataflow import Desk, check_law, policy_section, small_config, sources
from astraflow.types import EpisodeLease
from astraflow.wire import messages as m

NODES = st.sampled_from(["a", "b"])
REWARDS = st.sampled_from([0.0, 1.0, 1.0, None])


def said(batch: Batch) -> list[str]:
    """What a batch is made of."""
    return [f"{g.group_id}: {[(e.part.put, e.advantage) for e in g.entries]}" for g in batch.groups]


class Dataflow(RuleBasedStateMachine):
    """One policy, staleness 1, an evaluation every second step; subclasses vary the run."""

    policies = {"actor": policy_section(2, 1)}  # noqa: RUF012
    num_steps = 0
    num_damaged = 0
    desk: Desk | None = None
    max_age: int | None = None  # of what is trained again; None: max_staleness

    @initialize()
    def begin(self) -> None:
        config = small_config(
            run__steps=6, policies=self.policies, evaluation={"source": "held", "every": 3, "num_tasks": 1}
        )
        self.desk = Desk(config, sources(4))
        self.desk.start("a", "b")
        self.num_trainers = 0
        self.trainer = dict.fromkeys(self.policies, "t")
        self.held: list[tuple[str, EpisodeLease]] = []
        self.lost: list[tuple[str, EpisodeLease]] = []
        self.accepted: dict[str, int] = {}
        self.content: dict[tuple[str, int], list[str]] = {}
        self.fresh: dict[tuple[str, int], list[tuple[str, int]]] = {}  # episodes trained for the first time

    @rule(node=NODES, n=st.integers(1, 8))
    def lease(self, node: str, n: int) -> None:
        if node in self.desk.machine.state.nodes:
            self.held += [(node, lease) for lease in self.desk.lease(n, node)]

    @rule(data=st.data(), reward=REWARDS, failed=st.sampled_from([False, False, False, True]))
    @precondition(lambda self: self.held)
    def commit(self, data: st.DataObject, reward: float | None, failed: bool) -> None:
        node, lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        oldest, newest = (
            max(lease.min_versions.values()),
            min(p.latest for p in self.desk.machine.state.policies.values()),
        )
        version = data.draw(st.integers(min(oldest, newest), newest))
        error = "env: broke" if failed else None
        answer = self.desk.commit([lease], [reward], version=version, node=node, error=error)[lease.episode_id]
        if answer == "accepted":
            assert lease.episode_id not in self.accepted, "accepted twice"
            self.accepted[lease.episode_id] = lease.attempt
            self.lost.append((node, lease))
        else:
            assert answer.startswith("refused"), answer

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def environment_fails(self, data: st.DataObject) -> None:
        node, lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        answers = [self.desk.commit([lease], node=node, error="env_error: broke")[lease.episode_id] for _ in range(2)]
        if answers == ["accepted", "duplicate"]:  # it has no attempts left
            self.accepted[lease.episode_id] = lease.attempt
        else:
            assert "refused" in answers[1], "it is played again"
        self.lost.append((node, lease))

    @rule(node=NODES)
    def play_a_round(self, node: str) -> None:
        newest = min(p.latest for p in self.desk.machine.state.policies.values())
        leases = self.desk.lease(6, node)
        ahead = [x for x in leases if max(x.min_versions.values()) > newest]  # one policy is, the other cannot be yet
        self.held += [(node, x) for x in ahead]
        leases = [x for x in leases if x not in ahead]
        self.desk.commit(leases, lambda x: float(int(x.episode_id[-1]) % 2), version=newest, node=node)
        self.accepted |= {x.episode_id: x.attempt for x in leases}

    @rule(data=st.data())
    @precondition(lambda self: self.lost)
    def commit_late_or_again(self, data: st.DataObject) -> None:
        node, lease = data.draw(st.sampled_from(self.lost))
        before = self.desk.machine.state.num_episodes
        answer = self.desk.commit([lease], node=node)[lease.episode_id]
        assert answer == "duplicate" if self.accepted.get(lease.episode_id) == lease.attempt else "refused" in answer
        assert self.desk.machine.state.num_episodes == before

    @rule(data=st.data())
    @precondition(lambda self: self.held)
    def lease_runs_out(self, data: st.DataObject) -> None:
        node, lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.desk.do(c.Expire(leases=[(lease.episode_id, lease.attempt)]))
        self.lost.append((node, lease))

    @rule(data=st.data(), counts=st.booleans())
    @precondition(lambda self: self.held)
    def lease_is_returned(self, data: st.DataObject, counts: bool) -> None:
        node, lease = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.desk.do(c.ReturnEpisodes(node, [(lease.episode_id, lease.attempt, counts)]))
        self.lost.append((node, lease))

    @rule(node=NODES, died=st.booleans())
    def node_goes_and_comes_back(self, node: str, died: bool) -> None:
        self.desk.do(c.Expire(nodes=[node]) if died else c.DrainNode(node))
        self.lost += [x for x in self.held if x[0] == node]
        self.held = [x for x in self.held if x[0] != node]
        self.desk.do(c.JoinNode(m.Join(node_id=node, name=node, capacity=8, run_id="r")))

    @rule(data=st.data(), acked=st.booleans())
    def train(self, data: st.DataObject, acked: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.policies)))
        version = self.desk.machine.state.policies[name].version
        if version >= 6:
            return
        batch = self.desk.take(version, self.trainer[name], name)
        if batch is None:
            return
        groups = said(batch)
        assert self.content.setdefault((name, batch.step), groups) == groups, "the batch changed"
        fresh = batch.groups[batch.num_replayed :]
        self.fresh[name, batch.step] = [(g.group_id, e.sibling) for g in fresh for e in g.entries]
        assert fresh or (batch.acked and self.num_damaged), "nothing new"
        for groups, bound in ((batch.groups, self.max_age), (fresh, None)):
            if not groups:
                continue
            oldest = min(v for g in groups for e in g.entries for v in e.part.min_versions)
            assert oldest >= version - (bound or self.policies[name]["batch"]["max_staleness"]), "too old"
        if acked:
            self.desk.ack(batch.step, self.trainer[name], name)

    @rule(data=st.data())
    def checkpoint(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.policies)))
        policy = self.desk.machine.state.policies[name]
        self.desk.cover(data.draw(st.integers(0, policy.version)), self.trainer[name], name)

    @rule(data=st.data())
    def trainer_dies_and_resumes(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.policies)))
        policy = self.desk.machine.state.policies[name]
        self.num_trainers += 1
        self.trainer[name] = f"t{self.num_trainers}"
        newest = policy.latest + (policy.latest + 1 in policy.batches)
        self.desk.resume(data.draw(st.integers(policy.covered, newest)), self.trainer[name], name)

    @rule()
    def snapshot(self) -> None:
        self.desk.keep_snapshot()

    @rule()
    def service_is_killed_and_starts_again(self) -> None:
        before = json.loads(self.desk.machine.snapshot())
        self.desk.restart()
        assert json.loads(self.desk.machine.snapshot()) == before

    @rule(data=st.data(), node=NODES)
    def a_command_raises(self, data: st.DataObject, node: str) -> None:
        name = data.draw(st.sampled_from(sorted(self.policies)))
        version = self.desk.machine.state.policies[name].version
        commands = [
            c.LeaseEpisodes(node, "spoiled", 5), c.TakeBatch(name, self.trainer[name], version),
            c.AckBatch(name, f"{name}/{version + 1}", m.Ack(trainer_id=self.trainer[name], version=version + 1)),
        ]  # fmt: skip
        before = json.loads(self.desk.machine.snapshot())
        self.desk.spoil(data.draw(st.sampled_from(commands)))
        after = json.loads(self.desk.machine.snapshot())
        assert sum(after.pop("voids").values()) == sum(before.pop("voids").values()) + 1
        assert after == before

    def teardown(self) -> None:
        if self.desk is not None:
            event(f"steps made: {min(p.latest for p in self.desk.machine.state.policies.values())}")

    @invariant()
    def law(self) -> None:
        type(self).num_steps += 1
        check_law(self.desk.machine, damaged=self.num_damaged > 0)
        assert all(imbalance(self.desk.machine.state, name) == 0 for name in self.policies)

    @invariant()
    def nothing_is_in_two_batches(self) -> None:
        for name in self.policies:
            episodes = [e for (n, _), batch in self.fresh.items() if n == name for e in batch]
            assert len(episodes) == len(set(episodes))

    @invariant()
    def what_is_held_is_known_on_both_sides(self) -> None:
        state = self.desk.machine.state
        held = {(n, e, a) for n, node in state.nodes.items() for e, a in node.held.items()}
        ours = {(n, lease.episode_id, lease.attempt) for n, lease in self.held}
        assert held <= ours, "the machine thinks a node plays what it does not"
        assert not any(e.startswith("eval/") for _, e, _ in ours - held), "only the end of training takes leases away"
        for node in state.nodes:
            told = self.desk.machine.leases.unwanted(node, [(e, a) for n, e, a in ours if n == node])
            assert set(told) == {(e, a) for n, e, a in ours - held if n == node}, "it plays in vain and is not told"


MIN_STEPS = 920  # of each machine; of all together more than 10,000
NUM_MACHINES = {"test_properties": 5, "test_properties_of_batches": 9}


def counted(machine: type[Dataflow]) -> type[unittest.TestCase]:
    """The test of a machine, which takes at least so many steps."""

    class Counted(machine.TestCase):  # type: ignore[misc, name-defined]
        settings = settings(max_examples=30, stateful_step_count=50, deadline=None)

        def runTest(self) -> None:
            machine.num_steps = 0
            super().runTest()
            assert machine.num_steps >= MIN_STEPS, f"{machine.__name__} took {machine.num_steps} steps"

    return Counted
