"""[policies.<name>]: what is trained, on what, and how."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from astraflow.config.sections.base import Component, Name, Spec, Strict, component_of, or_none


class SamplingSection(Strict):
    """Sampling of training rollouts; every value is sent explicitly to the engine."""

    temperature: float = Field(1.0, ge=0, description="> 0 in training; 0, of policies that are only served: greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: off")
    min_p: float = Field(0.0, ge=0, le=1, description="share of the most likely token's probability; 0: off")
    max_tokens: int = Field(256, ge=1, description="new tokens of one call; agents may ask for less")
    agents_choose: list[Literal["temperature", "top_p", "top_k", "min_p"]] = Field(
        [], description="what follows an agent's request where it names a value; the rest is as set here"
    )


class EngineSection(Component):
    """engine: what serves this policy on a node."""

    type: str = "local"


EngineSpec = Annotated[EngineSection, BeforeValidator(component_of)]


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
    engine_corrections: dict[str, list[Spec]] = Field(
        {}, description="engine, as local-bfloat16 -> corrections of what it sampled, instead of `corrections`"
    )
    anchor: Literal["behavior", "proximal"] = Field(
        "behavior", description="policy that the loss measures its ratio from; proximal: before the first update"
    )
    mask_truncated: bool = Field(False, description="answers that a length limit cut are left out of the loss")
    entropy: float = Field(0.0, ge=0, description="bonus on the entropy of trained tokens, loss per nat")
    z_loss: float = Field(0.0, ge=0, description="penalty on the squared log normaliser of the logits")
    kl: Annotated[KlSection | None, BeforeValidator(or_none)] = None
    distill: Annotated[DistillSection | None, BeforeValidator(or_none)] = None

    @property
    def all_corrections(self) -> dict[str, list[Component]]:
        """Setting, below algorithm -> corrections of some of the data."""
        own = {f"engine_corrections.{engine}": specs for engine, specs in self.engine_corrections.items()}
        return {"corrections": self.corrections, **own}

    def corrections_of(self, engine: str) -> list[Component]:
        """What corrects the data that an engine of this name (`config.engine_name`) sampled."""
        return self.engine_corrections.get(engine, self.corrections)

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
    branches: Literal["each", "once"] = Field(
        "each", description="each branch has its group's weight, or a share of it"
    )
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
    quantize: Literal["none", "nf4"] = Field("none", description="nf4: linear layers of the base in 4 bits a weight")


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
    process: str = Field("", description="policies that name the same one are trained by one process, in turn")
    ranks: int = Field(
        1, ge=1, le=65_536, description="processes that hold a part of the model each, on one host by the launcher"
    )
    tensor_parallel: int = Field(1, ge=1, description="ranks that hold a part of each linear layer; divides ranks")
    context_parallel: int = Field(1, ge=1, description="ranks that divide the tokens of a pack; divides ranks")
    threads: int = Field(0, ge=0, description="intra-op threads; 0: cores divided by torch processes, at least 1")
    frozen: list[str] = Field([], description="parts of the model that are not trained, by the names of its weights")
    gradient_checkpointing: bool = Field(
        False, description="less memory for activations, about a third more arithmetic"
    )
    kernels: Literal["torch", "liger"] = Field("torch", description="liger: Triton kernels of norms and MLPs, on a GPU")
    peak_tflops: float = Field(0.0, ge=0, description="TFLOP/s of one device, for perf/mfu; 0: by its name, if known")
    audit_trajectories: int = Field(
        4, ge=0, description="trajectories a step rescored under the exact versions that sampled them (logprob gap)"
    )
    max_logprob_gap: float = Field(0.5, gt=0, description="p99 of the gap above which an alarm is raised")


class CopySection(Strict):
    """copy_of: served are earlier weights of another policy, as an opponent from its past."""

    policy: Name = Field(description="a policy that is trained, of the same model")
    every: int = Field(10, ge=1, description="its versions from one copy to the next")
    keep: int = Field(1, ge=1, description="newest copies, one of which plays an episode, the same for its group")


class PolicySection(Strict):
    """[policies.<name>]: one model, trained or only served."""

    model: str = Field(description="Hugging Face directory, or a built-in name: tiny-char, smollm2-135m-instruct")
    engine: EngineSpec = EngineSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    batch: BatchSection = BatchSection()
    operators: list[Spec] = Field([Component(type="zero_variance")])
    sampling: SamplingSection = SamplingSection()
    optimizer: OptimizerSection = OptimizerSection()
    warm_start: Annotated[WarmStartSection | None, BeforeValidator(or_none)] = None
    critic: Annotated[CriticSection | None, BeforeValidator(or_none)] = None
    lora: Annotated[LoraSection | None, BeforeValidator(or_none)] = None
    trainer: TrainerSection = TrainerSection()
    tool_parser: str = Field("auto", description="how tool calls are read: auto, hermes, llama3, bracket, none")
    frozen: bool = Field(False, description="served as it is, never trained: no trainer, no steps")
    frozen_steps: int = Field(0, ge=0, description="steps of the others before it is trained; it makes so many fewer")
    copy_of: Annotated[CopySection | None, BeforeValidator(or_none)] = None

    @property
    def remote(self) -> bool:
        """A service elsewhere has its model, by whose name it knows it: no directory, no weights, no tokens."""
        return self.engine.type == "remote"

    @property
    def trained(self) -> bool:
        """It has a trainer."""
        return not self.frozen and self.copy_of is None
