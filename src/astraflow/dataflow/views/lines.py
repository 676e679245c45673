"""Events as one short line for the log; everything else of them is in metrics.jsonl and /status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from astraflow.dataflow.machine.commands import Event

_STEP = {
    "reward": "reward/mean",
    "success": "success/mean",
    "staleness": "staleness/mean",
    "dropped": "groups/dropped",
    "in_flight": "groups/in_flight",
    "queue": "queue/groups",
}
_EVAL = {"success": "eval/success", "reward": "eval/reward", "tasks": "eval/num_tasks", "wall_s": "eval/wall_s"}


def line_of(event: Event) -> str:
    """`<kind> <name>=<value> ...`"""
    fields = event.fields
    match event.kind:
        case "step":
            shown = {"policy": fields["policy"], "step": fields["step"], **_picked(fields, _STEP)}
        case "eval":
            shown = {"version": fields["version"], **_picked(fields, _EVAL)}
        case _:
            shown = dict(fields)
    return " ".join([event.kind, *(f"{name}={_text(value)}" for name, value in shown.items())])


def _picked(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {short: fields[name] for short, name in names.items() if name in fields}


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
