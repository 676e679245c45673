"""What a run in two regions leaves of itself; whole runs are in tests/flow."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

from astraflow.config.schema import RunConfig
from astraflow.testing.network.pacing import Conditions
from astraflow.testing.network.regions import TwoRegions
from astraflow.testing.network.shaper import Traffic


def test_rows_of_the_moment_in_which_the_trainer_ends_are_read(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    run, looks = TwoRegions(RunConfig.model_construct(), tmp_path, Conditions()), list[int]()

    def poll() -> int | None:
        looks.append(len(looks))
        if len(looks) < 3:
            return None
        rows = [{"kind": "step", "step": step} for step in (1, 2, 3)]
        (tmp_path / "a" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        return 0

    run._processes["trainer"] = SimpleNamespace(poll=poll)
    outcome = run._watch(10.0, lambda: (Traffic(up=len(looks)), Traffic()))
    assert [row["step"] for row in outcome.steps] == [1, 2, 3]
    assert [passed.step for passed in outcome.passed] == [0, 1, 2, 3]
    assert outcome.passed[0].data.up == 0 and outcome.passed[-1].data.up >= 3
