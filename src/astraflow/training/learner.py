"""What a trainer owns: the model, its optimizer state, its published versions and its checkpoints. Knows no service."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from astraflow.algorithms.corrections import Corrected
from astraflow.algorithms.losses.contract import PolicyLoss
from astraflow.config.env import cache_dir
from astraflow.config.rooms import build, check_options, resolve
from astraflow.config.schema import Component, PolicySection, RunConfig
from astraflow.config.serving import off_policy_problems
from astraflow.config.stages import reference_stage
from astraflow.errors import ConfigError
from astraflow.models.checkpoints import latest_checkpoint
from astraflow.models.load import state_tensors
from astraflow.models.registry import model_directory
from astraflow.models.scoring.lean.liger import use_liger
from astraflow.models.scoring.packing import rows_from_table
from astraflow.models.scoring.recompute import recompute_activations
from astraflow.training.audit import Auditor
from astraflow.training.checkpoint import (
    TrainingState,
    load_optimizer_tensors,
    load_state,
    optimizer_tensors,
    write_model,
)
from astraflow.training.credit.chains import chains_of
from astraflow.training.credit.critic import Critic
from astraflow.training.credit.truncation import without_truncated
from astraflow.training.feed.publisher import publisher_for
from astraflow.training.guards.batches import SKIPPED, check_rows, keeping_skipped, longest_row
from astraflow.training.guards.memory import naming_memory
from astraflow.training.guards.packed import prepared_scoring
from astraflow.training.guards.resumed import check_same_model
from astraflow.training.multi.bases import Bases
from astraflow.training.optimize.flops import StepCost, peak_tflops
from astraflow.training.optimize.frozen import freeze
from astraflow.training.optimize.minibatches import groups_of
from astraflow.training.parallel.loading import Stored
from astraflow.training.parallel.ranks import ALONE, Ranks, device_of
from astraflow.training.reference import KlPenalty, check_tokens, load_reference
from astraflow.training.saver import Saver
from astraflow.training.sft import Company, warm_start
from astraflow.training.step import StepCounts, Stepper, StepSettings
from astraflow.training.trained import load_trained
from astraflow.types import EffectiveWeights
from astraflow.weights.store import FileStore, Pins

SMALL_PARAMETERS = 5_000_000  # below this a second intra-op thread costs more than it computes

log = logging.getLogger(__name__)


class Learner:
    """One policy between two of its versions. `version` is the newest one that was published."""

    def __init__(
        self,
        config: RunConfig,
        policy: str,
        run_dir: Path,
        threads: int = 0,
        should_stop: Callable[[], bool] = lambda: False,
        ranks: Ranks = ALONE,
        bases: Bases | None = None,
    ) -> None:
        """Load the newest checkpoint of `run_dir`, or the model of the run file, warm start included.

        Args: threads: intra-op threads; 0: as the run file says. should_stop: True ends a step with StepInterrupted.
        ranks: each of them makes a learner, and calls it as the others do. Rank 0 publishes. bases: of a process that
        trains several policies.
        Raises: ConfigError: options of the loss. ModelError, TrainingError: what cannot be loaded.
        """
        self.config, self.policy = config, policy
        self.section: PolicySection = config.policies[policy]
        self._should_stop, self._ranks = should_stop, ranks.arranged(self.section.trainer)
        self.root = run_dir / "checkpoints" / policy
        self._skipped = run_dir / SKIPPED / policy
        torch.manual_seed(config.run.seed)
        torch.set_num_threads(threads or self.section.trainer.threads or _automatic_threads(config))
        # Config and tokenizer files always come from the model of the run file, so that a version published again
        # after a resume is equal to the byte.
        self._directory = model_directory(config.base_of(policy), cache_dir(), config.run.seed)
        resumed = _newest(self.root, ranks)
        if resumed is not None:
            check_same_model(resumed, policy, self._directory)
        self._load_model(resumed, run_dir / "adapters" / policy, bases)
        if not threads and not self.section.trainer.threads and self.model.num_parameters() < SMALL_PARAMETERS:
            torch.set_num_threads(1)
        self.version = 0
        with naming_memory(policy, self.section):
            self.stepper = self._stepper()
        self.auditor = Auditor(
            self.section.trainer.audit_trajectories, self.section.batch.max_staleness + 1,
            self.section.sampling.temperature, self.section.trainer.max_logprob_gap, config.run.seed,
        )  # fmt: skip
        # A warm start makes version 0 here and nowhere else: it is what stages take as the reference model.
        first = frozenset({0} if self.section.warm_start is not None else ())
        pins = Pins(first, config.pools_of(policy))
        kept = config.weights
        self.store = FileStore(
            run_dir / "weights", policy, keep=kept.keep, full_every=kept.full_every, durable=False, pins=pins
        )
        self._publisher = publisher_for(self.store, deltas=kept.deltas, sharded=ranks.many, leads=ranks.leads)
        self._saver = Saver(self.root, ranks, config.run.keep_checkpoints)
        self.saved = -1  # version of the newest checkpoint that was begun, or resumed from
        self._published: Mapping[str, torch.Tensor] = {}  # what `version` is, by the model's names
        warm = resumed is None and self._warm_start()
        if resumed is not None:
            self._restore(load_state(resumed, self._read_parts if ranks.many else None))
            log.info("resumed at version %d from %s", self.version, resumed)
        self._remember_and_publish()
        if warm:
            self.save()  # a restart before the first checkpoint of the run must not learn it all again
        with naming_memory(policy, self.section):
            self.stepper.penalty = self._penalty()

    def _load_model(self, resumed: Path | None, adapters: Path, bases: Bases | None) -> None:
        with naming_memory(self.policy, self.section):
            self.trained = load_trained(self.section, self._directory, resumed, adapters, self._ranks, bases)
        self.model = self.trained.model
        freeze(self.model, self.section.trainer.frozen)
        self._cost = StepCost(self.model)
        self._device = device_of(self.section.trainer.device)
        with naming_memory(self.policy, self.section):
            if self.section.trainer.gradient_checkpointing:
                recompute_activations(self.model)
            stored = Stored(self.trained.source, self._device)
            self._score = prepared_scoring(self.model, f"policies.{self.policy}.model", self._ranks, stored)
        if self.section.trainer.kernels == "liger":
            use_liger(self.model)

    def train(self, table: pa.Table) -> dict[str, float]:
        """One step on the rows of a batch; the next version is under way when this returns: readers wait for it.
        Metrics by slash name."""
        rows = rows_from_table(table)
        check_rows(rows, self.model)
        trained = without_truncated(rows, table) if self.section.algorithm.mask_truncated else rows
        chains = chains_of(table, trained) if self.stepper.critic is not None else None
        with (
            naming_memory(self.policy, self.section, longest_row(rows)),
            keeping_skipped(self._skipped if self._ranks.leads else None, table, self.stepper.counts),
        ):
            metrics = self.stepper.step(trained, self.version, groups_of(table), chains)
        metrics |= self._cost.usage(metrics, self.section.batch.epochs, self._peak_tflops)
        if trained is not rows:
            metrics["masked/truncated"] = 1 - float((trained.weights > 0).sum() / max(1, (rows.weights > 0).sum()))
        self.version += 1
        self._published = tensors = self.trained.copy()
        metrics["perf/publish_wait_s"] = self._publish(tensors)
        begin = time.perf_counter()
        metrics |= self.auditor.audit(self._score, rows, self.version, self.section.batch.tokens_per_microbatch)
        metrics["perf/audit_s"] = time.perf_counter() - begin
        self.auditor.remember(self.version, tensors)
        metrics["weights/kept_existing"] = float(self.store.num_kept_existing)
        if metrics.get("logprob_gap/alarm") and self._ranks.leads:
            log.warning(
                "logprob_gap/p99=%.4g is above trainer.max_logprob_gap=%g; compare dtype, temperature and template of "
                "engine and trainer", metrics["logprob_gap/p99"], self.section.trainer.max_logprob_gap,
            )  # fmt: skip
        return metrics

    def save(self) -> None:
        """Begin to write a checkpoint of `version`, if there is none; everything after it can be done again bit for
        bit.

        Raises: TrainingError: the one before could not be written.
        """
        if self.saved == self.version:
            return
        self.flush()
        counts = self.stepper.counts
        state = TrainingState(
            version=self.version,
            step=counts.step,
            skipped=counts.skipped,
            skipped_in_a_row=counts.skipped_in_a_row,
            loss_scale=replace(counts.scale),
            optimizer=optimizer_tensors(self.model, self.stepper.optimizer),
            audit_versions={v: t for v, t in self.auditor.versions.items() if v != self.version},
            master=self.trained.master(),
            critic=self.stepper.critic.state() if self.stepper.critic is not None else None,
        )
        # Of several ranks each has a part of the model only, and the store has all of it, since `flush`.
        whole = None if self._ranks.many else self.trained.whole(self._published)
        published = self.trained.published(self._published)

        def write(place: Path) -> None:
            version = self.store.fetch(state.version) if whole is None else published
            tensors = self.trained.merged(version) if whole is None else whole
            write_model(place, self.model, tensors, self._directory)
            self.trained.write(place, version)

        self._saver.submit(state, write)
        self.saved = state.version

    def covered(self) -> int:
        """The version from which a trainer goes on in the worst case, by the checkpoints that this process wrote; -1:
        not known."""
        return self._saver.covered

    def finish_saving(self) -> None:
        """All checkpoints are on disk. Raises: TrainingError: one could not be written."""
        self._saver.flush()

    def effective_weights(self, dtype: str) -> EffectiveWeights:
        """What an engine of `dtype` must compute with under `version`, to be compared with what it says."""
        return EffectiveWeights(self.version, dtype, self.trained.effective(dtype))

    def flush(self) -> None:
        """`version` is visible. Raises: WeightError: it could not be published."""
        self._publisher.flush()

    def close(self) -> None:
        """Finish what is being published and saved."""
        self._saver.close()
        self._publisher.close()

    @property
    def _peak_tflops(self) -> float | None:
        """Of all ranks together."""
        trainer = self.section.trainer
        one = peak_tflops(trainer.peak_tflops, self._device, trainer.dtype)
        return None if one is None else one * self._ranks.size

    def _stepper(self) -> Stepper:
        loss = _loss(self.policy, self.section)
        if problems := off_policy_problems(self.policy, self.section, loss.corrects_off_policy):
            raise ConfigError("run file", problems)
        settings = StepSettings(
            optimizer=self.section.optimizer,
            total_steps=self.config.steps_of(self.policy),
            tokens_per_microbatch=self.section.batch.tokens_per_microbatch,
            temperature=self.section.sampling.temperature,
            entropy=self.section.algorithm.entropy,
            z_loss=self.section.algorithm.z_loss,
            arithmetic=self.section.trainer.dtype,
            epochs=self.section.batch.epochs,
            minibatches=self.section.batch.minibatches,
            seed=self.config.run.seed,
        )
        stepper = Stepper(self.model, loss, settings, self._should_stop, self._ranks, self._score)
        stepper.critic = self._critic()
        return stepper

    def _penalty(self) -> KlPenalty | None:
        """Version 0 is published already: after a warm start it is the reference."""
        algorithm = self.section.algorithm
        section = algorithm.penalty
        if section is None:
            return None
        reference, to_go = None, algorithm.distill is None and self.stepper.critic is None
        if reference_stage(self.config, self.policy) is None:
            reference = load_reference(
                self.config, self.policy, self.model, self._directory, lambda: self.store.fetch(0), self._ranks
            )
            if reference.model is self.model:
                reference = replace(reference, score=self._score)
        return KlPenalty(section, self.section.sampling.temperature, reference, to_go)

    def _critic(self) -> Critic | None:
        section, directory = self.section.critic, self._directory
        if section is None:
            return None
        if section.model:
            directory = model_directory(section.model, cache_dir(), self.config.run.seed)
            check_tokens("critic.model", section.model, directory, self._directory)
        critic = Critic(section, self.section.optimizer, self.config.steps_of(self.policy), directory)
        critic.model.to(self.model.device)
        if self.section.trainer.gradient_checkpointing:
            recompute_activations(critic.model.decoder)
        return critic

    def _warm_start(self) -> bool:
        section = self.section.warm_start
        if section is None:
            return False
        company = Company(self._should_stop, self._ranks, self._score)
        metrics = warm_start(self.model, self._directory, self.config, self.policy, company)
        log.info("warm start: %d steps in %.1f s, loss %.4f", section.steps, metrics["perf/wall_s"], metrics["loss"])
        return True

    def _read_parts(self, folder: Path) -> Mapping[str, torch.Tensor]:
        from astraflow.training.parallel.parts import read_parts  # a second to load

        return read_parts(folder, state_tensors(self.model))

    def _restore(self, state: TrainingState) -> None:
        self.trained.restore(state)
        load_optimizer_tensors(self.model, self.stepper.optimizer, state.optimizer)
        if self.stepper.critic is not None:
            self.stepper.critic.restore(state.critic or {})
        self.stepper.counts = StepCounts(state.step, state.skipped, state.skipped_in_a_row, state.loss_scale)
        self.version = self.saved = state.version
        for version, tensors in sorted(state.audit_versions.items()):
            self.auditor.remember(version, tensors)

    def _remember_and_publish(self) -> None:
        self._published = self.trained.copy()
        self.auditor.remember(self.version, self._published)
        self._publish(self._published)
        self._publisher.flush()

    def _publish(self, tensors: Mapping[str, torch.Tensor]) -> float:
        return self._publisher.submit(self.version, self.trained.published(tensors), self.trained.files)


def _newest(root: Path, ranks: Ranks) -> Path | None:
    """The newest whole checkpoint, as rank 0 sees it."""
    name = b""
    if ranks.leads and (newest := latest_checkpoint(root)) is not None:
        name = newest.name.encode()
    name = ranks.tell(name if ranks.leads else None)
    return root / name.decode() if name else None


def _loss(policy: str, section: PolicySection) -> PolicyLoss:
    where, algorithm = f"policies.{policy}.algorithm", section.algorithm
    loss: PolicyLoss = _made("losses", algorithm.loss, f"{where}.loss")
    lists = {
        setting: [_made("corrections", spec, f"{where}.{setting}.{i}") for i, spec in enumerate(specs)]
        for setting, specs in algorithm.all_corrections.items()
    }
    if not any(lists.values()) and algorithm.anchor == "behavior":
        return loss
    by_engine = {engine: lists[f"engine_corrections.{engine}"] for engine in algorithm.engine_corrections}
    return Corrected(loss, lists["corrections"], algorithm.anchor == "proximal", by_engine)


def _made(room: str, spec: Component, where: str) -> Any:
    if problems := check_options(resolve(room, spec.type, f"{where}.type"), spec.options, where, set()):
        raise ConfigError("run file", problems)
    return build(room, spec.type, spec.options, where)


def _automatic_threads(config: RunConfig) -> int:
    num_ranks = sum(config.policies[policies[0]].trainer.ranks for policies in config.trainers.values())
    return max(1, (os.cpu_count() or 1) // (num_ranks + len(config.rollout.nodes)))
