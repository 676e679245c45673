"""`astraflow sft`, `eval`, `try`: one model without a run around it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from astraflow.cli.run import Recipe, open_run
from astraflow.cli.services import Parent, TokenFile, rank_place, read_token, start_ranks, tie
from astraflow.cli.swarm import options_of
from astraflow.config.env import user_path
from astraflow.errors import ConfigError, EpisodeError, LaunchError

if TYPE_CHECKING:
    from astraflow.config.schema import RunConfig
    from astraflow.launch.evaluation.run import Side
    from astraflow.launch.rundir import RunDirectory

Model = Annotated[
    str, typer.Argument(help="A run directory (its newest checkpoint), a model directory, or a built-in model name.")
]
Target = Annotated[
    str,
    typer.Argument(
        help="A run directory (its newest checkpoint), a model directory, a built-in model, NAME@URL, or a run file or "
        "recipe (its own models, or those of --model)."
    ),
]
RecipeOption = Annotated[
    str, typer.Option("--recipe", help="Run file with sources and workflow; default: that of the run directory.")
]
Policy = Annotated[
    str, typer.Option("--policy", help="The policy that a model directory is; needed where there are several.")
]
Source = Annotated[str, typer.Option("--source", help="Default: that of [evaluation], else the training source.")]
Temperature = Annotated[float, typer.Option("--temperature", min=0.0, help="0: greedy.")]


def sft(
    ctx: typer.Context,
    recipe: Recipe,
    out: Annotated[Path, typer.Option("--out", help="Directory to write the model to.")],
    policy: Policy = "",
    threads: Annotated[int, typer.Option("--threads", min=1, help="Intra-op threads of torch, of each rank.")] = 1,
    rank: Annotated[int, typer.Option("--rank", hidden=True)] = -1,
    ranks: Annotated[int, typer.Option("--ranks", hidden=True)] = 0,
    rendezvous: Annotated[str, typer.Option("--rendezvous", hidden=True)] = "",
    parent: Parent = 0,
) -> None:
    """Take only the supervised warm start of a policy and save the model; change any setting after the recipe.

    With `trainer.ranks` above 1, that many processes do it here; torchrun starts them on several hosts.
    """
    tie(parent)
    config = open_run(recipe, ctx.args)
    name = choose_policy(config, policy)
    section = config.policies[name]
    if section.warm_start is None:
        raise ConfigError(recipe, [f"policies.{name}.warm_start is missing; it says what sft learns from"])
    if out.exists():
        raise LaunchError("out", str(out), "already exists", "give another directory")
    from astraflow.observe.logs import setup_logging

    place = rank_place(rank, ranks, rendezvous)
    setup_logging("sft" if place is None or place[0] == 0 else f"sft.{place[0]}")
    if place is None and section.trainer.ranks > 1:
        words = ["sft", recipe, f"--out={out}", f"--policy={name}", f"--threads={threads}", *ctx.args]
        start_ranks(f"sft of {name}", section.trainer.ranks, words, None)
        return
    with ExitStack() as stack:
        if parent and rank >= 0:  # `run_ranks` started it
            from astraflow.training.parallel.launch import signs_of_life

            stack.enter_context(signs_of_life(rank, rendezvous))
        import torch

        from astraflow.config.env import cache_dir
        from astraflow.models.registry import model_directory
        from astraflow.training.parallel.ranks import ALONE, RankPlace, joined
        from astraflow.training.sft import run_sft

        torch.set_num_threads(threads)
        directory = model_directory(section.model, cache_dir(), config.run.seed)
        company = ALONE if place is None or place[1] == 1 else stack.enter_context(joined(RankPlace(*place)))
        stack.enter_context(company.watched())
        metrics = run_sft(directory, out, config, name, company)
        if company.leads:
            typer.echo(f"loss {metrics['loss']:.4f}; wrote {out}")


def evaluate(
    ctx: typer.Context,
    target: Target,
    model: Annotated[
        list[str] | None, typer.Option("--model", help="Like TARGET; may be repeated: all are compared with the first.")
    ] = None,
    recipe: RecipeOption = "",
    source: Annotated[
        list[str] | None, typer.Option("--source", help="May be repeated. Default: as of [evaluation], else training.")
    ] = None,
    policy: Policy = "",
    samples: Annotated[int, typer.Option("--samples", min=1, help="Episodes of each task: k.")] = 1,
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="Default: that of [evaluation], else 0: greedy.")
    ] = None,
    num_tasks: Annotated[int, typer.Option("--num-tasks", min=0, help="First tasks of a source; 0: all.")] = 0,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Episodes played at once.")] = 64,
    key_env: Annotated[str, typer.Option("--key-env", help="Variable with the key of the services.")] = "",
    out: Annotated[
        Path | None, typer.Option("--out", help="Directory of the results. Default: evals/RUN-MARK; goes on there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json instead of the table.")] = False,
) -> None:
    """Measure models on tasks, without a run: avg@k and pass@k with intervals, side by side on the same tasks.

    What was played is kept and not played again when the same command is given again.
    """
    from astraflow.launch.evaluation.run import Evaluation
    from astraflow.launch.evaluation.run import evaluate as play_all
    from astraflow.launch.evaluation.table import lines_of
    from astraflow.launch.play import PlayOptions

    names = list(model or [])
    if is_run_file(target):
        recipe = recipe or target
    else:
        names.insert(0, target)
        run = run_at(target)
        recipe = recipe or (str(run.config_file) if run is not None else "")
    sides = [open_side(name, recipe, policy, ctx.args, key_env) for name in names or [target]]
    config = sides[0].config
    if temperature is None:
        temperature = config.evaluation.temperature if config.evaluation is not None else 0.0
    if samples > 1 and temperature == 0.0:
        typer.echo("temperature=0 lets a model say the same in every sample; give --temperature", err=True)
    wanted = Evaluation(
        config, sides, list(dict.fromkeys(source or [default_source(config)])), num_tasks,
        PlayOptions(samples, temperature, concurrency),
    )  # fmt: skip
    path = out or wanted.default_path
    results = play_all(wanted, path)
    if as_json:
        typer.echo((path / "results.json").read_text(encoding="utf-8"), nl=False)
        return
    for line in lines_of(results, samples):
        typer.echo(line)
    typer.echo(f"[low, high]: 95 %; every task is in {path / 'results.json'}")


def try_out(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="As of `eval`; with --url a workflow: FILE.py:NAME or a name.")],
    prompt: Annotated[str, typer.Argument(help="Text of the task; default: a row of the source.")] = "",
    row: Annotated[int, typer.Option("--row", "--task", min=0, help="Row of the source.")] = 0,
    recipe: RecipeOption = "",
    source: Source = "",
    policy: Policy = "",
    temperature: Annotated[
        float | None, typer.Option("--temperature", min=0.0, help="Default: greedy; with --url as in training.")
    ] = None,
    url: Annotated[str, typer.Option("--url", help="Swarm door of a node: play against the policies of now.")] = "",
    ids: Annotated[bool, typer.Option("--ids", help="With --url: print the token ids, too.")] = False,
    token_file: TokenFile = None,
) -> None:
    """Play one task and print the conversation token by token as the policy saw it, and the reward. Trains nothing."""
    overrides = list(ctx.args)
    if prompt.startswith("--"):  # typer takes the first unknown option for the text
        overrides, prompt = [prompt, *overrides], ""
    if url:
        if prompt or recipe or policy:
            raise LaunchError("--url", url, "goes with --task and --source only", "name the task by its row")
        _try_at(url, model, overrides, (source, row, temperature), token_file, ids)
        return
    from astraflow.launch.play import PlayOptions, choose_task, conversation, play

    config, models = open_model(model, recipe, policy, overrides)
    task, graded = choose_task(config, source or default_source(config), row, prompt)
    (episode,) = play(config, models, [task], PlayOptions(1, temperature or 0.0, 1))
    typer.echo(f"task  {json.dumps(task.fields, ensure_ascii=False)}")
    for name, directory in models.items():
        spoken = conversation(None if config.policies[name].remote else Path(directory), episode, name)
        for sampled, text in spoken:
            typer.echo(f"{name if sampled else 'given'}> {text}")
    if episode.error is not None:
        raise EpisodeError(f"the episode failed: {episode.error}")
    if graded:
        rewards = {t.policy: t.reward for t in episode.trajectories if t.parent_branch < 0}
        _say_reward(rewards, episode.metrics)
    else:
        typer.echo("no reward: this text is no row of the source, so its answer is not known")


def _try_at(
    url: str, workflow: str, overrides: list[str], task: tuple[str, int, float | None], token_file: Path | None,
    ids: bool,
) -> None:  # fmt: skip
    from astraflow.launch.remote.trial import TrialPlay, lines_of, play_trial, rewards_of
    from astraflow.observe.logs import setup_logging

    source, row, temperature = task
    token = read_token(token_file)
    setup_logging("try", secrets=(token,))
    played = TrialPlay(
        url=url, workflow=workflow, row=row, options=options_of(overrides), source=source, temperature=temperature,
        token=token,
    )  # fmt: skip
    found, trial = play_trial(played)
    typer.echo(f"task {found.source}/{found.row}  {json.dumps(found.fields, ensure_ascii=False)}")
    for line in lines_of(trial, ids=ids):
        typer.echo(line)
    typer.echo(f"calls {json.dumps(trial.num_calls)}  {trial.wall_s:.2f} s")
    if trial.error is not None:
        raise EpisodeError(f"the episode failed: {trial.error}")
    _say_reward(rewards_of(trial), trial.metrics)


def _say_reward(rewards: Mapping[str, float | None], metrics: Mapping[str, float]) -> None:
    typer.echo(f"reward {json.dumps(rewards)}  metrics {json.dumps(metrics)}")
    if unscored := [name for name, reward in rewards.items() if reward is None]:
        typer.echo(f"{', '.join(unscored)}: unscored, so never trained on; return a number as the reward", err=True)


def open_model(model: str, recipe: str, policy: str, overrides: list[str]) -> tuple[RunConfig, dict[str, str]]:
    """The run file and a model directory for each policy.

    Raises: LaunchError: no run file is known, a run has no checkpoint yet. ModelError: no such model.
    """
    from astraflow.config.env import cache_dir
    from astraflow.models.registry import model_directory

    path, run = user_path(model), run_at(model)
    if not recipe and run is None:
        raise LaunchError(
            "model", model, "belongs to no run directory, so its tasks are not known", "name them with --recipe"
        )
    config = open_run(recipe or str(run.config_file if run else ""), overrides)
    whole = run is not None and path.resolve() == run.path.resolve()  # each policy has a checkpoint there
    names = list(config.trained) if whole and not policy else [choose_policy(config, policy)]
    models = {p: config.base_of(p) for p in config.policies}
    newest = {p: run.newest_checkpoint(p) for p in models} if run is not None else {}
    models |= {p: str(found) for p, found in newest.items() if found is not None}
    copies = {p: section.copy_of.policy for p, section in config.policies.items() if section.copy_of is not None}
    models |= {p: models[of] for p, of in copies.items()}
    if not whole:
        models[names[0]] = model
    elif lacking := [name for name in names if newest[name] is None]:
        raise LaunchError(
            "run directory", model, f"has no whole checkpoint of {', '.join(lacking)}", "wait for its first one"
        )
    return config, {
        p: m if config.policies[p].remote else str(model_directory(m, cache_dir(), config.run.seed))
        for p, m in models.items()
    }


def run_at(model: str) -> RunDirectory | None:
    """The run that this is, or that this checkpoint is of."""
    from astraflow.launch.rundir import RunDirectory

    path = user_path(model)
    places = (path, *path.resolve().parents[2:3])
    return next((RunDirectory(p) for p in places if (p / "run.resolved.json").is_file()), None)


def is_run_file(target: str) -> bool:
    """It says what to play, and is no model."""
    from astraflow.config.recipes import recipe_names

    return user_path(target).is_file() or (not Path(target).exists() and target in recipe_names())


def open_side(name: str, recipe: str, policy: str, overrides: list[str], key_env: str) -> Side:
    """One side of an evaluation: a model as `open_model` knows it, `MODEL@URL` at a service, or a run file as it is.

    Raises: as `open_model`. LaunchError: no run file is known.
    """
    from astraflow.config.env import cache_dir
    from astraflow.config.sections.policy import EngineSection
    from astraflow.launch.evaluation.run import Side
    from astraflow.models.registry import model_directory

    model, at, url = name.rpartition("@")
    if not (at and url.startswith(("http://", "https://"))) and not is_run_file(name):
        return Side(name, *open_model(name, recipe, policy, overrides))
    if not recipe:
        raise LaunchError("--model", name, "says nothing of its tasks", "name them with --recipe")
    config = open_run(recipe, overrides)
    sections = dict(config.policies)
    if not is_run_file(name):
        served = choose_policy(config, policy)
        engine = {"type": "remote", "url": url} | ({"key_env": key_env} if key_env else {})
        update = {"model": model, "engine": EngineSection.model_validate(engine), "tool_parser": "auto"}
        sections[served] = sections[served].model_copy(update=update)
        config = config.model_copy(update={"policies": sections})
    models = {
        p: section.model if section.remote else str(model_directory(config.base_of(p), cache_dir(), config.run.seed))
        for p, section in sections.items()
    }
    return Side(name, config, models)


def choose_policy(config: RunConfig, policy: str) -> str:
    """The named policy, or the only one.

    Raises: LaunchError: none named although there are several, or an unknown name.
    """
    known = sorted(config.policies)
    if not policy and len(known) == 1:
        return known[0]
    if policy not in known:
        raise LaunchError(
            "policy", policy or "none", "must be a policy of the run file", f"--policy is one of: {', '.join(known)}"
        )
    return policy


def default_source(config: RunConfig) -> str:
    """Held-out tasks where the run file names some."""
    return config.evaluation.source if config.evaluation is not None else config.train_sources[0]
