"""A profile from the directory of a run: costs by what its nodes and trainers measured, episodes by its history.

| cost                          | from                                                                            |
|-------------------------------|---------------------------------------------------------------------------------|
| engine: step_s, row_s, prompt | least squares without negative values: growth of busy_s against that of decode  |
|                               | steps, sampled and prefill tokens between rows of metrics.jsonl                 |
| trainer: token_s, step_s      | forward and backward per sampled token; the rest of a step                      |
| swap_s, call_s                | means over the run                                                              |
| versions                      | the manifests that are still there                                              |
| tokens, rounds, who is called | committed episodes of the history; all calls share their spread of tokens       |
| kept                          | groups trained of those that are trained or dropped by operators                |

Times were measured beside whatever else ran. So costs are scaled until the simulated run of the same run file keeps
engines and trainers busy for as long as the real one did; what a step then lacks is put down to the worker processes
(worker_s).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from astraflow.config.schema import RunConfig
from astraflow.dataflow.journal.history import read_lives
from astraflow.errors import LaunchError
from astraflow.launch.rundir import RunDirectory
from astraflow.observe.jsonl import read_jsonl
from astraflow.observe.summary import Row, metric, steps_of
from astraflow.simulate.engine import shared_by
from astraflow.simulate.profile import (
    Call,
    EngineCost,
    EpisodeShape,
    PolicyCost,
    Profile,
    Serving,
    TrainerCost,
    VersionCost,
)
from astraflow.simulate.world import Plan, simulate
from astraflow.weights.manifest import Manifest

_GATHER_MS = 20.0  # of the embedded engine where the run file says nothing
_ROUNDS = 8  # of scaling


@dataclass(frozen=True)
class _Played:
    """Committed episodes."""

    num: int
    of_policy: Mapping[str, int]  # episodes that called it
    spread: float  # sigma of the log-normal distribution of an episode's tokens
    begin_s: float  # first admission


def fitted(run_dir: Path, cores: float = 0.0) -> Profile:
    """The profile of a run. `cores`: on which all its processes ran; 0: they did not share any.

    Raises: LaunchError: no run, or one without two steps of each policy.
    """
    directory = RunDirectory(run_dir)
    config = directory.config()
    rows = steps_of(read_jsonl(directory.metrics)) if directory.metrics.exists() else []
    for name in config.trained:
        if sum(row.get("policy") == name for row in rows) < 3:
            raise LaunchError(
                "run directory", str(run_dir), f"has fewer than three steps of {name}", "use a longer run"
            )
    played = _played(directory, rows)
    engine, call_s = _engine(rows, len(set(shared_by(config).values())))
    policies = {}
    for name in config.policies:
        own = msgspec.structs.replace(engine, gather_s=_gather_s(config, name))
        policies[name] = PolicyCost(
            engine=own, trainer=_trainer(rows, name), weights=_versions(run_dir, name), kept=_kept(rows, name),
            groups=_groups(rows, config, name),
        )  # fmt: skip
    serving = Serving(cores=cores, call_s=call_s, start_s=played.begin_s)
    shape = _episodes(rows, config, played)
    profile = Profile(episode=shape, policies=policies, serving=serving)
    return _scaled(profile, config, rows)


def measured(run_dir: Path) -> dict[str, Any]:
    """What a simulation predicts, as the run was: by policy seconds per step, staleness and idle share of its trainer;
    idle shares, and the run time of the last step. Steps after the first of each policy."""
    rows = steps_of(read_jsonl(RunDirectory(run_dir).metrics))
    names = list(dict.fromkeys(str(row["policy"]) for row in rows))
    policies = {}
    for name in names:
        own = _of(rows, name)
        policies[name] = {
            "steps": len(own), "step_s": (own[-1]["time_s"] - own[0]["time_s"]) / (len(own) - 1),
            "trainer_idle": _waited(own[1:]), "staleness_mean": _mean(own[1:], "staleness/mean"),
        }  # fmt: skip
    begin = max(_of(rows, name)[0]["time_s"] for name in names)
    spans = [(b, a) for a, b in itertools.pairwise(rows) if a["time_s"] >= begin]
    idle = [(metric(b, "nodes/idle_fraction"), b["time_s"] - a["time_s"]) for b, a in spans]
    known = [(share, span) for share, span in idle if share is not None]
    total = sum(span for _, span in known)
    return {
        "policies": policies, "wall_s": max(row["time_s"] for row in rows),
        "trainer_idle": _waited([row for name in names for row in _of(rows, name)[1:]]),
        "node_idle": sum(share * span for share, span in known) / total if total else None,
    }  # fmt: skip


def _played(directory: RunDirectory, rows: Sequence[Row]) -> _Played:
    tokens: list[float] = []
    of_policy: dict[str, int] = {}
    begin = math.inf
    for moments in read_lives(directory.journal / "history").values():
        for moment in moments:
            if moment.what == "admitted" and moment.fields.get("purpose") == "train":
                begin = min(begin, moment.now)
            elif moment.what == "committed":
                tokens += moment.fields.get("tokens", [])
                for name, rewards in moment.fields.get("reward", {}).items():
                    of_policy[name] = of_policy.get(name, 0) + sum(reward is not None for reward in rewards)
    if not tokens:
        raise LaunchError("run directory", str(directory.path), "has no history of episodes", "use a finished run")
    values = np.asarray(tokens, float)
    spread = math.sqrt(math.log1p(float(values.var()) / float(values.mean()) ** 2))
    return _Played(len(tokens), of_policy, spread, begin if math.isfinite(begin) else rows[0]["time_s"])


def _episodes(rows: Sequence[Row], config: RunConfig, played: _Played) -> EpisodeShape:
    chances = {name: min(1.0, played.of_policy.get(name, 0) / played.num) for name in config.policies}
    last = rows[-1]
    num_calls = (metric(last, "nodes/calls") or 0.0) / max(1.0, metric(last, "nodes/episodes_done") or 0.0)
    of_round = sum(chances.values()) or 1.0
    rounds = max(1.0, num_calls / of_round)
    sampled = (metric(last, "nodes/sampled_tokens") or 0.0) / max(1.0, metric(last, "nodes/requests") or 0.0)
    prompt = (metric(last, "nodes/prefill_tokens") or 0.0) / max(1.0, metric(last, "nodes/requests") or 0.0)
    calls = []
    for name, chance in chances.items():
        if not chance:
            continue
        of_episode = _mean(_of(rows, name), "tokens/per_episode")
        tokens = (of_episode / rounds if of_episode else sampled) or 1.0
        # Of an episode's tokens a call has a part, so its own spread is larger.
        spread = math.sqrt(math.log1p(math.expm1(played.spread**2) * max(1.0, num_calls)))
        calls.append(Call(policy=name, tokens=tokens, spread=round(spread, 3), prompt_tokens=prompt, chance=chance))
    return EpisodeShape(calls=calls, rounds=rounds)


def _engine(rows: Sequence[Row], num_engines: int) -> tuple[EngineCost, float]:
    names = ("nodes/busy_s", "nodes/swap_s", "nodes/decode_steps", "nodes/sampled_tokens", "nodes/prefill_tokens")
    seen = [[metric(row, name) or 0.0 for name in names] for row in rows]
    seen = [values for values, _ in itertools.groupby(seen)]
    grown = np.diff(np.asarray(seen), axis=0)
    grown = grown[(grown >= 0).all(axis=1)]  # a node that left takes its counters with it
    last = rows[-1]
    swaps = max(1.0, metric(last, "nodes/swaps") or 0.0)
    swap_s = (metric(last, "nodes/swap_s") or 0.0) / swaps
    call_s = (metric(last, "nodes/loop_cpu_s") or 0.0) / max(1.0, metric(last, "nodes/calls") or 0.0)
    if not len(grown):
        raise LaunchError("metrics.jsonl", len(rows), "has no two reports of the nodes", "use a longer run")
    busy = np.maximum(0.0, num_engines * grown[:, 0] - grown[:, 1])
    step_s, row_s, prefill_s = _least_squares(grown[:, 2:], busy)
    return EngineCost(step_s=step_s, row_s=row_s, prefill_token_s=prefill_s, swap_s=swap_s), call_s


def _gather_s(config: RunConfig, name: str) -> float:
    engine = config.policies[name].engine
    return float(engine.options.get("gather_ms", _GATHER_MS)) / 1e3 if engine.type == "local" else 0.0


def _least_squares(columns: np.ndarray, target: np.ndarray) -> list[float]:
    """Factors >= 0 of three columns: the best of all subsets whose free solution is positive."""
    best, found = math.inf, [0.0] * columns.shape[1]
    for size in range(1, columns.shape[1] + 1):
        for chosen in itertools.combinations(range(columns.shape[1]), size):
            part = columns[:, chosen]
            factors = np.linalg.lstsq(part, target, rcond=None)[0]
            error = float(((part @ factors - target) ** 2).sum())
            if (factors >= 0).all() and error < best:
                best, found = error, [0.0] * columns.shape[1]
                for index, factor in zip(chosen, factors.tolist(), strict=True):
                    found[index] = factor
    return found


def _trainer(rows: Sequence[Row], name: str) -> TrainerCost:
    own = _of(rows, name)[1:]
    if not own:
        return TrainerCost()
    tokens = sum(metric(row, "tokens/sampled") or 0.0 for row in own)
    passes = sum(metric(row, "perf/forward_backward_s") or 0.0 for row in own)
    busy = sum(metric(row, "perf/busy_s") or 0.0 for row in own)
    return TrainerCost(step_s=max(0.0, busy - passes) / len(own), token_s=passes / max(1.0, tokens))


def _versions(run_dir: Path, name: str) -> VersionCost:
    manifests = [
        msgspec.json.decode(path.read_bytes(), type=Manifest)
        for path in sorted((run_dir / "weights" / name).glob("*/manifest.json"))
    ]
    if not manifests:
        return VersionCost()
    deltas = [manifest.delta.nbytes for manifest in manifests if manifest.delta is not None]
    full = sum(entry.nbytes for entry in manifests[-1].tensors)
    return VersionCost(full_bytes=float(full), delta_bytes=sum(deltas) / len(deltas) if deltas else 0.0)


def _kept(rows: Sequence[Row], name: str) -> float:
    own = _of(rows, name)
    if not own:
        return 1.0
    last = own[-1]
    trained = metric(last, "groups/trained") or 0.0
    dropped = sum(
        value for key, value in last.items()
        if key.startswith("groups/dropped/") and key.rpartition("/")[2] not in ("stale", "finished")
    )  # fmt: skip
    return trained / (trained + dropped) if trained else 1.0


def _groups(rows: Sequence[Row], config: RunConfig, name: str) -> int:
    """Where the run file does not say it: with `batch.tokens` or `batch.episodes`."""
    batch = config.policies[name].batch
    if not (batch.tokens or batch.episodes):
        return 0
    return max(1, round(_mean(_of(rows, name), "batch/groups") or 0.0))


def _scaled(profile: Profile, config: RunConfig, rows: Sequence[Row]) -> Profile:
    """See the module. Every round corrects all of it by what the one before lacked."""
    own = {name: _of(rows, name) for name in config.trained}
    busy_s = {name: _mean(steps[1:], "perf/busy_s") or 0.0 for name, steps in own.items()}
    step_s = {name: (steps[-1]["time_s"] - steps[0]["time_s"]) / (len(steps) - 1) for name, steps in own.items()}
    engine_s = _growth(rows, "nodes/busy_s") / max(1.0, _growth(rows, "nodes/episodes_done"))
    calls = profile.episode.rounds * sum(call.chance for call in profile.episode.calls)
    for _ in range(_ROUNDS):
        found = simulate(config, profile, Plan(steps=min(config.run.steps, 40)))
        engine = engine_s / found.engine_s_per_episode if found.engine_s_per_episode > 0 else 1.0
        costs = {}
        for name, cost in profile.policies.items():
            known = found.policies.get(name)
            trainer = busy_s[name] / known.busy_s if known is not None and known.busy_s > 0 else 1.0
            costs[name] = msgspec.structs.replace(
                cost, trainer=_times(cost.trainer, trainer), engine=_times(cost.engine, engine)
            )
        longer = sum(step_s[name] / found.policies[name].step_s for name in own) / len(own) - 1.0
        worker_s = profile.serving.worker_s + longer * found.s_per_episode / calls
        serving = msgspec.structs.replace(profile.serving, worker_s=max(0.0, worker_s))
        profile = msgspec.structs.replace(profile, policies=costs, serving=serving)
    return profile


def _growth(rows: Sequence[Row], name: str) -> float:
    return (metric(rows[-1], name) or 0.0) - (metric(rows[0], name) or 0.0)


def _times(cost: Any, factor: float) -> Any:
    seconds = {
        name: factor * value
        for name, value in msgspec.structs.asdict(cost).items()
        if name.endswith("_s") and name != "gather_s"
    }
    return msgspec.structs.replace(cost, **seconds)


def _of(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row.get("policy") == name]


def _mean(rows: Sequence[Row], name: str) -> float | None:
    values = [value for row in rows if (value := metric(row, name)) is not None]
    return sum(values) / len(values) if values else None


def _waited(rows: Sequence[Row]) -> float | None:
    waited = sum(metric(row, "perf/wait_s") or 0.0 for row in rows)
    busy = sum(metric(row, "perf/busy_s") or 0.0 for row in rows)
    return waited / (waited + busy) if waited + busy else None
