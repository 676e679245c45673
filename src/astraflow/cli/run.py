"""`astraflow run` and `astraflow validate`."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.config.schema import RunConfig
from astraflow.errors import ConfigError

if TYPE_CHECKING:
    from astraflow.launch.rundir import RunDirectory

Recipe = Annotated[str, typer.Argument(help="A run file, or the name of a shipped recipe (`astraflow recipes`).")]

AcceptDamage = Annotated[
    bool, typer.Option("--accept-damage", help="With --resume: go on from the last good command of a damaged journal.")
]


def open_run(recipe: str, overrides: list[str]) -> RunConfig:
    """The checked run file: TOML by path or name, or the `run.resolved.json` of a run directory."""
    from astraflow.config.load import config_from_json, load_run
    from astraflow.config.recipes import recipe_path

    for word in overrides:  # every setting has a section, and a section can only be taken out
        if word.startswith("-") and "." not in word.partition("=")[0] and not word.endswith("=none"):
            raise ConfigError(
                recipe, [f"option={word!r} is neither an option of this command nor --section.key=value; see --help"]
            )
    path = recipe_path(recipe)
    if path.suffix != ".json":
        return load_run(path, join_pairs(overrides))
    if overrides:
        raise ConfigError(str(path), [f"override={overrides[0]!r} must go with a TOML run file; name that instead"])
    return config_from_json(path.read_bytes(), str(path))


def join_pairs(words: list[str]) -> list[str]:
    """`--a.b 1` is `--a.b=1`."""
    joined: list[str] = []
    for word in words:
        if not word.startswith("--") and joined and "=" not in joined[-1]:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def run(
    ctx: typer.Context,
    recipe: Recipe,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run of this name.")] = False,
    or_resume: Annotated[bool, typer.Option("--or-resume", help="Go on with it if there is one, else start.")] = False,
    accept_damage: AcceptDamage = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be started.")] = False,
) -> None:
    """Train: start and supervise every service of a run on this machine, to its end.

    Change any setting after the recipe, for example: astraflow run quickstart --run.steps=5 --run.seed=1
    """
    from astraflow.config.env import token_from_env
    from astraflow.launch.checks import check_ports, check_start
    from astraflow.launch.plan import plan_processes
    from astraflow.wire.app import check_bind

    config = open_run(recipe, ctx.args)
    token = token_from_env()
    check_bind(config.dataflow.host, token, "dataflow.host")
    check_bind(config.weights.host, token, "weights.host")
    if config.rollout.swarm is not None:
        check_bind(config.rollout.swarm.host, token, "rollout.swarm.host")
    cores = os.cpu_count() or 1
    if dry_run:
        _, missing = check_start(config, here=False)
        for spec in plan_processes(config, cores):
            when = f", joins after {spec.start_after_s:g} s" if spec.start_after_s else ""
            typer.echo(f"{spec.name}: {spec.threads} thread{'s' if spec.threads > 1 else ''}{when}")
        typer.echo(f"run directory: {Path(config.run.directory) / config.run.name}")
        _say_missing(missing)
        return
    check_start(config, here=True)
    check_ports(config)
    resume = resume or (or_resume and (Path(config.run.directory) / config.run.name / "run.resolved.json").exists())
    _launch(config, resume=resume, accept_damage=accept_damage, token=token, cores=cores)


def _launch(config: RunConfig, *, resume: bool, accept_damage: bool, token: str | None, cores: int) -> None:
    """Run to the end, write the report, say where everything is."""
    from astraflow.launch.claim import claim
    from astraflow.launch.report import is_finished, write_report
    from astraflow.launch.supervisor import Supervisor
    from astraflow.observe.console import progress_display
    from astraflow.observe.trackers import TrackerFeed

    finished = False
    with ExitStack() as opened:
        directory = opened.enter_context(claim(config, resume=resume, accept_damage=accept_damage))
        if is_finished(directory, config):
            _say_results(config, directory)
            typer.echo(
                f"run {config.run.name} is finished, all {config.run.steps} steps are made; go on with it by "
                f"--resume --run.steps={2 * config.run.steps}, or start another by --run.name={config.run.name}-2"
            )
            return
        if config.observe.trackers:
            settings = config.model_dump(mode="json")
            opened.enter_context(TrackerFeed(config.observe.trackers, directory.path, config.run.name, settings))
        typer.echo(f"run {config.run.name}: {config.run.steps} steps; logs and results in {directory.path}")
        try:
            with progress_display(config, directory.metrics) as progress:
                supervisor = Supervisor(config, directory, cores, progress, token, accept_damage=accept_damage)
                finished = supervisor.run()
        finally:
            if directory.metrics.exists():
                try:
                    write_report(directory.path, progress.status)
                except OSError as error:  # a full disk must not hide why the run ended
                    fix = f"make room, then: astraflow report {directory.path}"
                    typer.echo(f"report={directory.report} cannot be written ({error.strerror}); {fix}", err=True)
                _say_results(config, directory)
    if not finished:
        typer.echo("the run was interrupted; go on with it by --resume", err=True)
        raise typer.Exit(130)


def _say_missing(problems: list[str]) -> None:
    for problem in problems:
        typer.echo(f"this machine cannot start it yet: {problem}")


def _say_results(config: RunConfig, directory: RunDirectory) -> None:
    """The curve, and where everything is."""
    from astraflow.observe.chart import terminal_curve
    from astraflow.observe.jsonl import read_jsonl

    typer.echo("\n" + terminal_curve(read_jsonl(directory.metrics)))
    for name in config.trained:
        newest = directory.newest_checkpoint(name)
        typer.echo(f"checkpoint of {name}: {newest or 'none yet'}")
    typer.echo(f"report: {directory.report / 'summary.md'}")


def validate(
    ctx: typer.Context,
    recipe: Recipe,
    show: Annotated[bool, typer.Option("--show", help="Print every setting with its value.")] = False,
) -> None:
    """Check a run file and say everything that is wrong with it."""
    import json

    from astraflow.config.load import resolved_json
    from astraflow.launch.checks import check_start
    from astraflow.observe.redact import redact

    config = open_run(recipe, ctx.args)
    rows, missing = check_start(config, here=False)
    if show:
        typer.echo(json.dumps(redact(json.loads(resolved_json(config))), indent=2))
        return
    counts = ", ".join(f"{name} {count} rows" for name, count in rows.items())
    typer.echo(f"{recipe} is valid: {config.run.steps} steps of {', '.join(config.policies)}; sources: {counts}")
    _say_missing(missing)
