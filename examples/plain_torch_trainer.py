"""GRPO in plain torch, driven by the dataflow: this file takes the place of `astraflow trainer`.

cd examples
astraflow dataflow digits.toml --port 7700 &
astraflow node --dataflow http://127.0.0.1:7700 &
python plain_torch_trainer.py http://127.0.0.1:7700 actor runs/digits
"""

import shutil
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from astraflow.config.env import cache_dir
from astraflow.models.registry import model_directory
from astraflow.training.checkpoint import load_optimizer_tensors, optimizer_tensors
from astraflow.training.feed.dataset import PolicyBatches
from astraflow.training.feed.session import TrainerSession

CLIP = 0.2


def load(checkpoints, model_dir, lr):
    """Model, optimizer and version of the newest checkpoint, or a fresh start at version 0."""
    found = sorted(checkpoints.glob("step-*"))
    model = AutoModelForCausalLM.from_pretrained(found[-1] if found else model_dir)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    if found:
        load_optimizer_tensors(model, optimizer, load_file(found[-1] / "optimizer.safetensors"))
    return model, optimizer, int(found[-1].name.removeprefix("step-")) if found else 0


def save(checkpoints, model, optimizer, version):
    """A checkpoint appears whole: written beside its place, then renamed."""
    building = checkpoints / ".building"
    shutil.rmtree(building, ignore_errors=True)
    model.save_pretrained(building)
    save_file(optimizer_tensors(model, optimizer), building / "optimizer.safetensors")
    building.rename(checkpoints / f"step-{version:06d}")


def loss_of(model, micro, num_tokens):
    """Clipped surrogate over the trained tokens of one microbatch, as a part of the mean over the whole batch."""
    logits = model(**micro.inputs()).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, micro.input_ids[:, 1:, None])[..., 0]
    mask, advantages = micro.loss_mask[:, 1:], micro.advantages[:, 1:]
    ratio = torch.where(mask, logprobs - micro.behavior_logprobs[:, 1:], 0.0).exp()
    surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)
    return -(surrogate * micro.weights[:, 1:] * mask).sum() / num_tokens


def main(dataflow, policy, run_dir):
    checkpoints = run_dir / "checkpoints" / policy
    checkpoints.mkdir(parents=True, exist_ok=True)
    with TrainerSession(dataflow, policy, weights=run_dir / "weights") as session:
        run, section = session.config.run, session.config.policies[policy]
        model_dir = model_directory(section.model, cache_dir(), run.seed)  # or any Hugging Face directory
        model, optimizer, version = load(checkpoints, model_dir, section.optimizer.lr)
        session.publish(version, model.state_dict())
        session.resume(version)
        batches = PolicyBatches(session, tokens_per_microbatch=section.batch.tokens_per_microbatch)
        for batch in DataLoader(batches, batch_size=None):
            losses = []
            for micro in batch.microbatches:
                loss = loss_of(model, micro, batch.num_tokens)
                loss.backward()
                losses.append(loss.item())
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), section.optimizer.grad_clip)
            optimizer.step()
            optimizer.zero_grad()
            session.publish(batch.step, model.state_dict())
            batches.done(batch, {"loss": sum(losses), "grad_norm": norm.item()})
            sys.stderr.write(f"step {batch.step}: reward {batch.header.metrics['reward/mean']:.3f}\n")
            if batch.step % run.checkpoint_every == 0 or batch.step == run.steps:
                save(checkpoints, model, optimizer, batch.step)
                session.checkpoint()
        session.wait_until_finished()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
