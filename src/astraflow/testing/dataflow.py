"""Small runs of the dataflow room for tests: a source, a run file, episodes, and a machine with a hand-turned clock."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from astraflow.config.schema import RunConfig
from astraflow.contracts import Source
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.plan import ReadTokens
from astraflow.dataflow.machine.records import Added, Batch, EpisodeCommit, Part, PolicyState, Put, QueuedGroup
from astraflow.dataflow.machine.serving.pacing import most_in_flight
from astraflow.dataflow.machine.serving.waiting import size_of
from astraflow.dataflow.state import Machine
from astraflow.types import Episode, EpisodeLease, Tokens, Trajectory
from astraflow.wire import messages as m


class Rows:
    """A source of `size` rows; `salt` changes its content."""

    def __init__(self, size: int = 10, salt: str = "") -> None:
        self._size, self._salt = size, salt

    def __len__(self) -> int:
        return self._size

    def row(self, index: int) -> dict[str, Any]:
        return {"question": f"q{index}{self._salt}"}

    def fingerprint(self) -> str:
        return f"rows/{self._size}/{self._salt}"


def sources(size: int = 10, held: int = 3, salt: str = "") -> dict[str, Source]:
    """The sources of `small_config`."""
    return {"train": Rows(size, salt), "held": Rows(held)}


def policy_section(groups: int = 2, max_staleness: int = 1, max_dropped_groups: int = 1000, **more: Any) -> Any:
    """One [policies.<name>] section as a mapping."""
    batch = {"groups": groups, "max_staleness": max_staleness, "max_dropped_groups": max_dropped_groups}
    return {"model": "tiny-char", "batch": batch, **more}


def small_config(**changes: Any) -> RunConfig:
    """One policy "actor": 2 groups of 2 episodes a batch, staleness 1, 5 steps. `run__steps=3` changes `run.steps`."""
    raw: dict[str, Any] = {
        "run": {"name": "small", "steps": 5, "seed": 3},
        "sources": {"train": {"type": "sums"}, "held": {"type": "sums"}},
        "workflow": {"type": "single_turn", "group_size": 2, "timeout_s": 20.0, "max_attempts": 2},
        "policies": {"actor": policy_section()},
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        node = raw
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
    return RunConfig.model_validate(raw)


def trajectory(
    reward: float | None, version: int = 0, *, policy: str = "actor", branch: int = 0, tokens: int = 4, marker: int = 7
) -> Trajectory:
    """`tokens` tokens, ids from `marker` on, of which the first was given and the rest sampled at `version`."""
    mask = np.arange(tokens) > 0
    return Trajectory(
        policy=policy,
        branch=branch,
        parent_branch=branch - 1,
        fork_at=0,
        token_ids=np.arange(marker, marker + tokens, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0).astype(np.float32),
        versions=np.where(mask, version, -1).astype(np.int32),
        call_index=np.where(mask, 0, -1).astype(np.int16),
        reward=reward,
    )


def row_tokens(put: Put, rows: Sequence[int]) -> list[Tokens]:
    """Tokens of rows that exist in a `Desk` only: three sampled ones, whose ids say where the row lies."""
    ids = [np.array([put.segment, put.offset, row], np.int32) for row in rows]
    one = np.ones(3, np.int32)
    return [Tokens(i, one > 0, np.full(3, -0.5, np.float32), 0 * one, (0 * one).astype(np.int16)) for i in ids]


def episode(
    lease: EpisodeLease,
    node_id: str,
    reward: float | None = 1.0,
    version: int = 0,
    *,
    error: str | None = None,
    trajectories: list[Trajectory] | None = None,
) -> Episode:
    """What a node commits for `lease`."""
    if trajectories is None:
        trajectories = [] if error is not None else [trajectory(reward, version)]
    return Episode(
        episode_id=lease.episode_id,
        attempt=lease.attempt,
        node_id=node_id,
        task=lease.task,
        trajectories=trajectories,
        error=error,
    )


class Desk:
    """A machine and its clock; every command is kept, as the journal would, so that `restart` can replay them."""

    def __init__(
        self, config: RunConfig, rows: Mapping[str, Source] | None = None, read_tokens: ReadTokens | None = None
    ) -> None:
        """`read_tokens`: default: three sampled tokens per row, others for each row."""
        self.config, self._rows, self._read_tokens = config, dict(rows or sources()), read_tokens or row_tokens
        self.machine = Machine(config, self._rows, read_tokens=self._read_tokens)
        self.now = 0.0
        self.instructions: list[c.Instruction] = []
        self._log: list[tuple[float, c.Command]] = []
        self._snapshot: bytes | None = None
        self._num_requests = self._num_puts = 0

    def do(self, command: c.Command) -> Any:
        """Apply a command now."""
        self._log.append((self.now, command))
        applied = self.machine.apply(command, self.now)
        self.instructions += applied.instructions
        return applied.reply

    def start(self, *nodes: str, version: int = 0) -> None:
        """Every policy's trainer "t" resumes at `version`, and the nodes join."""
        for name in self.config.policies:
            self.resume(version, policy=name)
        for node_id in nodes or ("n",):
            self.do(c.JoinNode(m.Join(node_id=node_id, name=node_id, capacity=8, run_id="r")))

    def resume(self, version: int, trainer: str = "t", policy: str = "actor") -> m.ResumeReply:
        """A trainer starts."""
        resume = m.Resume(trainer_id=trainer, version=version, urls=("file:///w",), run_id="r")
        reply: m.ResumeReply = self.do(c.ResumePolicy(policy, resume))
        return reply

    def lease(self, n: int = 1, node: str = "n", request: str | None = None) -> list[EpisodeLease]:
        """Up to `n` episodes."""
        self._num_requests += 1
        leases: list[EpisodeLease] = self.do(c.LeaseEpisodes(node, request or f"r{self._num_requests}", n))
        return leases

    def commit(
        self,
        leases: Sequence[EpisodeLease],
        reward: Callable[[EpisodeLease], float | None] | Sequence[float | None] = lambda lease: 1.0,
        *,
        version: int = 0,
        node: str = "n",
        error: str | None = None,
        policies: Sequence[str] = (),
        tokens: int = 3,
    ) -> dict[str, str]:
        """Commit an episode for each lease, one row of `tokens` sampled tokens per policy."""
        self._num_puts += 1
        put = Put(1 + self._num_puts // 100, 64 * self._num_puts, 64)
        rewards = [reward(lease) for lease in leases] if callable(reward) else list(reward)
        episodes = []
        for i, (lease, value) in enumerate(zip(leases, rewards, strict=True)):
            parts = [
                Part(name, put.key, [i], [version], version, tokens, 0, value, (), 1)
                for name in policies or self.config.policies
            ]
            parts = parts if error is None else []
            episodes.append(EpisodeCommit(lease.episode_id, lease.attempt, error, {}, parts))
        answers: dict[str, str] = self.do(c.CommitEpisodes(node, put, episodes))
        return answers

    def play(self, n: int, version: int = 0, node: str = "n") -> list[EpisodeLease]:
        """Lease `n` episodes and commit them, rewards 0 and 1 in turn within each group."""
        leases = self.lease(n, node)
        self.commit(leases, lambda lease: float(int(lease.episode_id[-1]) % 2), version=version, node=node)
        return leases

    def take(self, version: int, trainer: str = "t", policy: str = "actor") -> Batch | None:
        """The batch that follows `version`."""
        grant = self.do(c.TakeBatch(policy, trainer, version))
        return self.machine.state.policies[policy].batches[grant.step] if grant is not None else None

    def ack(self, step: int, trainer: str = "t", policy: str = "actor", **metrics: float) -> None:
        """Step `step` is trained."""
        self.do(c.AckBatch(policy, f"{policy}/{step}", m.Ack(trainer_id=trainer, version=step, metrics=metrics)))

    def cover(self, version: int, trainer: str = "t", policy: str = "actor") -> None:
        """A checkpoint of `version` exists."""
        self.do(c.CoverBatches(policy, m.Checkpoint(trainer_id=trainer, version=version)))

    def step(self, version: int, policy: str = "actor") -> Batch:
        """Take and acknowledge the batch that follows `version`."""
        batch = self.take(version, policy=policy)
        assert batch is not None
        self.ack(batch.step, policy=policy)
        return batch

    def stage_lease(
        self, stage: str, n: int = 1, worker: str = "w", request: str | None = None
    ) -> list[tuple[str, int]]:
        """Entries for a worker of a stage, with about `n` rows."""
        self._num_requests += 1
        given: list[tuple[str, int]] = self.do(c.LeaseRows(stage, worker, request or f"r{self._num_requests}", n))
        return given

    def stage_add(
        self,
        stage: str,
        leases: Sequence[tuple[str, int]],
        reward: Callable[[str], float | None] = lambda entry_id: None,
        *,
        worker: str = "w",
        request: str | None = None,
        problem: str = "",
    ) -> dict[str, str]:
        """Columns for leased entries, one row each."""
        self._num_puts += 1
        self._num_requests += 1
        put = Put(1 + self._num_puts // 100, 64 * self._num_puts, 64)
        entries = [c.EntryColumns(e, attempt, [i], reward(e), problem) for i, (e, attempt) in enumerate(leases)]
        command = c.AddColumns(stage, worker, request or f"r{self._num_requests}", None if problem else put, entries)
        answers: dict[str, str] = self.do(command)
        return answers

    def pass_time(self, seconds: float) -> c.Expire | None:
        """Turn the clock and let what is due expire."""
        self.now += seconds
        expire = self.machine.due(self.now)
        if expire is not None:
            self.do(expire)
        return expire

    def keep_snapshot(self) -> None:
        """What the journal does from time to time."""
        self._snapshot, self._log = self.machine.snapshot(), []

    def spoil(self, command: c.Command) -> None:
        """A command raised when it was applied, whatever it had changed by then: it is void (`dataflow.rebuild`)."""
        with suppress(c.Refusal):
            self.machine.apply(command, self.now)
        self._log.append((self.now, c.VoidCommand(0, type(command).__name__, "spoiled")))
        self.restart()

    def restart(self) -> None:
        """Lose the machine; build it again from the last snapshot and the commands after it."""
        self.machine = Machine(self.config, self._rows, self._snapshot, self._read_tokens)
        for now, command in self._log:
            try:
                self.machine.apply(command, now)
            except c.Refusal:
                continue
        self.do(c.Reopen())


def check_law(machine: Machine, *, damaged: bool = False) -> None:
    """The accounting law, the gate, and that every byte that is needed is kept and no other. `damaged`: rows were, so
    batches may be smaller than planned.

    Raises: AssertionError: naming what does not hold.
    """
    state = machine.state
    for name, policy in state.policies.items():
        assert policy.num_dropped == sum(policy.dropped.values()), name
        held = {g.group_id for g in policy.queue.values()}
        assert len(held) == len(policy.queue), f"{name}: a group waits twice"
        held |= {g.group_id for g in state.staged.values() if g.policy == name}
        held |= {g.group_id for b in policy.batches.values() if not b.acked for g in b.groups[b.num_replayed :]}
        if policy.rest is not None:
            held.add(policy.rest.group.group_id)
        playing = [g for g in state.groups.values() if g.purpose == "train"]
        open_here = [g.group_id for g in playing if name in state.tasks[g.group_id].open_policies]
        assert policy.in_flight == len(held) + len(open_here), f"{name}: in flight is not what is held"
        plan = machine.context.plan.policies[name]
        assert policy.in_flight <= most_in_flight(plan), f"{name}: gate exceeded"
        if not plan.tokens and not plan.episodes and policy.latest > 0 and not damaged:
            assert policy.trained + policy.num_replayed == policy.latest * plan.groups, f"{name}: batches are not full"
        assert set(policy.selected) <= set(policy.stored), f"{name}: what is not stored is selected"
        assert len(policy.selected) <= policy.owed, f"{name}: more is selected than operators asked for"
        assert not set(policy.stored) & {g.group_id for g in policy.queue.values()}, f"{name}: stored and waiting"
        sizes = [size_of(g) for g in policy.queue.values()]
        assert policy.queue_episodes == sum(s.episodes for s in sizes), name
        assert policy.queue_tokens == sum(s.tokens for s in sizes), name
    assert state.admitted == state.trained + sum(state.dropped.values()) + len(state.tasks)
    check_sources(machine)
    entries = [e for p in state.policies.values() for g in _kept_groups(p) for e in g.entries]
    kept: list[Part | Added] = [e.part for e in entries]
    kept += [
        part for g in state.groups.values() if g.purpose == "train" for r in g.results if r is not None
        if r.error is None for part in r.parts
    ]  # fmt: skip
    entries += [e for log in state.logs.values() for g in log.groups for e in g.entries]
    kept += [e.part for log in state.logs.values() for g in log.groups for e in g.entries]
    kept += check_stages(machine)
    kept += [added for e in entries for added in e.added]
    refs: dict[int, int] = {}
    for part in kept:
        refs[part.put] = refs.get(part.put, 0) + 1
    assert refs == state.put_refs
    assert set(refs) == set(state.puts)
    segments = [put.segment for put in state.puts.values()]
    assert {s: segments.count(s) for s in segments} == state.segment_puts


def _kept_groups(policy: PolicyState) -> list[QueuedGroup]:
    """Groups whose rows are kept, as often as something needs them."""
    groups = [*policy.queue.values(), *(s.group for s in policy.stored.values())]
    groups += [g for b in policy.batches.values() for g in b.groups]
    return [*groups, policy.rest.group] if policy.rest is not None else groups


def check_stages(machine: Machine) -> list[Part | Added]:
    """What waits for stages waits exactly once, and is held on both sides; gives what it needs.

    Raises: AssertionError: naming what does not hold.
    """
    state, needed, waiting, held = machine.state, list[Part | Added](), set(), set()
    for key, group in state.staged.items():
        assert (group.closed is None) != (group.queued is None)
        assert group.policy in key and any(entry.left for entry in group.entries.values()), key
        for k, entry in group.entries.items():
            needed += entry.added
            assert not set(entry.holders) - set(entry.left)
            held |= {(stage, worker, f"{key}/{k}", entry.attempts[stage]) for stage, worker in entry.holders.items()}
            ready = [s for s in entry.left if not set(machine.stages.plans[s].after) & set(entry.left)]
            waiting |= {(stage, f"{key}/{k}") for stage in ready if stage not in entry.holders}
        if group.closed is not None:
            needed += [part for r in group.closed.results if r is not None for part in r.parts]
        else:
            needed += [entry.part for entry in group.entries.values()]
    pending = [(name, x[2]) for name, stage in state.stages.items() for x in stage.pending]
    assert sorted(pending) == sorted(waiting), "pending is not what waits"
    workers = {
        (name, worker_id, *lease)
        for name, stage in state.stages.items()
        for worker_id, worker in stage.workers.items()
        for lease in worker.held.items()
    }
    assert workers == held, "leases differ between workers and entries"
    return needed


def check_sources(machine: Machine) -> None:
    """Each row that a cursor passed was admitted or skipped, and the mix owes nobody more than a pick or two.

    Raises: AssertionError: naming what does not hold.
    """
    state, plan = machine.state, machine.context.plan
    for name, source in state.sources.items():
        rows = plan.sources[name].num_rows
        passed = source.epoch * rows + source.position
        assert passed == source.admitted + sum(source.skipped.values()), f"sources.{name}: a row was lost"
        assert source.in_flight == sum(group_id.startswith(f"{name}/") for group_id in state.tasks), name
        assert 0 <= source.position < rows and abs(source.credit) <= len(state.sources), name
    assert state.admitted == sum(source.admitted for source in state.sources.values())
