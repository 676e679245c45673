"""What a person sees while a run goes on: a live panel in a terminal, one plain line per step everywhere else."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from astraflow.config.schema import RunConfig
from astraflow.observe.health.watch import Watch
from astraflow.observe.health.window import Limits
from astraflow.observe.jsonl import JsonlTail
from astraflow.observe.summary import Row, interval_of, metric

QUIET_S = 20.0
_PACE_STEPS = 20  # the newest, from which the time that is left is told
"""Without a terminal, a wait longer than this is said once per so many seconds."""


class RunDisplay:
    """The progress of one run. `update` and `note` are called by the launcher, from one thread."""

    def __init__(
        self,
        run: str,
        steps: int,
        metrics_file: Path | None = None,
        console: Console | None = None,
        limits: Mapping[str, Limits] | None = None,
    ) -> None:
        """`limits`: of the policies whose rows are watched; what they warn of is said."""
        self._run, self._steps = run, steps
        self._console = console or Console(highlight=False)
        self._console.soft_wrap = not self._console.is_terminal  # a narrow panel wraps; lines of a file are whole
        self._tail = JsonlTail(metrics_file) if metrics_file is not None else None
        self._started = self._spoke = time.monotonic()
        self._watch = Watch(limits or {})
        self._newest: dict[str, Row] = {}  # by policy
        self._paces: dict[str, deque[tuple[int, float]]] = {}  # by policy: (step, seconds of the run)
        self._evaluation: Row | None = None
        self._errors: set[str] = set()  # kinds that were said
        self._live: Live | None = None
        self.status: dict[str, Any] = {}  # the last that came; what the report is written from

    def __enter__(self) -> RunDisplay:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._take_rows()
        if self._live is not None:
            self._refresh()
            self._live.stop()

    def update(self, status: dict[str, Any]) -> None:
        """The newest reply of /status; new rows of metrics.jsonl are read here, too."""
        self.status = status
        self._take_rows()
        for kind, first in status.get("episodes", {}).get("first_errors", {}).items():
            if kind not in self._errors:
                self._errors.add(kind)
                self._say(f"an episode failed (the first of its kind), {kind}: {first}")
        self._refresh()
        if self._live is None and time.monotonic() - self._spoke > QUIET_S and not status.get("finished"):
            self._say(waiting_line(status, time.monotonic() - self._started))

    def row(self, row: Row) -> None:
        """A step or an evaluation round that is done; a live panel shows it at the next `update`."""
        if row.get("kind") == "eval":
            self._evaluation = row
        else:
            self._newest[str(row.get("policy", ""))] = row
            self._take_pace(row)
        if self._live is None:
            self._say(eval_line(row) if row.get("kind") == "eval" else self._step_line(row))
        for warned in self._watch.add(row):
            self._say(f"warning, {warned.policy} step {warned.step}: {warned.message}")

    def note(self, text: str) -> None:
        """One line that stays."""
        self._say(text)

    def _step_line(self, row: Row) -> str:
        left_s = self._left_s(str(row.get("policy", "")))
        return step_line(row, self._steps, self.status) + (f"  left {_clock(left_s)}" if left_s is not None else "")

    def _take_pace(self, row: Row) -> None:
        at = metric(row, "time_s")
        if at is not None:
            pace = self._paces.setdefault(str(row.get("policy", "")), deque(maxlen=_PACE_STEPS))
            pace.append((int(row.get("step", 0)), at))

    def _left_s(self, policy: str) -> float | None:
        """Until the last step, at the pace of the newest ones; None while too few are done."""
        pace = self._paces.get(policy)
        if pace is None or len(pace) < 3 or pace[-1][0] <= pace[0][0]:
            return None
        a_step = (pace[-1][1] - pace[0][1]) / (pace[-1][0] - pace[0][0])
        return max(0.0, (self._steps - pace[-1][0]) * a_step)

    def _take_rows(self) -> None:
        for row in self._tail.new_rows() if self._tail is not None else []:
            self.row(row)

    def _say(self, text: str) -> None:
        self._spoke = time.monotonic()
        self._console.print(Text(text))

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)

    def _panel(self) -> Group:
        elapsed = time.monotonic() - self._started
        done = min((int(row.get("step", 0)) for row in self._newest.values()), default=0)
        left = [left_s for policy in self._newest if (left_s := self._left_s(policy)) is not None]
        head = Table.grid(padding=(0, 2))
        head.add_row(
            Text(self._run, style="bold"),
            ProgressBar(total=max(1, self._steps), completed=done, width=30, finished_style="green"),
            Text(f"step {done}/{self._steps}"),
            Text(_clock(elapsed)),
            Text(f"left {_clock(max(left))}" if left else ""),
        )
        lines: list[Any] = [head]
        for policy, row in self._newest.items():
            lines.append(Text(f"  {policy}: " + "  ".join(_step_facts(row, self.status))))
        if self._evaluation is not None:
            lines.append(Text("  " + eval_line(self._evaluation)))
        if self.status:
            lines += [Text(f"  {line}") for line in _pool_lines(self.status)]
        return Group(*lines)


def progress_display(config: RunConfig, metrics_file: Path | None = None) -> RunDisplay:
    """The display of a run, to be used with `with`. `metrics_file`: its metrics.jsonl, for rewards and warnings."""
    return RunDisplay(config.run.name, config.run.steps, metrics_file, limits=Limits.of(config))


def step_line(row: Row, steps: int, status: Mapping[str, Any]) -> str:
    """One step in one line."""
    policy = str(row.get("policy", ""))
    at = metric(row, "time_s", "wall_s")
    head = f"[{_clock(at)}] " if at is not None else ""
    return f"{head}{policy} step {row.get('step')}/{steps}  " + "  ".join(_step_facts(row, status))


def eval_line(row: Row) -> str:
    """One evaluation round in one line."""
    facts = [f"held-out at version {row.get('step')}:"]
    for name, label in (("eval/success", "success"), ("eval/reward", "reward")):
        value = metric(row, name)
        if value is not None:
            facts.append(f"{label} {value:.3f}")
        if label == "success" and (ends := interval_of(row)) is not None:
            facts.append(f"[{ends[0]:.3f}, {ends[1]:.3f}]")
    tasks, failed = metric(row, "eval/num_tasks"), metric(row, "eval/num_failed")
    facts.append(f"({tasks or 0:.0f} tasks" + (f", {failed:.0f} failed episodes)" if failed else ")"))
    return " ".join(facts)


def waiting_line(status: Mapping[str, Any], elapsed_s: float) -> str:
    """What the run waits for, when no step was done for a while."""
    waits = []
    for name, policy in dict(status.get("policies", {})).items():
        gate = policy.get("gate", {})
        if int(policy.get("version", 0)) < 0:
            waits.append(f"{name} has no weights yet: its trainer loads the model, or shows it demonstrations")
            continue
        waits.append(
            f"{name} waits for step {int(policy.get('version', 0)) + 1}: {policy.get('queue', 0)} groups are complete, "
            f"{gate.get('in_flight', 0)} of {gate.get('limit', 0)} in flight"
        )
    for name, stage in dict(status.get("stages", {})).items():
        if stage["waiting"] or stage["leased"]:
            waits.append(f"{stage['waiting'] + stage['leased']} episodes wait for stage {name}")
    for name, consumer in dict(status.get("consumers", {})).items():
        if consumer["holds"]:
            waits.append(f"consumer {name} is behind and holds new tasks")
    failed = sum(status.get("episodes", {}).get("errors", {}).values())
    nodes = status.get("nodes", [])
    tail = f"; {len(nodes)} nodes"
    clients = [node["stats"]["swarm/clients"] for node in nodes if "swarm/clients" in node.get("stats", {})]
    if clients:
        tail += f" with {sum(clients):.0f} swarm clients"
    if nodes and not any(node.get("capacity", 1) for node in nodes):
        tail += ", none of which plays (workers = 0)"
    tail += f"; {failed} episodes failed so far" if failed else ""
    return f"[{_clock(elapsed_s)}] " + ("; ".join(waits) or "the run starts") + tail


def _step_facts(row: Row, status: Mapping[str, Any]) -> list[str]:
    facts = []
    for label, shape, names in (
        ("reward", "{:.3f}", ("reward/mean",)),
        ("success", "{:.3f}", ("success/mean",)),
        ("staleness", "{:.2f}", ("staleness/mean",)),
        ("queue", "{:.0f}", ("queue/groups",)),
        ("tok/s", "{:,.0f}", ("nodes/tokens_per_s", "perf/loop_tokens_per_s")),
        ("gap", "{:.1e}", ("logprob_gap/p99",)),
        ("idle node", "{:.0%}", ("nodes/idle_fraction",)),
        ("trainer", "{:.0%}", ("perf/idle_fraction",)),
    ):
        value = metric(row, *names)
        if value is not None:
            facts.append(f"{label} {shape.format(value)}")
    count = metric(row, "nodes/count")
    facts.append(f"nodes {count if count is not None else len(status.get('nodes', [])):.0f}")
    return facts


def _pool_lines(status: Mapping[str, Any]) -> list[str]:
    lines = []
    for node in status.get("nodes", []):
        versions = " ".join(f"{name} v{version}" for name, version in dict(node.get("versions", {})).items())
        silent = node.get("silent_s") or 0.0
        late = f"  silent for {silent:.0f} s" if silent > 5 else ""
        lines.append(f"{node.get('name')}: plays {node.get('leased')} of {node.get('capacity')}  {versions}{late}")
    account = status.get("accounting", {})
    if account:
        dropped = "  ".join(f"{reason} {count}" for reason, count in dict(account.get("dropped", {})).items())
        lines.append(
            f"tasks: {account.get('admitted')} admitted, {account.get('trained')} trained, "
            f"{account.get('in_flight')} in flight" + (f"; dropped: {dropped}" if dropped else "")
        )
    for name, source in dict(status.get("sources", {})).items():
        refused = "  ".join(f"{operator} {count}" for operator, count in dict(source.get("skipped", {})).items())
        if refused:
            lines.append(f"source {name}: {source.get('admitted')} admitted; skipped: {refused}")
    for name, stage in dict(status.get("stages", {})).items():
        lines.append(
            f"stage {name}: {stage['waiting']} wait, {stage['leased']} leased, {stage['done']} done by "
            f"{len(stage['workers'])} workers" + (f", {stage['lost']} lost" if stage["lost"] else "")
        )
    rounds = status.get("evaluation", {}).get("open", [])
    lines += [f"evaluation of version {r['version']}: {r['done']} of {r['of']} tasks" for r in rounds]
    return lines


def _clock(seconds: float | None) -> str:
    minutes, rest = divmod(int(seconds or 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"
