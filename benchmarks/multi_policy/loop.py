"""The synchronous, trainer-centred loop: one process commands everything, all policies step together.

    tasks ─► all episodes of the step ─► barrier ─► train each policy in turn ─► barrier ─► new weights ─► tasks ...

As in the multi-agent forks of verl and OpenRLHF. Engine, model code, loss, workflow, tasks, batch and start weights are
those of our run; the loop asks the engines in its own process, with no gateway, journal or wire in between. Its forms:

| form     | GPUs                                               | beside the loop as published                   |
|----------|----------------------------------------------------|------------------------------------------------|
| shared   | all for the rollout, then all for each trainer     |                                                |
| split    | some for the rollout, the others for the trainers  | as ours                                        |
| parallel | as split                                           | policies are trained at the same time          |
| overlap  | as split                                           | and the next step's rollout runs meanwhile     |

    python -m benchmarks.multi_policy.loop --form shared --start DIR --seed 0 [--until 0.8] [--seconds 120] [--real]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from astraflow.config.rooms import build
from astraflow.config.schema import PolicySection, RunConfig
from astraflow.dataflow.operators.chain import Chain, chain_of
from astraflow.engines.local import LocalEngine
from astraflow.models.load import load_model, state_tensors
from astraflow.models.scoring.packing import TokenRows
from astraflow.rollout.context.trie import full_sequence
from astraflow.training.step import Stepper, StepSettings
from astraflow.types import Group, Task, Trajectory
from benchmarks.multi_policy.hardware import GPUS, SCALE
from benchmarks.multi_policy.modelled import ModelledEngine, ModelledLoss
from benchmarks.multi_policy.playing import Branches, Rewards, Speaker, evaluate, play
from benchmarks.multi_policy.sides import ROLLOUT_GPUS, Curve, run_config


class Policy(Speaker):
    """Model, optimizer and engine of one policy. `versions`: the weights after each step."""

    def __init__(self, name: str, section: PolicySection, place: Placement, seed: int) -> None:
        self.section, self.version = section, 0
        self._chain = chain_of(name, section)
        self.versions: list[Mapping[str, Any]] = []
        self.model = load_model(section.model)
        loss = ModelledLoss(place.trainer_gpus, place.scale)
        settings = StepSettings(
            section.optimizer, 1_000_000, section.batch.tokens_per_microbatch, entropy=section.algorithm.entropy
        )
        self.stepper = Stepper(self.model, loss, settings)
        if place.scale:
            engine: Any = ModelledEngine(
                section.model, gpus=place.engine_gpus, scale=place.scale, max_concurrency=place.rows, seed=seed
            )
        else:
            engine = LocalEngine(section.model, max_concurrency=place.rows, seed=seed)
        super().__init__(name, section, engine)
        self.busy_s = 0.0

    def train(self, groups: Sequence[Sequence[Branches]]) -> None:
        """One step on all episodes of all groups."""
        begin = time.perf_counter()
        self.stepper.step(self._rows(groups), self.version)
        self.version += 1
        self.busy_s += time.perf_counter() - begin

    def push(self) -> Any:
        """The weights as they are now, on their way into the engine."""
        copied = {name: tensor.detach().clone() for name, tensor in state_tensors(self.model).items()}
        self.versions += [copied] if self.version else []
        return self.engine.load_weights(self.version, copied)

    def _rows(self, groups: Sequence[Sequence[Branches]]) -> TokenRows:
        rows: list[tuple[Trajectory, np.ndarray, float]] = []
        episodes = [[episode[self.name] for episode in group] for group in groups]
        credit = advantages(self._chain, episodes, self.version + 1)
        for own, of_group in zip(episodes, credit, strict=True):
            for branches, advantage in zip(own, of_group, strict=True):
                rows += [(b, full_sequence(branches, b.branch), advantage) for b in branches]

        def flat(name: str, fill: float, dtype: Any) -> np.ndarray:
            given = [np.full(b.fork_at, fill, dtype) for b, _, _ in rows]
            pieces = [np.concatenate((g, getattr(b, name))) for g, (b, _, _) in zip(given, rows, strict=True)]
            return np.concatenate(pieces).astype(dtype)

        lengths = np.array([len(ids) for _, ids, _ in rows])
        return TokenRows(
            starts=np.concatenate(([0], lengths.cumsum())).astype(np.int64),
            token_ids=np.concatenate([ids for _, ids, _ in rows]).astype(np.int32),
            trained=flat("loss_mask", 0, bool),
            behavior_logprobs=flat("behavior_logprobs", 0, np.float32),
            advantages=np.repeat(np.array([a for _, _, a in rows], np.float32), lengths),
            versions=flat("versions", -1, np.int32),
            weights=np.ones(len(rows), np.float32),
        )


def advantages(chain: Chain, episodes: Sequence[Sequence[Sequence[Trajectory]]], step: int) -> list[list[float]]:
    """Of each episode of each group, by the operators that our data service would ask; `step` begins with 1.
    `episodes`: [groups][siblings][branches] of one policy."""
    groups = [
        Group(
            group_id=str(number), policy=own[0][0].policy, task=Task("train", number, 0, {}),
            episode_ids=[str(k) for k in range(len(own))], rewards=[b[0].reward for b in own],
            rewards_per_call=[()] * len(own), num_calls=[len(b) for b in own], metrics=[{}] * len(own),
            num_tokens=[int(sum(np.sum(x.loss_mask) for x in b)) for b in own], min_version=[step - 1] * len(own),
            errors=[None] * len(own),
        )
        for number, own in enumerate(episodes)
    ]  # fmt: skip
    for group in groups:
        chain.on_group(group)
    chain.on_batch(groups, step)
    return [group.advantages or [] for group in groups]


@dataclass(frozen=True)
class Placement:
    """Which GPUs do what. `scale` 0: nothing is modelled."""

    engine_gpus: float  # of one policy
    trainer_gpus: float
    scale: float
    rows: int  # requests of a policy at once

    @classmethod
    def of(cls, form: str, policies: int, scale: float, rows: int) -> Placement:
        """See the table above."""
        if form == "shared":
            return cls(GPUS / policies, GPUS, scale, rows)
        return cls(ROLLOUT_GPUS / policies, (GPUS - ROLLOUT_GPUS) / policies, scale, rows)


class Loop:
    """All of it."""

    def __init__(self, config: RunConfig, form: str, seed: int, scale: float) -> None:
        batch, self._size = next(iter(config.policies.values())).batch, config.workflow.group_size
        self._groups, self._form = batch.groups, form
        place = Placement.of(form, len(config.policies), scale, self._groups * self._size)
        self.policies = [Policy(name, section, place, seed) for name, section in config.policies.items()]
        options = config.workflow.options | {"scale": scale or SCALE}
        self._workflow = build("workflows", config.workflow.type, options, "workflow")
        self._tasks = _tasks(config, seed)
        self._episodes = 0
        self._pool = ThreadPoolExecutor(len(self.policies))
        self.facts: dict[str, float] = {}

    async def run(self, curve: Curve) -> None:
        """Steps until the curve is over."""
        await self._push()
        curve.begin()
        ahead = asyncio.create_task(self._roll_out())
        rollout_s = train_s = push_s = 0.0
        while True:
            begin = time.perf_counter()
            groups, rewards = await ahead
            rolled = time.perf_counter()
            if self._form == "overlap":
                ahead = asyncio.create_task(self._roll_out())
            await self._train(groups)
            trained = time.perf_counter()
            await self._push()
            end = time.perf_counter()
            rollout_s, train_s, push_s = rollout_s + rolled - begin, train_s + trained - rolled, push_s + end - trained
            means = {p.name: float(np.mean([r[p.name] for r in rewards])) for p in self.policies}
            if curve.step(means):
                break
            if self._form != "overlap":
                ahead = asyncio.create_task(self._roll_out())
        ahead.cancel()
        self.facts = {"rollout_s": rollout_s, "train_s": train_s, "push_s": push_s, **self._facts(curve.wall_s)}
        for policy in self.policies:
            policy.engine.close()

    def versions(self) -> list[dict[str, Any]]:
        """The weights of all policies after each step."""
        return [{p.name: p.versions[step] for p in self.policies} for step in range(self.policies[0].version)]

    async def _train(self, groups: Sequence[Sequence[Branches]]) -> None:
        loop = asyncio.get_running_loop()
        steps = [lambda p=p: p.train(groups) for p in self.policies]
        if self._form in ("shared", "split"):
            for step in steps:
                await loop.run_in_executor(self._pool, step)
        else:
            await asyncio.gather(*(loop.run_in_executor(self._pool, step) for step in steps))

    async def _push(self) -> None:
        await asyncio.gather(*(asyncio.wrap_future(policy.push()) for policy in self.policies))

    async def _roll_out(self) -> tuple[list[list[Branches]], list[Rewards]]:
        tasks = [next(self._tasks) for _ in range(self._groups)]
        played = await asyncio.gather(*(self._play(task) for task in tasks for _ in range(self._size)))
        branches = [branches for branches, _ in played]
        cut = range(0, len(branches), self._size)
        return [branches[i : i + self._size] for i in cut], [rewards for _, rewards in played]

    async def _play(self, task: Task) -> tuple[Branches, Rewards]:
        self._episodes += 1
        return await play(self._workflow, task, self.policies, str(self._episodes))

    def _facts(self, wall_s: float) -> dict[str, float]:
        stats = [policy.engine.stats() for policy in self.policies]
        facts = {
            "engine_idle": 1 - sum(s["busy_s"] for s in stats) / len(stats) / wall_s,
            "trainer_idle": 1 - sum(p.busy_s for p in self.policies) / len(self.policies) / wall_s,
        }
        if "row_s" in stats[0]:
            facts["rows_running"] = sum(s["row_s"] for s in stats) / wall_s
        return facts


def _tasks(config: RunConfig, seed: int) -> Iterator[Task]:
    source = build("sources", config.sources["train"].type, config.sources["train"].options, "sources.train")
    rng, epoch = random.Random(seed), 0
    while True:
        order = list(range(len(source)))
        rng.shuffle(order)
        yield from (Task("train", row, epoch, source.row(row)) for row in order)
        epoch += 1


def main() -> None:
    """Train until the target or the time limit; one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--form", choices=("shared", "split", "parallel", "overlap"), default="shared")
    parser.add_argument("--start", type=Path, required=True, help="folder with a model directory for each policy")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--until", type=float, default=None, help="stop at this reward of every policy")
    parser.add_argument("--threads", type=int, default=1, help="intra-op threads")
    parser.add_argument("--real", action="store_true", help="model nothing but the tools")
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    scale = 0.0 if args.real else SCALE
    curve = Curve(args.until, args.seconds)
    config = run_config(args.start, args.seed)
    loop = Loop(config, args.form, args.seed, scale)
    torch.set_num_threads(args.threads)  # the engines' setting is that of the whole process
    asyncio.run(loop.run(curve))
    row = curve.row(evaluate(config, loop.versions(), args.seed), loop.facts)
    sys.stdout.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
