"""What a rollout service goes through. The trainer is a fake that publishes a version for each batch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from pathlib import Path

from astraflow.dataflow.machine import commands as c
from astraflow.testing.conformance.acts.alike import ON, Acts, disk_full, service_away, trained
from astraflow.testing.conformance.checks.rollout import RolloutCheck
from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.rules import ROLLOUT
from astraflow.testing.conformance.stand import (
    HEARTBEAT_S,
    ActOver,
    Candidate,
    Stand,
    run_file,
)
from astraflow.testing.conformance.tap import Exchange
from astraflow.testing.services import PublishingTrainer

_PAUSE_S = 1.0  # of an episode that is to be cancelled


def named(*names: str) -> Callable[[Exchange], bool]:
    """Exchanges of these operations."""
    return lambda x: x.name in names


def a_run_to_its_end(stand: Stand) -> None:
    """Three steps, and one commit arrives twice; then the run is over."""
    stand.tap.disturb("twice", named("commit"))
    stand.start()
    stand.wait("node.join", "join", lambda: stand.seen(lambda x: x.name == "join" and x.done))
    twice = partial(stand.seen, lambda x: x.fault == "twice" and x.done)
    stand.wait("commit.all", "commit an episode", twice)
    after = twice()[0].answered
    more = partial(stand.seen, lambda x: x.name == "commit" and x.at > after)
    stand.wait("commit.duplicate", "commit another episode after one was a duplicate", more)
    stand.findings.hold("commit.duplicate", True, "")
    stand.wait("commit.all", "commit what three steps need", lambda: trained(stand) >= 3)
    stand.findings.hold("commit.all", True, "")
    stand.ends("node.finished", "although it was told that the run is over")
    told = stand.seen(lambda x: bool(x.reply.get("finished")) and x.done)
    if told:
        asked = stand.seen(lambda x: x.name == "lease" and x.at > told[0].answered + HEARTBEAT_S)
        stand.findings.hold("node.finished", not asked, "it leased again after it was told that the run is over")


def lost_answers(stand: Stand) -> None:
    """Answers to a lease and to a commit are lost."""
    stand.tap.disturb("lost", lambda x: x.name == "lease" and x.body.get("n", 0) > 0)
    stand.tap.disturb("lost", named("commit"))
    stand.start()
    lost = partial(stand.seen, lambda x: x.fault == "lost")
    stand.wait("commit.repeat", "commit", lambda: len(lost()) == 2)
    (commit,) = [x for x in lost() if x.name == "commit"]
    keys = _keys(commit)
    again = partial(stand.seen, lambda x: x.name == "commit" and x.at > commit.at and _keys(x) >= keys)
    stand.wait("commit.repeat", f"send the commit of {sorted(keys)} again", again)
    stand.wait("commit.all", "go on", lambda: trained(stand) >= 2)
    stand.findings.hold("commit.repeat", True, "")


def a_full_disk(stand: Stand) -> None:
    """Commits are answered 507 for a while."""
    disk_full(stand, "commit", "send a commit", trained)


def a_restart(stand: Stand) -> None:
    """The service is away for a second."""
    service_away(stand, "commit.all", "commit what a step needs", trained)


def a_lease_that_runs_out(stand: Stand) -> None:
    """Leases end while their episodes are played; a heartbeat's reply says so."""
    stand.start()
    stand.wait("node.join", "lease", lambda: _leased(stand))
    given = _leased(stand)
    stand.service.submit(c.Expire([], [given[0]], []))
    told = partial(stand.seen, lambda x: x.name == "heartbeat" and x.done and bool(x.reply.get("cancelled")))
    stand.wait("node.heartbeat", "send a heartbeat", partial(stand.seen, named("heartbeat")))
    stand.wait("cancel", "name an episode that it plays in a heartbeat", told)
    stand.wait("commit.all", "go on after a lease ran out", lambda: trained(stand) >= 1)


def a_node_that_was_forgotten(stand: Stand) -> None:
    """The service gives the node up, as after a long silence."""
    stand.start()
    stand.wait("node.join", "lease", lambda: _leased(stand))
    node_id = stand.seen(named("join"))[0].body["node_id"]
    stand.service.submit(c.Expire([node_id], [], []))
    refused = partial(stand.seen, lambda x: x.status == 404)
    stand.wait("node.heartbeat", "send a heartbeat", refused)
    after = refused()[0].answered
    stand.wait("node.rejoin", "join again", partial(stand.seen, lambda x: x.name == "join" and x.at > after))
    stand.wait("node.rejoin", "go on after it joined again", lambda: trained(stand) >= 1)
    stand.findings.hold("node.rejoin", True, "")


def told_to_end(stand: Stand) -> None:
    """SIGTERM while episodes are played."""
    stand.start()
    stand.wait("node.join", "lease", lambda: _leased(stand))
    stand.tell_to_end()
    stand.ends("node.drain", "after SIGTERM", code=None)
    left = stand.seen(lambda x: x.name == "drain" and x.status == 200)
    stand.findings.hold("node.drain", bool(left), "it ended without DELETE /nodes/{id}")


ACTS: Acts = {
    "run": (a_run_to_its_end, {"steps": 3}),
    "lost": (lost_answers, {"steps": ON}),
    "full": (a_full_disk, {"steps": ON}),
    "restart": (a_restart, {"steps": ON}),
    "cancel": (a_lease_that_runs_out, {"steps": ON, "sources__train__pause_s": _PAUSE_S}),
    "forgotten": (a_node_that_was_forgotten, {"steps": ON, "sources__train__pause_s": _PAUSE_S}),
    "end": (told_to_end, {"steps": ON, "sources__train__pause_s": _PAUSE_S}),
}


def play(act: str, place: Path, candidate: Candidate) -> tuple[Findings, str]:
    """What one act showed, and the end of what the process wrote."""
    findings = Findings(ROLLOUT)
    script, settings = ACTS[act]
    config = run_file(candidate, **settings)
    with Stand(place, config, candidate, findings) as stand:
        stand.enter(PublishingTrainer(stand.service.url, place / "weights", stand.token, model=candidate.model))
        with contextlib.suppress(ActOver):
            script(stand)
        run_id = stand.service.call(lambda: stand.service.shell.run_id)
        exchanges = list(stand.tap.exchanges)
        tail = stand.tail()
    RolloutCheck(findings, run_id, config.dataflow.dead_after_s, stand.away).read(exchanges)
    return findings, tail


def _leased(stand: Stand) -> list[tuple[str, int]]:
    found = stand.seen(lambda x: x.name in ("lease", "commit") and x.done)
    return [(lease["episode_id"], lease["attempt"]) for x in found for lease in x.reply.get("leases", ())]


def _keys(x: Exchange) -> set[tuple[str, int]]:
    return {(e["episode_id"], int(e["attempt"])) for e in x.body.get("episodes", ())}
