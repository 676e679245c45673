"""The task, model and warm start that every side of `bench_loop` trains on, written for torch and transformers alone.

Two turns: `3*4?` -> the policy calls `[3*4]` -> the tool says `<12>` -> the policy answers `12.`
Reward: 0.1 for a valid call, 0.2 x the share of the expression that was copied, 0.7 for the right answer.

The random streams are those of the peer measurement: one seed gives one set of weights on every side.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

MARKS = ("<pad>", "<bos>", "<eos>")
CHARS = [*MARKS, *"0123456789abcdefghijklmnopqrstuvwxyz+-*=()[]<>:?. \nUDLRGSX#"]
ID = {symbol: i for i, symbol in enumerate(CHARS)}
PAD, BOS, EOS = 0, 1, 2
OPS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}

PROMPTS, GROUP = 32, 16  # rollouts of one step: PROMPTS x GROUP
LR, CLIP, GRAD_CLIP, BETAS = 1e-3, 0.2, 1.0, (0.9, 0.95)
TURN_TOKENS = 7  # new tokens of one turn
SFT_STEPS, SFT_LR, SFT_ROWS = 200, 2e-3, 64


@dataclass(frozen=True)
class Problem:
    """One sum."""

    text: str  # "3*4?"
    answer: str  # "12"


def problem_stream(rng: random.Random, listed: Path | None) -> Iterator[Problem]:
    """Endless problems: of all 300, or of a JSON list `[[text, answer], ...]` (the train split of a run file)."""
    if listed is None:
        while True:
            yield draw(rng)
    problems = [Problem(text, answer) for text, answer in json.loads(listed.read_text())]
    while True:
        yield rng.choice(problems)


def draw(rng: random.Random) -> Problem:
    """One of all 300 problems."""
    a, b, op = rng.randrange(10), rng.randrange(10), rng.choice("+-*")
    return Problem(f"{a}{op}{b}?", str(OPS[op](a, b)))


def evaluate(expression: str) -> int:
    """The value of `d op d`."""
    return OPS[expression[1]](int(expression[0]), int(expression[2]))


def is_call(turn: str) -> bool:
    """True when the finished turn is a well-formed call `[d op d]`."""
    return len(turn) == 5 and turn[0] == "[" and turn[4] == "]" and turn[1].isdigit() and turn[3].isdigit() \
        and turn[2] in OPS  # fmt: skip


def score(problem: Problem, expression: str | None, answer: str | None) -> tuple[float, bool]:
    """Reward and success of one episode. `expression`: None without a valid call; `answer`: None if it did not end."""
    if expression is None:
        return 0.0, False
    reward = 0.1 + 0.2 * sum(a == b for a, b in zip(expression, problem.text, strict=False)) / 3
    right = answer is not None and answer.strip() == problem.answer + "."
    return reward + (0.7 if right else 0.0), right


def load_or_warm_start(start: Path | None, rng: random.Random) -> PreTrainedModel:
    """The model of a Hugging Face directory, or a new one after its warm start."""
    if start is None:
        model = make_model()
        warm_start(model, rng)
        return model
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    if model.config.vocab_size != len(CHARS):
        raise SystemExit(f"--start={start} must have {len(CHARS)} symbols; give a tiny-char model")
    return model.eval()


def make_model() -> PreTrainedModel:
    """Qwen3, 2 layers, width 128, 0.4M parameters, tied, fp32."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            head_dim=32, vocab_size=len(CHARS), hidden_size=128, intermediate_size=384, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
            pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS,
        )
    )  # fmt: skip


def _demonstration(rng: random.Random) -> tuple[list[int], list[int]]:
    """Token ids and loss mask of one demonstration: one in five is right, the others in shape only."""
    problem = draw(rng)
    if rng.random() > 0.2:
        expression = f"{rng.randrange(10)}{rng.choice('+-*')}{rng.randrange(10)}"
        answer = f"{rng.randrange(0, 82)}."
    else:
        expression, answer = problem.text[:3], problem.answer + "."
    call, told, final = encode(f"[{expression}]"), encode(f"<{evaluate(expression)}>"), encode(answer)
    ids = [BOS, *encode(problem.text), *call, EOS, *told, *final, EOS]
    mask = [0] * (1 + len(problem.text)) + [1] * (len(call) + 1) + [0] * len(told) + [1] * (len(final) + 1)
    return ids, mask


def warm_start(model: PreTrainedModel, rng: random.Random) -> None:
    """Supervised steps on demonstrations."""
    model.eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=SFT_LR, weight_decay=0.0, betas=BETAS)
    for _ in range(SFT_STEPS):
        rows = [_demonstration(rng) for _ in range(SFT_ROWS)]
        ids = pad([r for r, _ in rows])
        mask = pad([m for _, m in rows]).float()
        attend = pad([[1] * len(r) for r, _ in rows])
        logits = model(input_ids=ids, attention_mask=attend).logits[:, :-1]
        logprobs = F.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        loss = -(logprobs * mask[:, 1:]).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def encode(text: str) -> list[int]:
    """Characters to ids."""
    return [ID[c] for c in text]


def pad(rows: Sequence[Sequence[int]]) -> torch.Tensor:
    """Right-padded int64 matrix."""
    width = max(len(r) for r in rows)
    return torch.tensor([[*r, *[PAD] * (width - len(r))] for r in rows])


def first_at(curve: Sequence[tuple[float, float]], level: float, window: int = 3) -> float | None:
    """Seconds until the mean reward of `window` consecutive steps first reaches `level`; curve: (t_s, reward)."""
    for i in range(window - 1, len(curve)):
        if statistics.mean(r for _, r in curve[i - window + 1 : i + 1]) >= level:
            return round(curve[i][0], 1)
    return None


@dataclass
class Curve:
    """Prints one JSON line per step and one at the end; every side prints the same keys."""

    engine: str
    seed: int
    threads: int
    seconds: float
    until: float | None = None  # stop once this reward is reached (mean of 3 steps)
    rows: list[tuple[float, float, float, int]] = field(default_factory=list)  # t_s, reward, success, tokens

    def step(self, t: float, reward: float, success: float, tokens: int) -> bool:
        """Record one step; True when it is time to stop. `tokens`: generated since the start."""
        self.rows.append((t, reward, success, tokens))
        emit(t=round(t, 2), step=len(self.rows), reward=round(reward, 4), success=round(success, 4), tokens=tokens)
        return t > self.seconds or (self.until is not None and self.first(self.until) is not None)

    def first(self, level: float) -> float | None:
        """`first_at` over the recorded steps."""
        return first_at([(t, r) for t, r, _, _ in self.rows], level)

    def finish(self, **facts: Any) -> None:
        """The last line."""
        wall = self.rows[-1][0]
        steps = len(self.rows)
        emit(
            done=True, engine=self.engine, task="calc", seed=self.seed, threads=self.threads, steps=steps,
            s_per_step=round(wall / steps, 4), steps_per_s=round(steps / wall, 3), t_half=self.first(0.5),
            episodes_per_s=round(steps * PROMPTS * GROUP / wall, 1), tokens_per_s=round(self.rows[-1][3] / wall),
            first=round(self.rows[0][1], 3), last=round(statistics.mean(r for _, r, _, _ in self.rows[-5:]), 3),
            success_end=round(statistics.mean(s for _, _, s, _ in self.rows[-5:]), 3),
            rss_mb=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024), **facts,
        )  # fmt: skip


def arguments(about: str | None) -> argparse.Namespace:
    """The options that every side takes."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--until", type=float, default=None, help="stop once this reward is reached")
    parser.add_argument("--start", type=Path, default=None, help="Hugging Face directory to begin from (no warm start)")
    parser.add_argument("--problems", type=Path, default=None, help="JSON list of [text, answer] to train on")
    return parser.parse_args()


def emit(**facts: Any) -> None:
    """One JSON line on stdout."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()
