"""How long until two policies that learn together are at the same reward: a synchronous, trainer-centred loop, ours
synchronous, ours asynchronous; and one policy alone beside TRL.

Episodes have long-tailed lengths (log-normal decode lengths and tool delays). Times are those of a modelled machine of
16 GPUs with two 8B models (`multi_policy/hardware.py` states every number), since two cores would be the bottleneck of
everything else: tokens are sampled and gradients made by tiny models, the services are the real ones. Beside it the
same with nothing modelled but the tools ("real"). All sides of a seed begin from equal weights. What counts is when the
weights are at the target: those of each step are evaluated after the clock has stopped, alike for all sides, and are
there when the mean of five is at it for both policies (`steps`, `t_s`). Beside it the same by the rewards of the
batches that were trained (`steps_trained`, `t_trained_s`), which were sampled by earlier weights: one step earlier in
the loop, up to `max_staleness + 1` in ours.

    python -m benchmarks.bench_multi_policy [--seeds 0,1,2] [--peers .venv-peers/bin/python] [--quick] [--parts a,b]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from astraflow.config.env import child_environment
from benchmarks import sides as single
from benchmarks.harness import Check, Result
from benchmarks.multi_policy import hardware
from benchmarks.multi_policy.ours import Limits, run_ours
from benchmarks.multi_policy.sides import ROLLOUT_GPUS, TOP, warm_start

MIN_SPEEDUP, MIN_OVER_TRL = 2.7, 1.3
TARGET = 0.8
STALENESS = 3
SHORT_S = 20.0  # of runs of which only the time of a step counts
SINGLE_S = 60.0  # limit of each run of one policy
PARTS = ("modelled", "synchronous", "breakdown", "real", "trl")
ONCE = ("breakdown", "real")  # with the first seed alone


@dataclass(frozen=True)
class Work:
    """What one seed shares."""

    seed: int
    folder: Path
    start: Path
    limits: Limits


def main() -> None:
    """Measure and write `results/multi_policy.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--seconds", type=float, default=180.0, help="limit of each run")
    parser.add_argument("--until", type=float, default=TARGET, help="reward of each policy")
    parser.add_argument("--peers", type=Path, default=Path(".venv-peers/bin/python"), help="Python that has TRL")
    parser.add_argument("--parts", default=",".join(PARTS), help="which to measure")
    parser.add_argument("--starts", type=Path, default=None, help="keep start weights in this folder for another time")
    parser.add_argument("--quick", action="store_true", help="two minutes: one seed, few steps, writes no result")
    args = parser.parse_args()
    if args.quick:
        args.seeds, args.seconds, args.until, args.parts = "0", 20.0, 1.0, "modelled"
    parts = args.parts.split(",")
    if "trl" in parts and not args.peers.exists():
        print(f"peers={args.peers} does not exist: TRL is not measured; run `make bench-peers`", flush=True)
        parts.remove("trl")
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="bench-multi-policy-") as place:
        seeds = [int(seed) for seed in args.seeds.split(",")]
        for seed in seeds:
            folder = Path(place) / str(seed)
            start = (args.starts.resolve() if args.starts else Path(place)) / f"start-{seed}"
            work = Work(seed, folder, warm_start(start, seed), Limits(args.until, args.seconds))
            _measure(work, parts if seed == seeds[0] else [p for p in parts if p not in ONCE], rows)
        if "trl" in parts:
            _single(Path(place), args, rows)
    rows += gains(rows)
    result = Result("multi_policy", _settings(args), rows, checks(rows, args.seconds))
    Result("multi_policy", {}, _without_curves(rows), result.checks).show()
    if not args.quick:
        print(f"wrote {result.write()}")


def _measure(work: Work, parts: Sequence[str], rows: list[dict[str, Any]]) -> None:
    if "modelled" in parts:
        _note(rows, work, "modelled", "loop, shared", _loop(work, "shared"))
        _note(rows, work, "modelled", "ours", _ours(work, STALENESS))
    if "synchronous" in parts:
        _note(rows, work, "modelled", "ours, max_staleness 0", _ours(work, 0))
    if "breakdown" in parts:
        short = replace(work, limits=Limits(work.limits.until, min(SHORT_S, work.limits.seconds)))
        for form in ("split", "parallel", "overlap"):
            _note(rows, work, "modelled", f"loop, {form}", _loop(short, form))
        for staleness in (1, 2):
            _note(rows, work, "modelled", f"ours, max_staleness {staleness}", _ours(short, staleness))
    if "real" in parts:
        for threads in sorted({1, os.cpu_count() or 1}):
            _note(rows, work, "real", f"loop, threads {threads}", _loop(work, "split", threads))
        _note(rows, work, "real", "ours", _ours(work, STALENESS, real=True))


def gains(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What each difference between the loop and ours does to the time of a step, with the first seed."""
    pairs = (
        ("GPUs of their own for rollout and training", "loop, shared", "loop, split"),
        ("policies are trained at the same time", "loop, split", "loop, parallel"),
        ("the next rollout runs beside training", "loop, parallel", "loop, overlap"),
        ("nobody waits for the longest episodes", "loop, overlap", "ours"),
        ("all", "loop, shared", "ours"),
    )
    found = [(what, _step_ratio(rows, slow, fast)) for what, slow, fast in pairs]
    return [{"times": "gain", "side": what, "gain": gain} for what, gain in found if gain is not None]


def _step_ratio(rows: Sequence[dict[str, Any]], slow: str, fast: str = "ours") -> float | None:
    """Over the steps that both made, without the first: episodes get shorter as fewer answers are refused."""
    first = {row["side"]: row["curve"] for row in reversed(rows) if row["times"] == "modelled"}
    if slow not in first or fast not in first:
        return None
    steps = min(len(first[slow]), len(first[fast]))
    if steps < 2:
        return None
    taken = [first[side][steps - 1][0] - first[side][0][0] for side in (slow, fast)]
    return float(taken[0] / taken[1])


def _ours(work: Work, staleness: int, real: bool = False) -> Callable[[], dict[str, Any]]:
    return lambda: run_ours(work.folder, work.start, work.seed, staleness, work.limits, real)


def _loop(work: Work, form: str, real_threads: int = 0) -> Callable[[], dict[str, Any]]:
    """`real_threads` 0: modelled."""

    def measure() -> dict[str, Any]:
        command = [
            sys.executable, "-m", "benchmarks.multi_policy.loop", f"--form={form}", f"--start={work.start}",
            f"--seed={work.seed}", f"--seconds={work.limits.seconds}", f"--until={work.limits.until}",
            f"--threads={max(1, real_threads)}", *(["--real"] if real_threads else []),
        ]  # fmt: skip
        threads = {"OMP_NUM_THREADS": str(max(1, real_threads))}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=TOP, env=child_environment(None, threads),
            timeout=work.limits.seconds + 300.0,
        )  # fmt: skip
        if done.returncode:
            raise SystemExit(f"the loop ended with exit code {done.returncode}:\n{done.stderr[-3000:]}")
        row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return row

    return measure


def _note(rows: list[dict[str, Any]], work: Work, times: str, side: str, measure: Callable[[], dict[str, Any]]) -> None:
    row = {"times": times, "side": side, "seed": work.seed, **measure()}
    rows.append(row)
    print(" ".join(f"{key}={_short(value)}" for key, value in row.items() if key != "curve"), flush=True)


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _single(place: Path, args: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """One policy: our calculator run and TRL's GRPOTrainer, as in bench_loop, TRL with its better number of threads."""
    problems = single.write_problems(place)
    for seed in map(int, args.seeds.split(",")):
        settings = single.Settings(seed, min(args.seconds, SINGLE_S), place / "single")
        ours, start = single.run_ours(settings)
        threads = os.cpu_count() or 1
        for row in (ours, single.run_other("trl", str(args.peers), settings, threads, start, problems)):
            rows.append({"times": "single", **row})
            print(" ".join(f"{key}={_short(value)}" for key, value in rows[-1].items()), flush=True)


def checks(rows: Sequence[dict[str, Any]], limit_s: float) -> list[Check]:
    """The bounds. What was not measured is not ok, but for TRL, which is left out."""
    found = [
        Check.at_least(
            "two policies: times as fast to the same reward as the synchronous loop on shared GPUs",
            _ratio(rows, "loop, shared", limit_s), MIN_SPEEDUP, "x",
        ),
        Check.at_least(
            "two policies: the same by the rewards of the batches that were trained",
            _ratio(rows, "loop, shared", limit_s, "t_trained_s"), MIN_SPEEDUP, "x",
        ),
        Check.at_least(
            "two policies: a step, times as fast as the synchronous loop with as many GPUs for each part",
            _step_ratio(rows, "loop, split"), MIN_SPEEDUP, "x",
        ),
    ]  # fmt: skip
    if trl := [row for row in rows if row["times"] == "single"]:
        ratio = single.speedup(trl, "astraflow", "trl", min(limit_s, SINGLE_S))
        found.append(Check.at_least("one policy: times as fast to reward 0.5 as TRL", ratio, MIN_OVER_TRL, "x"))
    return found


def _ratio(rows: Sequence[dict[str, Any]], side: str, limit_s: float, time: str = "t_s") -> float | None:
    """Geometric mean over seeds of the side's time over ours. A side counts with the limit where it did not arrive;
    ours must."""
    slow, fast = (
        {row["seed"]: row[time] for row in rows if (row["times"], row["side"]) == ("modelled", name)}
        for name in (side, "ours")
    )
    seeds = slow.keys() & fast.keys()
    if not seeds or None in fast.values():
        return None
    return statistics.geometric_mean((slow[seed] or limit_s) / fast[seed] for seed in seeds)


def _without_curves(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in row.items() if key != "curve"} for row in rows]


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    words = {name: value for name, value in vars(args).items() if name not in ("peers", "starts")}
    return {
        **words, "scale": hardware.SCALE, "gpus": hardware.GPUS,
        "rollout_gpus": ROLLOUT_GPUS, "max_staleness": STALENESS, "call_tokens": asdict(hardware.CALL_TOKENS),
        "tool_s": asdict(hardware.TOOL_S), "decoding": asdict(hardware.Decoding()),
        "train_gpu_s_per_token": hardware.TRAIN_GPU_S_PER_TOKEN,
    }  # fmt: skip


if __name__ == "__main__":
    main()
