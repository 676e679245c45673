"""A marked logprob from the calls of an agent to the trained token: merge, wire, journal, restart, split, pack."""

from __future__ import annotations

import numpy as np
import pytest

from astraflow.dataflow.client import DataflowClient
from astraflow.models.scoring.packing import pack_rows, rows_from_table
from astraflow.rollout.context.trie import trajectories
from astraflow.testing.dataflow import episode, small_config, sources
from astraflow.testing.services import DataflowThread
from astraflow.training.feed.tensors import microbatches
from astraflow.types import Call, Generation
from astraflow.wire.messages import Join, Resume

MARKER = np.float32(-7.25)
VERSION = 0


def call(index, prompt, sampled, marked):
    """A call whose sampled tokens have logprobs that say where they are, but for the marked one."""
    logprobs = [MARKER if token == marked else -(index + 1) / 8 - i / 64 for i, token in enumerate(sampled)]
    arrays = (np.array(sampled, np.int32), np.array(logprobs, np.float32), np.full(len(sampled), VERSION, np.int32))
    return Call("actor", index, np.array(prompt, np.int32), Generation(*arrays, "stop"))


def marked_token(number):
    return 900 + number


def conversation(lease, number):
    """A conversation that goes on, and two forks: one with another past, one inside a turn. The mark of episode
    `number` lies in call `number` modulo 4."""
    ids = [[10, 11, 12], [20, 21], [30, 31, 32], [40, 41]]
    ids[number % 4][1] = marked_token(number)
    prompts = [[1, 2], [1, 2, *ids[0], 3], [1, 2, *ids[0], 4], [1, 2, *ids[0][:2], 5]]
    calls = [call(i, prompts[i], ids[i], marked_token(number)) for i in range(4)]
    branches = trajectories(calls, "actor", reward=float(lease.episode_id.endswith("1")))
    assert [b.parent_branch for b in branches].count(-1) < len(branches) == 3
    played = episode(lease, "n", trajectories=branches)
    context = [*prompts[number % 4], *ids[number % 4]]
    return played, context[: context.index(marked_token(number))]


@pytest.fixture
def shares(tmp_path):
    """Marked token -> the tokens before it; and what each of two ranks gets of the batch, after a restart."""
    config, contexts = small_config(policies__actor__batch__groups=4), {}
    with DataflowThread(config, tmp_path, sources=sources()) as service:
        client = DataflowClient(service.url)
        run = client.run().run_id
        trainer = Resume(trainer_id="t", version=0, urls=("file:///w",), run_id=run)
        client.resume("actor", trainer)
        client.join(Join(node_id="n", name="n", capacity=8, run_id=run))
        for number, lease in enumerate(client.lease("n", 8).leases):
            answer, contexts[marked_token(number)] = conversation(lease, number)
            assert set(client.commit([answer]).values()) == {"accepted"}
        service.restart()
        client.resume("actor", trainer)
        tables = []
        for rank in range(2):
            answer = client.batch("actor", "t", 0, wait_s=10, rank=rank, ranks=2)
            assert answer is not None
            tables.append(answer[1])
        client.close()
    return contexts, tables


def test_a_marker_reaches_its_own_token_and_no_other(shares):
    contexts, tables = shares
    assert len(contexts) == 8 and all(table.num_rows for table in tables)
    for budget in (1, 16, 10_000):
        found = {}
        for table in tables:
            rows = rows_from_table(table)
            for pack in pack_rows(rows, budget):
                for n in np.flatnonzero(pack.behavior_logprobs == MARKER):
                    row, token = pack.rows[pack.target_sequence[n]], int(pack.target_ids[n])
                    assert token not in found and pack.versions[n] == VERSION
                    path = rows.token_ids[rows.starts[row] : rows.starts[row + 1]].tolist()
                    found[token] = path[: path.index(token)]
                    assert pack.token_ids[pack.target_index[n]] == found[token][-1]
                assert not set(contexts) & set(pack.target_ids[pack.behavior_logprobs != MARKER].tolist())
        assert found == contexts


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_marker_reaches_a_trainer_of_ones_own(shares, layout):
    contexts, tables = shares
    found = []
    for table in tables:
        for micro in microbatches(table, 32, layout):
            marked = micro.loss_mask & (micro.behavior_logprobs == float(MARKER))
            found += micro.input_ids[marked].tolist()
    assert sorted(found) == sorted(contexts)
