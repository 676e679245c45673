"""One policy on a node: its model directory, engine, chat template, and the loop that keeps its weights fresh."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from astraflow.config.checks.engines import served_problems
from astraflow.config.rooms import build, check_options, resolve
from astraflow.config.schema import EngineSection, PolicySection, RunConfig
from astraflow.contracts import Engine
from astraflow.errors import (
    ConfigError,
    EngineError,
    ModelError,
    Problem,
    ProtocolMismatch,
    Unauthorized,
    WeightError,
    WireError,
)
from astraflow.models.chat import ChatTokenizer
from astraflow.models.lora.adapter import read_adapter
from astraflow.models.remote.transcript import Transcript
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import parser_for
from astraflow.rollout.loop import in_thread
from astraflow.rollout.serving.past import Past
from astraflow.rollout.swap_check import ServedCheck
from astraflow.types import Adapter, WeightVersion
from astraflow.weights.client import Fetched, WeightClient

log = logging.getLogger("astraflow.node")
_PAUSE_S, _MAX_PAUSE_S = 0.25, 8.0


@dataclass(frozen=True)
class PolicyOptions:
    """What all policies of a node share."""

    cache: Path  # of built-in models
    seed: int  # of the run
    node_id: str
    concurrency: int  # requests decoded at once
    threads: int  # intra-op threads of an engine


class Weights:
    """The newest version that was announced, and the way from there into the engine."""

    def __init__(
        self, policy: str, client: WeightClient, on_version: Callable[[], None], check: ServedCheck | None = None,
        past: Past | None = None,
    ) -> None:  # fmt: skip
        """`on_version` is called when another version is in force. `check`: looks at every one that is. `past`: which
        is taken instead of the newest."""
        self._policy, self._client, self._on_version, self.check = policy, client, on_version, check
        self._past = past
        self._newest = self._announced = WeightVersion(policy, -1)
        self._news = asyncio.Event()
        self._held: Fetched | None = None  # what the next delta is applied to
        self.num_failures = 0

    @property
    def announced(self) -> int:
        """The newest version that is known to exist."""
        return self._announced.version

    def announce(self, newest: WeightVersion) -> None:
        """There is this version (older ones, and those known already, change nothing)."""
        if newest.version >= self._newest.version:
            self._newest = newest
        wanted = newest if self._past is None else self._past.of(newest)
        if wanted is not None and (
            wanted.version > self._announced.version
            or (wanted.version == self._announced.version and wanted.urls != self._announced.urls)
        ):
            self._announced = wanted
            self._news.set()

    async def fetch_newer(self, version: int) -> Fetched:
        """Waits for a version above `version` and fetches it, trying again until a store has it.

        The tensors of the version before are changed in place: nobody may read them any more.
        Raises: Unauthorized or ProtocolMismatch: trying again cannot help.
        """
        pause_s = _PAUSE_S
        while True:
            self._news.clear()
            wanted = self._announced
            if wanted.version <= version:
                await self._news.wait()
                continue
            held = self._held
            try:
                fetched = await in_thread(lambda: self._client.fetch(wanted, held), f"weights-{self._policy}")  # noqa: B023
            except (Unauthorized, ProtocolMismatch):
                raise
            except (WeightError, WireError) as error:
                self.num_failures += 1
                log.warning("weights of %s %d: %s", self._policy, wanted.version, error)
            else:
                # Of a policy whose versions travel whole, a copy in host memory would be of no use.
                self._held = fetched if version < 0 or fetched.held.manifest.delta is not None else None
                return fetched
            if self._past is not None:  # the one that was wanted may be gone by now, or never have been here
                self._announced = self._newest
            try:
                async with asyncio.timeout(pause_s):
                    await self._news.wait()
            except TimeoutError:
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)

    async def follow(self, engine: Engine) -> None:
        """Background task: every newer version goes into `engine`. Raises: ModelError: the weights do not fit."""
        while True:
            fetched = await self.fetch_newer(engine.version)
            adapter = read_adapter(fetched.files)
            await asyncio.wrap_future(engine.load_weights(fetched.version, fetched.tensors, adapter))
            self._on_version()
            if self.check is not None:
                await self.check.look(engine, fetched)


def served_here(
    config: RunConfig, node: str, given: Mapping[str, EngineSection], serves: Sequence[str] = ()
) -> tuple[RunConfig, frozenset[str]]:
    """The run with the engines of one node, `given` to it, else those of the run file's node of its name; and the
    policies that have one here, by `serves` in the same way.

    Raises: ConfigError: one that is not in the run file cannot serve its policy.
    """
    problems = [
        f"--serves {name} names no policy of this run; known: {', '.join(config.policies)}"
        for name in serves
        if name not in config.policies
    ]
    for name, engine in given.items():
        where = f"--engine {name}"
        if name not in config.policies:
            problems.append(f"{where} names no policy of this run; known: {', '.join(config.policies)}")
            continue
        try:
            target = resolve("engines", engine.type, where)
            problems += check_options(target, engine.options, where, {"model_dir"})
        except Problem as error:
            problems.append(str(error))
        problems += served_problems(where, name, config.policies[name], engine)
    if problems:
        raise ConfigError(f"node {node}", problems)
    engines = config.engines_of(node) | dict(given)
    policies = {
        name: section.model_copy(update={"engine": engines[name]}) if name in engines else section
        for name, section in config.policies.items()
    }
    own = frozenset(serves or config.node(node).serves or config.policies)
    return config.model_copy(update={"policies": policies}), own


async def start_policy(
    name: str, section: PolicySection, options: PolicyOptions, weights: Weights, engines: Sequence[Engine] | int = 1,
    kind: type[PolicyEndpoint] = PolicyEndpoint,
) -> PolicyEndpoint:  # fmt: skip
    """The engines and chat template of a policy. Its model comes from the cache or disk, else from the weight store.

    Args: engines: they are there already, or how many to start. kind: another one for engines of other nodes, which
    need no weights from here.
    Raises: ModelError: the model cannot be used.
    """

    def built(directory: Path | str) -> Awaitable[PolicyEndpoint]:
        return in_thread(lambda: _endpoint(kind, name, section, options, directory, engines), f"engine-{name}")

    if section.remote:
        return await built(section.model)
    try:
        directory = await in_thread(lambda: directory_of(section.model, options.cache, options.seed), f"model-{name}")
    except ModelError as error:
        if section.frozen:  # nobody publishes it
            raise ModelError(
                f"policies.{name}.model", section.model, "is frozen and not on this node",
                "copy the model directory to the same path here",
            ) from error  # fmt: skip
        log.info("%s; waiting for the published files of %s instead", error, name)
    else:
        endpoint = await built(directory)
        if section.frozen and kind is PolicyEndpoint:
            load = _load if isinstance(engines, int) else _load_base
            await asyncio.wrap_future(await in_thread(lambda: load(endpoint.engine, directory), f"weights-{name}"))
        return endpoint
    fetched = await weights.fetch_newer(-1)
    with tempfile.TemporaryDirectory(prefix=f"astraflow-{name}-") as place:
        published = Path(place)
        await in_thread(lambda: _write(fetched, published, name, section.model), f"model-{name}")
        return await built(published)


def _load(engine: Engine, directory: Path) -> Future[int]:
    """Its own weights, as version 0, which no trainer publishes."""
    from astraflow.models.load import load_model, state_tensors  # loads torch

    return engine.load_weights(0, state_tensors(load_model(directory)))


def _load_base(engine: Engine, directory: Path) -> Future[int]:
    """The same for an engine that has the base, on which others have adapters."""
    from astraflow.models.load import content_checksum  # loads torch

    return engine.load_weights(0, {}, Adapter(1.0, content_checksum(directory)))


def directory_of(model: str, cache: Path, seed: int) -> Path:
    """The directory of a policy's model. Raises: ModelError: it is not here."""
    from astraflow.models.registry import model_directory  # loads torch

    return model_directory(model, cache, seed)


def _write(fetched: Fetched, directory: Path, name: str, model: str) -> None:
    """A published version as a model directory. Raises: ModelError: it is only an adapter."""
    if read_adapter(fetched.files) is not None:
        raise ModelError(
            f"policies.{name}.model", model, "is the base of the published adapters and is not on this node",
            "copy the model directory to the same path here",
        )  # fmt: skip
    from safetensors.torch import save_file

    fetched.save_files(directory)
    save_file(dict(fetched.tensors), directory / "model.safetensors", {"format": "pt"})


def _endpoint(
    kind: type[PolicyEndpoint], name: str, section: PolicySection, options: PolicyOptions, directory: Path | str,
    engines: Sequence[Engine] | int,
) -> PolicyEndpoint:  # fmt: skip
    """`directory`: of the model, or its name at a service, for which characters are tokens."""
    chat: ChatTokenizer | Transcript = Transcript() if section.remote else ChatTokenizer(directory)
    if isinstance(engines, int):
        engines = [start_engine(name, section, options, directory, number=n) for n in range(engines)]
    parser = parser_for(section.tool_parser, chat, f"policies.{name}.tool_parser")
    return kind(engines[0], chat, parser, None, section.sampling.agents_choose, engines[1:])


def start_engine(
    name: str, section: PolicySection, options: PolicyOptions, directory: Path | str, policies: int = 1, number: int = 0
) -> Engine:
    """An engine for `policies` policies, of which `name` is one. `directory`: of the model, or its name at a service.
    `number`: which engine of the policy.

    Raises: ModelError: the model cannot be used. Problem: an option is out of its range.
    """
    given = {
        "max_concurrency": options.concurrency * policies,
        "threads": options.threads,
        # Two nodes (or two lives of one) must not sample the same noise for siblings of one group, nor two policies of
        # one model for one question.
        "seed": options.seed * 1_000_003 + zlib.crc32(f"{options.node_id}/{name}/{number}".encode()),
    }
    settings = {**given, **section.engine.options}
    try:
        where = f"policies.{name}.engine"
        engine: Engine = build("engines", section.engine.type, settings, where, model_dir=directory)
    except EngineError as error:  # an option out of its range will be that at every start
        raise Problem(f"policies.{name}.{error.thing}", error.value, error.rule, error.fix) from error
    return engine
