"""bench_multi_policy: the modelled machine, when a side is at the target, what the loop trains on."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.bench_multi_policy import checks, gains
from benchmarks.multi_policy.hardware import CALL_TOKENS, Decoding, LongTail, Rows
from benchmarks.multi_policy.loop import advantages
from benchmarks.multi_policy.sides import MARGIN, RUN_FILE, Curve, first_reached, last, reached
from benchmarks.multi_policy.tasks import Letters, Shown

from astraflow.config.load import load_run
from astraflow.dataflow.operators.chain import chain_of
from astraflow.types import Trajectory

PLAIN = Decoding(step_s=1.0, row_s=0.5, rows_per_gpu=2, swap_s=10.0, prefill_tokens_per_s=4.0)


def test_rows_share_the_gpu():
    rows = Rows(1.0, PLAIN)
    rows.add(1, 10, 0.0)  # alone: a step takes 1.5 s
    assert rows.next_end() == 15.0
    rows.add(2, 4, 3.0)  # 2 tokens later; together a step takes 2 s
    assert rows.next_end() == 3.0 + 4 * 2.0
    assert rows.advance(11.0) == [2]
    assert rows.next_end() == 11.0 + 4 * 1.5
    assert rows.advance(100.0) == [1]
    assert rows.busy_s == 17.0
    assert rows.row_s == 17.0 + 8.0


def test_more_gpus_make_rows_cheaper_not_steps():
    one, four = Rows(1.0, Decoding(1.0, 0.5)), Rows(4.0, Decoding(1.0, 0.5))
    for rows in (one, four):
        for key in range(4):
            rows.add(key, 10, 0.0)
    assert one.next_end() == 10 * 3.0
    assert four.next_end() == 10 * 1.5


def test_rows_without_a_place_wait_their_turn():
    rows = Rows(1.0, PLAIN)
    for key, tokens in enumerate((4, 2, 1)):
        rows.add(key, tokens, 0.0)
    assert (rows.running, rows.waiting) == (2, 1)
    assert rows.advance(4.0) == [1]  # 2 tokens of 2 s
    assert (rows.running, rows.waiting) == (2, 0)
    assert rows.advance(6.0) == [2]
    assert rows.advance(7.5) == [0]


def test_new_weights_stop_all_rows_while_their_contexts_are_read_again():
    rows = Rows(1.0, PLAIN)
    rows.add(1, 10, 0.0)
    until, ended = rows.pause(12.0)  # 8 tokens of context
    assert (until, ended) == (12.0 + 10.0 + 8 / 4.0, [])
    assert rows.advance(23.0) == []
    assert rows.next_end() == pytest.approx(24.0 + 3.0)
    assert rows.advance(27.0) == [1]


def test_the_tail_is_long_and_cut():
    import random

    rng = random.Random(0)
    drawn = sorted(CALL_TOKENS.draw(rng) for _ in range(20_000))
    assert drawn[10_000] == pytest.approx(800, rel=0.03)
    assert sum(drawn) / 20_000 == pytest.approx(1040, rel=0.03)
    assert drawn[-1] == 4096
    assert LongTail(3.0, 0.0, 9.0).draw(rng) == 3.0


def test_all_policies_must_be_at_the_target():
    rewards = [{"actor": 0.1, "verifier": 1.0}, *[{"actor": 0.8, "verifier": 0.9}] * 5]
    assert reached(rewards, 0.8)
    assert not reached(rewards, 0.81)
    assert not reached(rewards[:-1], 0.8)
    assert last(rewards) == {"actor": 0.8, "verifier": 0.9}


def test_the_target_is_reached_where_a_whole_window_is_there_first():
    rewards = [{"a": r} for r in (0.9, 0.1, 0.8, 0.8, 0.8, 0.8, 0.7, 0.9)]
    assert first_reached(rewards, 0.68) == 5
    assert first_reached(rewards, 0.8) == 8
    assert first_reached(rewards, 0.81) is None
    assert first_reached(rewards, None) is None


def test_weights_are_at_the_target_before_the_batches_that_they_sampled():
    curve = Curve(0.8, 100.0)
    curve.begin(50.0)
    trained = [0.5, 0.6, 0.7, *[0.8] * 5, *[0.8 + MARGIN + 0.001] * 5]
    over = [curve.step({"a": reward}, 51.0 + step) for step, reward in enumerate(trained)]
    assert over == [False] * 12 + [True]
    row = curve.row([{"a": reward} for reward in [*trained[3:], *[0.9] * 3]], {"push_s": 1.3, "staleness": 2.0})
    assert (row["steps"], row["t_s"], row["steps_trained"], row["t_trained_s"]) == (5, 5.0, 8, 8.0)
    assert row["curve"][0] == [1.0, 0.8, 0.5]
    assert (row["push"], row["staleness"], row["s_per_step"]) == (0.1, 2.0, 1.0)


def test_time_ends_a_run():
    curve = Curve(None, 3.0)
    curve.begin(0.0)
    assert [curve.step({"a": 1.0}, at) for at in (2.0, 3.0, 3.5)] == [False, False, True]


def row(side: str, seed: int, t_s: float | None) -> dict[str, object]:
    curve = [[10.0], [13.0], [16.0]] if "loop" in side else [[2.0], [3.0], [4.0], [9.0]]
    return {"times": "modelled", "side": side, "seed": seed, "t_s": t_s, "t_trained_s": t_s, "curve": curve}


def test_who_does_not_arrive_counts_with_the_limit():
    rows = [row("loop, shared", 0, 30.0), row("ours", 0, 10.0), row("loop, shared", 1, None), row("ours", 1, 10.0)]
    first = checks(rows, 120.0)[0]
    assert first.value == pytest.approx((3.0 * 12.0) ** 0.5)
    assert first.ok
    assert gains(rows) == [{"times": "gain", "side": "all", "gain": 3.0}]
    assert checks([*rows, row("loop, shared", 2, 30.0), row("ours", 2, None)], 120.0)[0].value is None


def trajectory(reward: float) -> Trajectory:
    one = np.ones(1, np.int32)
    return Trajectory(
        policy="verifier", branch=0, parent_branch=-1, fork_at=0, token_ids=one, loss_mask=one.astype(bool),
        behavior_logprobs=-one.astype(np.float32), versions=one, call_index=one.astype(np.int16), reward=reward,
    )  # fmt: skip


def test_the_loop_gives_credit_as_the_run_file_says():
    episodes = [[[trajectory(reward)] for reward in group] for group in ([1.0, 1.0], [0.0, 0.0], [1.0, 0.0])]
    policies = load_run(RUN_FILE).policies
    over_batch = advantages(chain_of("verifier", policies["verifier"]), episodes, 1)
    assert over_batch == [pytest.approx(row, abs=1e-5) for row in ([1, 1], [-1, -1], [1, -1])]
    over_group = advantages(chain_of("actor", policies["actor"]), episodes, 1)
    assert over_group == [pytest.approx(row, abs=1e-5) for row in ([0, 0], [0, 0], [1, -1])]


def test_every_pair_has_one_answer_and_is_shown_with_it_as_often_as_said():
    code = {row["question"]: row["answer"] for row in map(Letters(pairs=100, digits=4).row, range(100))}
    assert len(code) == 100
    assert set(code.values()) == set("0123")
    shown = Shown(of="answer", right=0.6, pairs=100, digits=4)
    said = [[message["content"] for message in shown.row(i)["messages"]] for i in range(len(shown))]
    assert np.mean([code[asked] == answer for asked, answer in said]) == pytest.approx(0.6 + 0.4 / 4, abs=0.03)
    verdicts = Shown(of="verdict", right=1.0, pairs=100, digits=4)
    for asked, verdict in ([m["content"] for m in verdicts.row(i)["messages"]] for i in range(400)):
        assert verdict == "n" or code[asked[:3]] == asked[3]
