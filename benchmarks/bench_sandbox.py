"""How many solutions a second does the sandbox judge, and do all references pass?

HumanEval's and MBPP's own solutions through the reward `code` in bubblewrap, as many at once as there are cores; beside
it, in the same run, an interpreter that starts in such a box and does nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from astraflow.rewards.code import Code
from astraflow.sandbox.calls import filter_file
from astraflow.sandbox.isolation import FIRST_UID, find_way
from astraflow.sources.code.humaneval import HumanEvalSource
from astraflow.sources.code.mbpp import MbppSource
from astraflow.types import Task
from benchmarks.harness import Check, Result

MIN_PER_S = 60.0
NUM_MBPP = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=8.0, help="at least so long is measured, of each")
    seconds = parser.parse_args().seconds
    cores = len(os.sched_getaffinity(0))
    result = Result("sandbox", {"cores": cores, "mbpp": NUM_MBPP, "seconds": seconds})
    mbpp = MbppSource(split="all", limit=NUM_MBPP)
    sets: dict[str, MbppSource | HumanEvalSource] = {"mbpp": mbpp, "humaneval": HumanEvalSource()}
    for name, source in sets.items():
        tasks = [Task(name, number, 0, source.row(number)) for number in range(len(source))]
        row = asyncio.run(_judged(name, tasks, cores, seconds))
        result.rows.append(row)
        result.checks.append(Check.at_least(f"{name}: references that pass", row["passed"], len(tasks)))
    result.rows.append({"what": "python in a box, nothing else", "per_s": _bare(cores, seconds)})
    result.checks.insert(0, Check.at_least("mbpp: executions per second", result.rows[0]["per_s"], MIN_PER_S, "1/s"))
    result.show()
    result.write()


async def _judged(name: str, tasks: list[Task], cores: int, seconds: float) -> dict[str, Any]:
    reward = Code(sandbox={"slots": cores})
    jobs = [reward.job(task["solution"], task) for task in tasks]
    sandbox = reward.sandbox
    await asyncio.gather(*(sandbox.run(job) for job in jobs[: 4 * cores]))  # drivers have started
    passed, num, walls, start = 0, 0, [], time.perf_counter()
    while not num or time.perf_counter() - start < seconds:
        verdicts = await asyncio.gather(*(sandbox.run(job) for job in jobs))
        passed = sum(verdict.outcome == "passed" for verdict in verdicts)
        walls += [verdict.wall_s * 1e3 for verdict in verdicts]
        num += len(jobs)
    took = time.perf_counter() - start
    walls.sort()
    return {
        "what": name, "tasks": len(tasks), "passed": passed, "per_s": num / took,
        "p50_ms": walls[len(walls) // 2], "p99_ms": walls[len(walls) * 99 // 100],
    }  # fmt: skip


def _bare(cores: int, seconds: float) -> float:
    way = find_way("bubblewrap", "")
    end = time.perf_counter() + seconds

    def lane(place: int) -> int:
        num = 0
        while time.perf_counter() < end:
            with filter_file() as calls:
                command = way.command(FIRST_UID + place, 1 << 20, calls, ["-c", "pass"])
                subprocess.run(command, stdin=subprocess.DEVNULL, check=True, pass_fds=(calls,))
            num += 1
        return num

    with ThreadPoolExecutor(cores) as pool:
        return sum(pool.map(lane, range(cores))) / seconds


if __name__ == "__main__":
    main()
