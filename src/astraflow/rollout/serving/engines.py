"""What a node serves: the engines of each policy, and the versions on their way into them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

from astraflow.config.schema import RunConfig
from astraflow.contracts import Engine
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.loop import in_thread
from astraflow.rollout.policies import PolicyOptions, Weights, directory_of, start_policy
from astraflow.rollout.served import ServedCheck
from astraflow.rollout.serving.past import Past
from astraflow.rollout.serving.sharing import number_of_engines, shared_engines
from astraflow.types import WeightVersion
from astraflow.weights.client import WeightClient


class Serving:
    """Of one run on one node. `endpoints` fills as `start` goes on."""

    def __init__(
        self, config: RunConfig, options: PolicyOptions, client: WeightClient, on_version: Callable[[], None]
    ) -> None:
        """`on_version` is called when another version of a policy is in force."""
        self._config, self._options = config, options
        self.endpoints: dict[str, PolicyEndpoint] = {}
        self.weights: dict[str, list[Weights]] = {}  # by policy, as its engines
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
        """The newest version of it that is known to exist."""
        return self.weights[policy][0].announced

    async def start(self) -> None:
        """All engines. Raises: ModelError, AstraFlowError: one of them cannot be built."""
        config = self._config
        shared = dict(await in_thread(lambda: list(shared_engines(config, self._options)), "engine-shared"))
        for name, section in config.policies.items():
            based = section.model_copy(update={"model": config.base_of(name)})
            engines = shared.get(name, number_of_engines(config, name))
            self.endpoints[name] = await start_policy(name, based, self._options, self.weights[name][0], engines)

    @property
    def engines(self) -> dict[str, Engine]:
        """The first of each policy."""
        return {name: endpoint.engine for name, endpoint in self.endpoints.items()}

    def pairs(self) -> Iterator[tuple[str, Engine, Weights]]:
        """Every engine, the policy that it is of, and what goes into it."""
        for name, endpoint in self.endpoints.items():
            for engine, weights in zip(endpoint.engines, self.weights[name], strict=True):
                yield name, engine, weights

    def close(self) -> None:
        """End all engines."""
        for _, engine, _ in self.pairs():
            engine.close()

    def _check(self, policy: str) -> ServedCheck | None:
        config, options = self._config, self._options
        if not config.weights.check or config.policies[policy].frozen:
            return None
        return ServedCheck(policy, partial(directory_of, config.base_of(policy), options.cache, options.seed))
