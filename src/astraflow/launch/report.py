"""What a run leaves for people: `report/{summary.json, summary.md, curves.png, staleness.png}`.

Read from metrics.jsonl, the last /status (kept as `report/status.json`) and run.resolved.json; whatever is missing is
left out, so a run that was interrupted, or that never made a step, has a report too.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from astraflow.config.schema import RunConfig
from astraflow.launch.rundir import RunDirectory
from astraflow.observe.chart import bars, terminal_curve
from astraflow.observe.health.watch import warnings_of
from astraflow.observe.jsonl import read_jsonl, write_whole
from astraflow.observe.summary import (
    Row,
    evals_of,
    interval_of,
    law_holds,
    metric,
    rewards_of,
    series,
    staleness_counts,
    staleness_label,
    steps_of,
    summarise,
)

__all__ = ["terminal_curve", "write_report"]

logger = logging.getLogger(__name__)
OWN = ("training", "rollout")  # of the time of a policy: not for the sake of another one


def write_report(run_dir: Path, status: Mapping[str, Any] | None = None) -> Path:
    """Write the report of a run and return its directory.

    Args: status: the last reply of /status; kept beside the report, so that writing it again needs none.
    """
    directory = RunDirectory(Path(run_dir))
    report = directory.report
    report.mkdir(parents=True, exist_ok=True)
    if status:
        write_whole(_kept(directory), json.dumps(status, indent=1))
    rows: Sequence[Row] = read_jsonl(directory.metrics)
    config = directory.config() if directory.config_file.exists() else None
    summary = summary_of(directory, rows)
    write_whole(report / "summary.json", json.dumps(summary, indent=1) + "\n")
    pictures = _draw(rows, report, config.run.name if config else directory.path.name)
    page = _page(directory, config, summary, rows, pictures)
    write_whole(report / "summary.md", page)
    return report


def summary_of(directory: RunDirectory, rows: Sequence[Row] | None = None) -> dict[str, Any]:
    """The content of summary.json, of what the run wrote so far. `rows`: its metrics where they are known."""
    kept = _kept(directory)
    status = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None
    rows = read_jsonl(directory.metrics) if rows is None else rows
    said = warnings_of(rows, directory.config()) if directory.config_file.exists() else []
    return summarise(rows, status) | {"warnings": [warned._asdict() for warned in said]}


def is_finished(directory: RunDirectory, config: RunConfig) -> bool:
    """The run ended with everything that `config` asks for: its rounds, and the last checkpoint of each policy."""
    kept = _kept(directory)
    if not kept.exists() or not json.loads(kept.read_text(encoding="utf-8")).get("finished"):
        return False
    newest = {policy: directory.newest_checkpoint(policy) for policy in config.trained}
    return all(path is not None and path.name == f"step-{config.steps_of(p):06d}" for p, path in newest.items())


def _kept(directory: RunDirectory) -> Path:
    return directory.report / "status.json"


def _page(
    directory: RunDirectory,
    config: RunConfig | None,
    summary: Mapping[str, Any],
    rows: Sequence[Row],
    pictures: Sequence[str],
) -> str:
    name = config.run.name if config else directory.path.name
    blocks = [f"# Run {name}", *([config.run.description] if config and config.run.description else [])]
    blocks += ["## Result", _results(summary, rows)]
    if curve := terminal_curve(rows):
        blocks.append(f"```\n{curve}\n```")
    blocks += [f"![{picture}]({picture})" for picture in pictures]
    blocks += ["## How it ran", _health(summary)]
    if summary["policies"]:
        blocks.append(_balance(summary["policies"]))
    if len(summary["engines"]) > 1:
        blocks.append(_engines(summary["engines"], rows))
    if summary["errors"]:
        blocks.append(_errors(summary["errors"]))
    if summary["warnings"]:
        blocks.append(_warnings(summary["warnings"]))
    counts = staleness_counts(steps_of(rows))
    if any(counts.values()):
        blocks.append(
            "Staleness of trained trajectories (versions between the oldest sampled token and the update):\n\n"
            f"```\n{bars({staleness_label(versions): count for versions, count in counts.items()})}\n```"
        )
    if config:
        blocks += ["## Settings", _settings(config)]
    blocks += ["## Use it", _usage(directory, config)]
    return "\n\n".join(blocks) + "\n"


def _results(summary: Mapping[str, Any], rows: Sequence[Row]) -> str:
    evaluated = bool(evals_of(rows))
    success = "success (held-out)" if evaluated else "success (training)"
    lines = ["| | start | end | best |", "|---|---|---|---|"]
    for label, key in (("reward (training)", "reward"), (success, "success")):
        span = summary[key]
        lines.append(f"| {label} | {_number(span['start'])} | {_number(span['end'])} | {_number(span['best'])} |")
    versions = ", ".join(f"{policy} {version}" for policy, version in summary["versions"].items()) or "none"
    lines += ["", f"{summary['steps']} steps in {_duration(summary['wall_s'])}; newest versions: {versions}."]
    if evaluated:
        lines += ["", *_rounds(evals_of(rows))]
    return "\n".join(lines)


def _rounds(rounds: Sequence[Row]) -> list[str]:
    lines = ["| version | time | success | reward | tasks | versions used |", "|---|---|---|---|---|---|"]
    for row in rounds:
        low, high = metric(row, "eval/min_version"), metric(row, "eval/max_version")
        used = "–" if low is None or high is None else f"{low:.0f}" if low == high else f"{low:.0f} to {high:.0f}"
        numbers = [_number(metric(row, f"eval/{name}")) for name in ("success", "reward", "num_tasks")]
        if (ends := interval_of(row)) is not None:
            numbers[0] += f" [{_number(ends[0])}, {_number(ends[1])}]"
        at = _duration(metric(row, "time_s", "wall_s"))
        lines.append(f"| {row.get('step')} | {at} | {' | '.join(numbers)} | {used} |")
    return lines


def _health(summary: Mapping[str, Any]) -> str:
    idle, gap, staleness, account = (summary[k] for k in ("idle", "logprob_gap", "staleness", "accounting"))
    dropped = sum(account["dropped"].values())
    reasons = ", ".join(f"{reason} {count}" for reason, count in sorted(account["dropped"].items()))
    law = "holds" if law_holds(account) else "DOES NOT HOLD"
    skipped = "; ".join(
        f"{source}: " + ", ".join(f"{operator} {n}" for operator, n in sorted(counts.items()))
        for source, counts in summary["skipped"].items()
    )
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            f"| node idle | {_percent(idle['node'])} |",
            f"| trainer idle | {_percent(idle['trainer'])} |",
            f"| sampled tokens per second | {_number(summary['tokens_per_s'])} |",
            f"| staleness mean, p99, max | {', '.join(_number(staleness[k]) for k in ('mean', 'p99', 'max'))} |",
            "| logprob gap, engine against trainer: p50, worst p99, max | "
            f"{', '.join(_number(gap[k]) for k in ('p50', 'p99', 'max'))} |",
            f"| tasks | {account['admitted']} admitted = {account['trained']} trained + {dropped} dropped "
            f"+ {account['in_flight']} in flight: the law {law} |",
            f"| dropped | {reasons or 'none'} |",
            *([f"| skipped before they were admitted | {skipped} |"] if skipped else []),
        ]
    )


def _balance(policies: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| policy | reward: start, end, best | its time |", "|---|---|---|"]
    for name, found in policies.items():
        rewards = ", ".join(_number(found["reward"][key]) for key in ("start", "end", "best"))
        shares = sorted(found["time"].items(), key=lambda share: -share[1])
        said = ", ".join(
            f"{cause if cause in OWN else f'waits for {cause}'} {_percent(part)}" for cause, part in shares
        )
        lines.append(f"| {name} | {rewards} | {said or '–'} |")
    return "\n".join(lines)


def _engines(engines: Mapping[str, Mapping[str, Any]], rows: Sequence[Row]) -> str:
    lines = [
        "| engine, node | episodes | sampled tokens | share | reward | worst gap p99 |",
        "|---|---|---|---|---|---|",
    ]
    for name, made in engines.items():
        gaps = [gap for _, _, gap in series(steps_of(rows), f"logprob_gap/{name.partition('@')[0]}/p99")]
        numbers = f"{made['episodes']} | {made['tokens']} | {_percent(made['share'])} | {_number(made['reward'])}"
        lines.append(f"| {name} | {numbers} | {_number(max(gaps, default=None))} |")
    return "\n".join(lines)


def _errors(errors: Mapping[str, Mapping[str, Any]]) -> str:
    lines = ["| failed episodes | number | first error |", "|---|---|---|"]
    for kind, error in errors.items():
        text = " ".join(error["first"].split()).replace("|", "\\|")
        lines.append(f"| {kind} | {error['count']} | {text or '–'} |")
    return "\n".join(lines)


def _warnings(warnings: Sequence[Mapping[str, Any]]) -> str:
    lines = ["| policy, step | warning |", "|---|---|"]
    for warned in warnings:
        text = warned["message"].replace("|", "\\|")
        lines.append(f"| {warned['policy']} {warned['step']} | {text} |")
    return "\n".join(lines)


def _settings(config: RunConfig) -> str:
    lines = ["| setting | value |", "|---|---|"]
    pairs: list[tuple[str, object]] = [
        ("workflow", f"{config.workflow.type}, group_size {config.workflow.group_size}"),
        ("train sources", ", ".join(f"{name}: {config.sources[name].type}" for name in config.train_sources)),
        ("seed", config.run.seed),
        ("nodes", ", ".join(f"{node.name} ({node.concurrency} episodes)" for node in config.rollout.nodes) or "none"),
    ]
    for name, policy in config.policies.items():
        pairs += [(f"{name}: model", policy.model), (f"{name}: engine", policy.engine.type)]
        if policy.copy_of is not None:
            pairs.append(
                (f"{name}: served", f"{policy.copy_of.policy} as it was, each {policy.copy_of.every} versions")
            )
        if not policy.trained:
            continue
        pairs += [
            (f"{name}: algorithm", f"{policy.algorithm.advantage.type}, {policy.algorithm.loss.type}"),
            (f"{name}: batch", f"{policy.batch.groups} groups, max_staleness {policy.batch.max_staleness}"),
            (f"{name}: optimizer", f"lr {policy.optimizer.lr:g}, {policy.optimizer.schedule}"),
        ]
    lines += [f"| {key} | {value} |" for key, value in pairs]
    return "\n".join([*lines, "", "Every setting: `run.resolved.json`."])


def _usage(directory: RunDirectory, config: RunConfig | None) -> str:
    lines = []
    for name in config.trained if config else []:
        checkpoint = directory.newest_checkpoint(name)
        if checkpoint is not None:
            lines.append(f"- checkpoint of `{name}`, a Hugging Face directory: `{checkpoint}`")
    if not lines:
        return "No checkpoint was written; go on with the run by `--resume`."
    run = directory.path
    return "\n".join([*lines, "", f"```\nastraflow try {run}\nastraflow eval {run}\n```"])


def _draw(rows: Sequence[Row], report: Path, title: str) -> list[str]:
    """Names of the pictures that were drawn; none without rows or without matplotlib."""
    if not steps_of(rows):
        return []
    if find_spec("matplotlib") is None:
        logger.warning("no pictures in %s: pip install 'astraflow[report]'", report)
        return []
    return [_draw_curves(rows, report / "curves.png", title), *_draw_staleness(rows, report / "staleness.png")]


def _draw_curves(rows: Sequence[Row], path: Path, title: str) -> str:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    by_step, by_time = figure.subplots(1, 2, sharey=True)
    curves = [
        ("reward (training)", rewards_of(rows), "-", "tab:blue"),
        ("success (training)", series(steps_of(rows), "success/mean"), ":", "tab:gray"),
        ("success (held-out)", series(evals_of(rows), "eval/success"), "o-", "tab:orange"),
    ]
    for label, points, style, color in curves:
        if points:
            steps, times, values = zip(*points, strict=True)
            by_step.plot(steps, values, style, color=color, label=label)
            by_time.plot(times, values, style, color=color, label=label)
    for axes, label in ((by_step, "step"), (by_time, "run time (s)")):
        axes.set_xlabel(label)
        axes.grid(alpha=0.3)
    by_step.legend(loc="best", fontsize="small")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    return path.name


def _draw_staleness(rows: Sequence[Row], path: Path) -> list[str]:
    from matplotlib.figure import Figure

    counts = staleness_counts(steps_of(rows))
    if not any(counts.values()):
        return []
    figure = Figure(figsize=(5, 3.2), layout="constrained")
    axes = figure.subplots()
    total = sum(counts.values())
    axes.bar([staleness_label(versions) for versions in counts], [count / total for count in counts.values()])
    axes.set_xlabel("staleness (versions)")
    axes.set_ylabel("share of trained trajectories")
    figure.savefig(path, dpi=120)
    return [path.name]


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _duration(seconds: float | None) -> str:
    if seconds is None:
        return "–"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{seconds:.1f} s"
