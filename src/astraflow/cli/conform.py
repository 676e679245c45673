"""`astraflow conform`: does a participant of one's own keep the rules of docs/protocol.md?"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.errors import ConfigError

if TYPE_CHECKING:
    from astraflow.testing.conformance.findings import Findings


class Role(StrEnum):
    """What is put to the test."""

    rollout = "rollout"
    trainer = "trainer"
    stage = "stage"
    consumer = "consumer"


def conform(
    ctx: typer.Context,
    role: Annotated[Role, typer.Argument(help="What the command is.")],
    act: Annotated[list[str] | None, typer.Option("--act", help="Only this act; may be repeated.")] = None,
    patience_s: Annotated[float, typer.Option(min=1.0, help="Longest wait for anything it must do.")] = 60.0,
    model: Annotated[
        str, typer.Option(help="rollout: publish the weights of this model; default: bytes without a meaning.")
    ] = "",
    stage_type: Annotated[
        str, typer.Option(help="stage: type of the stage in the run file, which says what it needs and adds.")
    ] = "astraflow.testing.stages:EchoStage",
) -> None:
    """Start a small run around a command (after --) and check the rules of the protocol one by one.

    The command gets {url}, {policy}, {stage}, {consumer} and {dir}, also as ASTRAFLOW_DATAFLOW_URL, ..., and the token.
    """
    if not ctx.args:
        raise ConfigError("conform", ["command=none must follow --; e.g. astraflow conform trainer -- ./mine {url}"])
    from astraflow.testing.conformance.stand import Candidate
    from astraflow.testing.conformance.suite import conform as play

    candidate = Candidate(command=list(ctx.args), patience_s=patience_s, model=model, stage_type=stage_type)

    def tell(act: str, findings: Findings, tail: str) -> None:
        typer.echo(f"{role.value} {act}: {'kept' if findings.ok else 'broken'}")
        if not findings.ok and tail:
            typer.echo("    the process wrote:\n" + "\n".join(f"    | {line}" for line in tail.splitlines()[-12:]))

    findings = play(role.value, candidate, tuple(act or ()), tell)
    typer.echo(findings.table())
    if not findings.ok:
        raise typer.Exit(1)
