"""The sampled tokens of an episode as one chain: what a critic judges, across calls, turns and branches.

prompt  a1 a2 a3 | observation  b1 b2 | another branch  c1 c2     given tokens are no part of it:
        a1 ─ a2 ─ a3 ─────────── b1 ─ b2 ─────────────── c1 ─ c2   what comes after a3 is b1
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from astraflow.models.scoring.packing import TokenRows
from astraflow.wire.codec import flat_values


@dataclass(frozen=True, slots=True)
class Chains:
    """The M trained tokens of a batch, episode after episode, each in the order in which it was sampled."""

    places: np.ndarray  # [M] int64 into the flat columns of the rows
    last_of_call: np.ndarray  # [M] bool
    last: np.ndarray  # [M] bool: of its episode


def chains_of(table: pa.Table, rows: TokenRows) -> Chains:
    """Of `rows`, which are made of `table`; calls of an episode follow each other by number."""
    calls = flat_values(table.column("call_index")).astype(np.int64)
    calls = calls if rows.places is None else calls[rows.places]
    row_of = np.repeat(np.arange(len(rows.weights)), np.diff(rows.starts))
    episodes = table.column("episode_id").combine_chunks().dictionary_encode().indices.to_numpy()[row_of]
    trained = np.flatnonzero(rows.trained & (rows.weights > 0)[row_of])
    order = trained[np.lexsort((trained, calls[trained], episodes[trained]))]
    other = np.append(np.diff(episodes[order]) != 0, True)
    return Chains(order, other | np.append(np.diff(calls[order]) != 0, True), other)


def with_rewards(rows: TokenRows, chains: Chains) -> TokenRows:
    """`rows` whose advantages are the rewards of calls, one for all tokens of a call as `advantage = "gae"` gives them:
    now the reward of a call is at its last token, and 0 at the others."""
    rewards = np.zeros_like(rows.advantages)
    at = chains.places[chains.last_of_call]
    rewards[at] = rows.advantages[at]
    return replace(rows, advantages=rewards)
