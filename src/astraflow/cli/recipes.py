"""Where run files come from: `astraflow recipes` has those of the project, `astraflow init` makes one of your own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from astraflow.config.recipes import about, examples, examples_dir, recipe_names, recipe_path
from astraflow.errors import LaunchError

app = typer.Typer(help="List, show or copy the shipped run files.", invoke_without_command=True, rich_markup_mode=None)


@app.callback()
def _default(ctx: typer.Context) -> None:
    if ctx.invoked_subcommand is None:
        names()


@app.command("list")
def names() -> None:
    """Every shipped recipe, and the examples of a checkout: how long it takes, what it is, what it needs."""
    _table({name: recipe_path(name) for name in recipe_names()})
    place = examples_dir()
    if place is not None:
        typer.echo(f"\nExamples, each to be run in its own folder below {place}:\n")
        _table({str(path.relative_to(place)): path for path in examples()})
    typer.echo("\nTimes are those of two cores without other work. Run one: astraflow run NAME")


def _table(files: dict[str, Path]) -> None:
    said = {name: about(path) for name, path in files.items()}
    names, times = max(map(len, said)), max(len(one.takes) for one in said.values())
    for name, one in said.items():
        needs = f"; needs {one.needs}" if one.needs else ""
        typer.echo(f"{name:<{names}}  {one.takes:<{times}}  {one.what}{needs}")


@app.command()
def show(name: Annotated[str, typer.Argument(help="A name from `astraflow recipes`.")]) -> None:
    """Print a recipe."""
    typer.echo(recipe_path(name).read_text(encoding="utf-8"), nl=False)


@app.command()
def copy(
    name: Annotated[str, typer.Argument(help="A name from `astraflow recipes`.")],
    target: Annotated[Path | None, typer.Argument(help="File to write; default: NAME.toml here.")] = None,
) -> None:
    """Copy a recipe, to change it."""
    source = recipe_path(name)
    path = target or Path(source.name)
    if path.is_dir():
        path = path / source.name
    if path.exists():
        raise LaunchError("target", str(path), "already exists", "give another file name")
    try:
        path.write_bytes(source.read_bytes())
    except OSError as error:
        raise LaunchError(
            "target", str(path), f"cannot be written ({error.strerror})", "give a file in a directory that exists"
        ) from error
    typer.echo(f"wrote {path}; run it with: astraflow run {path}")


def init(
    name: Annotated[Path, typer.Argument(help="Of the new folder, and of its run.")],
    like: Annotated[str, typer.Option("--like", help="tool_use, single_turn or team.")] = "tool_use",
) -> None:
    """Make a folder with an agent or environment, tasks, a run file and tests, which trains a tiny model at once."""
    from astraflow.scaffold.project import KINDS, create

    files = create(name, like)
    typer.echo(f"wrote {name}: {', '.join(files)}")
    typer.echo(f"It is {KINDS[like]} (others: --like {' or '.join(k for k in KINDS if k != like)}). Next:\n")
    typer.echo(f"  cd {name}")
    typer.echo("  python -m pytest          # seconds: the agent without a model")
    typer.echo("  astraflow run run.toml    # about a minute: a tiny model learns it\n")
    typer.echo("README.md there says how to make it yours.")
