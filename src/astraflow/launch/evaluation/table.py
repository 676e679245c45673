"""Results as text."""

from __future__ import annotations

from collections.abc import Sequence

from astraflow.launch.evaluation.measure import ALL, Comparison, Estimate, Results, Score


def lines_of(results: Results, samples: int) -> list[str]:
    """A line per source and side, then one per comparison."""
    sources = list(dict.fromkeys(score.source for score in results.scores))
    ks = sorted({k for score in results.scores for k in score.passes if samples > 1})
    head = ["source", "model", "tasks", f"avg@{samples}", *(f"pass@{k}" for k in ks), "reward", "unscored"]
    rows = [_cells(score, ks) for source in sources for score in results.scores if score.source == source]
    lines = _aligned([head, *rows])
    lines += [f"{c.source}: {_compared(c)}" for c in results.comparisons]
    lines += [f"{s.source}, {s.side}: {_failed(s)}" for s in results.scores if s.errors and s.source != ALL]
    lines += [
        f"{s.source}, {s.side}: played by {len(s.codes)} versions of the workflow's code; what differs is not known"
        for s in results.scores
        if len(s.codes) > 1 and s.source != ALL
    ]
    return lines


def _cells(score: Score, ks: Sequence[int]) -> list[str]:
    reward = "-" if score.reward is None else f"{score.reward:.3f}"
    if score.reward is not None and score.reward_se is not None:
        reward += f" ± {score.reward_se:.3f}"
    return [
        score.source, score.side, str(score.num_tasks), _shown(score.avg),
        *(_shown(score.passes[k]) for k in ks), reward, f"{score.num_unscored} of {score.num_episodes}",
    ]  # fmt: skip


def _shown(estimate: Estimate) -> str:
    if estimate.mean is None:
        return "-"
    return f"{estimate.mean:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def _compared(found: Comparison) -> str:
    if found.difference is None:
        return f"{found.second} and {found.first} have no task in common that both scored"
    return (
        f"{found.second} less {found.first}: {found.difference:+.3f} [{found.low:+.3f}, {found.high:+.3f}] on "
        f"{found.num_tasks} tasks, better on {found.better}, worse on {found.worse}"
    )


def _failed(score: Score) -> str:
    return "failed " + ", ".join(f"{kind} {count}" for kind, count in sorted(score.errors.items()))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
