"""Many steps of large rollouts through a real service: memory, open files and disk of the service must stay flat.

python -m astraflow.testing.faults.soak [STEPS] [MEGABYTES]: a table, and 1 when something grows.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from astraflow.config.env import child_environment
from astraflow.config.load import check_run, resolved_json
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import LaunchError
from astraflow.launch.rundir import read_ready
from astraflow.testing.runs import astraflow_command, wait_until
from astraflow.types import Episode, EpisodeLease, Trajectory
from astraflow.wire.messages import Join, Resume

GROUPS, SIBLINGS, COVER_EVERY = 2, 2, 5
_BYTES_PER_TOKEN = 4 + 1 + 4 + 4 + 2
GROWTH = {"memory_mb": 40.0, "files": 4, "disk_mb": 80.0, "log_mb": 24.0}
"""How much more the second half may take than the first, at its peak. A segment is up to 64 MB, and memory settles."""


class Sample(NamedTuple):
    """What the service takes at one moment."""

    memory_mb: float  # of the process, without pages of files that are mapped
    files: int  # open
    disk_mb: float  # segments
    log_mb: float  # journal, snapshots, histories


class Soak(NamedTuple):
    """Peaks of the two halves of a run, and what grew more than it may."""

    first: Sample
    second: Sample
    grown: list[str]


def soak(directory: Path, steps: int, megabytes: float, tell: Callable[[int, Sample], None] | None = None) -> Soak:
    """Run `steps` steps of 4 rollouts of so many MB against a service process in `directory`."""
    config = check_run(
        {
            "run": {"name": "soak", "directory": str(directory), "steps": steps, "checkpoint_every": COVER_EVERY},
            "sources": {"train": {"type": "sums", "size": 1000}},
            "workflow": {"type": "single_turn", "reward": "exact", "group_size": SIBLINGS},
            "policies": {"actor": {"model": "tiny-char", "batch": {"groups": GROUPS}, "operators": ["keep_all"]}},
            "dataflow": {"snapshot_every": 100},
        },
        "soak",
    )
    place = directory / "soak"
    place.mkdir(parents=True)
    (place / "run.resolved.json").write_text(resolved_json(config))
    command = astraflow_command("dataflow", str(place / "run.resolved.json"), "--run-dir", str(place), "--resume")
    with (place / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=child_environment(None)
        )
    try:
        ready = place / "dataflow" / "ready.json"
        wait_until(lambda: read_ready(ready, process.pid) is not None, "the service to answer", 60.0)
        samples = _play(
            DataflowClient(read_ready(ready, process.pid) or ""), process.pid, place, steps, megabytes, tell
        )
    finally:
        process.terminate()
        process.wait(30.0)
    half = len(samples) // 2
    first, second = (Sample(*map(max, zip(*part, strict=True))) for part in (samples[:half], samples[half:]))
    grown = [
        f"{name}: {field_of(second, name):.1f} after {field_of(first, name):.1f}, may grow by {limit}"
        for name, limit in GROWTH.items()
        if field_of(second, name) > field_of(first, name) + limit
    ]
    return Soak(first, second, grown)


def field_of(sample: Sample, name: str) -> float:
    """A field by name."""
    return float(sample._asdict()[name])


def _play(
    client: DataflowClient, pid: int, place: Path, steps: int, megabytes: float,
    tell: Callable[[int, Sample], None] | None,
) -> list[Sample]:  # fmt: skip
    """Node and trainer in one, in turns; a sample after each step."""
    run_id = client.run().run_id
    client.join(Join(node_id="n", name="n", capacity=8, run_id=run_id))
    client.resume("actor", Resume(trainer_id="t", version=0, urls=(), run_id=run_id))
    size, samples = int(megabytes * 2**20 / _BYTES_PER_TOKEN), []
    for version in range(steps):
        leases = client.lease("n", GROUPS * SIBLINGS, wait_s=10.0).leases
        client.commit([_rollout(x, version, size) for x in leases])
        got = client.batch("actor", "t", version, wait_s=10.0)
        if got is None:
            raise LaunchError("soak", f"step {version + 1}", "got no batch in 10 s", "see the log of the service")
        client.ack(got[0], "t")
        if got[0].step % COVER_EVERY == 0:
            client.checkpoint("actor", "t", got[0].step)
        del got
        samples.append(_sample(pid, place))
        if tell is not None and version % max(1, steps // 10) == 0:
            tell(version + 1, samples[-1])
    client.close()
    return samples


def _rollout(lease: EpisodeLease, version: int, size: int) -> Episode:
    mask = np.ones(size, np.bool_)
    mask[0] = False
    row = Trajectory(
        policy="actor",
        branch=0,
        parent_branch=-1,
        fork_at=0,
        token_ids=np.arange(size, dtype=np.int32),
        loss_mask=mask,
        behavior_logprobs=np.where(mask, np.float32(-1), np.float32(0)),
        versions=np.where(mask, np.int32(version), np.int32(-1)),
        call_index=np.where(mask, np.int16(0), np.int16(-1)),
        reward=float(int(lease.episode_id[-1]) % 2),
    )
    return Episode(episode_id=lease.episode_id, attempt=lease.attempt, node_id="n", task=lease.task, trajectories=[row])


def _sample(pid: int, place: Path) -> Sample:
    """Of a process on Linux."""
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line)
    memory = int(status["RssAnon"].split()[0]) / 1024
    files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
    sizes = {path: _size(path) for path in (place / "dataflow").rglob("*") if path.is_file()}
    segments = sum(size for path, size in sizes.items() if path.parent.name in ("segments", "inbox"))
    return Sample(memory, files, segments / 2**20, (sum(sizes.values()) - segments) / 2**20)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # it was deleted just now
        return 0


def main(steps: int = 300, megabytes: float = 1.0) -> int:
    """0: everything stayed flat."""
    place = Path(tempfile.mkdtemp(prefix="astraflow-soak-"))
    head = "  ".join(f"{name:>9}" for name in Sample._fields)

    def tell(step: int, sample: Sample) -> None:
        sys.stdout.write(f"{step:>8}  " + "  ".join(f"{value:>9.1f}" for value in sample) + "\n")
        sys.stdout.flush()

    sys.stdout.write(f"{'step':>8}  {head}\n")
    try:
        result = soak(place, steps, megabytes, tell)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    for name, sample in (("1st half", result.first), ("2nd half", result.second)):
        sys.stdout.write(f"{name}  " + "  ".join(f"{value:>9.1f}" for value in sample) + "\n")
    sys.stdout.write("\n".join(result.grown or ["flat"]) + "\n")
    return int(bool(result.grown))


if __name__ == "__main__":
    sys.exit(main(*(int(word) for word in sys.argv[1:2]), *(float(word) for word in sys.argv[2:3])))
