"""Does a team end above one policy that samples as much? Coder and tester against a coder that votes, code with tests.

Both sides are run files of examples/teams on the same tasks, with the same settings and as many steps; the coder begins
from the same weights. The team writes code again, up to six times, while it fails the test that the tester wrote; the
policy alone answers with the one of five codes that it wrote most often. What counts is the share of held-out functions
that the final code gets right, by tests that neither sees. Sampled tokens are those of all policies.

    python -m benchmarks.bench_collaboration [--seeds 0,1,2] [--place DIR]

With --place the runs stay there, and one that has ended is not run again.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from astraflow.testing.runs import LaunchedRun
from benchmarks.harness import Check, Result

TEAMS = Path(__file__).parents[1] / "examples" / "teams"
SIDES = {"team": "by_example", "alone": "by_example_alone"}
"""Side -> run file."""
MAX_RUN_S = 1800.0


def main() -> None:
    """Measure and write `results/collaboration.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--place", type=Path, help="where the runs are kept")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-collaboration-") as scratch:
        for seed in map(int, args.seeds.split(",")):
            for side in SIDES:
                rows.append(row(_run(args.place or Path(scratch), side, seed), side, seed))
                print(" ".join(f"{k}={v}" for k, v in rows[-1].items() if k != "curve"), flush=True)
    result = Result("collaboration", {"seeds": args.seeds, "files": SIDES}, rows, checks(rows))
    result.show()
    print(f"wrote {result.write()}\n\n{markdown(rows)}")


def _run(place: Path, side: str, seed: int) -> list[dict[str, Any]]:
    """The metrics of a whole run."""
    name = f"{SIDES[side]}-{seed}"
    file = place / name / "metrics.jsonl"
    if not (place / name / "report" / "summary.json").exists():
        words = (f"--run.seed={seed}",)
        run = LaunchedRun.start(
            place, str(TEAMS / f"{SIDES[side]}.toml"), *words, name=name, environment={"PYTHONPATH": str(TEAMS)}
        )
        if run.wait(MAX_RUN_S):
            raise SystemExit(f"{side}, seed {seed}: the run failed:\n{run.words()}")
    return [json.loads(line) for line in file.read_text().splitlines()]


def row(metrics: Sequence[dict[str, Any]], side: str, seed: int) -> dict[str, Any]:
    """What one run shows. `curve`: step -> held-out success and tokens sampled for training until then."""
    steps = [m for m in metrics if m["kind"] == "step"]
    rounds = sorted((m for m in metrics if m["kind"] == "eval"), key=lambda m: m["step"])
    curve = {m["step"]: {"success": m["eval/success"], "tokens": sampled(steps, m["step"])} for m in rounds}
    coder = [step for step in steps if step["policy"] == "coder"]
    episodes = sum(step["batch/episodes"] for step in coder)
    last = list(curve.values())[-1]
    return {
        "side": side, "seed": seed, "start": rounds[0]["eval/success"], "end": last["success"],
        "tokens": int(last["tokens"]), "tokens_per_task": sum(step["tokens/sampled"] for step in steps) / episodes,
        "trained": int(sum(step["batch/groups"] for step in coder)), "dropped": int(coder[-1]["groups/dropped"]),
        "curve": curve,
    }  # fmt: skip


def sampled(steps: Sequence[dict[str, Any]], until: int) -> float:
    """Tokens sampled for training up to a step, by all policies. Dropped groups count as long as those of that step."""
    tokens = 0.0
    for policy in {step["policy"] for step in steps}:
        dropped = 0.0
        for step in steps:
            if step["policy"] == policy and step["step"] <= until:
                groups = step["batch/groups"] + step["groups/dropped"] - dropped
                tokens += step["tokens/sampled"] * groups / step["batch/groups"]
                dropped = step["groups/dropped"]
    return tokens


def checks(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """The team ends higher with every seed, on no more tokens."""
    by_seed: dict[int, dict[str, dict[str, Any]]] = defaultdict(dict)
    for own in rows:
        by_seed[own["seed"]][own["side"]] = own
    both = [sides for sides in by_seed.values() if len(sides) == len(SIDES)]
    gain = min((s["team"]["end"] - s["alone"]["end"] for s in both), default=None)
    more = max((s["team"]["tokens"] / s["alone"]["tokens"] for s in both), default=None)
    return [
        Check.at_least("held-out success of the team over one policy, worst seed", gain, 0.01),
        Check.at_most("tokens sampled by the team against one policy, worst seed", more, 1.0, "x"),
    ]


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    """The curve and the table of docs/multi-policy.md."""
    at = list(rows[0]["curve"])
    lines = [
        "| side | seed | sampled tokens per task | " + " | ".join(f"step {step}" for step in at) + " |",
        "|---|---|---|" + "---|" * len(at),
    ]
    curves = []
    for side in SIDES:
        own = [r for r in rows if r["side"] == side]
        for r in own:
            lines.append(_line([side, r["seed"], f"{r['tokens_per_task']:.1f}"], [r["curve"][step] for step in at]))
        mean = [
            {key: statistics.mean(r["curve"][step][key] for r in own) for key in ("success", "tokens")} for step in at
        ]
        tokens = statistics.mean(r["tokens_per_task"] for r in own)
        lines.append(_line([side, "mean", f"{tokens:.1f}"], mean))
        curves.append("  line [" + ", ".join(f"{point['success']:.3f}" for point in mean) + "]")
    chart = ["```mermaid", "xychart-beta", f"  x-axis step {at}", "  y-axis success 0 --> 0.5", *curves, "```"]
    return "\n".join([*chart, "", *lines])


def _line(cells: list[Any], points: Sequence[dict[str, float]]) -> str:
    shown = [f"{point['success']:.3f} ({point['tokens'] / 1000:.0f}k)" for point in points]
    return f"| {' | '.join(map(str, [*cells, *shown]))} |"


if __name__ == "__main__":
    main()
