"""What goes wrong in training before rewards tell, and what to try: one function a rule, None where all is well."""

from __future__ import annotations

from collections.abc import Callable

from astraflow.observe.health.window import FIRST, RECENT, WINDOW, Window

ALONE = ("gae", "distill", "reinforce_pp")  # estimators that do not compare siblings


def _entropy_collapse(w: Window) -> str | None:
    before, now, success = w.first("policy/entropy"), w.recent("policy/entropy"), w.recent("success/mean", 1.0)
    if w.count <= 2 * FIRST or not now < 0.1 * before or success >= 0.5:
        return None
    return (
        f"policy/entropy fell from {before:.3g} to {now:.3g} while only {success:.0%} succeed: answers are all alike "
        "and nothing new is tried; raise algorithm.entropy (0.001 to 0.01), clip_high (0.28) or sampling.temperature, "
        "or lower optimizer.lr, and begin again from an earlier checkpoint"
    )


def _entropy_explosion(w: Window) -> str | None:
    before, now = w.first("policy/entropy"), w.recent("policy/entropy")
    if w.count <= 2 * FIRST or not now > max(3 * before, before + 1.0):
        return None
    return (
        f"policy/entropy rose from {before:.3g} to {now:.3g}: the policy becomes noise; lower optimizer.lr, "
        "algorithm.entropy or batch.max_staleness, and look at logprob_gap/p99"
    )


def _gap(w: Window) -> str | None:
    p99, limit = w.newest("logprob_gap/p99"), w.limits.max_logprob_gap
    if p99 <= limit:
        return None
    return (
        f"logprob_gap/p99={p99:.3g} is above trainer.max_logprob_gap={limit:g}: engine and trainer compute different "
        "policies; compare their dtype, temperature, chat template and weight version (weights.check = true), or use "
        "algorithm.corrections = ['truncate']"
    )


def _gap_grows(w: Window) -> str | None:
    before, now = w.first("logprob_gap/p50"), w.recent("logprob_gap/p50")
    if w.count <= 2 * FIRST or not now > max(10 * before, 1e-3):
        return None
    return (
        f"logprob_gap/p50 grew from {before:.1e} to {now:.1e}: an engine drifts away from the trainer; look for one "
        "that does not take new versions or keeps old caches (weights.check = true), and at its dtype"
    )


def _equal_groups(w: Window) -> str | None:
    share, success = w.recent("groups/zero_variance_fraction", 0.0), w.recent("success/mean", 0.0)
    if w.count < RECENT or share <= 0.8 or w.limits.advantage in ALONE:
        return None
    if success > 0.9:
        tasks = "too easy: take harder ones (filter_solved, curriculum)"
    elif success < 0.1:
        tasks = "too hard: take easier ones (curriculum), a warm start, a reward with more steps"
    else:
        tasks = (
            "too easy or too hard: take those that are sometimes solved (filter_solved, curriculum), begin again with "
            "a lower optimizer.lr if it was not so at first"
        )
    return (
        f"{share:.0%} of the groups have equal rewards and teach nothing, {success:.0%} of the episodes succeed; tasks "
        f"are {tasks}, a larger workflow.group_size, or a higher sampling.temperature"
    )


def _no_reward(w: Window) -> str | None:
    if w.count < RECENT or w.recent("reward/std", 1.0) > 0 or w.limits.advantage in ALONE:
        return None
    return (
        f"all rewards of {RECENT} batches are {w.recent('reward/mean'):.3g}: nothing can be learnt; look at the grader "
        "with `astraflow trace`, and take tasks of which some are solved"
    )


def _clip(w: Window) -> str | None:
    share, most = w.recent("policy/clip_fraction", 0.0), 0.7 if w.limits.loss == "gspo" else 0.3
    if w.count < RECENT or share <= most:
        return None
    return (
        f"policy/clip_fraction={share:.0%} of the tokens lose their gradient to the clip; lower optimizer.lr, "
        "batch.max_staleness or batch.epochs, or widen clip_low and clip_high"
    )


def _far(w: Window) -> str | None:
    kl = w.newest("policy/approx_kl")
    if not kl > 0.5:
        return None
    return (
        f"policy/approx_kl={kl:.2f} nats a token: updates are so large that the policy is far from the one that "
        "sampled; lower optimizer.lr, or begin with optimizer.warmup_steps"
    )


def _ess(w: Window) -> str | None:
    share = w.recent("policy/ess", 1.0)
    if w.count < RECENT or share >= 0.5:
        return None
    return (
        f"policy/ess={share:.2f}: a few tokens decide the gradient, the data is far from the policy; lower "
        "batch.max_staleness or optimizer.lr, or set algorithm.corrections = ['truncate'] or the loss m2po"
    )


def _truncation(w: Window) -> str | None:
    share = w.recent("episodes/truncated", 0.0)
    if w.count < RECENT or share <= 0.3:
        return None
    return (
        f"{share:.0%} of the trajectories have a reply that was cut at sampling.max_tokens; raise it, or teach shorter "
        "answers (overlong_penalty) and leave cut ones out (algorithm.mask_truncated = true)"
    )


def _staleness(w: Window) -> str | None:
    bound, mean = w.limits.max_staleness, w.recent("staleness/mean", 0.0)
    if bound < 2 or mean < 0.9 * bound or w.count < RECENT:
        return None
    return (
        f"staleness/mean={mean:.2g} is at batch.max_staleness={bound}: nodes are ahead of the trainer; give it more of "
        "the machine and nodes less, or lower max_staleness"
    )


def _stale_drops(w: Window) -> str | None:
    stale, trained = w.growth("groups/dropped/stale"), w.growth("groups/trained")
    if not stale > 0.1 * (stale + trained):
        return None
    return (
        f"{stale / (stale + trained):.0%} of the groups were dropped as too old; raise batch.max_staleness, or shorten "
        "the longest episodes (workflow.timeout_s, sampling.max_tokens)"
    )


def _skipped(w: Window) -> str | None:
    if w.growth("skipped_steps") <= 0 and not (w.count == 1 and w.newest("skipped_steps") > 0):
        return None
    return (
        "a loss or gradient was not finite and its update was skipped; look at the batches in skipped_batches/ of the "
        "run directory, lower optimizer.lr, and compare dtype float32 with yours"
    )


def _gradient(w: Window) -> str | None:
    before, now = w.earlier("grad_norm"), w.recent("grad_norm")
    if w.count < WINDOW or not now > 10 * before > 0:
        return None
    return (
        f"grad_norm went from {before:.3g} to {now:.3g}; lower optimizer.lr or optimizer.grad_clip, and look at "
        "policy/ratio_max and reward/std"
    )


def _long_trajectory(w: Window) -> str | None:
    largest, budget = w.newest("microbatch_tokens/max"), w.limits.tokens_per_microbatch
    if largest <= budget:
        return None
    return (
        f"a trajectory of {largest:.0f} tokens is longer than batch.tokens_per_microbatch={budget}: it is never cut, "
        "so a step needs the memory of that many; raise the setting if there is enough, else lower sampling.max_tokens "
        "or the turns of the workflow"
    )


def _waiting(w: Window) -> str | None:
    idle = w.recent("perf/idle_fraction", 0.0)
    if w.count < WINDOW or idle <= 0.8:
        return None
    fix = "raise batch.max_staleness above 0, " if w.limits.max_staleness == 0 else ""
    return f"the trainer waits {idle:.0%} of its time; {fix}add nodes or swarm clients, or raise their concurrency"


def _failures(w: Window) -> str | None:
    failed, done = w.growth("nodes/episodes_failed/"), w.growth("nodes/episodes_done")
    if failed + done < 10 or failed <= 0.2 * (failed + done):
        return None
    return (
        f"{failed / (failed + done):.0%} of the episodes of the last steps failed; the first message of each kind is "
        "in `astraflow status`"
    )


def _wrong_weights(w: Window) -> str | None:
    if w.growth("nodes/weights_wrong") <= 0:
        return None
    return (
        "an engine computes with other weights than were published (nodes/weights_wrong); look at the logs of the nodes"
    )


RULES: dict[str, Callable[[Window], str | None]] = {
    "entropy_collapse": _entropy_collapse,
    "entropy_explosion": _entropy_explosion,
    "gap": _gap,
    "gap_grows": _gap_grows,
    "equal_groups": _equal_groups,
    "no_reward": _no_reward,
    "clip": _clip,
    "far": _far,
    "ess": _ess,
    "truncation": _truncation,
    "staleness": _staleness,
    "stale_drops": _stale_drops,
    "skipped": _skipped,
    "gradient": _gradient,
    "long_trajectory": _long_trajectory,
    "waiting": _waiting,
    "failures": _failures,
    "wrong_weights": _wrong_weights,
}
