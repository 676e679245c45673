"""Supervised steps on demonstrations `{messages, tools}`: the warm start of a run, and `astraflow sft`.

The same packing, forward pass and optimizer step as reinforcement learning; only the loss differs.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from astraflow.algorithms.losses.contract import LocalLoss, Metrics, Prepared, TrainedTokens
from astraflow.config.rooms import build
from astraflow.config.schema import PolicySection, RunConfig
from astraflow.contracts import Source
from astraflow.errors import SourceError
from astraflow.models.chat import ChatTokenizer
from astraflow.models.load import load_model, load_tensors, state_tensors
from astraflow.models.lora.layers import add_lora, load_lora, lora_tensors, peft_names
from astraflow.models.scoring.packing import TokenRows, rows_from_lists
from astraflow.models.scoring.recompute import recompute_activations
from astraflow.training.checkpoint import save_model
from astraflow.training.guards.batches import check_rows, longest_row
from astraflow.training.guards.memory import naming_memory
from astraflow.training.guards.packed import prepared_scoring
from astraflow.training.optimize.frozen import freeze
from astraflow.training.parallel.loading import Stored, open_model
from astraflow.training.parallel.ranks import ALONE, Ranks, device_of
from astraflow.training.parallel.scoring import Scoring
from astraflow.training.step import Stepper, StepSettings

Example = tuple[np.ndarray, np.ndarray]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Company:
    """Whom the steps are done with: see `Stepper`."""

    should_stop: Callable[[], bool] = lambda: False
    ranks: Ranks = ALONE
    score: Scoring | None = None


class NegativeLogLikelihood(LocalLoss):
    """-log p per demonstrated token; everything else about it is ignored."""

    def __init__(self) -> None:
        super().__init__("token")

    def __call__(self, tokens: TrainedTokens, prepared: Prepared = None) -> tuple[torch.Tensor, Metrics]:
        """See `PolicyLoss`."""
        return -tokens.policy_logprobs, {}


class Demonstrations:
    """Batches of tokenised demonstrations: a seeded shuffle per epoch, a function of the step alone."""

    def __init__(self, source: Source, name: str, tokenizer: ChatTokenizer, batch: int, seed: int) -> None:
        self._source, self._name, self._tokenizer = source, name, tokenizer
        self._batch, self._seed = batch, seed
        self._epoch, self._order = -1, np.empty(0, dtype=np.int64)
        self._examples: dict[int, Example] = {}

    def rows(self, step: int) -> TokenRows:
        """The batch of `step` (from 0). Raises: SourceError: a row that is no demonstration, naming it."""
        wanted = range(step * self._batch, (step + 1) * self._batch)
        return rows_from_lists([self._example(self._index(position)) for position in wanted])

    def _index(self, position: int) -> int:
        epoch, offset = divmod(position, len(self._source))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self._source))
        return int(self._order[offset])

    def _example(self, index: int) -> Example:
        if index not in self._examples:
            row = self._source.row(index)
            if not isinstance(row.get("messages"), list):
                raise SourceError(
                    f"sources.{self._name} row {index}", sorted(row), "has no list 'messages'",
                    "give demonstrations {messages, tools}",
                )  # fmt: skip
            ids, trained = self._tokenizer.training_example(row["messages"], row.get("tools"))
            self._examples[index] = (np.asarray(ids, dtype=np.int32), np.asarray(trained, dtype=bool))
        return self._examples[index]


def warm_start(
    model: PreTrainedModel, model_directory: Path, config: RunConfig, policy: str,
    company: Company = Company(),  # frozen
) -> dict[str, float]:  # fmt: skip
    """Take the warm start of a policy that has one, in place; returns the metrics of the last step.

    The optimizer is its own: that of the policy with the learning rate of the warm start, flat, and forgotten
    afterwards.
    """
    own = config.policies[policy]
    section = own.warm_start
    assert section is not None, policy
    spec = config.sources[section.source]
    source: Source = build("sources", spec.type, spec.options, f"sources.{section.source}")
    demonstrations = Demonstrations(
        source, section.source, ChatTokenizer(model_directory), section.batch, config.run.seed
    )
    settings = StepSettings(
        own.optimizer.model_copy(update={"lr": section.lr, "schedule": "constant", "warmup_steps": 0}),
        section.steps, own.batch.tokens_per_microbatch, arithmetic=own.trainer.dtype,
    )  # fmt: skip
    stepper = Stepper(model, NegativeLogLikelihood(), settings, company.should_stop, company.ranks, company.score)
    begin = time.perf_counter()
    metrics: dict[str, float] = {}
    for step in range(section.steps):
        rows = demonstrations.rows(step)
        check_rows(rows, model)
        with naming_memory(policy, own, longest_row(rows)):
            metrics = _supervised_metrics(stepper.step(rows, 0))
        if (step + 1) % 50 == 0 or step + 1 == section.steps:
            log.info("supervised step %d of %d: loss %.4f", step + 1, section.steps, metrics["loss"])
    return metrics | {"perf/wall_s": time.perf_counter() - begin}


def run_sft(
    model_directory: Path, target: Path, config: RunConfig, policy: str, ranks: Ranks = ALONE
) -> dict[str, float]:
    """Take the warm start of a policy as its run does and save it as a Hugging Face directory `target`; of several
    ranks, which all call it, rank 0 saves."""
    torch.manual_seed(config.run.seed)
    section = config.policies[policy]
    ranks = ranks.arranged(section.trainer)
    with naming_memory(policy, section):
        model = open_model(model_directory, ranks)
        if section.lora is not None:
            add_lora(model, section.lora)
        freeze(model, section.trainer.frozen)
        if section.trainer.gradient_checkpointing:
            recompute_activations(model)
        stored = Stored(model_directory, device_of(section.trainer.device))
        score = prepared_scoring(model, f"policies.{policy}.model", ranks, stored)
    metrics = warm_start(model, model_directory, config, policy, Company(ranks=ranks, score=score))
    if ranks.many:
        model = _gathered(model, model_directory, section, ranks)
    if ranks.leads:
        save_model(target, model, model_directory)
    ranks.tell(b"" if ranks.leads else None)  # it is written
    return metrics


def _gathered(model: PreTrainedModel, directory: Path, section: PolicySection, ranks: Ranks) -> PreTrainedModel:
    """On rank 0 the model with all that was trained; the others, which help, keep theirs."""
    from astraflow.training.parallel.sharding import whole  # a second to load

    trained: dict[str, torch.Tensor] = {}
    for name, tensor in (lora_tensors(model) or state_tensors(model)).items():
        full = whole(tensor)
        if ranks.leads:
            trained[name] = full.cpu()
    if not ranks.leads:
        return model
    gathered = load_model(directory)
    if section.lora is None:
        load_tensors(gathered, trained)
    else:
        add_lora(gathered, section.lora)
        load_lora(gathered, peft_names(trained))
    return gathered


def _supervised_metrics(metrics: dict[str, float]) -> dict[str, float]:
    """Without what only has a meaning against a behaviour policy."""
    return {
        name: value
        for name, value in metrics.items()
        if not name.startswith(("staleness/", "policy/")) or name == "policy/entropy"
    }
