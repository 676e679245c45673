"""`astraflow run quickstart` as a user would start it; the trainer takes the GPU by itself."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from record import Facts, Place, run_part

from astraflow.config.env import child_environment


def part(place: Place) -> Facts:
    """A few steps; the law of accounting must hold and the reward must rise (not in a dry run)."""
    steps = 2 if place.dry else 60
    words = [f"--run.steps={steps}", "--evaluation.num_tasks=8"]
    if place.dry:
        words += [
            "--policies.actor.warm_start.steps=4", "--policies.actor.batch.groups=2", "--workflow.group_size=4",
            "--policies.actor.trainer.device=cpu",
        ]  # fmt: skip
    with tempfile.TemporaryDirectory() as root:
        done = subprocess.run(
            [sys.executable, "-m", "astraflow", "run", "quickstart", f"--run.directory={root}", *words],
            capture_output=True, text=True, timeout=150, env=child_environment(None),
        )  # fmt: skip
        (place.out / "quickstart.log").write_text(done.stdout + done.stderr)
        if done.returncode:
            return {"exit_code": done.returncode, "ok": False}
        (path,) = Path(root).glob("*/report/summary.json")
        summary = json.loads(path.read_text())
    count = summary["accounting"]
    kept = count["admitted"] == count["trained"] + sum(count["dropped"].values()) + count["in_flight"]
    rises = place.dry or summary["reward"]["best"] > summary["reward"]["start"]
    return {
        "exit_code": 0, "steps": summary["steps"], "wall_s": summary["wall_s"], "reward": summary["reward"],
        "tokens_per_s": summary["tokens_per_s"], "logprob_gap": summary["logprob_gap"],
        "ok": kept and rises and summary["steps"] == steps,
    }  # fmt: skip


if __name__ == "__main__":
    run_part("quickstart", part)
