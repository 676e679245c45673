"""What a node serves: the engines of each policy, and the versions on their way into them; and the engines of other
nodes for policies that have none here."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial

from astraflow.config.schema import RunConfig
from astraflow.contracts import Engine
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.loop import Guarded, in_thread
from astraflow.rollout.neighbours.engine import FarEndpoint, FarEngine
from astraflow.rollout.neighbours.places import Neighbours
from astraflow.rollout.policies import PolicyOptions, Weights, directory_of, start_policy
from astraflow.rollout.serving.past import Past
from astraflow.rollout.serving.sharing import number_of_engines, shared_engines
from astraflow.rollout.swap_check import ServedCheck
from astraflow.types import Episode, WeightVersion
from astraflow.weights.client import WeightClient


class Serving:
    """Of one run on one node. `endpoints` fills as `start` and `reach` go on."""

    def __init__(
        self, config: RunConfig, options: PolicyOptions, client: WeightClient, on_version: Callable[[], None],
        served: Collection[str] | None = None,
    ) -> None:  # fmt: skip
        """`on_version` is called when another version of a policy is in force. `served`: policies that have an engine
        here, None: all."""
        self._config, self._options = config, options
        self.served = [name for name in config.policies if served is None or name in served]
        self.lacking = [name for name in config.policies if name not in self.served]
        self.endpoints: dict[str, PolicyEndpoint] = {}
        self.weights: dict[str, list[Weights]] = {}  # by policy, as its engines
        self.far: dict[str, list[FarEngine]] = {}  # of policies that have none here
        self._followers: dict[str, list[Weights]] = {}  # policy -> what its versions go into: its own and copies
        for name, section in config.policies.items():
            copy, engines = section.copy_of, number_of_engines(config, name)
            self.weights[name] = [
                Weights(
                    name, client, on_version, self._check(name), None if copy is None else Past(copy.every, engines, n)
                )
                for n in range(engines)
            ]
            self._followers.setdefault(name if copy is None else copy.policy, []).extend(self.weights[name])

    def hear(self, versions: Mapping[str, WeightVersion]) -> None:
        """There are these versions."""
        for name, version in versions.items():
            for weights in self._followers.get(name, ()):
                weights.announce(version)

    def announced(self, policy: str) -> int:
        """The newest version of it that is known to exist, and can be waited for: other nodes fetch their own."""
        return -1 if policy in self.far else self.weights[policy][0].announced

    async def start(self) -> None:
        """All engines of this node. Raises: ModelError, AstraFlowError: one of them cannot be built."""
        config = self._config
        load = partial(shared_engines, config, self._options, self.served)
        shared = dict(await in_thread(lambda: list(load()), "engine-shared"))
        for name in self.served:
            engines = shared.get(name, number_of_engines(config, name))
            self.endpoints[name] = await start_policy(
                name, config.based(name), self._options, self.weights[name][0], engines
            )

    def keep(self, tasks: Guarded) -> None:
        """From now on its engines get the newest weights, and one that ends is the end of `tasks`."""
        for name, engine, weights in self.pairs():
            tasks.spawn(f"engine of {name}", _raise_when_ended(engine))
            if not self._config.policies[name].frozen:
                tasks.spawn(f"weight loop of {name}", weights.follow(engine))

    async def reach(self, neighbours: Neighbours) -> None:
        """The policies that this node lacks, on others. Raises: EngineError: nobody serves one of them, for long."""
        config = self._config
        for name in self.lacking:
            numbers = range(number_of_engines(config, name))
            engines = [FarEngine(name, number, neighbours, config.rollout.unserved_s) for number in numbers]
            await engines[0].found()
            self.far[name] = engines
            self.endpoints[name] = await start_policy(
                name, config.based(name), self._options, self.weights[name][0], engines, FarEndpoint
            )

    @property
    def engines(self) -> dict[str, Engine]:
        """The first of each policy."""
        return {name: endpoint.engine for name, endpoint in self.endpoints.items()}

    def pairs(self) -> Iterator[tuple[str, Engine, Weights]]:
        """Every engine of this node, the policy that it is of, and what goes into it."""
        for name in self.served:
            if (endpoint := self.endpoints.get(name)) is not None:
                for engine, weights in zip(endpoint.engines, self.weights[name], strict=True):
                    yield name, engine, weights

    def sampled_far(self, episode: Episode) -> dict[str, str]:
        """Policy -> "<engine>@<node>" of another node that sampled it in an episode, once."""
        found = {}
        for name, engines in self.far.items():
            for engine in engines:
                if by := engine.sampled_by(episode.episode_id, episode.attempt):
                    found[name] = by
        return found

    def close(self) -> None:
        """End all engines."""
        for _, engine, _ in self.pairs():
            engine.close()
        for engines in self.far.values():
            for far in engines:
                far.close()

    def _check(self, policy: str) -> ServedCheck | None:
        config, options = self._config, self._options
        if not config.weights.check or config.policies[policy].frozen:
            return None
        return ServedCheck(policy, partial(directory_of, config.base_of(policy), options.cache, options.seed))


async def _raise_when_ended(engine: Engine) -> None:
    raise await asyncio.wrap_future(engine.ended)
