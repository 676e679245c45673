"""The KL penalty of a policy: what is added to its loss or taken from its advantages, and the reference behind it. A
teacher to be imitated is one too.

Where a stage adds `ref_logprobs` the reference is in the rows. Else it is scored here, in the trainer's own packs:

| policy        | reference                         | what is held                                                   |
|---------------|-----------------------------------|----------------------------------------------------------------|
| all weights   | version 0                         | a second model                                                 |
| `lora`        | version 0                         | the adapter's tensors as they were; without a warm start zeros |
| any           | `algorithm.kl.reference`, or      | a second model                                                 |
|               | `algorithm.distill.teacher`       |                                                                |

Nothing of it is in a checkpoint: all of it can be made again from the run file and the run directory.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import PreTrainedModel

from astraflow.algorithms.kl import ESTIMATORS, kl_estimates, kl_to_go
from astraflow.config.env import cache_dir
from astraflow.config.schema import KlSection, RunConfig
from astraflow.errors import ModelError, TrainingError
from astraflow.models.lora.adapter import PREFIX
from astraflow.models.lora.layers import lora_tensors
from astraflow.models.registry import model_directory
from astraflow.models.scoring.packing import Pack
from astraflow.training.guards.packed import prepared_scoring
from astraflow.training.parallel.loading import Stored, open_model
from astraflow.training.parallel.ranks import ALONE, Ranks
from astraflow.training.parallel.scoring import Scoring, load_whole, scoring_of

Tensors = Mapping[str, torch.Tensor]
ScoreAll = Callable[[Callable[[Pack], torch.Tensor]], list[np.ndarray]]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reference:
    """A model that does not learn. `weights` (by Hugging Face name): what it has instead of `model`'s own."""

    model: PreTrainedModel
    weights: Tensors | None = None
    score: Scoring | None = None  # None: `model` is whole

    @torch.no_grad()
    def logprobs(self, pack: Pack, temperature: float) -> torch.Tensor:
        """Logprobs [N] float32 of the trained tokens of `pack`."""
        return (self.score or scoring_of(self.model, ALONE))(pack, temperature, self.weights).logprobs


class KlPenalty:
    """`algorithm.kl` of one policy. `reference` None: the rows of its batches have the column `ref_logprobs`."""

    def __init__(
        self, section: KlSection, temperature: float, reference: Reference | None = None, to_go: bool = True
    ) -> None:
        """`to_go` False: a token gets its own KL as credit and not that of the later ones: from a teacher, or where a
        critic makes credit of it."""
        self.section, self.reference, self._temperature, self.to_go = section, reference, temperature, to_go

    def prepare(self, packs: list[Pack], scored: ScoreAll) -> list[Pack]:
        """The packs of a batch with `ref_logprobs`; with the penalty in the reward their advantages hold it.

        As in REINFORCE++ (arXiv:2501.03262) the reward of a token is -coef times its KL, by the logprobs that it was
        sampled with, so its advantage falls by coef times the sum over it and the later trained tokens of its sequence.
        The mean of that over the batch is given back: a baseline, which leaves the expected gradient as it is.
        Without `to_go` it falls by coef times the token's own KL: with k1, E[-A grad log pi] is then the gradient of
        KL(pi, ref) at each context as it was sampled (arXiv:2306.13649 equation 3 with the reverse KL).

        Args: scored: what a way to score one of them gives for all of `packs`.
        Raises: TrainingError: a trained token has no finite reference logprob.
        """
        values = [pack.ref_logprobs for pack in packs]
        if (reference := self.reference) is not None:
            values = [*scored(lambda pack: reference.logprobs(pack, self._temperature))]
        packs = [replace(p, ref_logprobs=_checked(own)) for p, own in zip(packs, values, strict=True)]
        if self.section.place == "loss" or not packs:
            return packs
        penalties = [self._sampled_kl(pack) for pack in packs]
        if self.to_go:
            penalties = [kl_to_go(own, pack.target_sequence) for own, pack in zip(penalties, packs, strict=True)]
            mean = np.concatenate(penalties).mean()
            penalties = [own - mean for own in penalties]
        return [
            replace(pack, advantages=(pack.advantages - self.section.coef * own).astype(np.float32))
            for pack, own in zip(packs, penalties, strict=True)
        ]

    def __call__(self, logprobs: torch.Tensor, pack: Pack) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss per trained token [N] of a prepared pack, and sums over them for metrics by slash name."""
        assert pack.ref_logprobs is not None
        reference = torch.from_numpy(pack.ref_logprobs).to(logprobs.device)
        with torch.no_grad():
            sums = {f"policy/kl_{name}": kl_estimates(logprobs, reference, name).sum() for name in ESTIMATORS}
        if self.section.place == "reward":
            return torch.zeros_like(logprobs), sums
        return self.section.coef * kl_estimates(logprobs, reference, self.section.estimator_used), sums

    def _sampled_kl(self, pack: Pack) -> np.ndarray:
        """[N] estimates for the policies that sampled the tokens."""
        assert pack.ref_logprobs is not None
        behavior, reference = (torch.from_numpy(x).double() for x in (pack.behavior_logprobs, pack.ref_logprobs))
        estimates: np.ndarray = kl_estimates(behavior, reference, self.section.estimator_used).numpy()
        return estimates


def _checked(values: np.ndarray | None) -> np.ndarray:
    if values is None or not np.isfinite(values).all():
        raise TrainingError(
            "batch.ref_logprobs", "missing" if values is None else "not finite",
            "must be there and finite for every trained token, as algorithm.kl needs it",
            "look at the stage that adds it, or at algorithm.kl.reference",
        )  # fmt: skip
    return values


def load_reference(
    config: RunConfig, policy: str, model: PreTrainedModel, directory: Path, first_version: Callable[[], Tensors],
    ranks: Ranks = ALONE,
) -> Reference:  # fmt: skip
    """The reference of `policy`, whose trained model is `model` and came from `directory`.

    Args: first_version: gives the tensors of version 0 as published; asked for after a warm start only.
    Raises: ModelError: it cannot be loaded or packed, or reads other tokens than the policy.
    """
    section = config.policies[policy]
    assert section.algorithm.penalty is not None
    name, warm = section.algorithm.penalty.reference, section.warm_start is not None
    if name:
        setting = f"algorithm.{section.algorithm.reference_setting}"
        other = model_directory(name, cache_dir(), config.run.seed)
        check_tokens(setting, name, other, directory)
        source, frozen = other, open_model(other, ranks)
        _check_rows(setting, name, frozen, model)
    elif section.lora is not None:
        own = lora_tensors(model)
        if warm:
            weights = {n.removeprefix(PREFIX): t.to(model.device) for n, t in first_version().items()}
        else:
            weights = {n: torch.zeros_like(t) for n, t in own.items() if n.endswith("lora_B.weight")}
        log.info("the reference of %s is its base %s", policy, "with the adapter of version 0" if warm else directory)
        return Reference(model, weights)
    else:
        source, frozen = directory, open_model(directory, ranks)
    frozen.requires_grad_(False)
    setting = f"algorithm.{section.algorithm.reference_setting}"
    score = prepared_scoring(frozen, setting, ranks, Stored(source, model.device))
    if warm and not name:
        load_whole(frozen, first_version(), ranks)
    log.info("the reference of %s is %s", policy, name or ("version 0" if warm else directory))
    return Reference(frozen, score=score)


def check_tokens(setting: str, name: str, other: Path, policy: Path) -> None:
    """Raises: ModelError: the model `name` in `other` reads other tokens than the policy's; `setting` asks for it."""
    theirs, ours = (
        Tokenizer.from_file(str(d / "tokenizer.json")).get_vocab(with_added_tokens=True) for d in (other, policy)
    )
    if theirs != ours:
        token = min(token for token, number in ours.items() if theirs.get(token) != number) if ours else ""
        raise ModelError(
            setting, name, f"has another vocabulary than the policy ({len(theirs)} tokens, not "
            f"{len(ours)}; {token!r} is {theirs.get(token)}, not {ours.get(token)})",
            "use a model with the policy's tokenizer",
        )  # fmt: skip


def _check_rows(setting: str, name: str, reference: PreTrainedModel, policy: PreTrainedModel) -> None:
    theirs, ours = (m.get_output_embeddings().weight.shape[0] for m in (reference, policy))  # type: ignore[no-untyped-call]
    if theirs < ours:
        raise ModelError(
            setting, name, f"has logits for {theirs} tokens, the policy for {ours}",
            "use a model with the policy's vocabulary",
        )  # fmt: skip
