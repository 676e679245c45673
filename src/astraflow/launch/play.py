"""Play tasks without a run: the engines, the gateway and one worker of a node, no dataflow service.

leases made here ─► runner ─► worker (your workflow) ─► gateway ─► engine of a model directory
                      └─► episodes, as a node would have committed them
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from astraflow.config.env import cache_dir
from astraflow.config.rooms import build
from astraflow.config.schema import RunConfig
from astraflow.contracts import Engine
from astraflow.errors import SourceError
from astraflow.models.chat import ChatTokenizer
from astraflow.models.registry import model_directory
from astraflow.models.remote.transcript import Transcript
from astraflow.rollout.gateway.app import create_app
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.loop import run_loop
from astraflow.rollout.policies import PolicyOptions, Weights, start_policy
from astraflow.rollout.pool import PoolLimits, WorkerPool
from astraflow.rollout.runner import Runner, RunnerOptions
from astraflow.rollout.worker.channel import Hello
from astraflow.types import Episode, EpisodeLease, Sampling, Task
from astraflow.weights.client import WeightClient
from astraflow.wire.app import bind, serve
from astraflow.workflows.load import build_workflow

NODE_ID = "local"


@dataclass(frozen=True)
class PlayOptions:
    """How tasks are played. `temperature` 0 is greedy."""

    samples: int = 1  # episodes of each task
    temperature: float = 0.0
    concurrency: int = 64
    threads: int = 1


def tasks_of(config: RunConfig, source: str, num_tasks: int) -> list[Task]:
    """The first `num_tasks` rows of a source of the run file; 0: all.

    Raises: SourceError: no such source, or malformed rows.
    """
    if source not in config.sources:
        known = ", ".join(sorted(config.sources))
        raise SourceError("source", source, "names no source of the run file", f"known: {known}")
    spec = config.sources[source]
    rows = build("sources", spec.type, spec.options, f"sources.{source}")
    count = min(num_tasks, len(rows)) if num_tasks else len(rows)
    return [Task(source, row, 0, rows.row(row)) for row in range(count)]


def choose_task(config: RunConfig, source: str, row: int, text: str) -> tuple[Task, bool]:
    """Row `row` of a source, or the first row that reads `text`; and whether its reward means something.

    A text that no row reads replaces the first text field of `row`, whose answer then does not fit it.
    Raises: SourceError: no such source or row.
    """
    tasks = tasks_of(config, source, 0)
    if row >= len(tasks):
        raise SourceError("row", row, f"must be below {len(tasks)}", f"{source} has no more rows")
    if not text:
        return tasks[row], True
    for task in tasks:
        if text in task.fields.values():
            return task, True
    fields = dict(tasks[row].fields)
    name = next((key for key, value in fields.items() if isinstance(value, str)), None)
    if name is None:
        raise SourceError("prompt", text, f"fits no field of {source}", "choose a task by --row")
    return Task(source, row, 0, {**fields, name: text}), False


def play(config: RunConfig, models: Mapping[str, str], tasks: Sequence[Task], options: PlayOptions) -> list[Episode]:
    """Play every task `samples` times; episodes in the order of the tasks. See `play_leases`."""
    episodes: list[Episode] = []
    play_leases(config, models, list(leases_of(config, tasks, options)), options, episodes.append)
    order = {task.group_id: place for place, task in enumerate(tasks)}
    return sorted(episodes, key=lambda e: (order[e.task.group_id], e.episode_id))


def play_leases(
    config: RunConfig,
    models: Mapping[str, str],
    leases: Sequence[EpisodeLease],
    options: PlayOptions,
    on_episode: Callable[[Episode], None],
) -> None:
    """Play these; each is handed over when it ends, in no order.

    Args: models: policy -> model directory or built-in name, in place of those of the run file.
    Raises: ModelError: a model cannot be used. EngineError: an engine ended. Problem, ConfigError: the workflow cannot
    be built, which is said before an engine starts.
    """
    build_workflow(config.workflow, sorted(config.policies))
    sections = {
        name: section
        if section.remote
        else section.model_copy(update={"model": str(_directory(models.get(name, config.base_of(name)), config))})
        for name, section in config.policies.items()
    }
    run_loop(_play(config.model_copy(update={"policies": sections}), leases, options, on_episode))


def _directory(model: str, config: RunConfig) -> Path:
    return model_directory(model, cache_dir(), config.run.seed)


def leases_of(config: RunConfig, tasks: Sequence[Task], options: PlayOptions) -> Iterator[EpisodeLease]:
    """Every episode to play, sampled as an evaluation round of the run samples at this temperature."""
    sampling = {
        name: Sampling(
            temperature=options.temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p, max_tokens=s.max_tokens
        )
        for name, s in ((name, section.sampling) for name, section in config.policies.items())
    }
    for task in tasks:
        for sample in range(options.samples):
            yield EpisodeLease(
                episode_id=f"{task.group_id}/{sample}", group_id=task.group_id, attempt=1, task=task, purpose="eval",
                timeout_s=config.workflow.timeout_s, min_versions={}, sampling=sampling,
            )  # fmt: skip


async def _play(
    config: RunConfig, leases: Sequence[EpisodeLease], options: PlayOptions, on_episode: Callable[[Episode], None]
) -> None:
    shared = PolicyOptions(cache_dir(), config.run.seed, NODE_ID, options.concurrency, options.threads)
    idle = WeightClient(None)  # the directories are known to be there: nothing is ever fetched
    endpoints = {
        name: await start_policy(name, section, shared, Weights(name, idle, lambda: None))
        for name, section in config.policies.items()
    }
    workflow = config.workflow
    gateway, over = Gateway(endpoints, workflow.call_timeout_s), asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    server = asyncio.create_task(serve(create_app(gateway), bind("127.0.0.1", 0, "gateway"), url.set_result, over))
    limits = PoolLimits()
    hello = Hello(
        workflow.type, workflow.options, list(config.policies), f"{await url}/v1", limits.pulse_s,
        max_output_bytes=workflow.max_output_bytes,
    )  # fmt: skip
    pool = WorkerPool(1, hello, lambda: runner.start_waiting(), limits)
    runner = Runner(
        RunnerOptions(NODE_ID, options.concurrency, step_timeout_s=workflow.step_timeout_s), gateway,
        {n: e.engine for n, e in endpoints.items()}, pool, on_episode,
    )  # fmt: skip
    try:
        await pool.start()
        work = asyncio.create_task(_feed(runner, leases))
        beside = (pool.watch(), runner.keep_deadlines(limits.pulse_s), *(_ended(e.engine) for e in endpoints.values()))
        tasks = {work, *(asyncio.create_task(c) for c in beside)}
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for task in done:
            task.result()
    finally:
        over.set()
        await pool.close()
        await server
        for endpoint in endpoints.values():
            endpoint.engine.close()


async def _ended(engine: Engine) -> None:
    """Raises: EngineError: why it serves nobody any more."""
    raise await asyncio.wrap_future(engine.ended)


async def _feed(runner: Runner, leases: Sequence[EpisodeLease]) -> None:
    """Hand out what there is room for until everything was played."""
    place = 0
    while place < len(leases):
        room = await runner.room(runner.capacity)
        runner.accept(leases[place : place + room])
        place += room
    await runner.emptied()


def conversation(model: Path | None, episode: Episode, policy: str) -> list[tuple[bool, str]]:
    """What the policy saw and sampled, in order: (sampled, text) with special tokens, of its longest branch. `model`:
    None: a service elsewhere has it."""
    branches = [t for t in episode.trajectories if t.policy == policy]
    if not branches:
        return []
    chat = Transcript() if model is None else ChatTokenizer(model)
    branch = max((t for t in branches if t.parent_branch < 0), key=lambda t: len(t.token_ids))
    spans: list[tuple[bool, list[int]]] = []
    for token, sampled in zip(branch.token_ids.tolist(), branch.loss_mask.tolist(), strict=True):
        if not spans or spans[-1][0] != sampled:
            spans.append((sampled, []))
        spans[-1][1].append(token)
    return [(sampled, chat.decode(ids, skip_special_tokens=False)) for sampled, ids in spans]
