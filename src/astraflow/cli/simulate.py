"""`astraflow simulate`: what a run file would do, on a simulated clock."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from astraflow.cli.run import Recipe, open_run
from astraflow.errors import ConfigError

if TYPE_CHECKING:
    from astraflow.config.schema import RunConfig
    from astraflow.simulate.profile import Profile
    from astraflow.simulate.world import Prediction


def simulate(
    ctx: typer.Context,
    recipe: Recipe,
    nodes: Annotated[
        int, typer.Option("--nodes", min=0, help="So many nodes, those of the run file again and again; 0: as it says.")
    ] = 0,
    measured: Annotated[
        Path | None, typer.Option("--from", help="A run directory: costs and episodes as that run measured them.")
    ] = None,
    profile: Annotated[Path | None, typer.Option("--profile", help="A profile, TOML or JSON; above --from.")] = None,
    cost: Annotated[
        list[str] | None, typer.Option("--cost", help="One value of the profile, above both: --cost network.rtt_s=0.15")
    ] = None,
    cores: Annotated[
        float, typer.Option("--cores", min=0, help="Cores that all share, as in the run of --from; 0: one each.")
    ] = 0.0,
    steps: Annotated[int, typer.Option("--steps", min=0, help="0: those of the run file.")] = 0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of lengths and delays.")] = 0,
    barrier: Annotated[
        bool, typer.Option("--barrier", help="The synchronous loop around the trainer, all policies in step.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Prediction and profile as JSON.")] = False,
) -> None:
    """Predict step time, idle shares, staleness and traffic of a run file without running it.

    Change any setting after the recipe, for example: --policies.actor.batch.max_staleness=2
    """
    import json

    import msgspec

    from astraflow.simulate.world import Plan
    from astraflow.simulate.world import simulate as played

    config = open_run(recipe, ctx.args)
    costs = _profile(config, measured, profile, cores, cost or [])
    found = played(config, costs, Plan(steps, nodes, seed, barrier))
    if as_json:
        typer.echo(json.dumps({"prediction": found.to_dict(), "profile": msgspec.to_builtins(costs)}, indent=1))
        return
    for line in lines_of(found):
        typer.echo(line)


def _profile(config: RunConfig, measured: Path | None, profile: Path | None, cores: float, words: list[str]) -> Profile:
    import msgspec

    from astraflow.config.load import read_overrides
    from astraflow.simulate.profile import merged, profile_of, read_raw

    if measured is None and profile is None:
        raise ConfigError("simulate", ["profile is missing; give --from RUN_DIR or --profile FILE (docs/scaling.md)"])
    raw: dict[str, Any] = {}
    if measured is not None:
        from astraflow.simulate.fit import fitted

        raw = msgspec.to_builtins(fitted(measured, cores))
        raw["policies"] = {name: costs for name, costs in raw["policies"].items() if name in config.policies}
    if profile is not None:
        raw = merged(raw, read_raw(profile))
    if cores:
        raw = merged(raw, {"serving": {"cores": cores}})
    over, problems = read_overrides([f"--{word}" for word in words])
    if problems:
        raise ConfigError("--cost", problems)
    return profile_of(merged(raw, over), config, str(profile or measured))


def lines_of(found: Prediction) -> list[str]:
    """The prediction as a table."""
    width = max(len("policy"), *map(len, found.policies))
    lines = [f"{'policy':<{width}}  steps  s per step  trainer idle  staleness mean, max  done after  dropped groups"]
    for name, own in found.policies.items():
        dropped = ", ".join(f"{reason} {count}" for reason, count in own.dropped.items()) or "-"
        staleness = f"{own.staleness_mean:.2f}, {own.staleness_max}"
        lines.append(
            f"{name:<{width}}  {own.steps:>5}  {own.step_s:>10.4g}  {own.trainer_idle:>12.0%}  {staleness:>19}  "
            f"{_duration(own.steps_done_s):>10}  {dropped}"
        )
    return [
        *lines, "",
        f"wall time        {_duration(found.wall_s)}",
        f"idle             trainers {found.trainer_idle:.0%}, nodes {found.node_idle:.0%}",
        f"sampled          {found.tokens_per_s:,.0f} tokens/s, {found.episodes_per_step:,.0f} episodes a step",
        f"between nodes and services, a step: {_bytes(found.bytes_per_step)} ({_bytes(found.weight_bytes_per_step)} of "
        f"weights), {found.messages_per_step:,.0f} messages",
    ]  # fmt: skip


def _duration(seconds: float) -> str:
    if seconds < 600:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 36_000 else f"{seconds / 3600:.1f} h"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count:.0f} B"
