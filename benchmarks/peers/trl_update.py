"""One update of TRL's GRPOTrainer on given sequences: its padding, its loss, its default microbatch of rows.

Runs in the environment described in README.md here.

    python -m benchmarks.peers.trl_update --work '{...}'
"""

from __future__ import annotations

import os
import tempfile

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import torch
from datasets import Dataset
from transformers import PreTrainedModel
from trl import GRPOConfig, GRPOTrainer

from benchmarks.peers.trl_grpo import make_tokenizer
from benchmarks.training.work import (
    GRAD_CLIP,
    PROMPT_TOKENS,
    Batch,
    Step,
    Work,
    given_work,
    make_optimizer,
    measure,
    padded,
    plain_model,
    tell,
)


def build(model: PreTrainedModel, batch: Batch, work: Work) -> Step:
    """GRPOTrainer pads a finished rollout batch once, to its longest row, and cuts it into equal microbatches."""
    out = tempfile.mkdtemp(prefix="trl_update_")
    trainer = GRPOTrainer(
        model=model, reward_funcs=lambda **_: [0.0], processing_class=make_tokenizer(),
        train_dataset=Dataset.from_list([{"prompt": "r:"}] * 8),
        args=GRPOConfig(
            output_dir=out, use_cpu=True, report_to="none", bf16=False, gradient_checkpointing=False, max_steps=1,
            per_device_train_batch_size=work.micro, gradient_accumulation_steps=work.rows // work.micro,
            num_generations=2, generation_batch_size=work.rows, beta=0.0, disable_tqdm=True,
        ),
    )  # fmt: skip
    trainer.current_gradient_accumulation_steps = work.rows // work.micro
    model.train()
    optimizer = make_optimizer(model)
    num_trained = torch.tensor(batch.num_trained)

    def step() -> float:
        ids, mask = padded(batch.sequences, batch.widest)
        for start in range(0, work.rows, work.micro):
            part = slice(start, start + work.micro)
            inputs = {
                "prompt_ids": ids[part, :PROMPT_TOKENS], "prompt_mask": mask[part, :PROMPT_TOKENS],
                "completion_ids": ids[part, PROMPT_TOKENS:], "completion_mask": mask[part, PROMPT_TOKENS:],
                "advantages": batch.advantages[part], "num_items_in_batch": num_trained,
            }  # fmt: skip
            trainer._compute_loss(model, inputs).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP))
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return step


if __name__ == "__main__":
    tell(measure(given_work()[0], build, plain_model))
