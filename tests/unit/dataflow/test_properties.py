"""Random interleavings of everything that can happen, crashes included: the accounting law holds at all times."""

from __future__ import annotations

import json
import unittest
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal

from hypothesis import event, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from astraflow.contracts import Operator
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.records import Batch, Put
from astraflow.dataflow.machine.serving.damage import needs
from astraflow.dataflow.views.law import imbalance
from astraflow.testing.dataflow import Desk, Rows, check_law, policy_section, row_tokens, small_config, sources
from astraflow.types import EpisodeLease, Group, SourceView, Task, Tokens
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


class TwoPolicies(Dataflow):
    """Two policies with batches of different size and different bounds."""

    policies = {"actor": policy_section(2, 1), "verifier": policy_section(1, 2)}  # noqa: RUF012


class Synchronous(Dataflow):
    """Staleness 0."""

    policies = {"actor": policy_section(1, 0)}  # noqa: RUF012


class Moody(Operator):
    """Every answer there is, by row, number of results and what is in flight."""

    place = "source"

    def __init__(self) -> None:
        self.num_results = 0

    def admit(self, task: Task, view: SourceView) -> float | Literal["wait"]:
        answers: tuple[float | Literal["wait"], ...] = (1.0, 0.5, 0.0, 1.0, "wait")
        if not view.in_flight:
            return 1.0  # a source that waits with nothing in flight would end the run
        return answers[(task.row + self.num_results + view.step + view.in_flight) % 5]

    def on_result(self, group: Group) -> None:
        self.num_results += 1

    def state_dict(self) -> dict[str, Any]:
        return {"num_results": self.num_results}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_results = state["num_results"]


class Mixed(Dataflow):
    """Two sources whose operators wait, skip and draw, with groups of different sizes."""

    sources: ClassVar[dict[str, Any]] = {
        "train": {"type": "sums", "operators": ["greso", f"{__name__}:Moody"]},
        "b": {"type": "sums", "group_size": 3, "operators": [{"type": "throttle", "per_step": 2}, f"{__name__}:Moody"]},
        "held": {"type": "sums"},
    }

    @initialize()
    def begin(self) -> None:
        super().begin()
        config = small_config(
            run__steps=6,
            policies=self.policies,
            sources=self.sources,
            mix={"ratios": {"train": [3, 1], "b": 1}},
            evaluation={"source": "held", "every": 3, "num_tasks": 1},
        )
        self.desk = Desk(config, {"train": Rows(4), "b": Rows(3), "held": Rows(3)})
        self.desk.start("a", "b")

    def teardown(self) -> None:
        if self.desk is not None:
            state = self.desk.machine.state
            event(f"failed: {state.failure}")
            event(f"skipped: {bool(state.skipped)}, from both: {all(s.admitted for s in state.sources.values())}")
        super().teardown()


class Operators(Dataflow):
    """Operators of every phase, with state and tokens; some answers are copies of others."""

    policies: ClassVar[dict[str, Any]] = {
        "actor": policy_section(
            1,
            2,
            operators=[
                {"type": "dedup", "window": 3},
                {"type": "reward_clip", "low": 0.5},
                {"type": "balance", "smooth": 0.5},
                "staleness_weight",
            ],
            algorithm={"advantage": {"type": "reinforce_pp", "baseline": "group"}},
        ),
        "verifier": policy_section(
            1, 1, operators=["reward_normalize"], algorithm={"advantage": {"type": "per_call", "gamma": 0.5}}
        ),
    }

    @initialize()
    def begin(self) -> None:
        super().begin()
        assert self.desk is not None

        def copies(put: Put, rows: Sequence[int]) -> list[Tokens]:
            return row_tokens(Put(1, put.offset % 128, 1), [row // 3 for row in rows])

        self.desk = Desk(self.desk.config, sources(4), copies)
        self.desk.start("a", "b")

    def teardown(self) -> None:
        if self.desk is not None:
            assert self.desk.machine.state.failure is None
            policies = self.desk.machine.state.policies
            event(f"copies: {policies['actor'].dropped.get('dedup', 0) > 0}")
            event(f"steps of each: {[p.latest for p in policies.values()]}")
        super().teardown()


def _serving(max_staleness: int, *operators: Any, **batch: Any) -> dict[str, Any]:
    section = policy_section(batch.pop("groups", 16), max_staleness, operators=["keep_all", *operators])
    section["batch"] |= batch
    return {"actor": section | {"algorithm": {"loss": "m2po"}}}


class Serving(Dataflow):
    """Gets further than single rules do: what batches are made of shows after a few steps."""

    @rule(data=st.data(), rounds=st.integers(1, 4))
    def play_and_train(self, data: st.DataObject, rounds: int) -> None:
        for _ in range(rounds):
            self.play_a_round("b")
            self.train(data, acked=True)


class Fifo(Serving):
    """Groups leave in the order of arrival, so some grow too old while they wait."""

    policies = _serving(2, groups=2, order="fifo")


class ByTokens(Serving):
    """A batch closes at nine tokens or three groups; an episode has three tokens."""

    policies = _serving(1, groups=3, tokens=9)


class ByEpisodes(Serving):
    """A batch is three episodes of groups of two."""

    policies = _serving(1, episodes=3)


class Replayed(Serving):
    """Half of a batch is trained again, up to three versions behind, with weights that depend on the batch."""

    max_age = 3
    policies = _serving(
        1,
        {"type": "replay", "ratio": 0.5, "size": 3, "max_age": 3, "max_uses": 3, "selector": "priority"},
        "staleness_weight",
        groups=2,
    )

    def teardown(self) -> None:
        if self.desk is not None:
            event(f"replayed: {self.desk.machine.state.policies['actor'].num_replayed > 0}")
        super().teardown()


class ReplayedByEpisodes(Replayed):
    """Pieces of groups that are cut are trained again together."""

    policies = _serving(
        1, {"type": "replay", "ratio": 0.5, "size": 3, "max_age": 3}, "staleness_weight", episodes=5, order="fifo"
    )


class Staged(Serving):
    """Stages before and after the operators, one that needs another's column, readers that hold and that skip."""

    policies = {"actor": policy_section(2, 1), "verifier": policy_section(1, 2)}  # noqa: RUF012
    stages: ClassVar[dict[str, Any]] = {
        "sum": {"type": "astraflow.testing.stages:EchoSumStage", "policies": ["actor"], "max_attempts": 2},
        "echo": {"type": "astraflow.testing.stages:EchoStage"},
        "judge": {"type": "astraflow.testing.stages:EchoReward", "policies": ["verifier"], "max_attempts": 2},
    }
    consumers: ClassVar[dict[str, Any]] = {
        "slow": {"max_behind": 5, "policies": ["actor"]},
        "quick": {"max_behind": 2, "when_behind": "skip"},
    }

    @initialize()
    def begin(self) -> None:
        super().begin()
        config = small_config(run__steps=6, policies=self.policies, stages=self.stages, consumers=self.consumers)
        self.desk = Desk(config, sources(4))
        self.desk.start("a", "b")
        self.leased: list[tuple[str, str, tuple[str, int]]] = []  # stage, worker, lease: what we think is held
        self.over: list[tuple[str, str, tuple[str, int]]] = []
        self.done: set[tuple[str, str]] = set()  # stage, entry
        self.read: dict[tuple[str, str], list[str]] = {}  # consumer, policy -> groups that it acknowledged

    @rule(stage=st.sampled_from(["echo", "sum", "judge"]), worker=st.sampled_from(["v", "w"]), n=st.integers(1, 4))
    def lease_rows(self, stage: str, worker: str, n: int) -> None:
        self.leased += [(stage, worker, lease) for lease in self.desk.stage_lease(stage, n, worker)]

    @rule(data=st.data(), good=st.sampled_from([True, True, True, False]))
    @precondition(lambda self: self.leased)
    def add_columns(self, data: st.DataObject, good: bool) -> None:
        stage, worker, lease = self.leased.pop(data.draw(st.integers(0, len(self.leased) - 1)))
        held = self.desk.machine.stages.held(stage, worker, *lease) is not None
        problem = "" if good else "failed: broke"
        reward = data.draw(REWARDS)
        answer = self.desk.stage_add(stage, [lease], lambda e: reward, worker=worker, problem=problem)[lease[0]]
        assert answer == "accepted" if held and good else answer.startswith("refused")
        if held and good:
            assert (stage, lease[0]) not in self.done, "added twice"
            self.done.add((stage, lease[0]))
        self.over.append((stage, worker, lease))

    @rule(data=st.data())
    @precondition(lambda self: self.over)
    def add_late_or_again(self, data: st.DataObject) -> None:
        stage, worker, lease = data.draw(st.sampled_from(self.over))
        before = self.desk.machine.state.stages[stage].num_done
        assert self.desk.stage_add(stage, [lease], worker=worker)[lease[0]].startswith("refused")
        assert self.desk.machine.state.stages[stage].num_done == before

    @rule(stage=st.sampled_from(["echo", "sum", "judge"]), worker=st.sampled_from(["v", "w"]), died=st.booleans())
    def worker_goes(self, stage: str, worker: str, died: bool) -> None:
        self.desk.do(c.Expire(workers=[(stage, worker)]) if died else c.LeaveStage(stage, worker))
        self.over += [x for x in self.leased if x[:2] == (stage, worker)]
        self.leased = [x for x in self.leased if x[:2] != (stage, worker)]

    @rule()
    def stages_do_everything(self) -> None:
        for stage in ("echo", "judge", "echo", "sum"):
            leases = self.desk.stage_lease(stage, 64, "x")
            answers = self.desk.stage_add(stage, leases, lambda e: float(int(e[-1]) % 2), worker="x")
            assert set(answers.values()) <= {"accepted"}
            self.done |= {(stage, e) for e, _ in leases}

    @rule(stage=st.sampled_from(["sum", "judge"]), n=st.integers(1, 2))
    def a_stage_breaks(self, stage: str, n: int) -> None:
        for _ in range(2):
            self.desk.stage_add(stage, self.desk.stage_lease(stage, n, "x"), worker="x", problem="failed: broke")

    @rule(data=st.data(), reader=st.sampled_from([("slow", "actor"), ("quick", "actor"), ("quick", "verifier")]))
    def consume(self, data: st.DataObject, reader: tuple[str, str]) -> None:
        name, policy = reader
        consumer, log = self.desk.machine.consumers.reader(name, policy)
        start = consumer.positions[policy]
        groups = [g.group_id for g in log.groups[start - log.first :]]
        count = data.draw(st.integers(0, len(groups)))
        self.desk.do(c.AckRows(name, policy, start + count))
        self.read.setdefault(reader, []).extend(groups[:count])

    def teardown(self) -> None:
        if self.desk is not None:
            state = self.desk.machine.state
            event(f"a stage dropped: {any(r.startswith('stage_') for p in state.policies.values() for r in p.dropped)}")
            event(f"missed: {any(x.missed for x in state.consumers.values())}")
        super().teardown()

    @invariant()
    def batches_have_all_columns(self) -> None:
        for policy in self.desk.machine.state.policies.values() if self.desk else ():
            for group in [*policy.queue.values(), *(g for b in policy.batches.values() for g in b.groups)]:
                for entry in group.entries:
                    wanted = {"actor": ["echo", "sum"], "verifier": ["echo", "judge"]}[entry.part.policy]
                    assert [a.stage for a in entry.added] == wanted

    @invariant()
    def nobody_reads_a_group_twice(self) -> None:
        assert all(len(read) == len(set(read)) for read in self.read.values())


class Damaged(Dataflow):
    """Rows turn out to be damaged."""

    @rule(data=st.data())
    @precondition(lambda self: self.desk.machine.state.puts)
    def rows_are_damaged(self, data: st.DataObject) -> None:
        state = self.desk.machine.state
        key = data.draw(st.sampled_from(sorted(state.puts)))
        acked = [b for p in state.policies.values() for b in p.batches.values() if b.acked]
        if any(all(any(needs(e, [key]) for e in g.entries) for g in b.groups) for b in acked):
            return  # a trained batch would be gone: the run fails, which has a test of its own
        self.num_damaged += 1
        self.desk.do(c.DropDamaged([key], "segment 1"))
        groups = [g for p in state.policies.values() for b in p.batches.values() for g in b.groups]
        groups += [g for p in state.policies.values() for g in p.queue.values()]
        assert not any(needs(e, [key]) for g in groups for e in g.entries)
        for name, step in list(self.content):
            batch = state.policies[name].batches.get(step)
            if batch is not None:
                self.content[(name, step)] = said(batch)
                fresh = batch.groups[batch.num_replayed :]
                self.fresh[name, step] = [(g.group_id, e.sibling) for g in fresh for e in g.entries]
            elif step > state.policies[name].latest:
                del self.content[(name, step)], self.fresh[name, step]

    def teardown(self) -> None:
        if self.desk is not None:
            dropped = sum(p.dropped.get("damaged", 0) for p in self.desk.machine.state.policies.values())
            event(f"damaged: {min(dropped, 3)} groups dropped")
        super().teardown()


class DamagedReplayed(Damaged, ReplayedByEpisodes):
    """The same with cut groups and groups that are trained again."""


class DamagedStaged(Damaged, Staged):
    """The same with stages and consumers."""


MIN_STEPS = 920  # of each; of all together more than 10,000


def counted(machine: type[Dataflow]) -> type[unittest.TestCase]:
    """The test of a machine, which takes at least so many steps."""

    class Counted(machine.TestCase):  # type: ignore[misc, name-defined]
        settings = settings(max_examples=30, stateful_step_count=50, deadline=None)

        def runTest(self) -> None:
            machine.num_steps = 0
            super().runTest()
            assert machine.num_steps >= MIN_STEPS, f"{machine.__name__} took {machine.num_steps} steps"

    return Counted


TestDataflow = counted(Dataflow)
TestTwoPolicies = counted(TwoPolicies)
TestSynchronous = counted(Synchronous)
TestFifo = counted(Fifo)
TestByTokens = counted(ByTokens)
TestByEpisodes = counted(ByEpisodes)
TestReplayed = counted(Replayed)
TestReplayedByEpisodes = counted(ReplayedByEpisodes)
TestOperators = counted(Operators)
TestMixed = counted(Mixed)
TestStaged = counted(Staged)
TestDamaged = counted(Damaged)
TestDamagedReplayed = counted(DamagedReplayed)
TestDamagedStaged = counted(DamagedStaged)


def test_all_of_them_take_ten_thousand_steps() -> None:
    names = [name for name in globals() if name.startswith("Test")]
    assert len(names) * MIN_STEPS >= 10_000
