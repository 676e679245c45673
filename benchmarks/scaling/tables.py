"""Rows of `results/scaling.json` as the tables of docs/scaling.md."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.scaling.latency import RTTS_MS
from benchmarks.scaling.sweeps import POLICIES, RATIOS, STALENESS, TAILS

Rows = Sequence[Mapping[str, Any]]


def tables(rows: Rows) -> Iterator[str]:
    """Each part that has rows, in Markdown."""
    parts = {part: [row for row in rows if row["part"] == part] for part in ("check", "latency", "sweep", "sizes")}
    if parts["check"]:
        yield _check(parts["check"])
    if parts["latency"]:
        yield _latency(parts["latency"])
    if parts["sweep"]:
        yield from _sweeps(parts["sweep"])
    if parts["sizes"]:
        yield _sizes(parts["sizes"])


def _check(rows: Rows) -> str:
    head = ["run", "policy", "s per step: real", "simulated", "error", "trainer idle", "node idle", "staleness"]
    return _table(head, [
        [
            f"{row['run']} (fitted)" if row["run"] == row["fitted_on"] else row["run"], row["policy"],
            row["s_per_step"], row["simulated"], f"{row['error']:+.0%}",
            f"{row['trainer_idle']:.0%}, {row['simulated_trainer_idle']:.0%}",
            f"{row['node_idle']:.0%}, {row['simulated_node_idle']:.0%}",
            f"{row['staleness']:.2f}, {row['simulated_staleness']:.2f}",
        ]
        for row in rows
    ])  # fmt: skip


def _latency(rows: Rows) -> str:
    by = {(row["groups"], row["rtt_ms"]): row for row in rows}
    lines = []
    for groups in dict.fromkeys(row["groups"] for row in rows):
        cells = [_cell(by[groups, rtt_ms]) for rtt_ms in RTTS_MS]
        last = by[groups, RTTS_MS[-1]]
        lines.append([groups, *cells, f"{last['simulated_staleness_4']:.2f}"])
    head = ["groups a batch", *(f"{rtt_ms} ms" for rtt_ms in RTTS_MS), f"{RTTS_MS[-1]} ms, max_staleness 4"]
    return _table(head, lines)


def _cell(row: Mapping[str, Any]) -> str:
    said = f"{row['simulated']:.2f}"
    return said if row["s_per_step"] is None else f"**{row['s_per_step']:.2f}**, {said}"


def _sweeps(rows: Rows) -> Iterator[str]:
    of = {name: [row for row in rows if row["table"] == name] for name in ("ratio", "staleness", "policies")}
    ratios = [[row["tail"], row["rollout_s"], *(row[f"x{ratio:g}"] for ratio in RATIOS)] for row in of["ratio"]]
    yield _table(["sigma", "rollout, s", *(f"{ratio:g}" for ratio in RATIOS)], ratios)
    staleness = [[row["tail"], *(row[f"s{s}"] for s in STALENESS)] for row in of["staleness"]]
    yield _table(["sigma", *map(str, STALENESS)], staleness)
    by_tail = {spread: [row[f"t{spread:g}"] for row in of["policies"]] for spread in TAILS}
    yield _table(["sigma", *map(str, POLICIES)], [[spread, *cells] for spread, cells in by_tail.items()])


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
