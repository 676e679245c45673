"""Why a delta could not be read or applied. Every one of them leaves the reader's tensors as they were."""

from __future__ import annotations

from astraflow.errors import WeightError
from astraflow.weights.manifest import TornPart


class DamagedDelta(TornPart):
    """Bytes are not those that were encoded; fetching them again may help."""


class WrongBase(WeightError):
    """The delta starts from another version, or from tensors of another shape, than the reader holds."""


class DeltaMismatch(WeightError):
    """A tensor has another checksum after the change than the target version; fetch that version in full."""
