"""What one command did to tasks, as moments of their lives; and such a life as text.

| moment    | fields                                                                          |
|-----------|---------------------------------------------------------------------------------|
| skipped   | operator (of its source; never admitted)                                        |
| admitted  | policies, purpose                                                               |
| leased    | episodes that one request got, attempt, node                                    |
| lost      | episode, attempt, node, why (given back, silent, environment failed, over)      |
| committed | episodes of one request, attempt, node, their rewards per policy, their tokens, |
|           | code (version of the workflow's code)                                           |
| failed    | episode, attempt, node, code, error                                             |
| refused   | episode, attempt, node, why                                                     |
| judged    | policy; advantages and weight that its operators made                           |
| columns   | policy, stage, episode                                                          |
| queued    | policy                                                                          |
| batch     | policy, step                                                                    |
| trained   | policy, step                                                                    |
| dropped   | policy, reason                                                                  |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from astraflow.dataflow.journal.history import Life, Moment
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.records import split_id
from astraflow.dataflow.state import Applied, Machine
from astraflow.types import EpisodeLease

Found = tuple[str, str, dict[str, Any]]
_ENDS = ("trained", "dropped")


def moments_of(command: c.Command, applied: Applied, machine: Machine) -> Iterator[Found]:
    """The moments of one applied command: (task, what, fields)."""
    match command:
        case c.LeaseEpisodes():
            yield from _leased(command, applied.reply, machine)
        case c.CommitEpisodes():
            yield from _committed(command, applied.reply)
        case c.AddColumns():
            yield from _columns(command, applied.reply)
    left = isinstance(command, c.DrainNode | c.ReturnEpisodes)
    silent, failed = isinstance(command, c.Expire), isinstance(command, c.CommitEpisodes)
    why = "given back" if left else "silent" if silent else "environment failed" if failed else "over"
    for instruction in applied.instructions:
        match instruction:
            case c.Happened(what="judged"):
                advantages = [round(a, 4) for a in instruction.fields["advantages"]]
                yield instruction.group_id, "judged", {**instruction.fields, "advantages": advantages}
            case c.Happened():
                yield instruction.group_id, instruction.what, instruction.fields
            case c.Cancel():
                group_id, k = split_id(instruction.episode_id)
                fields = {"episode": k, "attempt": instruction.attempt, "node": instruction.node_id, "why": why}
                yield group_id, "lost", fields
            case c.Event(kind="dropped"):
                fields = {name: instruction.fields[name] for name in ("policy", "reason")}
                yield instruction.fields["group_id"], "dropped", fields
    match command:
        case c.TakeBatch() if applied.reply is not None:
            yield from _batch("batch", command.policy, applied.reply.step, machine)
        case c.AckBatch():
            yield from _batch("trained", command.policy, command.ack.version, machine)


def _leased(command: c.LeaseEpisodes, leases: Iterable[EpisodeLease], machine: Machine) -> Iterator[Found]:
    for (group_id, attempt), siblings in groupby(leases, lambda lease: (lease.group_id, lease.attempt)):
        episodes, purpose = [], ""
        for lease in siblings:
            episodes.append(split_id(lease.episode_id)[1])
            purpose = lease.purpose
        if episodes[0] == 0 and attempt == 1:
            account = machine.state.tasks.get(group_id)
            policies = list(account.open_policies) if account is not None else []
            yield group_id, "admitted", {"policies": policies, "purpose": purpose}
        yield group_id, "leased", {"episodes": episodes, "attempt": attempt, "node": command.node_id}


def _committed(command: c.CommitEpisodes, answers: dict[str, str]) -> Iterator[Found]:
    done: dict[tuple[str, int, str], dict[str, Any]] = {}  # siblings of one request and code share a moment
    for episode in command.episodes:
        group_id, k = split_id(episode.episode_id)
        answer = answers[episode.episode_id]
        if answer == "accepted" and episode.error is None:
            mark = (group_id, episode.attempt, episode.code)
            fields = done.get(mark)
            if fields is None:
                fields = {
                    "episodes": [],
                    "attempt": episode.attempt,
                    "node": command.node_id,
                    "reward": {},
                    "tokens": [],
                }
                if episode.code:
                    fields["code"] = episode.code
                done[mark] = fields
            siblings, parts = fields["episodes"], episode.parts
            siblings.append(k)
            fields["tokens"].append(parts[0].num_tokens if len(parts) == 1 else sum(part.num_tokens for part in parts))
            for part in parts:
                rewards = fields["reward"].setdefault(part.policy, [])
                if len(rewards) + 1 < len(siblings):  # it was not called in the episodes before
                    rewards += [None] * (len(siblings) - 1 - len(rewards))
                rewards.append(part.reward)
            continue
        fields = {"episode": k, "attempt": episode.attempt, "node": command.node_id}
        if answer == "accepted":
            code = {"code": episode.code} if episode.code else {}
            yield group_id, "failed", {**fields, **code, "error": (episode.error or "")[:200]}
        else:
            yield group_id, "refused", {**fields, "why": answer.removeprefix("refused: ")}
    for (group_id, *_), fields in done.items():
        yield group_id, "committed", fields


def _columns(command: c.AddColumns, answers: dict[str, str]) -> Iterator[Found]:
    for entry_id, answer in answers.items():
        policy, _, rest = entry_id.partition("/")
        group_id, k = split_id(rest)
        fields = {"policy": policy, "stage": command.stage, "episode": k}
        yield group_id, "columns" if answer == "accepted" else "refused", {**fields, "why": answer}


def _batch(what: str, policy: str, step: int, machine: Machine) -> Iterator[Found]:
    batch = machine.state.policies[policy].batches.get(step)
    for group in batch.groups if batch is not None else []:
        yield group.group_id, what, {"policy": policy, "step": step}


def life_lines(life: Life) -> list[str]:
    """One line a moment, and where the task is now."""
    lines, seen = [], set[str]()
    if life.begins_s and life.moments and life.moments[0].what != "admitted":
        lines.append(f"(what happened before {life.begins_s:.3f} s is older than the history kept)")
    for moment in life.moments:
        text = _text(moment)
        if text not in seen:  # a request that was repeated changes nothing
            seen.add(text)
            lines.append(f"{moment.now:12.3f} s  {text}")
    lines.append(where_now(life.moments))
    return lines


def _text(moment: Moment) -> str:
    fields = dict(moment.fields)
    return f"{moment.what:<10}" + " ".join(f"{name}={_value(value)}" for name, value in fields.items())


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{k}:{_value(v)}" for k, v in value.items()) or "-"
    if isinstance(value, list):
        return ",".join(_value(v) for v in value) or "-"
    return f"{value:.4g}" if isinstance(value, float) else "none" if value is None else str(value)


def where_now(moments: list[Moment]) -> str:
    """Where the task with this life is."""
    if moments[-1].what == "skipped":
        return f"skipped by {moments[-1].fields['operator']}, never admitted"
    admitted = next((m for m in moments if m.what == "admitted"), None)
    ends = {m.fields["policy"]: m for m in moments if m.what in _ENDS}
    policies = admitted.fields["policies"] if admitted is not None else list(ends)
    if not policies:
        return f"last seen: {moments[-1].what}"
    ended = []
    for name in policies:
        end = ends.get(name)
        if end is None:
            last = next((m.what for m in reversed(moments) if m.fields.get("policy", name) == name), "admitted")
            ended.append(f"in flight for {name} (last: {last})")
        elif end.what == "trained":
            ended.append(f"trained by {name} in step {end.fields['step']}")
        else:
            ended.append(f"dropped for {name}: {end.fields['reason']}")
    return "; ".join(ended)
