"""`astraflow worker`: play episodes of a run from any machine. Loads no torch."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from astraflow.cli.services import Parent, TokenFile, Watch, WorkerMemory, read_token, tie


def worker(
    ctx: typer.Context,
    url: Annotated[str, typer.Option("--url", help="Of the swarm door that a node printed.")],
    workflow: Annotated[str, typer.Option("--workflow", help="FILE.py:NAME, module:NAME, or a built-in name.")],
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes played at once.")] = 16,
    workers: Annotated[int, typer.Option(min=1, help="Worker processes that run workflow code.")] = 1,
    watch: Watch = False,
    source: Annotated[list[str] | None, typer.Option(help="Play this source only; may be repeated.")] = None,
    name: Annotated[str, typer.Option(help="For people; default: the host's name.")] = "",
    worker_memory_bytes: WorkerMemory = 8 << 30,
    max_output_bytes: Annotated[int, typer.Option(min=1024, help="That code of one episode may write.")] = 1 << 20,
    drain_s: Annotated[float, typer.Option(min=0, help="To finish what is in play when told to leave.")] = 10.0,
    token_file: TokenFile = None,
    parent: Parent = 0,
) -> None:
    """Play a workflow for the node at URL until the run is over; `--workflow.KEY=VALUE` are its options."""
    tie(parent)
    from astraflow.launch.remote.worker import RemoteOptions, run_worker
    from astraflow.rollout.pool import PoolLimits

    options = RemoteOptions(
        url=url, workflow=workflow, options=options_of(ctx.args), token=read_token(token_file), name=name,
        sources=tuple(source or ()), concurrency=concurrency, workers=workers, watch=watch,
        max_output_bytes=max_output_bytes, limits=PoolLimits(memory_bytes=worker_memory_bytes), drain_s=drain_s,
    )  # fmt: skip
    run_worker(options)


def options_of(words: list[str]) -> dict[str, Any]:
    """`--workflow.a.b=value` as options of a workflow.

    Raises: ConfigError: another word.
    """
    from astraflow.config.load import read_overrides
    from astraflow.errors import ConfigError

    raw, problems = read_overrides(words)
    if set(raw) - {"workflow"}:
        problems.append(f"options={sorted(set(raw) - {'workflow'})} are none of a worker; give --workflow.KEY=VALUE")
    if problems:
        raise ConfigError("command line", problems)
    found: dict[str, Any] = raw.get("workflow", {})
    return found
