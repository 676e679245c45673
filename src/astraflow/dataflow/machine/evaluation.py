"""Evaluation rounds on held-out tasks, played by the same nodes beside training.

A round is due at version 0, every `evaluation.every` steps, and at the end; with several policies the slowest counts.
Its tasks are opened one by one when a node asks, and folded into sums when complete, so a round costs no memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from astraflow.dataflow.machine.admission.rows import open_group
from astraflow.dataflow.machine.commands import Event, MetricsRow, Wake
from astraflow.dataflow.machine.plan import Context, EvalPlan
from astraflow.dataflow.machine.records import EpisodeCommit, EvalRound, OpenGroup
from astraflow.estimates import TaskMeans, ks_of, pass_at_k
from astraflow.types import Task


class Evaluation:
    """The rounds of one run; without an [evaluation] section there are none."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @property
    def done(self) -> bool:
        """No round is open and none will come."""
        state = self._context.state
        return self._context.plan.evaluation is None or (state.next_round < 0 and not state.rounds)

    @property
    def waiting(self) -> bool:
        """Some evaluation episode waits for a node."""
        state = self._context.state
        return bool(state.eval_pending) or any(r.next_task < r.num_tasks for r in state.rounds)

    def start_due(self) -> None:
        """Open the rounds that the newest version calls for."""
        plan, state = self._context.plan, self._context.state
        if plan.evaluation is None or not self._context.all_resumed:
            return
        newest = self._context.slowest
        while 0 <= state.next_round <= newest:
            version = state.next_round
            state.rounds.append(EvalRound(version, plan.evaluation.num_tasks, started_s=self._context.now))
            later = min(version + plan.evaluation.every, plan.steps)
            state.next_round = later if version < plan.steps else -1
            self._context.out.append(Wake("leases"))

    def reopen(self) -> None:
        """The run may have been made longer or shorter: which round is next. No version gets a second one."""
        plan, state = self._context.plan, self._context.state
        if plan.evaluation is None or 0 <= state.next_round <= plan.steps:
            return
        newest, every = self._context.slowest, plan.evaluation.every
        following = min((max(newest, 0) // every + 1) * every, plan.steps)
        known = {r.version for r in state.rounds} | {int(r["eval/version"]) for r in state.results}
        wanted = state.next_round > plan.steps or not self._context.training_over
        state.next_round = following if wanted and following not in known else -1

    def next_group(self) -> OpenGroup | None:
        """Open the next task of the oldest round that has one."""
        context = self._context
        evaluation = context.plan.evaluation
        for round_ in context.state.rounds:
            if evaluation is not None and round_.next_task < round_.num_tasks:
                row = round_.next_task
                round_.next_task += 1
                group_id = f"eval/{round_.version}/{evaluation.source}/{row}"
                task = Task(evaluation.source, row, 0, {})
                return open_group(context, group_id, task, evaluation.samples, "eval")
        return None

    def complete(self, group: OpenGroup) -> None:
        """Fold a complete group into its round, and close the round after its last task."""
        context = self._context
        evaluation, state = context.plan.evaluation, context.state
        version = version_of(group.group_id)
        round_ = next((r for r in state.rounds if r.version == version), None)
        if evaluation is None or round_ is None:  # the section was taken out of the run file
            return
        folded = [_fold(round_, result, state.policies) for result in group.results if result is not None]
        _add_task(round_, [success for success in folded if success is not None], evaluation.samples)
        round_.num_done += 1
        if round_.num_done == round_.num_tasks:
            state.rounds.remove(round_)
            self._publish(round_, evaluation)

    def _publish(self, round_: EvalRound, evaluation: EvalPlan) -> None:
        context = self._context
        metrics = {"eval/version": float(round_.version), **_estimated(f"eval/avg@{evaluation.samples}", round_.avg)}
        for k, of_k in round_.passes.items():
            metrics |= _estimated(f"eval/pass@{k}", of_k)
        if round_.num_scored:  # else nothing is known of it, which is not 0
            metrics["eval/reward"] = round_.reward_sum / round_.num_scored
            metrics["eval/success"] = round_.success_sum / round_.num_scored
        metrics |= {
            "eval/num_tasks": float(round_.num_tasks),
            "eval/num_episodes": float(round_.num_episodes),
            "eval/num_failed": float(round_.num_failed),
            "eval/min_version": float(round_.min_version),
            "eval/max_version": float(round_.max_version),
            "eval/wall_s": context.now - round_.started_s,
        }
        context.state.results.append(metrics)
        context.out.append(MetricsRow("eval", "", round_.version, context.now, metrics))
        context.out.append(Event("eval", {"version": round_.version, **metrics}))
        context.out.append(Wake("leases"))


def version_of(group_id: str) -> int:
    """The version that an evaluation group is for."""
    return int(group_id.split("/", 2)[1])


def _add_task(round_: EvalRound, successes: Sequence[float], samples: int) -> None:
    """`successes`: of the scored episodes of a task. What was not scored counts for nothing."""
    num_scored, num_passed = len(successes), sum(success >= 0.5 for success in successes)
    if successes:
        round_.avg.add(sum(successes) / num_scored, num_scored)
    for k in ks_of(samples):
        of_k = round_.passes.setdefault(k, TaskMeans())
        if num_scored >= k:
            of_k.add(pass_at_k(num_scored, num_passed, k), num_scored)


def _estimated(name: str, means: TaskMeans) -> dict[str, float]:
    """Nothing where no task says anything."""
    if means.mean is None or means.interval is None:
        return {}
    return {name: means.mean, f"{name}/low": means.interval.low, f"{name}/high": means.interval.high}


def _fold(round_: EvalRound, result: EpisodeCommit, trained: Collection[str]) -> float | None:
    """Add one episode; its success, None: unscored. What policies earn that are only served is of no interest."""
    round_.num_episodes += 1
    parts = [part for part in result.parts if part.policy in trained]
    for part in parts:
        if part.max_version >= 0:
            oldest = part.min_version
            round_.min_version = oldest if round_.min_version < 0 else min(round_.min_version, oldest)
            round_.max_version = max(round_.max_version, part.max_version)
    rewards = [p.reward for p in parts if p.reward is not None]
    if result.error is not None or not rewards:
        round_.num_failed += 1
        return None
    reward = sum(rewards) / len(rewards)
    success = success_of(result, reward)
    round_.num_scored += 1
    round_.reward_sum += reward
    round_.success_sum += success
    return success


def success_of(result: EpisodeCommit, reward: float) -> float:
    """The episode's "success" metric; without one, a reward of at least 1."""
    return result.metrics.get("success", float(reward >= 1.0))
