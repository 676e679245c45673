"""A run whose nodes are in another region: everything passes the link, weights by a relay."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from astraflow.config.load import check_run
from astraflow.config.recipes import recipe_path
from astraflow.config.schema import RunConfig
from astraflow.errors import LaunchError
from astraflow.testing.forked import popen
from astraflow.testing.network.pacing import Conditions
from astraflow.testing.network.regions import Region, TwoRegions
from astraflow.weights.store import FileStore

LINK = Conditions(bits_per_s=200e6, delay_s=0.005)


def small(steps: int) -> RunConfig:
    raw = tomllib.loads(recipe_path("quickstart").read_text())
    raw.pop("evaluation")
    raw["run"]["steps"] = steps
    raw["workflow"]["group_size"] = 4
    raw["dataflow"] = {"heartbeat_s": 0.3}
    policy = raw["policies"]["actor"]
    policy["batch"] |= {"groups": 4}
    policy["warm_start"]["steps"] = 3
    policy["trainer"] = {"dtype": "bfloat16"}
    return check_run(raw, "quickstart")


@pytest.mark.flow
def test_a_run_over_a_link_ends_and_all_its_bytes_are_counted(tmp_path: Path) -> None:
    region = Region(nodes=2, concurrency=16, relay=True)
    outcome = TwoRegions(small(3), tmp_path / "run", LINK, region, popen).run(300.0)
    assert [row["step"] for row in outcome.steps] == [1, 2, 3]
    assert [passed.step for passed in outcome.passed] == [0, 1, 2, 3]
    last = outcome.passed[-1]
    trainers = FileStore(tmp_path / "run" / "a" / "weights", "actor")
    version = max(trainers.infos().values(), key=lambda info: info.full_nbytes)
    assert last.weights.down > version.full_nbytes, "weights came some other way than over the link"
    tokens = sum(row["tokens/sampled"] for row in outcome.steps)
    assert last.data.up > 8 * tokens, "trajectories (an id and a logprob for each token) came some other way"
    copied = FileStore(next((tmp_path / "run" / "b" / "relay").glob("*/actor")).parent, "actor")
    assert copied.versions(), "the relay copied nothing"


@pytest.mark.flow
def test_a_process_that_fails_ends_the_run_with_its_words(tmp_path: Path) -> None:
    config = small(3)
    wrong = config.model_copy(
        update={"policies": {"actor": config.policies["actor"].model_copy(update={"model": "tiny-car"})}}
    )
    with pytest.raises(LaunchError, match=r"(?s)process=(trainer|node\d) ended with \d.*tiny-car"):
        TwoRegions(wrong, tmp_path / "run", LINK, Region(nodes=1), popen).run(300.0)
