"""Episodes: who plays which attempt until when, and what happens to the result.

```
 waiting ─lease─► held(node, attempt) ─commit─► done ─(all siblings)─► group complete
    ▲                 │ lease ran out, node died or left, its environment failed
    └─────────────────┘ attempt + 1 is offered; after workflow.max_attempts losses: done with error "lost",
                         or with that of the environment
```

A result is accepted from the holder of the current attempt only, so nothing can be counted twice.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine.admission.gate import Admission
from astraflow.dataflow.machine.commands import Cancel, CommitEpisodes, Event, Refusal, ReturnEpisodes, Wake
from astraflow.dataflow.machine.evaluation import Evaluation, version_of
from astraflow.dataflow.machine.plan import Context, PolicyPlan, ServedPlan
from astraflow.dataflow.machine.records import EpisodeCommit, NodeState, OpenGroup, split_id
from astraflow.types import EpisodeLease, Sampling, Task, WeightVersion, error_kind
from astraflow.wire import messages

MAX_PER_REQUEST = 1024
PLAYED_AGAIN = frozenset({"env_error", "env_timeout"})
"""Kinds of errors of which a fresh environment may be free."""


class Leases:
    """Nodes and what they play. `complete` is called with each group whose last episode is done."""

    def __init__(
        self, context: Context, admission: Admission, evaluation: Evaluation, complete: Callable[[OpenGroup], None]
    ) -> None:
        self._context, self._admission, self._evaluation, self._complete = context, admission, evaluation, complete

    def join(self, join: messages.Join) -> None:
        """A node enters; again is a no-op."""
        nodes = self._context.state.nodes
        if join.node_id not in nodes:
            nodes[join.node_id] = NodeState(join.name, join.capacity, join.host)
            self._context.out.append(Event("node_joined", {"node_id": join.node_id, "name": join.name}))

    def leave(self, node_id: str, *, died: bool) -> None:
        """A node is gone; what it held is offered again."""
        node = self._context.state.nodes.get(node_id)
        if node is None:
            return
        self.give_back(list(node.held.items()), lost=died)
        del self._context.state.nodes[node_id]
        kind = "node_died" if died else "node_left"
        self._context.out.append(Event(kind, {"node_id": node_id, "name": node.name}))

    @property
    def available(self) -> bool:
        """A node that asks now gets something."""
        return bool(self._context.state.pending) or self._admission.open or self._evaluation.waiting

    def versions(self) -> dict[str, WeightVersion]:
        """The newest version of every policy."""
        return {n: WeightVersion(n, p.latest, p.urls) for n, p in self._context.state.policies.items()}

    def newest(self) -> dict[str, int]:
        """The newest version of every policy that a node can have: one more while a step is trained, as it is published
        before it is acknowledged."""
        policies = self._context.state.policies
        newest = {name: p.latest + (p.latest + 1 in p.batches) for name, p in policies.items()}
        served = self._context.plan.served.items()
        return newest | {name: newest[of.copy_of] if of.copy_of else 0 for name, of in served}

    def node(self, node_id: str) -> NodeState:
        """The node, or 404."""
        node = self._context.state.nodes.get(node_id)
        if node is None:
            raise Refusal(404, f"node_id={node_id} is not in the pool; join again", reason="unknown_node")
        return node

    def unwanted(self, node_id: str, playing: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
        """Those attempts that the node does not hold (any more), except what it has handed in; or 404."""
        held = self.node(node_id).held
        gone = [(e, a) for e, a in playing if held.get(e) != a]
        return [(e, a) for e, a in gone if self._accepted(*split_id(e)) != a]

    def lease(self, node_id: str, request_id: str, n: int) -> list[EpisodeLease]:
        """Up to `n` episodes; a repeated request gets those of its first time that the node still holds."""
        node = self.node(node_id)
        if request_id == node.last_request:
            return self._leases([e for e in node.last_leases if e in node.held])
        picked = self._pick(min(n, MAX_PER_REQUEST))
        if not picked:
            return []
        given = []
        for group, k in picked:
            group.attempts[k] += 1
            group.holders[k] = node_id
            episode_id = f"{group.group_id}/{k}"
            node.held[episode_id] = group.attempts[k]
            given.append(episode_id)
        node.last_request, node.last_leases = request_id, given
        return self._leases(given)

    def _pick(self, n: int) -> list[tuple[OpenGroup, int]]:
        """Evaluation first, at most half of a reply while there is training work."""
        state = self._context.state
        self._admission.begin()
        if not self._evaluation.waiting:
            return self._pick_train(n)
        training = bool(state.pending) or self._admission.open
        share = n
        if training:
            share = n // 2 if n > 1 else int(state.eval_turn)
            state.eval_turn = not state.eval_turn
        picked = self._pick_eval(share)
        picked += self._pick_train(n - len(picked))
        return picked

    def _pick_train(self, n: int) -> list[tuple[OpenGroup, int]]:
        state = self._context.state
        picked: list[tuple[OpenGroup, int]] = []
        while len(picked) < n:
            if not state.pending:
                group = self._admission.next_group()
                if group is None:
                    break
                _offer(state.pending, group)
            _, k, group_id = heapq.heappop(state.pending)
            picked.append((state.groups[group_id], k))
        return picked

    def _pick_eval(self, n: int) -> list[tuple[OpenGroup, int]]:
        state = self._context.state
        picked: list[tuple[OpenGroup, int]] = []
        while len(picked) < n:
            if not state.eval_pending:
                group = self._evaluation.next_group()
                if group is None:
                    break
                _offer(state.eval_pending, group)
            _, k, group_id = heapq.heappop(state.eval_pending)
            picked.append((state.groups[group_id], k))
        return picked

    def _leases(self, episode_ids: Iterable[str]) -> list[EpisodeLease]:
        plan, groups = self._context.plan, self._context.state.groups
        policies: dict[str, PolicyPlan | ServedPlan] = {**plan.policies, **plan.served}
        known: dict[str, tuple[Task, dict[str, int], dict[str, Sampling]]] = {}  # siblings have it in common
        leases = []
        for episode_id in episode_ids:
            group_id, k = split_id(episode_id)
            group = groups[group_id]
            if group_id not in known:
                known[group_id] = (
                    Task(group.source, group.row, group.epoch, self._context.fields(group.source, group.row)),
                    self._min_versions(group),
                    {name: of_policy.sampling[group.purpose] for name, of_policy in policies.items()},
                )
            task, oldest, sampling = known[group_id]
            leases.append(
                EpisodeLease(
                    episode_id=episode_id, group_id=group_id, attempt=group.attempts[k], task=task,
                    purpose=group.purpose, timeout_s=plan.timeout_s, min_versions=oldest, sampling=sampling,
                )
            )  # fmt: skip
        return leases

    def _min_versions(self, group: OpenGroup) -> dict[str, int]:
        """The oldest version of each policy that may play episodes of `group`."""
        context, plan = self._context, self._context.plan
        if group.purpose == "eval":
            round_ = version_of(group.group_id)
            return {name: plan.version_in(name, round_) for name in (*plan.policies, *plan.served)}
        return dict.fromkeys(plan.served, 0) | {
            name: max(0, context.state.policies[name].latest - policy.max_staleness)
            for name, policy in plan.policies.items()
        }

    def commit(self, command: CommitEpisodes) -> dict[str, str]:
        """Per episode: "accepted", "duplicate", or "refused: <why>". Each is atomic on its own."""
        results, num_parts, finished = {}, 0, []
        for episode in command.episodes:
            group, answer = self._receive(command.node_id, episode)
            results[episode.episode_id] = answer
            if group is None:
                continue
            if group.purpose == "train" and episode.error is None:
                num_parts += len(episode.parts)
            if not group.num_open:
                finished.append(group)
        if command.put is not None:
            accounts.hold(self._context, command.put, num_parts)
        for group in finished:
            self._close(group)
        return results

    def _receive(self, node_id: str, episode: EpisodeCommit) -> tuple[OpenGroup | None, str]:
        state, (group_id, k) = self._context.state, split_id(episode.episode_id)
        group = state.groups.get(group_id)
        if group is None or not 0 <= k < len(group.attempts) or group.results[k] is not None:
            return None, self._late(group_id, k, episode.attempt)
        if episode.attempt != group.attempts[k] or group.holders[k] != node_id:
            state.num_refused += 1
            return None, "refused: " + _why(group, k, episode.attempt, node_id)
        if self._again(group, k, episode):
            return None, "accepted"
        group.holders[k], group.results[k] = None, episode
        group.num_open -= 1
        state.nodes[node_id].held.pop(episode.episode_id, None)
        state.num_episodes += 1
        if episode.error is not None:
            accounts.count_error(self._context, episode.error)
        accounts.count_code(state, episode, group.purpose)
        accounts.count_engines(state, episode, group.purpose)
        return group, "accepted"

    def _again(self, group: OpenGroup, k: int, episode: EpisodeCommit) -> bool:
        """It failed by no fault of the policy, and has attempts left: it is counted and offered again."""
        again = episode.error is not None and error_kind(episode.error) in PLAYED_AGAIN
        if not again or group.losses[k] + 1 >= self._context.plan.max_attempts:
            return False
        accounts.count_error(self._context, episode.error or "")
        self.give_back([(episode.episode_id, episode.attempt)], lost=True)
        return True

    def _accepted(self, group_id: str, k: int) -> int:
        """The attempt whose result was accepted; 0: all attempts were lost; -1: none yet, or nobody knows any more."""
        group = self._context.state.groups.get(group_id)
        if group is not None:
            known = [-1 if result is None else result.attempt for result in group.results]
        else:
            known = self._context.state.recent.get(group_id, [])
        return known[k] if 0 <= k < len(known) else -1

    def _late(self, group_id: str, k: int, attempt: int) -> str:
        accepted = self._accepted(group_id, k)
        if accepted == attempt:
            return "duplicate"
        self._context.state.num_refused += 1
        if accepted > 0:
            return f"refused: attempt {attempt} is over, attempt {accepted} was accepted"
        if accepted == 0:
            return f"refused: attempt {attempt} is over, all attempts were lost"
        return f"refused: group {group_id} is not in flight"

    def give_back(self, leases: Iterable[tuple[str, int]], *, lost: bool) -> None:
        """Offer these attempts again; `lost` counts towards workflow.max_attempts. Others than current are ignored."""
        state = self._context.state
        for episode_id, attempt in leases:
            group_id, k = split_id(episode_id)
            group = state.groups.get(group_id)
            if group is None or group.holders[k] is None or group.attempts[k] != attempt:
                continue
            self._cancel(group, k)
            state.num_lost += lost
            group.losses[k] += lost
            if group.losses[k] < self._context.plan.max_attempts:
                heapq.heappush(
                    state.pending if group.purpose == "train" else state.eval_pending, (group.seq, k, group_id)
                )
                continue
            error = f"lost: {group.losses[k]} attempts ended without a result"
            group.results[k] = EpisodeCommit(episode_id, 0, error, {}, [])
            group.num_open -= 1
            accounts.count_error(self._context, error)
            if not group.num_open:
                self._close(group)
        self._context.out.append(Wake("leases"))

    def returned(self, command: ReturnEpisodes) -> None:
        """Its node will not play these: they are offered again. What it does not hold (any more) is ignored."""
        held = self.node(command.node_id).held
        for episode_id, attempt, lost in command.leases:
            if held.get(episode_id) == attempt:
                self.give_back([(episode_id, attempt)], lost=lost)

    def abandon_training(self) -> None:
        """Every policy has made its steps: what is still played for training is dropped."""
        state = self._context.state
        state.pending.clear()
        for group in [g for g in state.groups.values() if g.purpose == "train"]:
            del state.groups[group.group_id]
            for k in range(len(group.holders)):
                self._cancel(group, k)
            done = [r for r in group.results if r is not None and r.error is None]
            accounts.release(self._context, (part for r in done for part in r.parts))
            for name in list(state.tasks[group.group_id].open_policies):
                accounts.settle_dropped(self._context, name, group.group_id, "finished")

    def _cancel(self, group: OpenGroup, k: int) -> None:
        holder = group.holders[k]
        if holder is not None:
            episode_id = f"{group.group_id}/{k}"
            self._context.state.nodes[holder].held.pop(episode_id, None)
            group.holders[k] = None
            self._context.out.append(Cancel(holder, episode_id, group.attempts[k]))

    def _close(self, group: OpenGroup) -> None:
        del self._context.state.groups[group.group_id]
        accounts.remember(self._context, group.group_id, [r.attempt for r in group.results if r is not None])
        self._complete(group)


def _offer(heap: list[tuple[int, int, str]], group: OpenGroup) -> None:
    for k in range(len(group.attempts)):
        heapq.heappush(heap, (group.seq, k, group.group_id))


def _why(group: OpenGroup, k: int, attempt: int, node_id: str) -> str:
    current, holder = group.attempts[k], group.holders[k]
    if attempt > current:
        return f"attempt {attempt} was never leased"
    if holder is None:
        return f"attempt {attempt} is over, attempt {current + 1} waits for a node"
    if attempt == current:
        return f"attempt {attempt} is held by {holder}, not by {node_id}"
    return f"attempt {attempt} is over, attempt {current} is held by {holder}"
