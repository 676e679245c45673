"""The accounting law: `admitted = trained + dropped{reason} + in_flight`, per policy and over all of them.

Also who still needs which bytes: a put is kept while a waiting or retained group points at one of its rows, a segment
while one of its puts is kept.
"""

from __future__ import annotations

from collections.abc import Iterable

from astraflow.dataflow.machine.commands import DropSegment, Event, Wake
from astraflow.dataflow.machine.plan import Context
from astraflow.dataflow.machine.records import (
    Added,
    CodeAccount,
    EngineAccount,
    Entry,
    EpisodeCommit,
    Failed,
    Part,
    PolicyState,
    Put,
    State,
    TaskAccount,
)
from astraflow.errors import Problem
from astraflow.types import Purpose, error_kind

RECENT_GROUPS = 4096
UNSCORED = "unscored"  # reason of a group that had no reward, or failures of several kinds; of an episode without one
NOT_CALLED = "not_called"  # reason of a group in which the workflow called the policy in less than two episodes
LEFT_OUT = "left_out"  # reason of a scored episode that an operator took out of its group
_MESSAGE_CHARS = 300
_MOST_REASONS = 64  # of drops, per policy, and of errors: operators and workflows of users name their own
_MOST_CODES = 64  # versions of the workflow's code whose episodes are counted; the longest unused is forgotten
_MOST_ENGINES = 256  # whose work is counted; the longest unused is forgotten
_ADVICE = {
    "zero_variance": "make rewards differ within a group: easier or more varied tasks, a warm start, a lower "
    "optimizer.lr if they once did, a higher sampling.temperature, a larger workflow.group_size; or keep equal groups "
    "with operators = ['keep_all']",
    "length_filter": "change length_filter.min_tokens, length_filter.max_tokens or sampling.max_tokens: too few "
    "episodes of a group are within the bounds",
    "dedup": "raise sampling.temperature: the answers of a group are copies of each other; or lower dedup.min_episodes",
    NOT_CALLED: "let the workflow call this policy in two episodes of a group or more; or say frozen = true, or take "
    "it out of the run file",
    "stale": "raise batch.max_staleness, or lower batch.groups: groups are older than allowed when they are complete",
}


def admit(context: Context, group_id: str, source: str) -> None:
    """A task takes one slot of every policy that trains now."""
    state = context.state
    state.sources[source].admitted += 1
    state.sources[source].in_flight += 1
    wanted = [name for name in state.policies if context.takes_groups(name)]
    for name in wanted:
        state.policies[name].admitted += 1
    state.admitted += 1
    state.tasks[group_id] = TaskAccount(wanted)


def settle_trained(context: Context, name: str, group_id: str) -> None:
    """The group was part of an acknowledged step of policy `name`."""
    context.state.policies[name].trained += 1
    _settle(context, name, group_id, trained=True, reason="")


def settle_dropped(context: Context, name: str, group_id: str, reason: str, *, failed: bool = False) -> None:
    """The group will not be trained by policy `name`; its slot is free. `failed`: for want of scored episodes."""
    policy = context.state.policies[name]
    if reason not in policy.dropped and len(policy.dropped) >= _MOST_REASONS:
        reason = "other"
    policy.dropped[reason] = policy.dropped.get(reason, 0) + 1
    policy.num_dropped += 1
    _settle(context, name, group_id, trained=False, reason=reason)
    context.out.append(Event("dropped", {"policy": name, "group_id": group_id, "reason": reason}))
    context.out.append(Wake("leases"))
    elsewhere = reason == NOT_CALLED and any(
        context.takes_groups(other) for other in context.state.policies if other != name
    )
    if reason != "finished" and not elsewhere:  # while others train, a policy may go without calls
        policy.dropped_in_row += 1
        policy.failed_in_row += failed
        _check_anything_left(context, name, policy)


def drop_episodes(context: Context, name: str, group_id: str, num: int, reason: str) -> None:
    """So many episodes with rows will not be trained by policy `name`, though their group goes on or was trained."""
    if num:
        counts = context.state.policies[name].dropped_episodes
        counts[reason] = counts.get(reason, 0) + num
        fields = {"policy": name, "group_id": group_id, "reason": reason, "episodes": num}
        context.out.append(Event("episodes_dropped", fields))


def of_sources(context: Context) -> dict[str, float]:
    """Metrics of a step: tasks admitted and skipped so far, by source."""
    metrics = {}
    for name, source in context.state.sources.items():
        metrics[f"sources/{name}/admitted"] = float(source.admitted)
        metrics |= {f"sources/{name}/skipped/{operator}": float(n) for operator, n in source.skipped.items()}
    return metrics


def count_error(context: Context, error: str) -> None:
    """One more failed episode; the first message of each kind is kept, so that somebody can mend the cause."""
    kind, state = error_kind(error), context.state
    if kind not in state.errors and len(state.errors) >= _MOST_REASONS:
        kind = "other"
    state.errors[kind] = state.errors.get(kind, 0) + 1
    if kind not in state.first_errors:
        text = error.removeprefix(f"{kind}:").strip()
        state.first_errors[kind] = text if len(text) <= _MESSAGE_CHARS else text[: _MESSAGE_CHARS - 3] + "..."
        context.out.append(Event("episode_error", {"kind": kind, "error": state.first_errors[kind]}))


def count_code(state: State, episode: EpisodeCommit, purpose: Purpose) -> None:
    """One more episode of a version of the workflow's code, where the node says which."""
    if not episode.code:
        return
    account = state.codes.pop(episode.code, None) or CodeAccount()
    state.codes[episode.code] = account
    account.episodes += 1
    account.failed += episode.error is not None
    rewards = [part.reward for part in episode.parts if part.reward is not None] if purpose == "train" else []
    account.scored += len(rewards)
    account.reward_sum += sum(rewards)
    if len(state.codes) > _MOST_CODES:
        del state.codes[next(iter(state.codes))]


def count_engines(state: State, episode: EpisodeCommit, purpose: Purpose) -> None:
    """What the engines sampled of an episode, where the node says which they are."""
    for part in episode.parts:
        if not part.engine:
            continue
        account = state.engines.pop(part.engine, None) or EngineAccount()
        state.engines[part.engine] = account
        account.episodes += 1
        account.tokens += part.num_tokens
        if purpose == "train" and part.reward is not None:
            account.scored += 1
            account.reward_sum += part.reward
    if len(state.engines) > _MOST_ENGINES:
        del state.engines[next(iter(state.engines))]


def failure_reason(unscored: Iterable[tuple[str | None, bool]]) -> str:
    """Why a group without enough scored episodes is dropped: of its unscored ones the errors, and whether the policy
    was called."""
    kinds = {error_kind(e) if e is not None else UNSCORED if called else NOT_CALLED for e, called in unscored}
    return kinds.pop() if len(kinds) == 1 else UNSCORED


def fail(context: Context, failed: Failed) -> None:
    """The run cannot go on; the first failure is kept."""
    if context.state.failure is not None:
        return
    context.state.failure = failed
    context.out.append(Event("alarm", {"failure": str(failed)}))
    context.out.append(Wake("leases"))
    context.out.extend(Wake(name) for name in context.state.policies)


def fail_by(context: Context, error: Problem) -> None:
    """The run cannot go on because of `error`."""
    fail(context, failed_by(error))


def failed_by(error: Problem) -> Failed:
    """`error`, whose text may be of a user, made fit for a snapshot."""
    said = (text.encode("utf-8", "replace").decode() for text in (error.thing, str(error.value), error.rule, error.fix))
    thing, value, rule, fix = said
    return Failed(type(error).__name__, thing, value[:_MESSAGE_CHARS], rule, fix)


def _settle(context: Context, name: str, group_id: str, *, trained: bool, reason: str) -> None:
    state = context.state
    account = state.tasks[group_id]
    account.open_policies.remove(name)
    account.trained = account.trained or trained
    if account.open_policies:
        return
    del state.tasks[group_id]
    state.sources[group_id.partition("/")[0]].in_flight -= 1
    if account.trained:
        state.trained += 1
    else:
        state.dropped[reason] = state.dropped.get(reason, 0) + 1


def _check_anything_left(context: Context, name: str, policy: PolicyState) -> None:
    limit = context.plan.policies[name].max_dropped_groups
    if policy.dropped_in_row < limit:
        return
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(policy.dropped.items()))
    if 2 * policy.failed_in_row > limit:
        rule, fix = _failing(context)
    else:
        rule = "groups were dropped in a row without one batch"
        most = max(policy.dropped, key=lambda reason: policy.dropped[reason])
        fix = _ADVICE.get(most) or _stage_advice(context, most)
        fix = fix or f"loosen what drops groups as '{most}', see policies.{name}.operators"
    where = f"policies.{name}.batch.max_dropped_groups"
    rule, fix = f"{rule} (so far: {reasons})", f"{fix}; or raise this limit"
    fail(context, Failed("NothingToTrainOn", where, str(limit), rule, fix))


def _stage_advice(context: Context, reason: str) -> str:
    """What to mend when a stage is the reason; "": it is none."""
    stage = reason.removeprefix("stage_")
    if stage == reason or stage not in context.state.stages:
        return ""
    return f"mend stages.{stage}, whose last failure was: {context.state.stages[stage].last_problem}"


def _failing(context: Context) -> tuple[str, str]:
    """Rule and fix when most groups were dropped because their episodes failed: the errors say what to mend."""
    state = context.state
    rule = "groups were dropped in a row without one batch, most because their episodes failed or had no reward"
    if not state.errors:
        return rule, "let the workflow return a reward; None means unscored"
    kinds = sorted(state.errors, key=lambda kind: -state.errors[kind])[:3]
    said = ". ".join(f"{kind} ({state.errors[kind]} episodes): {state.first_errors.get(kind, '')}" for kind in kinds)
    return rule, f"mend what fails, the first error of each kind is: {said}"


def remember(context: Context, group_id: str, attempts: list[int]) -> None:
    """Keep the accepted attempts of a closed group for a while, so that a repeated commit is known as a duplicate."""
    recent = context.state.recent
    recent[group_id] = attempts
    while len(recent) > RECENT_GROUPS:
        del recent[next(iter(recent))]


def hold(context: Context, put: Put, num_parts: int) -> None:
    """`num_parts` parts point at the put."""
    if not num_parts:
        return
    state = context.state
    if put.key not in state.puts:
        state.puts[put.key] = put
        state.segment_puts[put.segment] = state.segment_puts.get(put.segment, 0) + 1
    state.put_refs[put.key] = state.put_refs.get(put.key, 0) + num_parts


def retain_entries(context: Context, entries: Iterable[Entry]) -> None:
    """One more needs the rows of these entries, and what stages added to them."""
    refs = context.state.put_refs
    for entry in entries:
        for key in (entry.part.put, *(a.put for a in entry.added)):
            refs[key] += 1


def release_entries(context: Context, entries: Iterable[Entry]) -> None:
    """One less needs the rows of these entries, and what stages added to them."""
    for entry in entries:
        release(context, (entry.part, *entry.added))


def release(context: Context, parts: Iterable[Part | Added]) -> None:
    """These parts need their rows no more; forgets puts and segments that nobody needs."""
    state = context.state
    for part in parts:
        left = state.put_refs[part.put] - 1
        if left:
            state.put_refs[part.put] = left
            continue
        del state.put_refs[part.put]
        segment = state.puts.pop(part.put).segment
        puts = state.segment_puts[segment] - 1
        if puts:
            state.segment_puts[segment] = puts
        else:
            del state.segment_puts[segment]
            context.out.append(DropSegment(segment))
