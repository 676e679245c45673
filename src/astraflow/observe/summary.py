"""A run in numbers: the rows of metrics.jsonl and the last /status become `report/summary.json`.

Rows are flat: `{kind: "step" | "eval", policy, step, time_s, <metric>: <number>, ...}`; a missing metric gives None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]

_STALENESS = "staleness/count/"
_EXACT = 16  # staleness below is counted by itself, from here on in classes of doubling width


def metric(row: Row, *names: str) -> float | None:
    """The first of `names` that the row has as a number."""
    for name in names:
        value = row.get(name)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
    return None


def series(rows: Iterable[Row], *names: str) -> list[tuple[int, float, float]]:
    """(step, run time in s, value) of the rows that have one of the metrics; policies that share a step: their mean."""
    found: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        value = metric(row, *names)
        if value is not None:
            found.setdefault(int(row.get("step", 0)), []).append((metric(row, "time_s", "wall_s") or 0.0, value))
    return [
        (step, max(at for at, _ in points), sum(value for _, value in points) / len(points))
        for step, points in sorted(found.items())
    ]


def steps_of(rows: Iterable[Row]) -> list[Row]:
    """Rows of optimizer steps."""
    return [row for row in rows if row.get("kind") == "step"]


def evals_of(rows: Iterable[Row]) -> list[Row]:
    """Rows of evaluation rounds."""
    return [row for row in rows if row.get("kind") == "eval"]


def interval_of(row: Row) -> tuple[float, float] | None:
    """Of avg@k, in a row of an evaluation round."""
    name = next((n.removesuffix("/low") for n in row if n.startswith("eval/avg@") and n.endswith("/low")), None)
    low, high = metric(row, f"{name}/low"), metric(row, f"{name}/high")
    return None if low is None or high is None else (low, high)


def rewards_of(rows: Sequence[Row]) -> list[tuple[int, float, float]]:
    """Mean training reward by step."""
    return series(steps_of(rows), "reward/mean")


def successes_of(rows: Sequence[Row]) -> tuple[str, list[tuple[int, float, float]]]:
    """("held-out", by version) when the run was evaluated, else ("training", by step)."""
    held_out = series(evals_of(rows), "eval/success")
    return ("held-out", held_out) if held_out else ("training", series(steps_of(rows), "success/mean"))


def staleness_metrics(staleness: np.ndarray, most: int) -> dict[str, float]:
    """Metrics of a batch: its trajectories by staleness ([trajectories] int, in versions), which is at most `most`. Few
    whatever `most` is: from 16 on they count classes (16 to 31, 32 to 63, ...), named by their least."""
    counts = np.bincount(np.minimum(np.maximum(staleness, 0), most)).tolist()
    metrics = {f"{_STALENESS}{i}": float(sum(counts[i : i + 1])) for i in range(min(most + 1, _EXACT))}
    edge = _EXACT
    while edge <= most:
        metrics[f"{_STALENESS}{edge}"] = float(sum(counts[edge : 2 * edge]))
        edge *= 2
    return metrics


def staleness_counts(rows: Iterable[Row]) -> dict[int, int]:
    """Trained trajectories by staleness; from 16 on by the least of its class, see `staleness_metrics`."""
    counts: dict[int, int] = {}
    for row in rows:
        for name, value in row.items():
            if name.startswith(_STALENESS):
                versions = int(name.removeprefix(_STALENESS))
                counts[versions] = counts.get(versions, 0) + int(value)
    return dict(sorted(counts.items()))


def staleness_label(least: int) -> str:
    """Of a class: "3", "16-31"."""
    return str(least) if least < _EXACT else f"{least}-{_most(least)}"


def summarise(rows: Sequence[Row], status: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of summary.json. `status`: the last reply of /status; without it the last rows stand in.

    reward: training batches, start and end are means of up to 5 steps, best the best such mean. success: evaluation
    rounds when there are any. idle: fraction of time nodes and trainers did not compute. logprob_gap: p50 the median
    over steps, p99 and max the worst step.
    """
    steps = steps_of(rows)
    times = [at for row in rows if (at := metric(row, "time_s", "wall_s")) is not None]
    wall_s = max([*times, float((status or {}).get("time_s") or 0.0)], default=0.0)
    kind, successes = successes_of(rows)
    return {
        "steps": max((int(row.get("step", 0)) for row in steps), default=0),
        "wall_s": round(wall_s, 3),
        "reward": _span([value for _, _, value in rewards_of(rows)], window=5),
        "success": _span([value for _, _, value in successes], window=1 if kind == "held-out" else 5),
        "idle": {"node": _node_idle(steps), "trainer": _trainer_idle(steps)},
        "staleness": _staleness(steps),
        "logprob_gap": {
            "p50": _over(steps, "logprob_gap/p50", np.median),
            "p99": _over(steps, "logprob_gap/p99", np.max),
            "max": _over(steps, "logprob_gap/max", np.max),
        },
        "accounting": accounting(steps, status),
        "skipped": skipped(steps),
        "errors": errors_of(status),
        "engines": dict(dict((status or {}).get("episodes", {})).get("engines", {})),
        "tokens_per_s": _tokens_per_s(steps, wall_s),
        "versions": _versions(steps, status),
        "policies": _by_policy(steps, status),
    }


def _by_policy(steps: Sequence[Row], status: Mapping[str, Any] | None) -> dict[str, Any]:
    """With several policies, of each: reward as above, and the share of its time by what it did or waited for."""
    names = list(dict.fromkeys(str(row.get("policy", "")) for row in steps))
    known = dict((status or {}).get("policies", {}))
    found = {}
    for name in names if len(names) > 1 else []:
        rewards = [value for row in steps if row.get("policy") == name
                   and (value := metric(row, "reward/mean")) is not None]  # fmt: skip
        waited = dict(dict(known.get(name, {})).get("waited_s", {}))
        total = sum(waited.values())
        shares = {cause: round(seconds / total, 4) for cause, seconds in waited.items()} if total else {}
        found[name] = {"reward": _span(rewards, window=5), "time": shares}
    return found


def accounting(steps: Sequence[Row], status: Mapping[str, Any] | None) -> dict[str, Any]:
    """admitted = trained + dropped + in_flight, in tasks; without a status from the last rows, summed over policies."""
    if status is not None and isinstance(status.get("accounting"), Mapping):
        account = status["accounting"]
        return {
            "admitted": int(account.get("admitted", 0)),
            "trained": int(account.get("trained", 0)),
            "dropped": {str(reason): int(count) for reason, count in dict(account.get("dropped", {})).items()},
            "in_flight": int(account.get("in_flight", 0)),
        }
    total: dict[str, Any] = {"admitted": 0, "trained": 0, "dropped": {}, "in_flight": 0}
    for row in {str(row.get("policy")): row for row in steps}.values():
        for name in ("admitted", "trained", "in_flight"):
            total[name] += int(metric(row, f"groups/{name}") or 0)
        for name, value in row.items():
            if name.startswith("groups/dropped/"):
                reason = name.removeprefix("groups/dropped/")
                total["dropped"][reason] = total["dropped"].get(reason, 0) + int(value)
    return total


def skipped(steps: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Tasks that operators refused before they were admitted: source -> operator -> number, as of the last row."""
    counts: dict[str, dict[str, int]] = {}
    for name, value in (steps[-1] if steps else {}).items():
        head, _, operator = name.partition("/skipped/")
        if operator and head.startswith("sources/"):
            counts.setdefault(head.removeprefix("sources/"), {})[operator] = int(value)
    return counts


def errors_of(status: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """Failed episodes by kind of error, most first: how many, and the first message."""
    episodes = dict((status or {}).get("episodes") or {})
    first = dict(episodes.get("first_errors") or {})
    counts = sorted(dict(episodes.get("errors") or {}).items(), key=lambda item: -item[1])
    return {str(kind): {"count": int(count), "first": str(first.get(kind, ""))} for kind, count in counts}


def law_holds(account: Mapping[str, Any]) -> bool:
    """Whether each admitted task is accounted for exactly once."""
    return bool(account["admitted"] == account["trained"] + sum(account["dropped"].values()) + account["in_flight"])


def _span(values: Sequence[float], window: int) -> dict[str, float | None]:
    if not values:
        return {"start": None, "end": None, "best": None}
    width = max(1, min(window, len(values) // 3))
    means = np.convolve(values, np.ones(width) / width, mode="valid")
    return {"start": float(means[0]), "end": float(means[-1]), "best": float(means.max())}


def _staleness(steps: Sequence[Row]) -> dict[str, float | None]:
    counts = staleness_counts(steps)
    total = sum(counts.values())
    if not total:
        worst = _over(steps, "staleness/max", np.max)
        return {"mean": _over(steps, "staleness/mean", np.mean), "p99": worst, "max": worst}
    known = _over(steps, "staleness/max", np.max)
    most = float(max(_most(versions) for versions, count in counts.items() if count))
    most = most if known is None else min(most, known)
    reached = np.cumsum(list(counts.values())) >= 0.99 * total
    p99 = list(counts)[int(np.argmax(reached))]
    return {"mean": _mean_staleness(steps, total), "p99": min(float(_most(p99)), most), "max": most}


def _most(least: int) -> int:
    """The highest staleness of a class."""
    return least if least < _EXACT else 2 * least - 1


def _mean_staleness(steps: Sequence[Row], total: int) -> float:
    """Over all trajectories: the means of the batches are exact, classes are not."""
    weighted = 0.0
    for row in steps:
        counts, mean = staleness_counts([row]), metric(row, "staleness/mean")
        if mean is None:
            weighted += sum(versions * count for versions, count in counts.items())
        else:
            weighted += mean * sum(counts.values())
    return weighted / total


def _trainer_idle(steps: Sequence[Row]) -> float | None:
    pairs = [(metric(row, "perf/wait_s"), metric(row, "perf/busy_s")) for row in steps]
    known = [(wait, busy) for wait, busy in pairs if wait is not None and busy is not None]
    total = sum(wait + busy for wait, busy in known)
    return sum(wait for wait, _ in known) / total if total > 0 else None


def _node_idle(steps: Sequence[Row]) -> float | None:
    return _weighted(steps, "nodes/idle_fraction")


def _tokens_per_s(steps: Sequence[Row], wall_s: float) -> float | None:
    rate = _weighted(steps, "nodes/tokens_per_s")
    if rate is not None:
        return rate
    tokens = [count for row in steps if (count := metric(row, "tokens/sampled")) is not None]
    return sum(tokens) / wall_s if tokens and wall_s > 0 else None


def _weighted(steps: Sequence[Row], name: str) -> float | None:
    """Mean of a metric that describes the time since the row before, weighted by that time."""
    total = weight = before = 0.0
    for row in steps:
        value, at = metric(row, name), metric(row, "time_s", "wall_s") or 0.0
        if value is not None:
            span = max(at - before, 1e-6)
            total, weight = total + value * span, weight + span
        before = at
    return total / weight if weight else None


def _over(steps: Sequence[Row], name: str, reduce: Any) -> float | None:
    values = [value for row in steps if (value := metric(row, name)) is not None]
    return float(reduce(values)) if values else None


def _versions(steps: Sequence[Row], status: Mapping[str, Any] | None) -> dict[str, int]:
    newest: dict[str, int] = {}
    for row in steps:
        policy = str(row.get("policy", ""))
        newest[policy] = max(newest.get(policy, 0), int(row.get("step", 0)))
    for policy, state in dict((status or {}).get("policies", {})).items():
        newest[policy] = max(newest.get(policy, 0), int(state.get("version", 0)))
    return newest
