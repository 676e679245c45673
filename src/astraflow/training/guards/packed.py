"""A model that is trained or scored by ranks is refused like any other when packs would be scored wrongly."""

from __future__ import annotations

from transformers import PreTrainedModel

from astraflow.models.scoring.forward import prepare_model
from astraflow.models.scoring.guard import prepared_as_itself
from astraflow.training.parallel.loading import Stored
from astraflow.training.parallel.ranks import Ranks
from astraflow.training.parallel.scoring import Scoring, scoring_of


def prepared_scoring(model: PreTrainedModel, what: str, ranks: Ranks, stored: Stored) -> Scoring:
    """The scoring of a model that was opened from `stored` and is given to its device, or divided over `ranks`, in
    place; see `prepared_as_itself`."""
    if not ranks.many:
        model.to(stored.device)  # type: ignore[arg-type]
    score = scoring_of(model, ranks, stored)
    if ranks.tensor > 1:  # linear layers in parts have one way to be called, and are of plain decoders
        prepare_model(model)
    else:
        prepared_as_itself(model, what, score)
    return score
