"""Logprobs of the sampled tokens under a model that does not learn: the reference of a KL penalty."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import pyarrow as pa

from astraflow.config.stages import Kind
from astraflow.errors import Problem
from astraflow.stages.context import StageRun
from astraflow.wire.codec import list_lengths

if TYPE_CHECKING:
    from transformers import PreTrainedModel

log = logging.getLogger(__name__)


class RefLogprobs:
    """Adds `ref_logprobs`: `log_softmax(logits / temperature)` of each sampled token, 0 where a token was given.

    The trainer's KL penalty (`policies.*.algorithm.kl`) reads it. The reference is version 0 of a row's policy: its
    `model`, after the warm start if there is one. The same packing, attention and projection as in the trainer, so both
    give the same numbers at version 0.
    """

    needs: ClassVar[tuple[str, ...]] = (
        "episode_id", "policy", "branch", "parent_branch", "fork_at", "token_ids", "loss_mask"
    )  # fmt: skip
    adds: ClassVar[Mapping[str, Kind]] = {"ref_logprobs": "token"}

    def __init__(
        self,
        *,
        run: StageRun,
        model: str = "",
        dtype: str = "float32",
        device: str = "cpu",
        tokens_per_pass: int = 8192,
    ) -> None:
        """`model`: another reference, a Hugging Face directory or built-in name; its tokenizer must be the policy's.
        `tokens_per_pass`: packed tokens of one forward pass.
        """
        if tokens_per_pass < 1:
            raise Problem(f"stages.{run.name}.tokens_per_pass", tokens_per_pass, "must be >= 1", "use 8192")
        if dtype not in ("float32", "bfloat16", "float16"):
            raise Problem(f"stages.{run.name}.dtype", dtype, "is not known", "use float32, bfloat16 or float16")
        self._run, self._model, self._dtype, self._device = run, model, dtype, device
        self._tokens_per_pass = tokens_per_pass
        self._models: dict[str, PreTrainedModel] = {}  # by policy, loaded when its first rows come

    def run(self, rows: pa.Table) -> pa.Table:
        """`ref_logprobs` of every row."""
        lengths = list_lengths(rows.column("token_ids"))
        starts = np.concatenate([[0], np.cumsum(lengths)])
        values = np.zeros(int(starts[-1]), dtype=np.float32)
        policies = np.array(rows.column("policy").to_pylist())
        for policy in dict.fromkeys(policies.tolist()):
            numbers = np.flatnonzero(policies == policy)
            own = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in numbers])
            values[own] = self._score(policy, rows if len(numbers) == len(policies) else rows.take(numbers))
        offsets = pa.array(starts.astype(np.int32))
        return pa.table({"ref_logprobs": pa.ListArray.from_arrays(offsets, pa.array(values))})

    def close(self) -> None:
        """Forget the models."""
        self._models.clear()

    def _score(self, policy: str, rows: pa.Table) -> np.ndarray:
        """[tokens of the rows] float32."""
        import torch

        from astraflow.models.scoring.forward import packed_logprobs
        from astraflow.models.scoring.packing import pack_rows, rows_to_score

        model, temperature = self._loaded(policy), self._run.config.policies[policy].sampling.temperature
        to_score = rows_to_score(rows)
        values = np.zeros(int(list_lengths(rows.column("token_ids")).sum()), dtype=np.float32)
        with torch.inference_mode():
            for pack in pack_rows(to_score, self._tokens_per_pass):
                logprobs = packed_logprobs(model, pack, temperature).logprobs
                values[pack.versions] = logprobs.float().cpu().numpy()
        return values

    def _loaded(self, policy: str) -> PreTrainedModel:
        if policy in self._models:
            return self._models[policy]
        import torch

        from astraflow.config.env import cache_dir
        from astraflow.models.load import load_model, load_tensors
        from astraflow.models.lora.merge import load_adapter
        from astraflow.models.registry import model_directory
        from astraflow.models.scoring.forward import prepare_model
        from astraflow.models.scoring.guard import prepared_as_itself

        if self._run.threads:
            torch.set_num_threads(self._run.threads)
        if self._model:
            directory = model_directory(self._model, cache_dir(), self._run.config.run.seed)
        else:
            directory = self._run.model_directory(policy)
        model = load_model(directory, self._dtype)
        tensors = None if self._model else self._run.first_weights(policy)
        lora = self._run.config.policies[policy].lora
        if tensors is not None and lora is not None:
            load_adapter(model, tensors, lora.alpha / lora.rank, {})
        elif tensors is not None:
            load_tensors(model, tensors)
        model.to(self._device)  # type: ignore[arg-type]
        if self._dtype == "float32":
            self._models[policy] = prepared_as_itself(model, f"stages.{self._run.name}.model")
        else:  # rounding would hide what is looked for; the trainer has tried the same layers
            self._models[policy] = prepare_model(model)
        origin = "version 0" if tensors is not None else directory
        log.info("the reference of %s is %s, %d parameters", policy, origin, model.num_parameters())
        return self._models[policy]
