"""TRL's GRPOTrainer on the calculator task: same model, weights, batch and hyperparameters as the other sides.

The episode goes through TRL's own tool loop. Runs in the environment described in README.md here; prints one JSON line
per optimizer step and one at the end, with the keys of `benchmarks.tiny_calculator.Curve`.

    python -m benchmarks.peers.trl_grpo --seed 0 --seconds 120 --threads 1 [--until 0.5]
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from dataclasses import asdict
from itertools import islice
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import PreTrainedTokenizerFast, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from benchmarks import tiny_calculator as task

ROLLOUTS = task.PROMPTS * task.GROUP
MICRO_ROWS = 128

# One user turn, an optional tool round, one answer: exactly the token sequence the other sides train on.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}{% if m.tool_calls %}"
    "{% for c in m.tool_calls %}[{% if c.function.name != 'calc' %}{{ c.function.name }}{{ c.function.arguments }}"
    "{% else %}{{ c.function.arguments.expr }}{% endif %}]{% endfor %}{% else %}{{ m.content }}{% endif %}"
    "{{ eos_token }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# Only a well-formed "[d op d]" that ends the turn is a tool call; anything else is content and ends the episode.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor_pattern": r"[?>]",
    "fields": {
        "tool_calls": {
            "open_pattern": r"^\[(?=[0-9][-+*][0-9]\]<eos>)",
            "close_pattern": r"\]<eos>",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "calc", "arguments": {"expr": "{content}"}}},
        },
        "content": {"close_pattern": r"<eos>", "content": "text"},
    },
}


def calc(expr: str) -> str:
    """
    Evaluate one sum.

    Args:
        expr: Two digits with an operator between them.
    """
    return f"<{task.evaluate(expr)}>"


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    core = Tokenizer(models.WordLevel(task.ID, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", padding_side="left",
        clean_up_tokenization_spaces=False,
    )  # fmt: skip
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.response_template = RESPONSE_TEMPLATE
    return tokenizer


def settings(out: str, seed: int) -> GRPOConfig:
    """The hyperparameters of `tiny_calculator`; bf16 autocast and gradient checkpointing (slower here) are off."""
    return GRPOConfig(
        output_dir=out, seed=seed, use_cpu=True, max_steps=1_000_000, report_to="none", save_strategy="no",
        disable_tqdm=True, logging_steps=1, dataloader_pin_memory=False, bf16=False, gradient_checkpointing=False,
        learning_rate=task.LR, lr_scheduler_type="constant", adam_beta2=task.BETAS[1], weight_decay=0.0,
        max_grad_norm=task.GRAD_CLIP, per_device_train_batch_size=MICRO_ROWS,
        gradient_accumulation_steps=ROLLOUTS // MICRO_ROWS, num_generations=task.GROUP, temperature=1.0, beta=0.0,
        epsilon=task.CLIP, num_iterations=1, max_completion_length=18, max_tool_calling_iterations=1,
        generation_kwargs={"max_new_tokens": task.TURN_TOKENS},
    )  # fmt: skip


class Clock(TrainerCallback):
    """One line per optimizer step."""

    def __init__(self, curve: task.Curve) -> None:
        self.curve, self.tokens, self.success, self.start = curve, 0, 0.0, 0.0

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Called after each step."""
        if logs is None or "reward" not in logs:
            return
        self.tokens += round(logs["completions/mean_length"] * ROLLOUTS)
        if self.curve.step(time.perf_counter() - self.start, logs["reward"], self.success, self.tokens):
            control.should_training_stop = True

    def reward(
        self, completions: list[Any], completion_ids: list[Any], text: Any, answer: Any, **_: Any
    ) -> list[float]:
        """TRL's reward function: scores each conversation."""
        scored = []
        for messages, ids, problem in zip(completions, completion_ids, map(task.Problem, text, answer), strict=True):
            calls = messages[0].get("tool_calls")
            expression = calls[0]["function"]["arguments"]["expr"] if calls else None
            final = messages[2]["content"] if len(messages) == 3 and ids[-1] == task.EOS else None
            scored.append(task.score(problem, expression, final))
        self.success = sum(right for _, right in scored) / len(scored)
        return [reward for reward, _ in scored]


def main() -> None:
    """Warm start, then train until time is up."""
    args = task.arguments(__doc__)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    rng = random.Random(args.seed)
    model = task.load_or_warm_start(args.start, rng)
    problems = list(islice(task.problem_stream(rng, args.problems), 20_000))
    rows = [{"prompt": [{"role": "user", "content": p.text}], **asdict(p)} for p in problems]
    clock = Clock(task.Curve("trl", args.seed, args.threads, args.seconds, args.until))
    with tempfile.TemporaryDirectory(prefix="trl_grpo_") as out:
        trainer = GRPOTrainer(
            model=model, reward_funcs=clock.reward, args=settings(out, args.seed), processing_class=make_tokenizer(),
            train_dataset=Dataset.from_list(rows), callbacks=[clock], tools=[calc],
        )  # fmt: skip
        trainer.remove_callback(PrinterCallback)
        torch.set_num_threads(args.threads)  # accelerate may have changed it
        clock.start = time.perf_counter()
        trainer.train()
    clock.curve.finish()


if __name__ == "__main__":
    main()
