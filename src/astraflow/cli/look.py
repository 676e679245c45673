"""`astraflow status`, `trace`, `report`, `doctor`: look, change nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from astraflow.errors import LaunchError, WireError


def status(
    where: Annotated[str, typer.Argument(help="URL of a dataflow service, or a run directory.")],
    as_json: Annotated[bool, typer.Option("--json", help="The whole reply.")] = False,
) -> None:
    """What a run is doing now, or how it ended."""
    import json

    reply = _live(where) if where.startswith(("http://", "https://")) else _of_directory(Path(where))
    if as_json:
        typer.echo(json.dumps(reply, indent=2))
        return
    for line in lines_of(reply):
        typer.echo(line)


def _live(url: str) -> dict[str, Any]:
    from astraflow.config.env import token_from_env
    from astraflow.wire.client import HttpClient

    return HttpClient(url, token_from_env(), give_up_s=2.0).json("GET", "/status", None, dict[str, Any])


def _of_directory(path: Path) -> dict[str, Any]:
    import json

    from astraflow.launch.claim import is_held
    from astraflow.launch.report import summary_of
    from astraflow.launch.rundir import RunDirectory

    directory = RunDirectory(path)
    config = directory.config()  # says clearly when there is no run here
    if is_held(directory) and directory.ready_file.exists():
        try:
            return _live(json.loads(directory.ready_file.read_text())["url"])
        except WireError:
            pass  # the service is gone: what it wrote says how it ended
    summary, metrics = directory.report / "summary.json", directory.metrics
    if summary.exists() and not (metrics.exists() and metrics.stat().st_mtime > summary.stat().st_mtime):
        return dict(json.loads(summary.read_text()))
    written = summary_of(directory)
    if not written["steps"]:
        raise LaunchError("run directory", str(path), "is not running and made no step", "go on with it by --resume")
    steps = [written["versions"].get(policy, 0) + config.policies[policy].frozen_steps for policy in config.trained]
    over = min(steps) >= config.run.steps
    state = "finished" if over else f"ended at step {min(steps)} of {config.run.steps}; go on with it by --resume"
    return {"run": config.run.name, "state": state, "report": f"astraflow report {path} writes it", **written}


def lines_of(reply: dict[str, Any], indent: str = "") -> list[str]:
    """Nested facts as indented lines."""
    lines = []
    for key, value in reply.items():
        if isinstance(value, dict) and value:
            lines += [f"{indent}{key}:", *lines_of(value, indent + "  ")]
        else:
            shown = f"{value:.4g}" if isinstance(value, float) else value
            lines.append(f"{indent}{key}: {shown}")
    return lines


def trace(
    run_dir: Annotated[Path, typer.Argument(help="Directory of a run, such as runs/quickstart.")],
    task: Annotated[
        str, typer.Argument(help="SOURCE/EPOCH/ROW, such as train/0/17; as in `group_id`. Left out: all tasks.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="The same as JSON.")] = False,
) -> None:
    """The life of one task: admitted, played, judged, queued, trained or dropped, with run times; or where all are."""
    import json

    import msgspec

    from astraflow.dataflow.journal.history import read_life, read_lives
    from astraflow.dataflow.views.life import life_lines, where_now
    from astraflow.launch.rundir import RunDirectory

    directory = RunDirectory(run_dir)
    directory.config()
    if not task:
        now = {name: where_now(moments) for name, moments in read_lives(directory.journal / "history").items()}
        lines = [json.dumps(now, indent=2)] if as_json else [f"{name}  {where}" for name, where in now.items()]
        typer.echo("\n".join(lines))
        return
    life = read_life(directory.journal / "history", task)
    if as_json:
        typer.echo(json.dumps([msgspec.structs.asdict(moment) for moment in life.moments], indent=2))
    elif life.moments:
        typer.echo("\n".join([f"task {task}", *life_lines(life)]))
    if not life.moments:
        rule = "was not looked at by this run"
        if life.begins_s:
            rule = f"is older than the history kept, which begins at {life.begins_s:.3f} s, or was not looked at"
        raise LaunchError("task", task, rule, f"name it as SOURCE/EPOCH/ROW; `astraflow trace {run_dir}` lists them")


def report(run_dir: Annotated[Path, typer.Argument(help="Directory of a run, such as runs/quickstart.")]) -> None:
    """Write the report of a run again and say where it is."""
    from astraflow.launch.report import write_report
    from astraflow.launch.rundir import RunDirectory

    directory = RunDirectory(run_dir)
    directory.config()
    write_report(directory.path)
    typer.echo(str(directory.report / "summary.md"))


def doctor(
    directory: Annotated[Path, typer.Option("--directory", help="Where runs would be written.")] = Path("runs"),
) -> None:
    """Check this machine: each line is ok or says what to do."""
    from astraflow.launch.checks import examine

    checks = examine(directory)
    for check in checks:
        mark = "ok  " if check.ok else "FAIL"
        typer.echo(f"{mark}  {check.name:<14} {check.found}" + (f"; {check.fix}" if check.fix else ""))
    if not all(check.ok for check in checks):
        raise typer.Exit(1)
