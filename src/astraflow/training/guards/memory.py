"""Out of memory, said with the settings that decide how much is needed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from astraflow.config.schema import PolicySection
from astraflow.errors import TrainingError

_SAID = ("can't allocate memory", "not enough memory", "out of memory", "alloc_failed")  # by CPU, MPS, CUDA, cuBLAS


@contextlib.contextmanager
def naming_memory(policy: str, section: PolicySection, longest: int | None = None) -> Iterator[None]:
    """Around what may run out of memory.

    Args: longest: input tokens of the longest trajectory of the batch at hand; None: the model is being loaded.
    Raises: TrainingError: it did.
    """
    try:
        yield
    except MemoryError as error:
        raise _named(policy, section, longest, error) from error
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError) or any(said in str(error).lower() for said in _SAID):
            raise _named(policy, section, longest, error) from error
        raise


def _named(policy: str, section: PolicySection, longest: int | None, error: BaseException) -> TrainingError:
    said = str(error).strip().partition("\n")[0] or type(error).__name__
    if longest is None:
        rule, fixes = "while the model was loaded", []
    else:
        budget = section.batch.tokens_per_microbatch
        rule = f"in a step with policies.{policy}.batch.tokens_per_microbatch={budget}"
        if longest > budget:
            rule += f", where the longest trajectory has {longest} tokens and is never cut"
            fixes = [f"lower policies.{policy}.sampling.max_tokens or the turns of the workflow"]
        else:
            fixes = [f"lower it to {max(longest, budget // 2)}"]
        if section.trainer.audit_trajectories:
            fixes.append(f"set policies.{policy}.trainer.audit_trajectories=0")
        if not section.trainer.gradient_checkpointing:
            fixes.append(f"set policies.{policy}.trainer.gradient_checkpointing=true")
    if section.lora is None:
        fixes.append(f"train an adapter (policies.{policy}.lora)")
    fixes.append("take a smaller model, or more memory")
    return TrainingError("memory", said, f"ran out {rule}", "; or ".join(fixes))
