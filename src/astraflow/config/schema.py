"""The run file as types: one TOML file describes a whole run (sources, workflow, policies, nodes, evaluation).

Unknown keys are errors. A component (`type = "..."` plus its own options) is checked against the signature of what it
names, see `config.rooms`. Everything here is torch-free.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from astraflow.config.sections.base import Component, Name, Spec, Strict, component_of, or_none
from astraflow.config.sections.policy import (
    AlgorithmSection,
    BatchSection,
    CopySection,
    CriticSection,
    DistillSection,
    EngineSection,
    EngineSpec,
    KlSection,
    LoraSection,
    OptimizerSection,
    PolicySection,
    SamplingSection,
    TrainerSection,
    WarmStartSection,
)

__all__ = [
    "RunConfig", "RunSection", "SourceSection", "MixSection", "WorkflowSection", "NodeSection", "RolloutSection",
    "SwarmSection",
    "EvaluationSection", "StageSection", "ConsumerSection", "DataflowSection", "WeightsSection", "ObserveSection",
    "PolicySection", "AlgorithmSection", "BatchSection", "CopySection", "CriticSection", "DistillSection",
    "EngineSection",
    "KlSection", "LoraSection", "OptimizerSection", "SamplingSection", "TrainerSection", "WarmStartSection",
    "Component", "Name", "Spec", "Strict",
]  # fmt: skip


MAX_GROUP = 65_536
"""Episodes of one task: what waits for the last of them is kept in memory."""


class RunSection(Strict):
    """[run]: name, length and place of the run."""

    name: Name
    seed: int = Field(0, ge=0)
    steps: int = Field(ge=1, description="batches that every trained policy learns from, one version each")
    directory: str = Field("runs", description="parent of the run directory")
    checkpoint_every: int = Field(50, ge=1, description="steps between checkpoints; the last step always has one")
    keep_checkpoints: int = Field(2, ge=0, description="newest checkpoints of a policy that stay; 0: all")
    description: str = ""


class SourceSection(Component):
    """[sources.<name>]. Keys beside these are options of the source named by `type`."""

    group_size: int | None = Field(
        None, ge=1, le=MAX_GROUP, description="episodes per task of this source; none: workflow.group_size"
    )
    operators: list[Spec] = Field([], description="operators that decide which of its tasks are rolled out")


def _ratio(value: Any) -> Any:
    return (value, value) if isinstance(value, int | float) else value


Share = Annotated[float, Field(ge=0)]
Ratio = Annotated[tuple[Share, Share], BeforeValidator(_ratio)]


class MixSection(Strict):
    """[mix]: several training sources by ratio; takes the place of `train_source`."""

    ratios: dict[Name, Ratio] = Field(
        description="source -> share of the groups, or [at the start, at the end]; they need not add up to 1"
    )
    schedule: Literal["linear", "cosine"] = Field("linear", description="how shares move from start to end")
    steps: int = Field(0, ge=0, description="steps over which shares move; 0: all of run.steps")


class WorkflowSection(Component):
    """[workflow]: what plays an episode. Keys beside these are options of the workflow named by `type`."""

    group_size: int = Field(8, ge=1, le=MAX_GROUP, description="episodes per task")
    timeout_s: float = Field(120.0, gt=0, description="deadline of one episode on a node; then it is offered again")
    call_timeout_s: float = Field(0.0, ge=0, description="deadline of one call; then it fails; 0: that of the episode")
    step_timeout_s: float = Field(
        0.0, ge=0, description="longest time of an episode without a call; then it fails; 0: that of the episode"
    )
    max_output_bytes: int = Field(
        1 << 20, ge=1024, description="what Python code of one episode may write to standard output and error"
    )
    max_attempts: int = Field(3, ge=1, description="attempts of one episode before it counts as failed")


class SwarmSection(Strict):
    """[rollout.swarm]: a door on each node that the launcher starts, for clients that play episodes elsewhere."""

    host: str = Field("127.0.0.1", description="beyond loopback needs a token")
    port: int = Field(0, ge=0, le=65535, description="of the first node; each further one takes the next; 0: any free")
    dead_after_s: float = Field(
        30.0, gt=0, description="silence of a client, no heartbeat and no call, after which an episode is given back"
    )
    max_episodes: int = Field(1024, ge=1, description="in the hands of the clients of one door at once")


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if value and not (host and port.isdecimal() and int(port) < 65536):
        raise ValueError("must be HOST:PORT, as 10.0.0.5:7801; port 0: any free")
    if host.strip("[]") in ("0.0.0.0", "::"):
        raise ValueError("must be an address by which other nodes reach this one, not that of all of its networks")
    return value


Address = Annotated[str, AfterValidator(_address)]


class NodeSection(Strict):
    """[[rollout.nodes]]: one rollout node that the launcher starts."""

    name: Name = "node"
    concurrency: int = Field(64, ge=1, description="episodes played at once")
    min_concurrency: int = Field(
        0, ge=0, description="least to which the load of the engines may lower it, by which it starts; 0: it stays"
    )
    workers: int = Field(
        1,
        ge=0,
        le=1000,
        description='worker processes that run workflow code; 0, also by workflow.type = "swarm": clients only',
    )
    watch: bool = Field(False, description="edits of the workflow's files are taken up while the run goes on")
    worker_memory_bytes: int = Field(
        8 << 30, ge=64 << 20, description="a worker and what it started that use more are killed (Linux)"
    )
    threads: int = Field(0, ge=0, description="intra-op threads of the engine; 0: automatic")
    engines: dict[Name, EngineSpec] = Field({}, description="policy -> what serves it here, instead of its own engine")
    serves: list[Name] = Field([], description="policies that have an engine here, others are reached; empty: all")
    listen: Address = Field(
        "", description="HOST:PORT by which other nodes reach its engines; empty: loopback, where nodes serve only some"
    )
    delay_s: float = Field(0.0, ge=0, description="added to every call: makes a slow node for tests and demonstrations")
    start_after_s: float = Field(0.0, ge=0, description="join this long after the run starts")
    kill_after_s: float = Field(0.0, ge=0, description="0: never; else SIGKILL once, this long after it started")


MAX_NODES = 1000
"""That one launcher starts."""


def _nodes(value: Any) -> Any:
    if not isinstance(value, int):
        return value
    if isinstance(value, bool) or not 0 <= value <= MAX_NODES:
        raise ValueError(f"must be 0 to {MAX_NODES} nodes, or a table for each")
    return [{"name": f"node{i}"} for i in range(value)]


class RolloutSection(Strict):
    """[rollout]: the nodes the launcher starts; more may join by hand at any time."""

    nodes: Annotated[list[NodeSection], BeforeValidator(_nodes)] = Field([NodeSection()])
    unserved_s: float = Field(
        60.0, gt=0, description="a call fails that waits so long for a node that serves its policy"
    )
    swarm: Annotated[SwarmSection | None, BeforeValidator(or_none)] = None


class EvaluationSection(Strict):
    """[evaluation]: rounds on held-out tasks, on the same nodes, beside training."""

    source: Name
    every: int = Field(20, ge=1, description="steps between rounds; one more at the start and at the end")
    num_tasks: int = Field(0, ge=0, description="first tasks of the source; 0: all")
    samples: int = Field(1, ge=1, description="k of avg@k")
    temperature: float = Field(0.0, ge=0, description="0: greedy")


class StageSection(Component):
    """[stages.<name>]: a stage, its policies and its workers. Keys beside these are options of its `type`."""

    policies: list[Name] = Field([], description="policies whose rows it works on; empty: all")
    workers: int = Field(1, ge=0, le=1000, description="worker processes that the launcher starts; 0: started by hand")
    rows: int = Field(64, ge=1, description="most rows of one lease")
    lease_s: float = Field(60.0, gt=0, description="silence after which leased rows are offered again")
    max_attempts: int = Field(3, ge=1, description="attempts after which a row's group is dropped")


class ConsumerSection(Strict):
    """[consumers.<name>]: a further reader of the rows that go to training, with a position of its own."""

    policies: list[Name] = Field([], description="empty: all")
    max_behind: int = Field(1000, ge=1, description="groups it may be behind")
    when_behind: Literal["hold", "skip"] = Field(
        "hold", description="hold: no new tasks; skip: oldest are counted as missed"
    )


class DataflowSection(Strict):
    """[dataflow]: the data service."""

    host: str = Field("127.0.0.1", description="anything but loopback needs a token (ASTRAFLOW_TOKEN)")
    port: int = Field(0, ge=0, le=65535, description="0: any free port")
    heartbeat_s: float = Field(2.0, gt=0)
    dead_after_s: float = Field(10.0, gt=0, description="silence after which a node's leases are offered again")
    batch_lease_s: float = Field(
        60.0, gt=0, description="silence after which a trainer is reported; its batch stays ready"
    )
    fsync: bool = Field(False, description="true: every commit survives a power failure, not only a kill")
    max_body_bytes: int = Field(1 << 30, ge=1 << 20, description="largest request body")
    max_episode_tokens: int = Field(1 << 18, ge=1, description="most tokens of an episode, each branch with its prefix")
    snapshot_every: int = Field(2000, ge=10, description="journaled commands between two snapshots")


def _base_url(value: str) -> str:
    if value and not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", value):
        raise ValueError("must be http://host:port or https://host by which nodes reach the server, or empty")
    return value


BaseUrl = Annotated[str, AfterValidator(_base_url)]


def _store_url(value: str) -> str:
    if value and not re.fullmatch(r"(?!.*::)(file:///|(?!https?:|file:)[A-Za-z][A-Za-z0-9+.-]*://)[^?#\s]+", value):
        raise ValueError("must be s3://bucket/prefix, file:///directory or the like without a query, or empty")
    return value


StoreUrl = Annotated[str, AfterValidator(_store_url)]


class WeightsSection(Strict):
    """[weights]: how many versions stay, and where they are served."""

    host: str = Field("127.0.0.1", description="where each trainer serves its weights; beyond loopback needs a token")
    port: int = Field(0, ge=0, le=65535, description="0: any free port")
    announce: BaseUrl = Field("", description="URL by which nodes reach that server; empty: as it listens")
    url: StoreUrl = Field("", description="object store that gets every version too; empty: none")
    keep: int = Field(4, ge=2, description="newest versions kept, beside those that are read or that they rest on")
    deltas: bool = Field(True, description="a version may travel as its changes since the one before")
    full_every: int = Field(50, ge=1, description="one version in so many carries all its tensors")
    check: bool = Field(False, description="nodes compare what their engines compute with with each version")


class ObserveSection(Strict):
    """[observe]: where the run can be looked at beside its own files."""

    trackers: list[Literal["wandb", "tensorboard", "trackio", "mlflow"]] = Field(
        [], description="experiment trackers that get the rows of metrics.jsonl, each with the extra of its name"
    )


class RunConfig(Strict):
    """A whole run file."""

    run: RunSection
    sources: dict[Name, Annotated[SourceSection, BeforeValidator(component_of)]]
    mix: Annotated[MixSection | None, BeforeValidator(or_none)] = None
    workflow: WorkflowSection
    policies: dict[Name, PolicySection]
    rollout: RolloutSection = RolloutSection()
    evaluation: Annotated[EvaluationSection | None, BeforeValidator(or_none)] = None
    dataflow: DataflowSection = DataflowSection()
    weights: WeightsSection = WeightsSection()
    observe: ObserveSection = ObserveSection()
    stages: dict[Name, Annotated[StageSection, BeforeValidator(component_of)]] = Field({})
    consumers: dict[Name, ConsumerSection] = Field({})
    train_source: Name = Field("train", description="the source that training tasks come from")

    @property
    def trained(self) -> dict[str, PolicySection]:
        """The policies that have a trainer."""
        return {name: policy for name, policy in self.policies.items() if policy.trained}

    @property
    def trainers(self) -> dict[str, list[str]]:
        """Name of a trainer process -> the policies that it trains."""
        found: dict[str, list[str]] = {}
        for name, policy in self.trained.items():
            found.setdefault(policy.trainer.process or name, []).append(name)
        return found

    def base_of(self, policy: str) -> str:
        """The model that versions of a policy are of or rest on, as `models.registry.model_directory` knows it."""
        section, lora = self.policies[policy], self.lora_of(policy)
        return section.model if lora is None or lora.quantize == "none" else f"{lora.quantize}:{section.model}"

    def based(self, policy: str) -> PolicySection:
        """Its section, with the model that its versions are of or rest on."""
        return self.policies[policy].model_copy(update={"model": self.base_of(policy)})

    def lora_of(self, policy: str) -> LoraSection | None:
        """The adapters that versions of a policy are; None: they are whole."""
        section = self.policies[policy]
        return (section if section.copy_of is None else self.policies[section.copy_of.policy]).lora

    def pools_of(self, policy: str) -> frozenset[tuple[int, int]]:
        """(every, number) of past versions of a policy that must stay for its copies, and for nodes that are late."""
        copies = (section.copy_of for section in self.policies.values() if section.copy_of is not None)
        return frozenset((copy.every, copy.keep + 1) for copy in copies if copy.policy == policy)

    def engines_of(self, node: str) -> dict[str, EngineSection]:
        """Policy -> what serves it on a node of this name, where that is not the policy's own engine."""
        return dict(self.node(node).engines)

    def node(self, name: str) -> NodeSection:
        """What is said of a node of this name."""
        return next((section for section in self.rollout.nodes if section.name == name), NodeSection())

    def steps_of(self, policy: str) -> int:
        """Steps that a policy makes; 0: it is only served."""
        section = self.policies[policy]
        return max(0, self.run.steps - section.frozen_steps) if section.trained else 0

    @property
    def train_sources(self) -> list[str]:
        """Where training tasks come from: the sources of [mix], else `train_source`."""
        return list(self.mix.ratios) if self.mix is not None else [self.train_source]

    def group_size(self, source: str) -> int:
        """Episodes per training task of `source`."""
        return self.sources[source].group_size or self.workflow.group_size
