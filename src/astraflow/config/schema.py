"""The run file as types: one TOML file describes a whole run (sources, workflow, policies, nodes, evaluation).

Unknown keys are errors. A component (`type = "..."` plus its own options) is checked against the signature of what it
names, see `config.rooms`. Everything here is torch-free.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]


class Strict(BaseModel):
    """Base of all sections: unknown keys are refused, defaults are checked too."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class Component(BaseModel):
    """Something chosen by `type` (a built-in name, `module:Object`, or an entry point); other keys are its options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    type: str

    @property
    def options(self) -> dict[str, Any]:
        """The keys beside `type`."""
        return dict(self.__pydantic_extra__ or {})


def _component(value: Any) -> Any:
    return {"type": value} if isinstance(value, str) else value


def _optional(value: Any) -> Any:
    """A command line cannot leave a table out, so there a text says it."""
    return None if value == "none" else value


Spec = Annotated[Component, BeforeValidator(_component)]


class RunSection(Strict):
    """[run]: name, length and place of the run."""

    name: Name
    seed: int = Field(0, ge=0)
    steps: int = Field(ge=1, description="batches that every policy learns from, one version each")
    directory: str = Field("runs", description="parent of the run directory")
    checkpoint_every: int = Field(50, ge=1, description="steps between checkpoints; the last step always has one")
    keep_checkpoints: int = Field(2, ge=0, description="newest checkpoints of a policy that stay; 0: all")
    description: str = ""


class SourceSection(Component):
    """[sources.<name>]. Keys beside these are options of the source named by `type`."""

    group_size: int | None = Field(
        None, ge=1, description="episodes per task of this source; none: workflow.group_size"
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

    group_size: int = Field(8, ge=1, description="episodes per task")
    timeout_s: float = Field(120.0, gt=0, description="deadline of one episode on a node; then it is offered again")
    max_attempts: int = Field(3, ge=1, description="attempts of one episode before it counts as failed")


class SamplingSection(Strict):
    """Sampling of training rollouts; every value is sent explicitly to the engine."""

    temperature: float = Field(1.0, gt=0, description="> 0 in training")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: off")
    max_tokens: int = Field(256, ge=1, description="new tokens of one call; agents may ask for less")


class EngineSection(Component):
    """engine: what serves this policy on a node."""

    type: str = "local"


class KlSection(Strict):
    """algorithm.kl: a penalty on the distance from a reference policy."""

    coef: float = Field(0.001, gt=0, description="penalty per nat")
    place: Literal["loss", "reward"] = Field("loss", description="reward: subtracted from advantages, no gradient")
    estimator: Literal["k1", "k2", "k3"] | None = Field(None, description="none: k3 in the loss, k1 in the reward")
    reference: str = Field("", description="empty: a stage's column, else version 0; stage: the column; or a model")

    @property
    def estimator_used(self) -> str:
        """`estimator`, or the one that goes with `place`."""
        return self.estimator or ("k3" if self.place == "loss" else "k1")


class DistillSection(Strict):
    """algorithm.distill: credit for each token from a teacher's logprobs."""

    teacher: str = Field(min_length=1, description="a model, or stage: the column of a stage")
    coef: float = Field(1.0, gt=0, description="credit per nat")


class AlgorithmSection(Strict):
    """algorithm: how credit becomes a gradient."""

    advantage: Spec = Component(type="grpo")
    loss: Spec = Component(type="ppo_clip")
    corrections: list[Spec] = Field([], description="factors on the loss for data of other policies")
    anchor: Literal["behavior", "proximal"] = Field(
        "behavior", description="policy that the loss measures its ratio from; proximal: before the first update"
    )
    mask_truncated: bool = Field(False, description="answers that a length limit cut are left out of the loss")
    entropy: float = Field(0.0, ge=0, description="bonus on the entropy of trained tokens, loss per nat")
    z_loss: float = Field(0.0, ge=0, description="penalty on the squared log normaliser of the logits")
    kl: Annotated[KlSection | None, BeforeValidator(_optional)] = None
    distill: Annotated[DistillSection | None, BeforeValidator(_optional)] = None

    @property
    def penalty(self) -> KlSection | None:
        """`kl`, or what `distill` comes to: the KL to the teacher, as a reward of each token."""
        if self.distill is None:
            return self.kl
        return KlSection(coef=self.distill.coef, place="reward", estimator="k1", reference=self.distill.teacher)

    @property
    def reference_setting(self) -> str:
        """Where the reference of `penalty` is named."""
        return "kl.reference" if self.distill is None else "distill.teacher"


class BatchSection(Strict):
    """batch: what one step trains on."""

    groups: int = Field(16, ge=1, description="groups per batch")
    tokens: int = Field(0, ge=0, description="a batch is full at this many sampled tokens too; 0: by groups only")
    episodes: int = Field(0, ge=0, description="episodes of a batch, siblings may part; 0: whole groups")
    order: Literal["edf", "fifo"] = Field("edf", description="edf: oldest weight version first; fifo: first complete")
    max_staleness: int = Field(1, ge=0, description="0: synchronous training")
    epochs: int = Field(1, ge=1, description="passes over a batch")
    minibatches: int = Field(1, ge=1, description="optimizer steps of a pass, on whole groups each")
    tokens_per_microbatch: int = Field(8192, ge=16, description="computed tokens of one forward and backward pass")
    max_dropped_groups: int = Field(
        1000, ge=1, description="consecutive groups dropped without one batch before the run stops with advice"
    )


Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerSection(Strict):
    """optimizer: how a gradient becomes a step, and its schedule."""

    type: Literal["adamw", "adamw_8bit", "sgd"] = "adamw"
    lr: float = Field(1e-5, ge=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0)
    momentum: float = Field(0.0, ge=0, lt=1, description="of sgd")
    weight_decay: float = Field(0.0, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    decay_steps: int = Field(0, ge=0, description="of wsd; 0: a fifth of run.steps")
    min_lr_ratio: float = Field(0.0, ge=0, le=1, description="share of lr that is left at the end of a schedule")


class CriticSection(Strict):
    """critic: a value model learnt beside the policy, for `algorithm.advantage = "gae"`."""

    model: str = Field("", description="what it starts from, as a policy's model; empty: that of the policy")
    lr: float = Field(1e-5, ge=0)
    gamma: float = Field(1.0, gt=0, le=1, description="discount per token")
    lam: float = Field(0.95, ge=0, le=1, description="lambda of GAE")
    target_lam: float | None = Field(None, ge=0, le=1, description="lambda of the critic's targets; none: lam")
    clip: float = Field(0.2, ge=0, description="most that the updates on a batch gain from moving a value; 0: no bound")
    normalize: bool = Field(True, description="advantages of a batch have mean 0 and standard deviation 1")
    warmup_steps: int = Field(0, ge=0, description="first steps in which the policy stays as it is")


class LoraSection(Strict):
    """lora: small matrices are trained beside frozen weights, and only they travel."""

    rank: int = Field(16, ge=1)
    alpha: float = Field(32.0, gt=0, description="what is learnt is scaled by alpha / rank")
    targets: list[str] = Field(
        ["all-linear"], min_length=1, description="last parts of the names of the layers that get one"
    )


class WarmStartSection(Strict):
    """warm_start: supervised steps on demonstrations before version 0 is published (also `astraflow sft`)."""

    source: Name
    steps: int = Field(200, ge=1)
    batch: int = Field(64, ge=1, description="demonstrations per step")
    lr: float = Field(1e-3, gt=0)


class TrainerSection(Strict):
    """trainer: how the training process runs."""

    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="auto: cuda where there is one")
    ranks: int = Field(1, ge=1, description="processes that hold a part of the model each, on one host by the launcher")
    threads: int = Field(0, ge=0, description="intra-op threads; 0: cores divided by torch processes, at least 1")
    gradient_checkpointing: bool = Field(
        False, description="less memory for activations, about a third more arithmetic"
    )
    peak_tflops: float = Field(0.0, ge=0, description="TFLOP/s of one device, for perf/mfu; 0: by its name, if known")
    audit_trajectories: int = Field(
        4, ge=0, description="trajectories a step rescored under the exact versions that sampled them (logprob gap)"
    )
    max_logprob_gap: float = Field(0.5, gt=0, description="p99 of the gap above which an alarm is raised")


class PolicySection(Strict):
    """[policies.<name>]: one trainable model."""

    model: str = Field(description="Hugging Face directory, or a built-in name: tiny-char, smollm2-135m-instruct")
    engine: Annotated[EngineSection, BeforeValidator(_component)] = EngineSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    batch: BatchSection = BatchSection()
    operators: list[Spec] = [Component(type="zero_variance")]
    sampling: SamplingSection = SamplingSection()
    optimizer: OptimizerSection = OptimizerSection()
    warm_start: Annotated[WarmStartSection | None, BeforeValidator(_optional)] = None
    critic: Annotated[CriticSection | None, BeforeValidator(_optional)] = None
    lora: Annotated[LoraSection | None, BeforeValidator(_optional)] = None
    trainer: TrainerSection = TrainerSection()
    tool_parser: str = Field("auto", description="how tool calls are read from text: auto, hermes, bracket, none")


class NodeSection(Strict):
    """[[rollout.nodes]]: one rollout node that the launcher starts."""

    name: Name = "node"
    concurrency: int = Field(64, ge=1, description="episodes played at once")
    workers: int = Field(1, ge=1, description="worker processes that run workflow code")
    threads: int = Field(0, ge=0, description="intra-op threads of the engine; 0: automatic")
    delay_s: float = Field(0.0, ge=0, description="added to every call: makes a slow node for tests and demonstrations")
    start_after_s: float = Field(0.0, ge=0, description="join this long after the run starts")
    kill_after_s: float = Field(0.0, ge=0, description="0: never; else SIGKILL once, this long after it started")


def _nodes(value: Any) -> Any:
    return [{"name": f"node{i}"} for i in range(value)] if isinstance(value, int) else value


class RolloutSection(Strict):
    """[rollout]: the nodes the launcher starts; more may join by hand at any time."""

    nodes: Annotated[list[NodeSection], BeforeValidator(_nodes)] = [NodeSection()]


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
    workers: int = Field(1, ge=0, description="worker processes that the launcher starts; 0: started by hand")
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
    sources: dict[Name, Annotated[SourceSection, BeforeValidator(_component)]]
    mix: Annotated[MixSection | None, BeforeValidator(_optional)] = None
    workflow: WorkflowSection
    policies: dict[Name, PolicySection]
    rollout: RolloutSection = RolloutSection()
    evaluation: Annotated[EvaluationSection | None, BeforeValidator(_optional)] = None
    dataflow: DataflowSection = DataflowSection()
    weights: WeightsSection = WeightsSection()
    observe: ObserveSection = ObserveSection()
    stages: dict[Name, Annotated[StageSection, BeforeValidator(_component)]] = {}
    consumers: dict[Name, ConsumerSection] = {}
    train_source: Name = Field("train", description="the source that training tasks come from")

    @property
    def train_sources(self) -> list[str]:
        """Where training tasks come from: the sources of [mix], else `train_source`."""
        return list(self.mix.ratios) if self.mix is not None else [self.train_source]

    def group_size(self, source: str) -> int:
        """Episodes per training task of `source`."""
        return self.sources[source].group_size or self.workflow.group_size
