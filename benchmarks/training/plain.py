"""The plain transformers loop, in the forms that people write: what ours must not be slower than.

python -m benchmarks.training.plain --work '{...}' one_by_one
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import PreTrainedModel

from benchmarks.training.work import (
    CLIP,
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

FORMS = {
    "one_by_one": "each sequence alone, without padding and without a mask",
    "sorted": "by length, in microbatches padded to their own longest; no mask, as padding on the right needs none",
}


def build(form: str, model: PreTrainedModel, batch: Batch, work: Work) -> Step:
    """The step of `form`: the clipped loss, mean over all trained tokens, at ratio 1."""
    optimizer = make_optimizer(model)
    order = sorted(range(work.rows), key=lambda row: len(batch.sequences[row]))
    size = 1 if form == "one_by_one" else work.micro
    if not Path(work.behavior).exists():
        save_file(behavior(model, batch), work.behavior)

    def step() -> float:
        for start in range(0, work.rows, size):
            rows = order[start : start + size]
            part = [batch.sequences[row] for row in rows]
            ids, mask = padded(part, max(map(len, part)))
            logprobs = scores(model, ids)
            ratio = (logprobs - logprobs.detach()).exp()
            credit = batch.advantages[rows][:, None]
            gain = torch.min(ratio * credit, ratio.clamp(1 - CLIP, 1 + CLIP) * credit)
            (-(gain * mask[:, PROMPT_TOKENS:]).sum() / batch.num_trained).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), GRAD_CLIP))
        optimizer.step()
        optimizer.zero_grad()
        return norm

    return step


def scores(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Logprobs of what follows the prompts. [rows, width] -> [rows, width - PROMPT_TOKENS]."""
    logits = model(input_ids=ids, use_cache=False).logits[:, PROMPT_TOKENS - 1 : -1]
    return F.log_softmax(logits, -1).gather(2, ids[:, PROMPT_TOKENS:, None])[..., 0]


@torch.no_grad()
def behavior(model: PreTrainedModel, batch: Batch) -> dict[str, torch.Tensor]:
    """The logprob of each token, 0 in the prompts, by number of the row."""
    padding = torch.zeros(PROMPT_TOKENS)
    return {str(i): torch.cat((padding, scores(model, row[None])[0])) for i, row in enumerate(batch.sequences)}


if __name__ == "__main__":
    given, (form,) = given_work()
    assert form in FORMS, f"the form must be one of {', '.join(FORMS)}"
    tell(measure(given, partial(build, form), plain_model))
