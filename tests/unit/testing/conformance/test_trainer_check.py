"""Trainers of several data-parallel ranks, as Megatron or torchtitan are: what the suite says of their requests."""

from __future__ import annotations

import pytest

from astraflow.testing.conformance.checks.trainer import TrainerCheck
from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.rules import RULES
from astraflow.testing.conformance.tap import Exchange


def _said(asked):
    """Findings of a trainer that resumes, takes these (rank, ranks) and acknowledges; "lost": the answer before is."""
    at, exchanges = iter(range(100)), []

    def exchange(name, reply=None, fault=None, **body):
        exchanges.append(
            Exchange(
                float(next(at)), name, {"batch_id": "b"} if name == "ack" else {}, {"trainer_id": "t", **body},
                status=200, answered=float(next(at)), reply=reply or {}, fault=fault,
            )
        )  # fmt: skip
        return exchanges[-1]

    exchange("resume", run_id="r", version=0).noted = {"seen": {0: b"0"}}
    for share in asked:
        if share == "lost":
            exchanges[-1].fault = "lost"
            continue
        body = {} if share is None else {"rank": share[0], "ranks": share[1]}
        exchange("batch", {"batch_id": "b", "step": 1}, version=0, **body)
    exchange("ack", version=1)
    findings = Findings(RULES["trainer"])
    TrainerCheck(findings, "r", 1).read(exchanges)
    return findings


@pytest.mark.parametrize(
    "asked",
    [[None], [(0, 1)], [(0, 2), (1, 2)], [(1, 2), (0, 2)], [(0, 2), (1, 2), "lost", (1, 2)], [None, "lost", None]],
)
def test_all_shares_before_the_acknowledgement(asked):
    findings = _said(asked)
    assert findings.result("batch.share") == "kept" and findings.ok, findings.table()


@pytest.mark.parametrize("asked", [[(0, 2)], [(0, 3), (2, 3)], [(0, 2), (1, 3)], [(0, 2), (1, 2), "lost"]])
def test_a_share_that_nobody_took_is_named(asked):
    assert _said(asked).result("batch.share") == "broken"


def test_a_lost_share_is_not_asked_for_again_by_another_rank():
    assert _said([(0, 2), "lost", (1, 2)]).result("batch.repeat") == "not seen"
    assert _said([(0, 2), "lost", (1, 2), (0, 2)]).result("batch.repeat") == "kept"
