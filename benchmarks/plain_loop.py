"""The plain single-process loop: sample 512 episodes, one GRPO step, again. The honest baseline of `bench_loop`.

Nothing between the model and the loop: one process, a KV cache, batched turns, padded batches cut at 128 rows. One
JSON line per step, one at the end.

    python -m benchmarks.plain_loop --seed 0 --seconds 60 --threads 1 [--until 0.5] [--start DIR]
"""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from itertools import islice

import torch
import torch.nn.functional as F
from transformers import DynamicCache, PreTrainedModel

from benchmarks import tiny_calculator as task

MICRO_ROWS = 128


@dataclass
class Rollout:
    """One episode: its ids, which were sampled, and the log-probability of each sampled one."""

    ids: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float
    success: bool


class Sampler:
    """Batched sampling on one growing KV cache; rows are ragged through the attention mask and explicit positions."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def begin(self, prompts: torch.Tensor, repeat: int) -> None:
        """Prefill equally long prompts once each, then give every one `repeat` rows."""
        out = self.model(input_ids=prompts, cache=DynamicCache(config=self.model.config), logits_to_keep=1)
        self.cache = out.past_key_values
        self.cache.batch_repeat_interleave(repeat)
        self.logits = out.logits[:, -1].repeat_interleave(repeat, 0)
        rows = len(self.logits)
        self.attend = torch.ones(rows, prompts.shape[1], dtype=torch.long)
        self.length = torch.full((rows,), prompts.shape[1])

    def turn(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sample until EOS or TURN_TOKENS. Returns ids [N, W], logprobs [N, W] and the number of valid tokens [N]."""
        ids, logprobs = [], []
        alive = torch.ones(len(self.logits), dtype=torch.bool)
        count = torch.zeros(len(self.logits), dtype=torch.long)
        for i in range(task.TURN_TOKENS):
            scores = F.log_softmax(self.logits, -1)
            token = (scores - torch.empty_like(scores).exponential_().log()).argmax(-1)  # Gumbel: an exact sample
            ids.append(token)
            logprobs.append(scores.gather(1, token[:, None])[:, 0])
            count += alive
            self.fed = alive.clone()  # rows whose last token has not entered the cache yet
            self.last = token
            alive = alive & (token != task.EOS)
            if i + 1 == task.TURN_TOKENS or not alive.any():
                break
            self.feed(token[:, None], self.fed[:, None].long())
        return torch.stack(ids, 1), torch.stack(logprobs, 1), count

    def feed(self, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Append `ids` [N, W] where `mask` is 1; `logits` become those after each row's last real token."""
        positions = self.length[:, None] + mask.cumsum(1) - mask
        self.attend = torch.cat([self.attend, mask], 1)
        out = self.model(input_ids=ids, attention_mask=self.attend, position_ids=positions, cache=self.cache).logits
        if ids.shape[1] == 1:
            self.logits = out[:, 0]
        else:
            self.logits = out[torch.arange(len(ids)), mask.sum(1) - 1]
        self.length = self.length + mask.sum(1)

    def keep(self, rows: torch.Tensor) -> None:
        """Drop all other rows."""
        self.cache.batch_select_indices(rows)
        self.attend, self.length, self.logits = self.attend[rows], self.length[rows], self.logits[rows]


@torch.inference_mode()
def roll_out(model: PreTrainedModel, problems: list[task.Problem]) -> list[Rollout]:
    """Play PROMPTS x GROUP episodes of two turns."""
    sampler = Sampler(model)
    prompts = [[task.BOS, *task.encode(p.text)] for p in problems]
    sampler.begin(torch.tensor(prompts), task.GROUP)
    rollouts, calls = [], []
    first = [t.tolist() for t in sampler.turn()]
    for row, (ids, logprobs, count) in enumerate(zip(*first, strict=True)):
        prompt = prompts[row // task.GROUP]
        ids, logprobs = ids[:count], logprobs[:count]
        mask = [0] * len(prompt) + [1] * count
        rollouts.append(Rollout([*prompt, *ids], mask, [0.0] * len(prompt) + logprobs, 0.0, False))
        text = "".join(task.CHARS[i] for i in ids[:-1]) if ids[-1] == task.EOS else ""
        if task.is_call(text):
            calls.append((row, text[1:4]))
    if calls:
        _second_turn(sampler, problems, rollouts, calls)
    return rollouts


def _second_turn(
    sampler: Sampler, problems: list[task.Problem], rollouts: list[Rollout], calls: list[tuple[int, str]]
) -> None:
    """Tell each caller the value, sample its answer, score it."""
    keep = torch.tensor([row for row, _ in calls])
    told = [task.encode(f"<{task.evaluate(expression)}>") for _, expression in calls]
    sampler.keep(keep)
    # The closing EOS of a call entered the cache only where other rows still went on; feed it with the observation.
    missing = sampler.length < torch.tensor([len(rollouts[row].ids) for row, _ in calls])
    chunk = [[task.EOS, *t] if m else t for t, m in zip(told, missing.tolist(), strict=True)]
    sampler.feed(task.pad(chunk), task.pad([[1] * len(c) for c in chunk]))
    second = [t.tolist() for t in sampler.turn()]
    for (row, expression), seen, ids, logprobs, count in zip(calls, told, *second, strict=True):
        rollout, ids, logprobs = rollouts[row], ids[:count], logprobs[:count]
        rollout.ids += seen + ids
        rollout.mask += [0] * len(seen) + [1] * count
        rollout.logprobs += [0.0] * len(seen) + logprobs
        answer = "".join(task.CHARS[i] for i in ids[:-1]) if ids[-1] == task.EOS else None
        rollout.reward, rollout.success = task.score(problems[row // task.GROUP], expression, answer)


def train_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, rollouts: list[Rollout]) -> None:
    """One GRPO step: group-relative advantages, clipped ratio, mean over all sampled tokens."""
    rewards = torch.tensor([r.reward for r in rollouts]).view(-1, task.GROUP)
    centred = rewards - rewards.mean(1, keepdim=True)
    advantages = (centred / (rewards.std(1, keepdim=True) + 1e-4)).flatten()
    total = sum(sum(r.mask) for r in rollouts)
    order = sorted(range(len(rollouts)), key=lambda i: len(rollouts[i].ids))
    optimizer.zero_grad()
    for start in range(0, len(order), MICRO_ROWS):
        rows = order[start : start + MICRO_ROWS]
        ids = task.pad([rollouts[i].ids for i in rows])
        mask = task.pad([rollouts[i].mask for i in rows])[:, 1:].float()
        width = ids.shape[1]
        behavior = torch.tensor([r.logprobs + [0.0] * (width - len(r.logprobs)) for r in (rollouts[i] for i in rows)])
        # Right padding under a causal mask needs no attention mask: no real token sees a pad.
        logits = model(input_ids=ids).logits[:, :-1]
        logprobs = F.log_softmax(logits, -1).gather(2, ids[:, 1:, None])[..., 0]
        ratio = (logprobs - behavior[:, 1:]).exp()
        credit = advantages[rows][:, None]
        gain = torch.min(ratio * credit, ratio.clamp(1 - task.CLIP, 1 + task.CLIP) * credit)
        (-(gain * mask).sum() / total).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), task.GRAD_CLIP)
    optimizer.step()


def main() -> None:
    """Warm start, then loop until time is up."""
    args = task.arguments(__doc__)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    begin = time.perf_counter()
    model = task.load_or_warm_start(args.start, rng)
    problems = task.problem_stream(rng, args.problems)
    warm_s = time.perf_counter() - begin
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.LR, weight_decay=0.0, betas=task.BETAS)
    curve = task.Curve("plain", args.seed, args.threads, args.seconds, args.until)
    tokens, generate_s, start = 0, 0.0, time.perf_counter()
    while True:
        before = time.perf_counter()
        rollouts = roll_out(model, list(islice(problems, task.PROMPTS)))
        generate_s += time.perf_counter() - before
        train_step(model, optimizer, rollouts)
        tokens += sum(sum(r.mask) for r in rollouts)
        reward = sum(r.reward for r in rollouts) / len(rollouts)
        success = sum(r.success for r in rollouts) / len(rollouts)
        if curve.step(time.perf_counter() - start, reward, success, tokens):
            break
    wall = time.perf_counter() - start
    curve.finish(warm_s=round(warm_s, 1), generate_share=round(generate_s / wall, 3))


if __name__ == "__main__":
    main()
