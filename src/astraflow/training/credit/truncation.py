"""Answers that a length limit cut, left out of the loss."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from astraflow.models.scoring.packing import TokenRows


def without_truncated(rows: TokenRows, table: pa.Table) -> TokenRows:
    """`rows`, made of `table`, with weight 0 where a length limit cut a trajectory: it counts in no denominator either.

    Its reward took part in what its siblings are compared with.
    Source: overlong filtering of DAPO, arXiv:2503.14476 section 3.4.
    """
    cut = table.column("truncated").to_numpy()
    return replace(rows, weights=rows.weights * ~cut)
