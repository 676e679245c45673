"""A model whose tokens would be scored wrongly when sequences lie packed one behind the other."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from astraflow.errors import ModelError
from astraflow.models.scoring.forward import PackedPolicy, Scores, prepare_model
from astraflow.models.scoring.packing import Pack, pack_rows, rows_from_lists

LENGTHS, SHARED = (9, 12, 7), 5  # tokens of the sequences that are tried; the first two have so many in common
TOLERANCE = 0.01  # nats, of float32; rounding makes 1e-4, a wrong layer around 1
SHARE = 0.1  # of the tokens may differ: rounding sends one to another expert now and then
_FIX = "use a decoder whose layers mix tokens by plain causal attention only, as Llama, Qwen3 or Mistral"


class Scorer(Protocol):
    """Scores packs, and single sequences as the model itself does; see `PackedPolicy`."""

    def __call__(self, pack: Pack, temperature: float) -> Scores:
        """The trained tokens of `pack`."""

    def itself(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Logits [T, V] of one sequence [T] by the model's own forward pass."""


def prepared_as_itself(model: PreTrainedModel, what: str, score: Scorer | None = None) -> PreTrainedModel:
    """`prepare_model`, and a few tokens are scored both packed and by the model's own forward pass, alone.

    State-space and linear-attention layers, convolutions over time, position biases and attention sinks do not go
    through the packed attention: such a model would learn from ratios that mean nothing, without any other sign.
    Args: model: in float32, with the attention that it was loaded with. what: the setting that asks for it. score: of
    ranks that have it in parts.
    Raises: ModelError: they differ, or the model cannot be called packed at all.
    """
    kind = type(model).__name__
    score = score or PackedPolicy(model)
    with torch.no_grad():
        alone = _alone(score, model.device, examples := _examples(model))
        try:
            prepare_model(model)
            packed = _packed(score, examples)
        except ModelError as error:
            if error.thing != "attention":
                raise
            raise ModelError(what, kind, f"{error.rule} in {error.value}", _FIX) from error
        except (TypeError, AttributeError) as error:
            raise ModelError(what, kind, f"cannot be called with packed sequences ({error})", _FIX) from error
    gap = (alone - packed).abs()
    if (gap > TOLERANCE).float().mean() > SHARE:  # not finite weights are another fault, and no gap
        raise ModelError(
            what, kind, f"gives other logprobs packed than alone (by up to {gap.max():.2g} nats): it has layers that "
            "do not go through packed attention", _FIX,
        )  # fmt: skip
    return model


def _examples(model: PreTrainedModel) -> list[torch.Tensor]:
    inputs = model.get_input_embeddings()
    assert isinstance(inputs, nn.Embedding)
    draw = torch.Generator().manual_seed(0)  # of its own: the run's stays as it is
    examples = [torch.randint(0, inputs.num_embeddings, (length,), generator=draw) for length in LENGTHS]
    examples[1][:SHARED] = examples[0][:SHARED]
    return examples


def _alone(score: Scorer, device: torch.device, examples: list[torch.Tensor]) -> torch.Tensor:
    """Logprobs of the tokens of each example but the first one, end to end."""
    found = []
    for ids in examples:
        here = ids.to(device)
        logits = score.itself(here)[:-1].float()
        found.append(logits.log_softmax(-1).gather(1, here[1:, None])[:, 0])
    return torch.cat(found).cpu()


def _packed(score: Scorer, examples: list[torch.Tensor]) -> torch.Tensor:
    """The same, of one pack with all of them."""
    rows = rows_from_lists([(ids.numpy(), torch.arange(len(ids)).numpy() > 0) for ids in examples])
    (pack,) = pack_rows(rows, sum(LENGTHS))
    sizes = torch.from_numpy(pack.target_sequence).bincount().tolist()
    own = torch.split(score(pack, 1.0).logprobs.cpu(), sizes)
    by_row = dict(zip(pack.rows.tolist(), own, strict=True))
    return torch.cat([by_row[row] for row in range(len(examples))])
