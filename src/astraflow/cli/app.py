"""`astraflow <verb>`: the verbs, one error form, exit codes. Every verb loads what it needs when it runs."""

from __future__ import annotations

import errno
import sys
import traceback
from collections.abc import Sequence
from io import TextIOWrapper
from typing import Annotated

import typer

from astraflow import __version__
from astraflow.cli import conform, look, play, recipes, run, services, simulate, swarm
from astraflow.config.env import settle_torch
from astraflow.errors import AstraFlowError

OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Commands that take `--section.key=value` after the recipe; `config.load` refuses what is no setting."""

FIXES = {
    errno.ENOSPC: "make room on the disk",
    errno.EFBIG: "raise the limit of the size of files (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EACCES: "let this user use it, or name another place",
    errno.EROFS: "name a place that can be written",
    errno.ENAMETOOLONG: "give a shorter name",
}

app = typer.Typer(
    name="astraflow",
    help="Reinforcement learning for agents as three services: rollout, dataflow, training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("run", context_settings=OVERRIDES)(run.run)
app.command("validate", context_settings=OVERRIDES)(run.validate)
app.command("init")(recipes.init)
app.add_typer(recipes.app, name="recipes")
app.command("dataflow", context_settings=OVERRIDES)(services.dataflow)
app.command("node")(services.node)
app.command("worker", context_settings=OVERRIDES)(swarm.worker)
app.command("trainer")(services.trainer)
app.command("stage")(services.stage)
app.command("relay")(services.relay)
app.command("retriever")(services.retriever)
app.command("status")(look.status)
app.command("trace")(look.trace)
app.command("report")(look.report)
app.command("doctor")(look.doctor)
app.command("conform", context_settings={"allow_extra_args": True})(conform.conform)
app.command("simulate", context_settings=OVERRIDES)(simulate.simulate)
app.command("sft", context_settings=OVERRIDES)(play.sft)
app.command("eval", context_settings=OVERRIDES)(play.evaluate)
app.command("try", context_settings=OVERRIDES)(play.try_out)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"astraflow {__version__}")
        raise typer.Exit


@app.callback()
def _global_options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show where an error came from (anywhere on the line).")
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0 done, 1 failed, 2 wrong input, 3 another rank of the
    trainer is gone, 130 interrupted."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in words
    if arguments is None:
        sys.path.insert(0, "")  # user code in the current directory, as `python -m astraflow` finds it
    settle_torch()
    for stream in (sys.stdout, sys.stderr):  # a terminal without Unicode shows "?", and the run goes on
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")
    try:
        app([word for word in words if word != "--debug"], prog_name="astraflow")
    except AstraFlowError as error:
        if debug:
            traceback.print_exc()
        typer.echo(f"error: {error}", err=True)
        return error.exit_code
    except OSError as error:  # a file or the system, where nobody nearer knew a better sentence
        if debug:
            traceback.print_exc()
        place = "system" if error.filename is None else f"file={error.filename}"
        fix = FIXES.get(error.errno or 0, "mend that, or see --debug")
        typer.echo(f"error: {place} cannot be used ({error.strerror or error}); {fix}", err=True)
        return 1
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else 0
    return 0
