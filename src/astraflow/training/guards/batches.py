"""Batches that cannot be trained: refused by name before the step, or kept on disk when it came out not finite."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet
from torch import nn
from transformers import PreTrainedModel

from astraflow.errors import TrainingError
from astraflow.models.scoring.packing import TokenRows
from astraflow.training.step import StepCounts

SKIPPED = "skipped_batches"  # folder of a run
MAX_KEPT = 10  # of one policy

log = logging.getLogger(__name__)


def longest_row(rows: TokenRows) -> int:
    """Tokens of the longest row."""
    return int(np.diff(rows.starts).max(initial=0))


def check_rows(rows: TokenRows, model: PreTrainedModel) -> None:
    """Raises: TrainingError: a token that the model does not have, or a row longer than its learned positions."""
    inputs = model.get_input_embeddings()
    assert isinstance(inputs, nn.Embedding)
    size = inputs.num_embeddings
    if len(rows.token_ids) and not 0 <= (worst := _worst(rows.token_ids, size)) < size:
        row = int(np.searchsorted(rows.starts, int(np.argmax(rows.token_ids == worst)), side="right")) - 1
        raise TrainingError(
            f"batch.rows[{row}].token_ids", worst, f"must be ids of the model, 0 to {size - 1}",
            "use the same model directory, tokenizer included, on nodes and trainer",
        )  # fmt: skip
    config = model.config.get_text_config().to_dict()
    limit = config.get("max_position_embeddings", config.get("n_positions"))
    # Rotary positions go on beyond it; a table of positions ends (some keep two places of it to themselves).
    tables = [m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding) and m is not inputs]
    if isinstance(limit, int) and longest_row(rows) > limit and any(limit <= n <= limit + 2 for n in tables):
        raise TrainingError(
            f"batch.rows[{int(np.diff(rows.starts).argmax())}]", f"{longest_row(rows)} tokens",
            f"is beyond the {limit} positions that the model has learned",
            "lower sampling.max_tokens, the turns of the workflow or the limit of the engine; or leave out longer "
            "demonstrations",
        )  # fmt: skip


@contextlib.contextmanager
def keeping_skipped(folder: Path | None, table: pa.Table, counts: StepCounts) -> Iterator[None]:
    """Around a step: when it skips an update, the batch is written to `folder` (None: another rank does it) as
    Parquet."""
    before, step = counts.skipped, counts.step + 1
    try:
        yield
    finally:
        if counts.skipped > before and folder is not None:
            _keep(folder, table, step)


def _worst(token_ids: np.ndarray, size: int) -> int:
    low, high = int(token_ids.min()), int(token_ids.max())
    return low if low < 0 else high


def _keep(folder: Path, table: pa.Table, step: int) -> None:
    path = folder / f"step-{step:06d}.parquet"
    why = _not_finite(table) or "the batch itself is finite: look at policy/ratio_max, grad_norm and the weights"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if len(list(folder.glob("*.parquet"))) >= MAX_KEPT:
            log.error("step %d was skipped: its loss or gradient is not finite; %s", step, why)
            return
        pyarrow.parquet.write_table(table, path)
    except OSError as error:
        log.error("step %d was skipped, and its batch=%s cannot be written (%s); make room", step, path, error.strerror)
        return
    log.error("step %d was skipped: its loss or gradient is not finite; %s; the batch is %s", step, why, path)


def _not_finite(table: pa.Table) -> str:
    """Columns with numbers that are not finite and the first row of each; empty: none."""
    found = []
    for name in ("advantages", "behavior_logprobs", "ref_logprobs", "weight"):
        if name not in table.column_names:
            continue
        column = table.column(name)
        values = column.to_pylist() if pa.types.is_floating(column.type) else None
        rows = (
            [i for i, value in enumerate(values) if value is not None and not np.isfinite(value)]
            if values is not None
            else [i for i, value in enumerate(column) if value.is_valid and not np.isfinite(value.values).all()]
        )
        if rows:
            found.append(f"{name} of row {rows[0]}" + (f" and {len(rows) - 1} more" if len(rows) > 1 else ""))
    return f"not finite in the batch: {', '.join(found)}" if found else ""
