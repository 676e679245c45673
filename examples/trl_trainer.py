"""TRL's GRPOTrainer, driven by the dataflow: TRL's loss, optimizer, schedule, logs and checkpoints, no generation.

    cd examples
    astraflow dataflow digits.toml --port 7700 &
    astraflow node --dataflow http://127.0.0.1:7700 &
    python trl_trainer.py http://127.0.0.1:7700 actor runs/digits       # in an environment with trl and astraflow

What is replaced: where batches come from (`get_train_dataloader`, `_prepare_inputs`), and that one step of TRL may be
several microbatches (`training_step`). What TRL would do before a batch (prompts, generation, rewards, advantages) is
the work of nodes and operators, so `reward_funcs` and the data set that its constructor asks for are idle.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

from datasets import Dataset
from torch.utils.data import DataLoader, IterableDataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

from astraflow.config.env import cache_dir
from astraflow.models.registry import model_directory
from astraflow.training.feed.dataset import PolicyBatches
from astraflow.training.feed.session import TrainerSession


class Rows(IterableDataset):
    """Trainer wants dicts."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return ({"batch": batch} for batch in self.batches)


class DataflowTrainer(GRPOTrainer):
    """A GRPOTrainer whose batches are those of `batches`, a PolicyBatches of layout "padded"."""

    def __init__(self, batches, **arguments):
        self.batches, self.taken = batches, None
        super().__init__(**arguments)

    def get_train_dataloader(self):
        """Not prepared by accelerate, which would ask for the next batch before this one is trained."""
        return DataLoader(Rows(self.batches), batch_size=None)

    def _prepare_inputs(self, inputs):
        return inputs

    def training_step(self, model, inputs, num_items_in_batch=None):
        """All microbatches of one batch; the denominator of the loss is that of the whole batch."""
        self.taken = batch = inputs["batch"]
        self.loss = sum(
            super(DataflowTrainer, self).training_step(model, self.inputs_of(micro, batch), None)
            for micro in batch.microbatches
        )
        for name, value in batch.header.metrics.items():
            self._metrics["train"][name].append(value)
        return self.loss

    def inputs_of(self, micro, batch):
        """TRL's names. Its prompt is our first token; what was not sampled behind it is masked as text of a tool."""
        micro = micro.to(self.args.device)
        return {
            "prompt_ids": micro.input_ids[:, :1],
            "prompt_mask": micro.attention_mask[:, :1].long(),
            "completion_ids": micro.input_ids[:, 1:],
            "completion_mask": micro.attention_mask[:, 1:].long(),
            "tool_mask": micro.loss_mask[:, 1:].long(),
            "advantages": micro.advantages[:, 1:] * micro.weights[:, 1:],
            "old_per_token_logps": micro.behavior_logprobs[:, 1:],
            "num_items_in_batch": micro.input_ids.new_tensor(batch.num_tokens),
        }


class Reports(TrainerCallback):
    """Tells the dataflow what the trainer has done."""

    def __init__(self, session):
        self.session, self.trainer = session, None

    def on_train_begin(self, args, state, control, model=None, **_):
        self.session.publish(state.global_step, model.state_dict())
        self.session.resume(state.global_step)

    def on_step_end(self, args, state, control, model=None, **_):
        self.session.publish(state.global_step, model.state_dict())
        self.trainer.batches.done(self.trainer.taken, {"loss": self.trainer.loss.item()})

    def on_save(self, args, state, control, **_):
        self.session.checkpoint()


def settings(run, section, out):
    """The hyperparameters of the run file in TRL's words. "dapo": a mean per token over the whole batch."""
    return GRPOConfig(
        output_dir=str(out), max_steps=run.steps, save_steps=run.checkpoint_every, seed=run.seed, logging_steps=1,
        report_to="none", disable_tqdm=True, bf16=False, gradient_checkpointing=False, ignore_data_skip=True,
        learning_rate=section.optimizer.lr, lr_scheduler_type=section.optimizer.schedule,
        adam_beta1=section.optimizer.betas[0], adam_beta2=section.optimizer.betas[1],
        weight_decay=section.optimizer.weight_decay, max_grad_norm=section.optimizer.grad_clip,
        loss_type="dapo", beta=0.0, temperature=section.sampling.temperature,
    )  # fmt: skip


def main(dataflow, policy, run_dir):
    out = run_dir / "checkpoints" / f"{policy}-trl"
    out.mkdir(parents=True, exist_ok=True)
    with TrainerSession(dataflow, policy, weights=run_dir / "weights") as session:
        run, section = session.config.run, session.config.policies[policy]
        model_dir = model_directory(section.model, cache_dir(), run.seed)  # or any Hugging Face directory
        reports = Reports(session)
        reports.trainer = trainer = DataflowTrainer(
            PolicyBatches(session, layout="padded", tokens_per_microbatch=section.batch.tokens_per_microbatch),
            model=AutoModelForCausalLM.from_pretrained(model_dir),
            processing_class=AutoTokenizer.from_pretrained(model_dir),
            reward_funcs=lambda completions, **_: [0.0] * len(completions),
            train_dataset=Dataset.from_list([{"prompt": ""}]),
            args=settings(run, section, out),
            callbacks=[reports],
        )
        trainer.train(resume_from_checkpoint=get_last_checkpoint(out))
        session.wait_until_finished()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
