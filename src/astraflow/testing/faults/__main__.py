"""`python -m astraflow.testing.faults [RUNS] [KILLS] [NETWORK RUNS] [SWARMS]`: the drills of `make faults`."""

from __future__ import annotations

import logging
import sys
import tempfile
from pathlib import Path

from astraflow.testing.faults.drill import Result, kill_drill, network_drill
from astraflow.testing.faults.swarm.drill import swarm_drill
from astraflow.testing.faults.weight_drills import DRILLS, run

_COLUMNS = f"{'seed':>4} {'tasks':>5} {'trained':>7} {'restarts':>8} {'s':>5}  {'result':<6} dropped; faults\n"


def main(runs: int = 17, kills: int = 3, network: int = 6, swarms: int = 3) -> int:
    """0: every run was right."""
    with tempfile.TemporaryDirectory(prefix="astraflow-drill-") as place:
        parent = Path(place)
        sys.stdout.write(_COLUMNS)
        results = [_told(kill_drill(parent, parent / "cache", seed, kills)) for seed in range(runs)]
        results += [_told(network_drill(parent, parent / "cache", seed)) for seed in range(network)]
        results += [_told(swarm_drill(parent, parent / "cache", seed)) for seed in range(swarms)]
        wrong_weights = _weights(parent)
    wrong = sum(bool(result.problems) for result in results)
    num_tasks = sum(result.admitted for result in results)
    sys.stdout.write(
        f"{runs * kills} kills, {network} runs on a bad network, {swarms} swarms, {num_tasks} tasks: "
        f"{wrong} runs are wrong\n"
    )
    return int(wrong + wrong_weights > 0)


def _weights(parent: Path) -> int:
    """Drills of the weight plane that went wrong."""
    wrong = 0
    logging.getLogger("astraflow").setLevel(logging.ERROR)  # what readers warn of is what the drills do
    for drill in DRILLS:
        outcome = run(drill, parent / drill.__name__)
        wrong += bool(outcome.problems)
        state = "wrong" if outcome.problems else "ok"
        sys.stdout.write(f"{outcome.name:<48} {outcome.wall_s:>5.1f} s  {state:<6} {outcome.seen}\n")
        for problem in outcome.problems:
            sys.stdout.write(f"      {problem}\n")
        sys.stdout.flush()
    sys.stdout.write(f"{len(DRILLS)} drills of the weight plane: {wrong} are wrong\n")
    return wrong


def _told(result: Result) -> Result:
    dropped = " ".join(f"{reason}:{count}" for reason, count in sorted(result.dropped.items())) or "-"
    sys.stdout.write(
        f"{result.seed:>4} {result.admitted:>5} {result.trained:>7} {result.restarts:>8} {result.wall_s:>5.1f}  "
        f"{'wrong' if result.problems else 'ok':<6} {dropped}; {result.faults}\n"
    )
    for problem in result.problems[:10]:
        sys.stdout.write(f"      {problem}\n")
    sys.stdout.flush()
    return result


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
