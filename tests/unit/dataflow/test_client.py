"""What the client makes of its arguments before they are sent."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from astraflow.errors import DataflowError
from astraflow.testing.dataflow import episode, small_config

STAGES = {"echo": {"type": "astraflow.testing.stages:EchoStage"}}
CONFIG = small_config(policies__actor__operators=["keep_all"], stages=STAGES)
NUMBERS: Any = {"loss": math.nan, "gap": np.float32(math.inf), "step": np.float32(7.0)}


def test_numbers_that_are_not_finite_are_left_out_of_all_that_is_sent(serve: Any) -> None:
    service = serve(small_config(policies__actor__operators=["keep_all"]))
    client = service.start()
    client.heartbeat("n", NUMBERS, {"actor": 0})
    client.trainer_heartbeat("actor", "t", NUMBERS)
    live = service.shell.machine.live
    assert service.call(lambda: live.trainers["actor"].stats) == {"step": 7.0}
    assert service.call(lambda: live.nodes["n"].stats) == {"step": 7.0}
    client.commit([episode(lease, "n", float(i)) for i, lease in enumerate(client.lease("n", 4).leases)])
    header, _ = client.batch("actor", "t", 0, wait_s=5.0)
    client.ack(header, "t", NUMBERS)
    assert service.call(lambda: service.shell.machine.state.policies["actor"].latest) == 1


def test_stats_of_a_stage_are_sent_in_the_same_way(serve: Any) -> None:
    service = serve(CONFIG)
    client = service.start()
    client.stage_lease("echo", "w", 0, stats=NUMBERS)
    (worker,) = client.status()["stages"]["echo"]["workers"]
    assert worker["stats"] == {"step": 7.0}


@pytest.mark.parametrize("value", ["abc", None, [1.0], 10**400])
def test_what_is_no_number_is_named(serve: Any, value: Any) -> None:
    client = serve(CONFIG).start()
    with pytest.raises(DataflowError, match=r"stats\['loss'\]=.* must be a number; "):
        client.trainer_heartbeat("actor", "t", {"loss": value})
