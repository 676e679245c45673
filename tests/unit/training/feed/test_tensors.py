"""Both layouts hold every trained token exactly once, with its own logprob, and models see the same."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
import torch

from astraflow.models.scoring.forward import packed_logprobs, prepare_model
from astraflow.models.scoring.packing import pack_rows, rows_from_table
from astraflow.training.feed.tensors import microbatches

LENGTHS = [5, 17, 3, 9, 9, 30, 2, 12]


def marked(make_table, random_rows, lengths=LENGTHS, **columns):
    """Rows whose trained tokens each carry a logprob of their own."""
    rows = random_rows(lengths)
    start = np.cumsum([0, *lengths])
    logprobs = [
        np.where(m, -1.0 - np.arange(len(m)) - a, 0).astype(np.float32)
        for (_, m), a in zip(rows, start[:-1], strict=True)
    ]
    return rows, make_table(rows, behavior_logprobs=logprobs, **columns)


def picked(micro, logits):
    """Trained token id, its behaviour logprob and its logprob under the model, in the order of the microbatch."""
    mask = micro.loss_mask[:, 1:]
    scores = logits[:, :-1].log_softmax(-1).gather(-1, micro.input_ids[:, 1:, None])[..., 0]
    return micro.input_ids[:, 1:][mask], micro.behavior_logprobs[:, 1:][mask], scores[mask]


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("budget", [1, 20, 34, 10_000])
def test_every_trained_token_is_there_once_with_what_belongs_to_it(make_table, random_rows, layout, budget):
    rows, table = marked(make_table, random_rows)
    found = microbatches(table, budget, layout)
    expected = {-1.0 - i for i in np.flatnonzero(np.concatenate([m for _, m in rows]))}
    marks = torch.cat([m.behavior_logprobs[m.loss_mask] for m in found]).tolist()
    assert len(marks) == len(expected) and set(marks) == expected
    ids = np.concatenate([i for i, _ in rows])
    for micro in found:
        sampled = micro.loss_mask
        assert torch.equal(
            micro.input_ids[sampled], torch.from_numpy(ids[(-1 - micro.behavior_logprobs[sampled]).long().numpy()])
        )
        assert (micro.advantages[sampled] == 1).all() and (micro.versions[sampled] == 0).all()
        assert (micro.versions[~sampled] == -1).all() and not micro.loss_mask[~micro.attention_mask].any()
        assert micro.input_ids.numel() <= max(budget, int(micro.lengths.max()))
        assert not sampled[micro.position_ids == 0].any(), "the first token of a sequence has no context"


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_plain_model_sees_what_our_own_packing_shows_it(make_model, make_table, random_rows, layout):
    rows, table = marked(make_table, random_rows)
    model = make_model()
    got = {}
    with torch.no_grad():
        for micro in microbatches(table, 40, layout):
            _, marks, scores = picked(micro, model(**micro.inputs()).logits)
            got |= dict(zip(marks.tolist(), scores.tolist(), strict=True))
        for pack in pack_rows(rows_from_table(table), 10_000):
            ours = packed_logprobs(prepare_model(model), pack, 1.0).logprobs
            for mark, score in zip(pack.behavior_logprobs.tolist(), ours.tolist(), strict=True):
                assert got[mark] == pytest.approx(score, abs=1e-4)
    assert len(got) == sum(int(m.sum()) for _, m in rows)


def test_a_fork_has_its_prefix_in_front_untrained(make_table):
    rows = [([5, 6, 7, 8], [False, True, True, True]), ([9, 10], [False, True])]
    columns = {"episode_id": ["e"] * 2, "branch": [0, 1], "parent_branch": [-1, 0], "fork_at": [0, 2]}
    (micro,) = microbatches(make_table(rows, **columns), 100, "padded")
    assert micro.input_ids.tolist() == [[5, 6, 7, 8], [5, 6, 9, 10]]
    assert micro.loss_mask.tolist() == [[False, True, True, True], [False, False, False, True]]


def test_columns_of_stages_follow_their_tokens_and_rows(make_table):
    rows = [([5, 6, 7, 8], [False, True, True, True]), ([9, 10], [False, True]), ([3, 4], [False, True])]
    columns = {"episode_id": ["e", "e", "f"], "branch": [0, 1, 0], "parent_branch": [-1, 0, -1], "fork_at": [0, 2, 0]}
    table = make_table(rows, **columns)
    reference = pa.array([[0.0, 6.0, 7.0, 8.0], [0.0, 10.0], None], pa.list_(pa.float32()))
    table = table.append_column("ref_logprobs", reference)
    table = table.append_column("judge", pa.array([1.5, None, 3.5], pa.float32()))
    (micro,) = microbatches(table, 100, "packed")
    values = micro.token_columns["ref_logprobs"][micro.loss_mask]
    ids = micro.input_ids[micro.loss_mask].float()
    given = ids != 4
    assert torch.equal(values[given], ids[given]) and values[~given].isnan().all()
    judged = dict(zip(micro.rows.tolist(), micro.row_columns["judge"].tolist(), strict=True))
    assert judged[0] == 1.5 and judged[2] == 3.5 and np.isnan(judged[1])


def test_rows_that_train_nothing_are_left_out(make_table):
    rows = [([5, 6], [False, True]), ([7, 8], [False, False]), ([9, 10], [False, True])]
    (micro,) = microbatches(make_table(rows, weight=[1.0, 1.0, 0.0]), 100, "packed")
    assert micro.input_ids.tolist() == [[5, 6]] and micro.rows.tolist() == [0]
    assert microbatches(make_table(rows, weight=[0.0] * 3), 100) == []


def test_offsets_and_devices(make_table, random_rows):
    _, table = marked(make_table, random_rows)
    micro = microbatches(table, 10_000)[0].to("cpu")
    assert micro.cu_lengths.dtype == torch.int32 and micro.cu_lengths[-1] == micro.input_ids.shape[1]
    assert micro.cu_lengths.tolist() == [*np.flatnonzero(micro.position_ids[0] == 0), micro.cu_lengths[-1]]
