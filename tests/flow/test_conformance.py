"""The suite passes small participants that keep every rule, and our own processes; each rule is seen to be broken."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from astraflow.cli.app import main
from astraflow.testing.conformance.findings import Findings
from astraflow.testing.conformance.rules import RULES
from astraflow.testing.conformance.stand import Candidate
from astraflow.testing.conformance.suite import ACTS, Role, conform
from astraflow.testing.forked import popen
from astraflow.testing.runs import astraflow_command

HERE = Path(__file__).parent / "conformance"
PROTOCOL = Path(__file__).parents[2] / "docs" / "protocol.md"
WHERE = {
    "rollout": ["{url}"],
    "trainer": ["{url}", "{dir}"],
    "stage": ["{url}"],
    "consumer": ["{url}", "{consumer}", "{dir}"],
}

# fault -> the act in which it comes out, and the rule that it breaks
BROKEN: dict[Role, dict[str, tuple[str, str]]] = {
    "rollout": {
        "no_token": ("run", "token"),
        "no_join": ("run", "node.join"),
        "wrong_run": ("run", "node.join"),
        "no_heartbeat": ("cancel", "node.heartbeat"),
        "no_rejoin": ("forgotten", "node.rejoin"),
        "keeps_lost_leases": ("forgotten", "node.drop"),
        "ignores_finished": ("run", "node.finished"),
        "no_drain": ("end", "node.drain"),
        "over_capacity": ("run", "lease.capacity"),
        "same_request_id": ("run", "lease.fresh"),
        "new_id_after_loss": ("lost", "lease.repeat"),
        "wrong_attempt": ("run", "commit.leased"),
        "drops_some": ("run", "commit.all"),
        "commits_twice": ("run", "commit.once"),
        "wrong_lengths": ("run", "commit.rows"),
        "wrong_row": ("run", "commit.task"),
        "wrong_version": ("run", "commit.versions"),
        "version_of_given": ("run", "commit.versions"),
        "no_commit_repeat": ("lost", "commit.repeat"),
        "hates_duplicates": ("run", "commit.duplicate"),
        "ignores_cancel": ("cancel", "cancel"),
        "names_nothing": ("cancel", "cancel"),
        "dies_on_507": ("full", "full"),
        "dies_when_away": ("restart", "restart"),
    },
    "trainer": {
        "no_token": ("run", "token"),
        "never_resumes": ("run", "resume.first"),
        "wrong_run": ("run", "resume.first"),
        "starts_at_1": ("run", "resume.fresh"),
        "resumes_at_0": ("killed", "resume.version"),
        "same_trainer_id": ("killed", "resume.version"),
        "new_id_after_loss": ("lost", "resume.repeat"),
        "publishes_late": ("run", "publish.resume"),
        "publishes_rarely": ("run", "publish.ack"),
        "changes_versions": ("killed", "publish.immutable"),
        "asks_ahead": ("run", "batch.version"),
        "busy": ("run", "batch.wait"),
        "forgets_a_share": ("run", "batch.share"),
        "skips_a_lost_batch": ("lost", "batch.repeat"),
        "acks_another": ("run", "ack.batch"),
        "acks_twice": ("run", "ack.once"),
        "forgets_a_lost_ack": ("lost", "ack.repeat"),
        "dies_on_replay": ("killed", "replay"),
        "no_checkpoint": ("run", "checkpoint"),
        "covers_ahead": ("run", "checkpoint"),
        "no_heartbeat": ("busy", "heartbeat"),
        "fights_back": ("replaced", "replaced"),
        "ignores_410": ("run", "over"),
        "dies_on_507": ("full", "full"),
        "dies_when_away": ("restart", "restart"),
    },
    "stage": {
        "no_token": ("run", "token"),
        "same_request_id": ("run", "lease.fresh"),
        "new_id_after_loss": ("lost", "lease.repeat"),
        "busy": ("run", "lease.wait"),
        "foreign": ("run", "columns.rows"),
        "reorders": ("run", "columns.rows"),
        "wrong_length": ("run", "columns.shape"),
        "wrong_type": ("run", "columns.shape"),
        "extra_column": ("run", "columns.shape"),
        "drops_some": ("run", "columns.all"),
        "twice": ("run", "columns.once"),
        "forgets_lost_columns": ("lost", "columns.repeat"),
        "no_leave": ("end", "worker.leave"),
        "ignores_finished": ("run", "worker.finished"),
        "dies_on_507": ("full", "full"),
        "dies_when_away": ("restart", "restart"),
    },
    "consumer": {
        "no_token": ("run", "token"),
        "wrong_policy": ("run", "read.policy"),
        "busy": ("run", "read.wait"),
        "ends_when_a_read_is_lost": ("lost", "read.repeat"),
        "acks_ahead": ("run", "ack.given"),
        "acks_from_memory": ("killed", "ack.given"),
        "leaves_the_last": ("run", "ack.all"),
        "forgets_a_lost_ack": ("lost", "ack.repeat"),
        "ignores_finished": ("run", "over"),
        "dies_on_507": ("full", "full"),
        "dies_when_away": ("restart", "restart"),
    },
}


def candidate(*command: str, **rest: Any) -> Candidate:
    """Started in a moment: one act after the other would load torch for seconds."""
    return Candidate(command=command, popen=popen, **{"patience_s": 150.0, **rest})


def participant(role: Role, fault: str = "", patience_s: float = 30.0) -> Candidate:
    return candidate(sys.executable, str(HERE / f"{role}.py"), *WHERE[role], fault, patience_s=patience_s)


Found = Callable[[Role, Candidate], Findings]


def told(findings: Findings) -> str:
    return "\n" + findings.table()


@pytest.fixture(scope="module")
def pool() -> Iterator[ThreadPoolExecutor]:
    """Acts wait more than they work."""
    with ThreadPoolExecutor(5) as pool:
        yield pool


@pytest.fixture
def found(pool: ThreadPoolExecutor) -> Found:
    """What all acts of a role show, played side by side; no rule is broken."""

    def play(role: Role, candidate: Candidate) -> Findings:
        findings = Findings(RULES[role])
        for shown in pool.map(lambda act: conform(role, candidate, [act]), ACTS[role]):
            findings.add(shown)
        assert findings.ok, told(findings)
        return findings

    return play


@pytest.mark.flow
@pytest.mark.slow
@pytest.mark.parametrize("role", list(BROKEN))
def test_a_participant_that_keeps_every_rule_passes_and_every_rule_was_seen(role: Role, found: Found) -> None:
    findings = found(role, participant(role))
    assert {rule for rule in RULES[role] if findings.result(rule) != "kept"} == set(), told(findings)


@pytest.mark.flow
@pytest.mark.slow
@pytest.mark.parametrize("role", list(BROKEN))
def test_each_rule_is_seen_to_be_broken(role: Role, pool: ThreadPoolExecutor) -> None:
    assert {rule for _, rule in BROKEN[role].values()} == set(RULES[role]), "each rule has a fault that breaks it"

    def play(fault: str) -> str:
        act, rule = BROKEN[role][fault]
        findings = conform(role, participant(role, fault, patience_s=6.0), [act])
        return "" if rule in findings.broken else f"{fault} was to break {rule}:{told(findings)}"

    wrong = [problem for problem in pool.map(play, BROKEN[role]) if problem]
    assert not wrong, "\n".join(wrong)


UNHURRIED = {"dataflow.dead_after_s": 15.0, "dataflow.batch_lease_s": 8.0}  # they load torch, several at a time
OURS: dict[Role, list[str]] = {
    "rollout": ["node", "--dataflow", "{url}", "--concurrency", "8"],
    "trainer": ["trainer", "--dataflow", "{url}", "--policy", "{policy}", "--run-dir", "{dir}"],
    "stage": ["stage", "{stage}", "--dataflow", "{url}"],
}


@pytest.mark.flow
@pytest.mark.slow
@pytest.mark.parametrize("role", list(OURS))
def test_our_own_processes_keep_every_rule(role: Role, found: Found) -> None:
    found(role, candidate(*astraflow_command(*OURS[role]), settings=UNHURRIED))


EXAMPLES: dict[Role, Candidate] = {
    "rollout": candidate(sys.executable, "custom_rollout.py", "{url}", model="tiny-char"),
    "stage": candidate(sys.executable, "custom_stage.py", "{url}", "{stage}", stage_type="custom_stage:Digits"),
}


@pytest.mark.flow
@pytest.mark.slow
@pytest.mark.parametrize("role", list(EXAMPLES))
def test_the_examples_keep_every_rule(role: Role, found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(PROTOCOL.parents[1] / "examples")
    monkeypatch.syspath_prepend(str(PROTOCOL.parents[1] / "examples"))
    found(role, EXAMPLES[role])


@pytest.mark.flow
def test_the_command_prints_a_table_and_says_what_was_broken(capfd: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, str(HERE / "stage.py"), "{url}"]
    assert main(["conform", "stage", "--act", "end", "--patience-s", "20", "--", *command]) == 0
    assert re.search(r"^worker\.leave +kept$", capfd.readouterr().out, re.MULTILINE)
    assert main(["conform", "stage", "--act", "end", "--patience-s", "20", "--", *command, "no_leave"]) == 1
    out = capfd.readouterr().out
    assert re.search(r"^worker\.leave +broken$", out, re.MULTILINE) and RULES["stage"]["worker.leave"] in out
    assert main(["conform", "stage"]) == 2
    assert main(["conform", "stage", "--act", "none", "--", "true"]) == 1


def test_every_rule_is_in_the_protocol_word_for_word() -> None:
    text = PROTOCOL.read_text()
    missing = [f"| `{name}` | {sentence} |" for rules in RULES.values() for name, sentence in rules.items()]
    assert not [row for row in missing if row not in text], "\n".join(r for r in missing if r not in text)
