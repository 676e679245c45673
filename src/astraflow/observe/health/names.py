"""Every number of a row of metrics.jsonl: unit, meaning, what is healthy. `docs/metrics.md` says the same; tests
compare it with this list, and this list with what runs write."""

from __future__ import annotations

import re
from functools import cache
from typing import NamedTuple


class RowMetric(NamedTuple):
    """`name` may hold `<placeholders>`."""

    name: str
    unit: str
    meaning: str
    healthy: str = "-"


STEP: dict[str, tuple[RowMetric, ...]] = {
    "Reward and credit": (
        RowMetric("reward/mean", "reward", "mean over the episodes of the batch, as graded", "rises"),
        RowMetric("reward/std", "reward", "its standard deviation", "above 0"),
        RowMetric("reward/min", "reward", "the lowest"),
        RowMetric("reward/max", "reward", "the highest", "above `reward/min`"),
        RowMetric(
            "success/mean", "share", "episodes that succeeded: the workflow's `success`, else reward >= 1", "rises"
        ),
        RowMetric("advantage/mean", "advantage", "mean over trained tokens", "near 0"),
        RowMetric("advantage/std", "advantage", "its standard deviation", "0.1 to 2"),
        RowMetric(
            "groups/zero_variance_fraction",
            "share",
            "groups with equal rewards among those that came in since the last batch, filtered out or not",
            "below 0.5; near 1 nothing is learnt",
        ),
    ),
    "Policy": (
        RowMetric("loss", "-", "the loss of the step; its value alone says little"),
        RowMetric(
            "policy/entropy", "nats", "mean entropy of the trained tokens at `sampling.temperature`", "falls slowly"
        ),
        RowMetric(
            "policy/ratio_mean", "ratio", "mean of r = π / μ: policy now over the policy that sampled", "0.95 to 1.05"
        ),
        RowMetric("policy/ratio_max", "ratio", "the largest r", "below 100"),
        RowMetric("policy/approx_kl", "nats", "KL(μ, π) per token, estimated by (r - 1) - log r", "below 0.05"),
        RowMetric(
            "policy/ess",
            "share",
            "effective sample size of the tokens by r: (Σr)² / (N Σr²)",
            "0.9 to 1; below 0.5 few tokens decide",
        ),
        RowMetric("policy/ess_sequences", "share", "the same of sequences, by the products of r", "falls with length"),
        RowMetric(
            "policy/clip_fraction", "share", "tokens whose gradient or weight the loss cut", "0 to 0.2; `gspo` 0.5"
        ),
        RowMetric("policy/clip_low_fraction", "share", "of them those with r < 1", "like the next"),
        RowMetric("policy/clip_high_fraction", "share", "those with r > 1", "more: raise `clip_high`"),
        RowMetric("policy/kl_k1", "nats", "with `kl`: KL(π, reference) per token, estimator k1", "below 0.1"),
        RowMetric("policy/kl_k2", "nats", "estimator k2", "below 0.1"),
        RowMetric("policy/kl_k3", "nats", "estimator k3", "below 0.1"),
        RowMetric("policy/log_norm", "nats", "with `z_loss`: mean log of the normaliser of the logits", "near 0"),
        RowMetric("policy/gate", "share", "`sapo`: mean share of the gradient left by the gate", "0.9 to 1"),
        RowMetric(
            "policy/outward_m2", "nats²", "`m2po`: mean of (log r)² of tokens moving away from μ", "below `threshold`"
        ),
        RowMetric("policy/outward_fraction", "share", "`m2po`: such tokens", "near 0.5"),
        RowMetric("policy/all_m2", "nats²", '`m2po` with `tokens = "all"`: mean of (log r)²', "below `threshold`"),
        RowMetric("policy/behavior_weight", "ratio", "`decoupled_ppo`: mean of q / μ, q the proximal policy", "near 1"),
        RowMetric("policy/dropped_fraction", "share", "`decoupled_ppo`: tokens above `max_weight`", "below 0.01"),
        RowMetric("correction/weight", "ratio", "mean factor of `truncate` and `mask`", "near 1"),
        RowMetric("correction/truncated", "share", "tokens that `truncate` cut", "below 0.05"),
        RowMetric("correction/masked", "share", "tokens that `mask` left out", "below 0.05"),
        RowMetric("correction/rejected", "share", "tokens of sequences that `reject` left out", "below 0.05"),
        RowMetric(
            "masked/truncated",
            "share",
            "with `mask_truncated`: trajectories that were cut and not trained",
            "below 0.2",
        ),
    ),
    "Critic": (
        RowMetric("critic/loss", "reward²", "mean squared error of the values, clipped", "falls"),
        RowMetric("critic/value", "reward", "mean value that the critic says", "follows the next"),
        RowMetric("critic/return", "reward", "mean return it learns from"),
        RowMetric("critic/explained_variance", "share", "1 - Var(return - value) / Var(return)", "rises above 0.5"),
        RowMetric("critic/clip_fraction", "share", "values whose change the clip bounded", "below 0.2"),
        RowMetric("critic/grad_norm", "-", "norm of its gradient before clipping", "no spikes"),
        RowMetric("critic/lr", "-", "its learning rate"),
    ),
    "Optimizer": (
        RowMetric("lr", "-", "learning rate of the step"),
        RowMetric("grad_norm", "-", "norm of the gradient before clipping, mean over updates", "no spikes"),
        RowMetric("updates", "updates", "updates of the weights in this step: epochs times minibatches"),
        RowMetric("skipped_steps", "updates", "updates skipped so far: loss or gradient was not finite", "0"),
        RowMetric("loss_scale", "-", "float16: factor on the loss against underflow of gradients", "256 to 65536"),
    ),
    "Engine against trainer": (
        RowMetric(
            "logprob_gap/p50",
            "nats",
            "median of abs(engine's - trainer's logprob) of the same token, under the weights that sampled it",
            "1e-6 in float32, 1e-3 in bfloat16; flat",
        ),
        RowMetric("logprob_gap/p99", "nats", "its 99th percentile", "below 0.1; flat"),
        RowMetric("logprob_gap/max", "nats", "the largest", "below 1"),
        RowMetric("logprob_gap/tokens", "tokens", "tokens that were compared", "above 0"),
        RowMetric("logprob_gap/<engine>/p50", "nats", "the median of what one engine sampled", "as of its precision"),
        RowMetric("logprob_gap/<engine>/p99", "nats", "its 99th percentile", "the same"),
        RowMetric("logprob_gap/<engine>/max", "nats", "the largest", "the same"),
        RowMetric("logprob_gap/<engine>/tokens", "tokens", "tokens that were compared", "above 0"),
        RowMetric("logprob_gap/unknown_tokens", "tokens", "of versions no longer held, left out", "0"),
        RowMetric(
            "logprob_gap/alarm", "0 or 1", "p99, of all or of one engine, is above `trainer.max_logprob_gap`", "0"
        ),
        RowMetric("engine_share/<engine>", "share", "trained tokens that one engine sampled", "as fast as it is"),
    ),
    "Staleness": (
        RowMetric(
            "staleness/mean",
            "versions",
            "the trainer's version minus the oldest of a trajectory's sampled tokens",
            "below `max_staleness`",
        ),
        RowMetric("staleness/p99", "versions", "its 99th percentile", "at most `max_staleness`, more with replay"),
        RowMetric("staleness/max", "versions", "the largest", "the same"),
        RowMetric("staleness/fresh_tokens", "share", "tokens sampled under the version they train"),
        RowMetric(
            "staleness/count/<n>",
            "trajectories",
            "of staleness n; from 16 on n is the least of a class of doubling width",
        ),
    ),
    "Sizes": (
        RowMetric("batch/groups", "groups", "groups of the batch"),
        RowMetric("batch/episodes", "episodes", "episodes of the batch"),
        RowMetric("batch/trajectories", "trajectories", "its trajectories; more than episodes where contexts fork"),
        RowMetric("batch/replayed_groups", "groups", "groups trained before"),
        RowMetric("tokens", "tokens", "trained tokens of the step"),
        RowMetric("tokens/sampled", "tokens", "sampled tokens of the batch"),
        RowMetric("tokens/per_episode", "tokens", "sampled tokens of an episode, mean", "no jumps"),
        RowMetric("tokens/per_episode_max", "tokens", "the most", "below what `sampling.max_tokens` and turns allow"),
        RowMetric("episodes/truncated", "share", "trajectories with a call cut by length", "below 0.1"),
        RowMetric("sequences", "sequences", "trained trajectories"),
        RowMetric("input_tokens", "tokens", "tokens of all sequences, context included"),
        RowMetric("computed_tokens", "tokens", "of them those computed: a common prefix counts once"),
        RowMetric("context_tokens/mean", "tokens", "tokens that a computed token sees, itself included"),
        RowMetric("microbatches", "microbatches", "forward and backward passes of an update"),
        RowMetric(
            "microbatch_tokens/max",
            "tokens",
            "computed tokens of the largest: memory follows it",
            "at most `tokens_per_microbatch`, else a trajectory is longer",
        ),
        RowMetric("queue/groups", "groups", "complete groups that wait for the next batch"),
    ),
    "Accounting, since the start of the run": (
        RowMetric("groups/admitted", "groups", "= trained + dropped + in flight"),
        RowMetric("groups/trained", "groups", "of acknowledged steps"),
        RowMetric("groups/dropped", "groups", "for all reasons"),
        RowMetric("groups/dropped/<reason>", "groups", "for one: an operator, `stale`, `unscored`, a kind of failure"),
        RowMetric("groups/in_flight", "groups", "neither trained nor dropped"),
        RowMetric("groups/replayed", "groups", "trained again, each time"),
        RowMetric("episodes/dropped/<reason>", "episodes", "left out of groups that were trained"),
        RowMetric("sources/<source>/admitted", "tasks", "tasks of a source that were admitted"),
        RowMetric("sources/<source>/skipped/<operator>", "tasks", "tasks that an operator refused"),
    ),
    "Time": (
        RowMetric("perf/wait_s", "s", "the trainer waited for this batch", "small beside the next"),
        RowMetric("perf/busy_s", "s", "everything else of the step"),
        RowMetric("perf/idle_fraction", "share", "wait of both", "below 0.3 where the trainer is the dear part"),
        RowMetric("perf/step_s", "s", "the step itself: packing to optimizer"),
        RowMetric("perf/pack_s", "s", "packing"),
        RowMetric("perf/reference_s", "s", "with `kl`: scoring under the reference"),
        RowMetric("perf/critic_s", "s", "with a critic: values and its updates"),
        RowMetric("perf/forward_backward_s", "s", "forward and backward passes", "most of `perf/step_s`"),
        RowMetric("perf/optimizer_s", "s", "clipping and update"),
        RowMetric("perf/audit_s", "s", "measuring the gap"),
        RowMetric("perf/publish_wait_s", "s", "waiting until the version before is published", "0"),
        RowMetric("perf/tokens_per_s", "tokens/s", "`input_tokens` over `perf/step_s`"),
        RowMetric("perf/loop_tokens_per_s", "tokens/s", "trained tokens over waiting and step"),
        RowMetric(
            "perf/tflops", "TFLOP/s", "arithmetic of forward and backward passes over `perf/step_s`, of all ranks"
        ),
        RowMetric("perf/mfu", "share", "that over the peak of the devices (`trainer.peak_tflops`)", "0.3 to 0.6"),
    ),
    "Weights": (
        RowMetric("weights/kept_existing", "versions", "published again with other content; the old one was kept", "0"),
        RowMetric("weights/mirror_version", "version", "with `weights.url`: newest in the object store"),
        RowMetric("weights/mirror_behind", "versions", "that it still lacks", "0 or 1"),
        RowMetric("weights/mirror_failures", "requests", "that failed so far", "0"),
        RowMetric("weights/mirror_skipped", "versions", "that were overtaken by newer ones", "0"),
        RowMetric("weights/mirror_bytes", "bytes", "sent so far"),
    ),
}
"""By chapter."""

NODES: tuple[RowMetric, ...] = (
    RowMetric("nodes/count", "nodes", "in the pool now"),
    RowMetric("nodes/tokens_per_s", "tokens/s", "sampled by the pool between its last two heartbeats"),
    RowMetric(
        "nodes/idle_fraction", "share", "of the time engines did not compute", "below 0.3 where nodes are the dear part"
    ),
    RowMetric("nodes/busy_s", "s", "engines computed, so far"),
    RowMetric("nodes/sampled_tokens", "tokens", "sampled so far"),
    RowMetric("nodes/prefill_tokens", "tokens", "of prompts computed so far; what a cache held does not count"),
    RowMetric("nodes/decode_steps", "steps", "of the engines so far"),
    RowMetric("nodes/requests", "requests", "to the engines so far"),
    RowMetric("nodes/running", "requests", "in decoding now"),
    RowMetric("nodes/waiting", "requests", "that wait for a place in an engine", "0; else lower `concurrency`"),
    RowMetric("nodes/kv_usage", "share", "of the memory for keys and values, of the fullest engine", "below 0.9"),
    RowMetric("nodes/preempted", "rows", "that lost their place in an engine for want of memory", "0; else less load"),
    RowMetric("nodes/server_running", "requests", "that engines with a server decode now, as it says"),
    RowMetric("nodes/server_waiting", "requests", "that wait in a server", "0; else lower `concurrency`"),
    RowMetric("nodes/restarts", "servers", "of engines that died or hung, started again so far", "0"),
    RowMetric("nodes/far_requests", "calls", "that nodes asked others for"),
    RowMetric("nodes/far_tokens", "tokens", "that they got so"),
    RowMetric(
        "nodes/far_lost",
        "calls",
        "that went on at another node, or at the same one after a cut",
        "0; else nodes that die",
    ),
    RowMetric("nodes/remote_tokens", "tokens", "that services of `remote` engines counted so far, prompts and replies"),
    RowMetric("nodes/remote_known", "verdicts", "for which no service was asked, as they were known"),
    RowMetric("nodes/remote_retries", "requests", "to services that were asked again so far", "few"),
    RowMetric("nodes/swaps", "versions", "put in force so far"),
    RowMetric("nodes/swap_s", "s", "that it took"),
    RowMetric("nodes/weights_checked", "versions", "with `weights.check`: compared with the trainer's"),
    RowMetric("nodes/weights_wrong", "versions", "of them with another checksum", "0"),
    RowMetric("nodes/weight_failures", "fetches", "that failed so far", "0"),
    RowMetric("nodes/calls", "calls", "of agents so far"),
    RowMetric("nodes/concurrency", "episodes", "that may be in play; with `min_concurrency` it follows the load"),
    RowMetric("nodes/episodes_in_play", "episodes", "now"),
    RowMetric("nodes/episodes_waiting", "episodes", "for a worker", "0; else more `workers`"),
    RowMetric("nodes/episodes_done", "episodes", "so far"),
    RowMetric("nodes/episodes_cancelled", "episodes", "so far"),
    RowMetric("nodes/episodes_failed/<kind>", "episodes", "so far", "0"),
    RowMetric("nodes/commits/<result>", "episodes", "answers of the dataflow service: `accepted`, `duplicate`, ..."),
    RowMetric("nodes/commit_backlog", "episodes", "played and not committed yet", "small"),
    RowMetric("nodes/unreachable", "requests", "to the dataflow service that failed", "0"),
    RowMetric("nodes/workers_restarted", "processes", "so far", "0"),
    RowMetric("nodes/edits", "edits", "of the workflow's files that were taken up"),
    RowMetric("nodes/edits_refused", "edits", "that did not work", "0"),
    RowMetric("nodes/loop_cpu_s", "s", "CPU of gateway and runner so far"),
    RowMetric("nodes/gateway/calls", "calls", "served so far"),
    RowMetric("nodes/gateway/cancelled", "calls", "whose agent went away"),
    RowMetric("nodes/gateway/streams_cut", "requests", "cut by the agent while they streamed; what it got is captured"),
    RowMetric("nodes/gateway/retries", "requests", "that repeat one before and got its answer"),
    RowMetric("nodes/gateway/malformed_tool_calls", "calls", "of tools that were unreadable and stayed text", "falls"),
    RowMetric("nodes/gateway/prompt_tokens", "tokens", "of prompts"),
    RowMetric("nodes/gateway/encoded_tokens", "tokens", "of them tokenised; the rest was known"),
    RowMetric("nodes/gateway/sampled_tokens", "tokens", "given to agents, and captured"),
    RowMetric("nodes/gateway/dropped_tokens", "tokens", "sampled, given to nobody: of cancelled calls, after a stop"),
    RowMetric("nodes/gateway/forks", "calls", "whose context did not continue one before", "0 for plain chats"),
    RowMetric("nodes/gateway/overlong", "calls", "refused for the length of their context", "0"),
    RowMetric("nodes/gateway/sampling_overridden", "calls", "whose sampling settings the run overrode"),
    RowMetric("nodes/gateway/engine_failures", "calls", "that an engine failed", "0"),
    RowMetric("nodes/gateway/open_episodes", "episodes", "with a key now"),
    RowMetric("nodes/swarm/clients", "clients", "of the doors, heard of within `rollout.swarm.dead_after_s`"),
    RowMetric("nodes/swarm/clients/<version>", "clients", "of them, by the version of their software"),
    RowMetric("nodes/swarm/asked", "episodes", "that clients wait for now", "0 while the run has tasks"),
    RowMetric("nodes/swarm/playing", "episodes", "in the hands of clients now"),
    RowMetric(
        "nodes/swarm/waiting", "episodes", "leased that wait for weights, or for a client that plays their source", "0"
    ),
    RowMetric(
        "nodes/swarm/episodes_<ending>",
        "episodes",
        "so far: `done`, `failed`, `timeout`, `aborted`, `given_back`, `cancelled`",
        "`given_back` near 0",
    ),
)
"""In rows of steps and of evaluation rounds: summed over the nodes at that moment."""

EVALUATION: tuple[RowMetric, ...] = (
    RowMetric("eval/success", "share", "of held-out episodes that succeeded", "rises"),
    RowMetric("eval/reward", "reward", "mean of held-out episodes", "rises"),
    RowMetric("eval/avg@<k>/low", "share", "lower end of its interval at 95 %, over tasks"),
    RowMetric("eval/avg@<k>/high", "share", "upper end"),
    RowMetric("eval/pass@<k>/low", "share", "lower end of its interval at 95 %, over tasks"),
    RowMetric("eval/pass@<k>/high", "share", "upper end"),
    RowMetric("eval/avg@<k>", "share", "success, each task of the same weight; k = `evaluation.samples`", "rises"),
    RowMetric("eval/pass@<k>", "share", "chance that one of k episodes of a task succeeds, without bias", "rises"),
    RowMetric("eval/version", "version", "the round was begun for"),
    RowMetric("eval/min_version", "version", "oldest that sampled in it", "`eval/version`"),
    RowMetric("eval/max_version", "version", "newest that sampled in it"),
    RowMetric("eval/num_tasks", "tasks", "of the round"),
    RowMetric("eval/num_episodes", "episodes", "of the round"),
    RowMetric("eval/num_failed", "episodes", "of them without a score", "0"),
    RowMetric("eval/wall_s", "s", "from its begin to its end"),
)

ALL: tuple[RowMetric, ...] = (*(metric for chapter in STEP.values() for metric in chapter), *NODES, *EVALUATION)

KEYS = ("kind", "policy", "step", "time_s")
"""Of a row, beside its metrics: "step" or "eval", whose, which, seconds of run time."""


def metric_of(name: str) -> RowMetric | None:
    """What is known of a name of a row. The names of losses, workflows and engines of users are not."""
    return next((metric for metric in ALL if _pattern(metric.name).fullmatch(name)), None)


@cache
def _pattern(name: str) -> re.Pattern[str]:
    return re.compile("".join(".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", name)))
