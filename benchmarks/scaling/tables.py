"""Rows of `results/scaling.json` as the tables of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.scaling.check import RUNS
from benchmarks.scaling.latency import GROUPS, RTTS_MS
from benchmarks.scaling.sweeps import POLICIES, RATIOS, STALENESS, TAILS

Rows = Sequence[Mapping[str, Any]]
BUSY = 8.0  # load average before a run above which two cores had other work; the run before leaves up to 7


def tables(rows: Rows) -> dict[str, str]:
    """Name -> Markdown, of each part that has rows."""
    parts = {part: [row for row in rows if row["part"] == part] for part in ("check", "latency", "sweep", "sizes")}
    found = {}
    if parts["check"]:
        found["check"] = _check(parts["check"])
    if parts["latency"]:
        found["latency"] = _latency(parts["latency"])
    if parts["sweep"]:
        found |= _sweeps(parts["sweep"])
    if parts["sizes"]:
        found["sizes"] = _sizes(parts["sizes"])
    return found


def filled(page: str, rows: Rows) -> str:
    """A page with the table of each name between `<!-- name -->` and `<!-- end -->`."""
    for name, text in tables(rows).items():
        mark = f"<!-- {name} -->"
        before, found, after = page.partition(mark)
        if found:
            _, end, rest = after.partition("<!-- end -->")
            page = f"{before}{mark}\n{text}\n{end}{rest}"
    return page


def _check(rows: Rows) -> str:
    head = ["run", "policy", "s per step: real", "simulated", "error", "trainer idle", "node idle", "staleness"]
    table = _table(head, [
        [
            f"{row['run']} (fitted)" if row["run"] == row["fitted_on"] else row["run"], row["policy"],
            row["s_per_step"], row["simulated"], f"{row['error']:+.0%}",
            f"{row['trainer_idle']:.0%}, {row['simulated_trainer_idle']:.0%}",
            f"{row['node_idle']:.0%}, {row['simulated_node_idle']:.0%}",
            f"{row['staleness']:.2f}, {row['simulated_staleness']:.2f}",
        ]
        for row in rows
    ])  # fmt: skip
    return table + _note(rows, "run", RUNS)


def _latency(rows: Rows) -> str:
    by = {(row["groups"], row["rtt_ms"]): row for row in rows}
    lines = []
    for groups in dict.fromkeys(row["groups"] for row in rows):
        cells = [_cell(by[groups, rtt_ms]) for rtt_ms in RTTS_MS]
        last = by[groups, RTTS_MS[-1]]
        lines.append([groups, *cells, f"{last['simulated_staleness_4']:.2f}"])
    head = ["groups a batch", *(f"{rtt_ms} ms" for rtt_ms in RTTS_MS), f"{RTTS_MS[-1]} ms, max_staleness 4"]
    return _table(head, lines) + _note(rows, "groups", GROUPS)


def _note(rows: Rows, column: str, wanted: Iterable[Any]) -> str:
    """What a reader must know of how the rows came to be: other work beside them, and which are not there yet."""
    lacking = [str(value) for value in wanted if value not in {row[column] for row in rows}]
    loads = [row["load"] for row in rows if row["load"] is not None]
    said = []
    if loads and max(loads) > BUSY:
        span = " to ".join(dict.fromkeys(f"{load:.0f}" for load in (min(loads), max(loads))))
        said.append(f"Seen beside other work: load {span} on two cores.")
    if lacking:
        said.append(f"Yet to be measured, {column}: {', '.join(lacking)}.")
    return f"\n\n({' '.join(said)})" if said else ""


def _cell(row: Mapping[str, Any]) -> str:
    said = f"{row['simulated']:.2f}"
    return said if row["s_per_step"] is None else f"**{row['s_per_step']:.2f}**, {said}"


def _sweeps(rows: Rows) -> dict[str, str]:
    of = {name: [row for row in rows if row["table"] == name] for name in ("ratio", "staleness", "policies")}
    ratios = [[row["tail"], row["rollout_s"], *(row[f"x{ratio:g}"] for ratio in RATIOS)] for row in of["ratio"]]
    staleness = [[row["tail"], *(row[f"s{s}"] for s in STALENESS)] for row in of["staleness"]]
    by_tail = [[spread, *(row[f"t{spread:g}"] for row in of["policies"])] for spread in TAILS]
    return {
        "ratio": _table(["sigma", "rollout, s", *(f"ratio {ratio:g}" for ratio in RATIOS)], ratios),
        "staleness": _table(["sigma", *(f"max_staleness {s}" for s in STALENESS)], staleness),
        "policies": _table(["sigma", "1 policy", *(f"{count} policies" for count in POLICIES[1:])], by_tail),
    }


def _sizes(rows: Rows) -> str:
    head = ["model", "nodes, GPUs", "train, s", "barrier, s", "ours, free", "Mbit/s", "ours, deltas", "over a relay",
            "whole versions", "bytes, messages a step"]  # fmt: skip
    return _table(head, [
        [
            row["model"], f"{row['nodes']}, {row['gpus']}", row["train_s"], row["barrier_s"], row["free_s"],
            f"{row['mbit']:,}", row["ours_s"], row["ours_relay_s"], f"{row['ours_full_s']:,.0f}",
            f"{row['mb_per_step'] / 1e3:.1f} GB, {row['messages_per_step']:,}",
        ]
        for row in rows
    ])  # fmt: skip


def _table(head: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)
