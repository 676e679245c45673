"""The same model where batches differ: orders and sizes, replay, stages and consumers, damage."""

from __future__ import annotations

from typing import Any, ClassVar

from hypothesis import event
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.serving.damage import needs
from astraflow.testing.dataflow import Desk, policy_section, small_config, sources
from dataflow_model import NUM_MACHINES, REWARDS, Dataflow, counted, said


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


TestFifo = counted(Fifo)
TestByTokens = counted(ByTokens)
TestByEpisodes = counted(ByEpisodes)
TestReplayed = counted(Replayed)
TestReplayedByEpisodes = counted(ReplayedByEpisodes)
TestStaged = counted(Staged)
TestDamaged = counted(Damaged)
TestDamagedReplayed = counted(DamagedReplayed)
TestDamagedStaged = counted(DamagedStaged)


def test_all_of_them_are_counted() -> None:
    assert sum(name.startswith("Test") for name in globals()) == NUM_MACHINES["test_properties_of_batches"]
