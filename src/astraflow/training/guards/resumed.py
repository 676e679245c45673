"""A checkpoint that does not belong to the run it is found in."""

from __future__ import annotations

from pathlib import Path

from astraflow.errors import TrainingError
from astraflow.models.stored import difference, stored_shapes


def check_same_model(checkpoint: Path, policy: str, directory: Path) -> None:
    """Raises: TrainingError: the weights in `checkpoint` have not the names and shapes of those in `directory`, the
    model of `policy`. ModelError: one of them cannot be read."""
    found = difference(stored_shapes(checkpoint), stored_shapes(directory))
    if found is not None:
        raise TrainingError(
            "checkpoint", str(checkpoint), f"is of another model than policies.{policy}.model ({found}: {directory})",
            "put back the model that the run began with, or start a new run with the checkpoint as its model",
        )  # fmt: skip
