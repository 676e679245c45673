"""Where does running apart pay, when does latency hurt, and when does it cost more than it gains?

| part    | answers                                                            | how                         |
|---------|--------------------------------------------------------------------|-----------------------------|
| check   | how far is `astraflow simulate` from real runs                     | six real runs               |
| latency | round trips of 0 to 300 ms, batches of 1 to 64 groups              | real runs and the simulator |
| sweep   | ratio of rollout to training, tails, staleness, number of policies | the simulator               |
| sizes   | bytes and seconds of weights against a step of 1.7B, 8B and 70B    | arithmetic, the simulator   |

    python -m benchmarks.bench_scaling [--parts check,latency,sweep,sizes] [--rtts-ms 0,50,300] [--steps 28]

check and latency take about eleven minutes on two cores without other work, the others one. It writes the tables of
docs/scaling.md. Rows of parts that are left out stay as they were in `results/scaling.json`.
Real runs that are in `--place` already are not played again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, Check, Result
from benchmarks.scaling import check, latency, sizes, sweeps
from benchmarks.scaling.tables import filled, tables

PARTS = ("check", "latency", "sweep", "sizes")
MOST_ERROR = 0.25
DOCS = Path(__file__).parents[1] / "docs" / "scaling.md"


def main() -> None:
    """Measure and write `results/scaling.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--steps", type=int, default=28, help="of a run of `check`")
    parser.add_argument("--latency-steps", type=int, default=10, help="of a run of `latency`")
    parser.add_argument("--rtts-ms", default="0,10,50,150,300", help="round trips that are measured, 0 first")
    parser.add_argument("--place", type=Path, help="where runs are kept; default: a directory that is removed")
    args = parser.parse_args()
    parts = args.parts.split(",")
    if unknown := set(parts) - set(PARTS):
        parser.error(f"parts={','.join(sorted(unknown))} are not known; use {','.join(PARTS)}")
    rtts_ms = [int(word) for word in args.rtts_ms.split(",")]
    if rtts_ms[:1] != [0] or set(rtts_ms) - set(latency.RTTS_MS):
        parser.error(f"rtts-ms={args.rtts_ms} must begin with 0 and be of {latency.RTTS_MS}")
    rows = [row for row in _known() if row["part"] not in parts]
    with tempfile.TemporaryDirectory(prefix="bench-scaling-") as place:
        for row in _measured(parts, (args.place or Path(place)), args.steps, args.latency_steps, rtts_ms):
            rows.append(row)
            print(" ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    rows.sort(key=lambda row: PARTS.index(row["part"]))
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    result = Result("scaling", settings, rows, _checks(rows))
    print("", *tables(rows).values(), "", sep="\n\n")
    Result("scaling", {}, [], result.checks).show()
    print(f"wrote {result.write()}")
    DOCS.write_text(filled(DOCS.read_text(), rows))
    print(f"wrote the tables of {DOCS}")


def _measured(
    parts: list[str], place: Path, steps: int, latency_steps: int, rtts_ms: list[int]
) -> Iterator[dict[str, Any]]:
    place.mkdir(parents=True, exist_ok=True)
    if "check" in parts:
        yield from check.rows(place, steps)
    if "latency" in parts:
        yield from latency.rows(place, rtts_ms, latency_steps)
    if "sweep" in parts:
        yield from sweeps.rows()
    if "sizes" in parts:
        yield from sizes.rows()


def _known() -> list[dict[str, Any]]:
    path = RESULTS / "scaling.json"
    return list(json.loads(path.read_text())["rows"]) if path.exists() else []


def _checks(rows: list[dict[str, Any]]) -> list[Check]:
    """Of runs that the costs were not fitted on, and of latency beyond 0."""
    own = [abs(row["error"]) for row in rows if row["part"] == "check" and row["run"] != row["fitted_on"]]
    far = [abs(row["error"]) for row in rows if row["part"] == "latency" and row["error"] is not None and row["rtt_ms"]]
    return [
        Check.at_most("seconds per step, simulated over real: largest error of the checked runs",
                      max(own, default=None), MOST_ERROR),
        Check.at_most("the same behind a link of 10 to 300 ms", max(far, default=None), MOST_ERROR),
    ]  # fmt: skip


if __name__ == "__main__":
    main()
