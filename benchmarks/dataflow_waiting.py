"""How long the machine takes to pick a batch while many rows wait. No I/O: the command alone."""

from __future__ import annotations

import gc
import time
from statistics import median

from astraflow.dataflow.machine import accounts
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.machine.records import Entry, Part, Put, QueuedGroup
from astraflow.testing.dataflow import Desk, policy_section, small_config, sources

PICKED_GROUPS = 8


def waiting_desk(num_rows: int, group_size: int = 8, order: str = "edf") -> Desk:
    """A started run in which `num_rows` rows wait, far more than a gate would admit; a batch is 8 groups.

    Groups are of 100 versions in mixed order. The rows of a group are one record, so that a million of them fit.
    """
    section = policy_section(PICKED_GROUPS, max_staleness=100)
    section["batch"]["order"] = order
    desk = Desk(small_config(run__steps=1000, policies={"actor": section}), sources(10))
    desk.start()
    machine = desk.machine
    for number in range(num_rows // group_size):
        group_id, version = f"train/0/{number}", number * 37 % 100
        part = Part("actor", Put(1, 0, 1).key, [0], [version], version, 100, 0, float(number % 2))
        accounts.admit(machine.context, group_id, "train")
        accounts.hold(machine.context, Put(1, 0, 1), group_size)
        entries = [Entry(part, 0.5, 1.0)] * group_size
        machine.queues.push("actor", QueuedGroup(group_id, 1.0, version, entries))
    return desk


def pick_ms(desk: Desk, repeats: int = 5) -> float:
    """Median milliseconds of forming a batch; `repeats` times 8 groups must wait."""
    taken = []
    version = desk.machine.state.policies["actor"].latest
    gc.collect()
    for step in range(version, version + repeats):
        command = c.TakeBatch("actor", "t", step)
        begin = time.perf_counter()
        grant = desk.machine.apply(command, desk.now).reply
        taken.append(time.perf_counter() - begin)
        assert grant is not None, "too few groups wait"
        desk.ack(step + 1)
    return 1e3 * median(taken)
