"""What does a slow link between trainer and nodes cost, with full versions, with deltas, with a relay beside the nodes?

Trainer and data service in region A, two nodes in region B; every byte between them passes the project's own shaper
(100 Mbit/s in each direction, 75 ms one way, so 150 ms there and back). One mode after the other on one machine:

| mode          | how a version travels                                                                   |
|---------------|-----------------------------------------------------------------------------------------|
| full          | each node fetches all tensors (`weights.deltas = false`)                                |
| delta         | each node fetches the changes since the version that it has                             |
| delta + relay | a relay in region B fetches the changes once, the nodes fetch from it                   |

    python -m benchmarks.bench_regions [--model smollm2|tiny] [--modes full,delta,delta+relay] [--steps 6]

Figures are per step after the first one (the start, when each node fetches a whole version, is told apart). Both models
are trained in bfloat16, so published weights are bfloat16 and a step changes a part of them.
"""

from __future__ import annotations

import argparse
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from astraflow.config.load import check_run
from astraflow.config.recipes import recipe_path
from astraflow.config.schema import RunConfig
from astraflow.observe.summary import staleness_counts
from astraflow.testing.network.pacing import Conditions
from astraflow.testing.network.regions import Outcome, Region, TwoRegions
from benchmarks.harness import Check, Result

MODES = ("full", "delta", "delta+relay")
NODE_IDLE = "nodes/idle_fraction"
RECIPES = {"smollm2": "smollm2-arithmetic", "tiny": "quickstart"}


def main() -> None:
    """Measure and write `results/regions.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(RECIPES), default="smollm2")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lr", type=float, default=5e-6)
    parser.add_argument("--mbit", type=float, default=100.0, help="of each direction")
    parser.add_argument("--delay-ms", type=float, default=75.0, help="one way")
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--limit-s", type=float, default=1200.0, help="of one mode")
    parser.add_argument("--place", type=Path, help="where runs are kept; default: a directory that is removed")
    args = parser.parse_args()
    link = Conditions(args.mbit * 1e6, args.delay_ms / 1e3)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-regions-") as place:
        for mode in args.modes.split(","):
            config = config_of(args.model, args.steps, args.lr, deltas=mode.startswith("delta"))
            region = Region(args.nodes, concurrency=16, relay=mode.endswith("relay"))
            run = TwoRegions(config, (args.place or Path(place)) / mode, link, region)
            rows.append(row_of(mode, run.run(args.limit_s)))
            print(" ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    result = Result("regions", settings, rows, _checks(rows))
    result.show()
    print(f"wrote {result.write()}")


def config_of(model: str, steps: int, lr: float, *, deltas: bool) -> RunConfig:
    """The shipped recipe with small batches, without its evaluation."""
    path = recipe_path(RECIPES[model])
    raw = tomllib.loads(path.read_text())
    raw.pop("evaluation")
    raw["run"] |= {"steps": steps, "checkpoint_every": 1000}
    raw["weights"] = {"deltas": deltas}
    raw["workflow"]["group_size"] = 4
    policy = raw["policies"]["actor"]
    policy["batch"] |= {"groups": 4, "max_staleness": 1}
    policy["optimizer"]["lr"] = lr
    policy["operators"] = ["keep_all"]
    policy["trainer"] = {"dtype": "bfloat16", "audit_trajectories": 0, "threads": 2 if model == "smollm2" else 1}
    if model == "tiny":
        policy["warm_start"]["steps"] = 20
    else:
        policy["sampling"]["max_tokens"] = 16
    return check_run(raw, RECIPES[model])


def row_of(mode: str, outcome: Outcome) -> dict[str, Any]:
    """The figures of one run, per step from the first row to the last."""
    first, last = outcome.passed[1], outcome.passed[-1]
    count = last.step - first.step
    rows = outcome.steps[1:]
    down = last.weights.minus(first.weights).down
    data = last.data.minus(first.data)
    waited, busy = (sum(row[f"perf/{name}_s"] for row in rows) for name in ("wait", "busy"))
    spans = [b["time_s"] - a["time_s"] for a, b in zip(outcome.steps, rows, strict=False)]
    idle = [(row[NODE_IDLE], span) for row, span in zip(rows, spans, strict=True) if NODE_IDLE in row]
    dropped = [sum(n for key, n in row.items() if key.startswith("groups/dropped/")) for row in outcome.steps]
    stale = staleness_counts(rows)
    return {
        "mode": mode, "steps": count, "s_per_step": round((last.time_s - first.time_s) / count, 2),
        "weights_bytes_per_step": down // count, "data_bytes_per_step": (data.up + data.down) // count,
        "bytes_per_step": (down + data.up + data.down) // count,
        "trainer_idle": round(waited / (waited + busy), 3),
        "node_idle": round(sum(share * span for share, span in idle) / sum(span for _, span in idle), 3),
        "dropped_per_step": round((dropped[-1] - dropped[0]) / count, 2),
        "staleness_mean": round(sum(k * n for k, n in stale.items()) / sum(stale.values()), 3),
        "staleness": {str(k): n for k, n in stale.items()}, "staleness_counts": _histogram(stale),
        "start_s": round(first.time_s, 1), "start_weights_bytes": first.weights.down,
        "connections": last.weights.connections + last.data.connections,
    }  # fmt: skip


def _histogram(stale: dict[int, int]) -> str:
    return " ".join(f"{versions}:{count}" for versions, count in stale.items() if count)


def _checks(rows: list[dict[str, Any]]) -> list[Check]:
    by = {row["mode"]: row for row in rows}

    def ratio(mode: str, other: str, figure: str) -> float | None:
        if mode not in by or other not in by or not by[other][figure]:
            return None
        return round(by[mode][figure] / by[other][figure], 4)

    return [
        Check.at_most("weight bytes over the link: delta over full",
                      ratio("delta", "full", "weights_bytes_per_step"), 0.5, "x"),
        Check.at_most("weight bytes over the link: with a relay over without, two nodes",
                      ratio("delta+relay", "delta", "weights_bytes_per_step"), 0.6, "x"),
        Check.at_most("seconds per step: delta over full", ratio("delta", "full", "s_per_step"), 1.0, "x"),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
