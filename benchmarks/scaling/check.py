"""Is the simulator right? Costs from one real run, predictions of others with other settings, and the difference.

| run       | fitted on | differs from it by                                                                 |
|-----------|-----------|------------------------------------------------------------------------------------|
| source    | itself    | nothing: `astraflow run quickstart`, 32 groups a batch, max_staleness 1            |
| sync      | source    | max_staleness 0                                                                    |
| small     | source    | batches of 8 groups, max_staleness 3, 128 episodes at once                         |
| two-nodes | source    | a fast node of 384 and a slow one of 128 places, whose calls take 50 ms longer     |
| team      | itself    | nothing: examples/teams/verifier.toml, two policies of other paces and staleness   |
| team-sync | team      | max_staleness 0 for both, 128 episodes at once                                     |

Runs of a pair stand beside each other, since a machine with other work changes from minute to minute.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from astraflow.config.env import child_environment
from astraflow.config.load import load_run, resolved_json
from astraflow.config.recipes import recipe_path
from astraflow.launch.rundir import RunDirectory
from astraflow.simulate.fit import fitted, measured
from astraflow.simulate.profile import Profile
from astraflow.simulate.world import Prediction, simulate
from astraflow.testing.runs import astraflow_command

TEAMS = Path(__file__).parents[2] / "examples" / "teams"
LIMIT_S = 300.0
_NODE = "--rollout.nodes"
RUNS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "source": ("quickstart", "source", ()),
    "sync": ("quickstart", "source", ("--policies.actor.batch.max_staleness=0",)),
    "small": (
        "quickstart", "source",
        ("--policies.actor.batch.groups=8", "--policies.actor.batch.max_staleness=3", f"{_NODE}.0.concurrency=128"),
    ),
    "two-nodes": (
        "quickstart", "source",
        (f'{_NODE}=[{{name="fast", concurrency=384}}, {{name="slow", concurrency=128, delay_s=0.05}}]',),
    ),
    "team": ("team", "team", ()),
    "team-sync": (
        "team", "team",
        ("--policies.actor.batch.max_staleness=0", "--policies.verifier.batch.max_staleness=0",
         f"{_NODE}.0.concurrency=128"),
    ),
}  # fmt: skip


def rows(place: Path, steps: int) -> Iterator[dict[str, Any]]:
    """Play all of RUNS in `place` and compare."""
    cores = float(os.cpu_count() or 1)
    profiles: dict[str, Profile] = {}
    for name, (recipe, fitted_on, words) in RUNS.items():
        load = os.getloadavg()[0]
        path = played(place, name, recipe, (*words, f"--run.steps={steps}"))
        if fitted_on == name:
            profiles[name] = fitted(path, cores)
        config = RunDirectory(path).config()
        for row in compared(name, fitted_on, measured(path), simulate(config, profiles[fitted_on])):
            yield row | {"load": round(load, 1)}


def played(place: Path, name: str, recipe: str, words: tuple[str, ...]) -> Path:
    """A real run without evaluation; gives its directory."""
    if (place / name / "report" / "summary.json").exists():
        return place / name
    source = TEAMS / "verifier.toml" if recipe == "team" else recipe_path(recipe)
    if str(TEAMS) not in sys.path:
        sys.path.append(str(TEAMS))  # where its sources are
    config = load_run(source, words).model_copy(update={"evaluation": None})
    renamed = config.run.model_copy(update={"name": name, "directory": str(place)})
    file = place / f"{name}.json"
    file.write_text(resolved_json(config.model_copy(update={"run": renamed})))
    with (place / f"{name}.out").open("wb") as out:
        subprocess.run(
            astraflow_command("run", str(file)), stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            env=child_environment(None, {"PYTHONPATH": os.pathsep.join(sys.path)}), timeout=LIMIT_S, check=True,
        )  # fmt: skip
    return place / name


def compared(name: str, fitted_on: str, real: dict[str, Any], found: Prediction) -> Iterator[dict[str, Any]]:
    """One row of each policy: real, simulated, difference."""
    for policy, own in real["policies"].items():
        said = found.policies[policy]
        yield {
            "part": "check", "run": name, "fitted_on": fitted_on, "policy": policy, "steps": own["steps"],
            "s_per_step": round(own["step_s"], 3), "simulated": round(said.step_s, 3),
            "error": round(said.step_s / own["step_s"] - 1, 3),
            "trainer_idle": round(own["trainer_idle"], 3), "simulated_trainer_idle": round(said.trainer_idle, 3),
            "node_idle": round(real["node_idle"], 3), "simulated_node_idle": round(found.node_idle, 3),
            "staleness": round(own["staleness_mean"], 2), "simulated_staleness": round(said.staleness_mean, 2),
            "wall_s": round(real["wall_s"], 1), "simulated_wall_s": round(found.wall_s, 1),
        }  # fmt: skip
