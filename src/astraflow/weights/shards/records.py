"""What ranks say to each other while they publish a version together: JSON, followed by raw bytes where there are any.

```
 other ranks ─ Layout ─► leader ─ Plan ─► other ranks ─ Frame per batch of tensors ─► leader ─ Outcome ─► other ranks
```
A rank that cannot go on says so in the `problem` of its next message, so the others never wait for it.
"""

from __future__ import annotations

import msgspec

from astraflow.weights.shards.regions import Region


class Held(msgspec.Struct, frozen=True):
    """What one rank has of one tensor."""

    name: str
    dtype: str  # safetensors code, as published
    shape: tuple[int, ...]  # of the whole tensor
    region: Region
    tied_to: str = ""  # an earlier tensor whose memory this one shares on the rank; "": none


class Layout(msgspec.Struct, frozen=True):
    """A rank is ready to publish `version`."""

    version: int
    base: int = -1  # the version of the snapshot that it can compare with; -1: none
    held: tuple[Held, ...] = ()
    unchanged: float = 0.0  # of its elements, judged by a sample
    num_elements: int = 0  # that it was judged by
    problem: str = ""


class Plan(msgspec.Struct, frozen=True):
    """What a rank has to send."""

    batches: tuple[tuple[str, ...], ...] = ()  # all tensors, in the order of the checkpoint
    sends: frozenset[str] = frozenset()  # tensors that this rank sends its block of
    whole: bool = True  # all elements; False: changes since the version before
    problem: str = ""


class Sent(msgspec.Struct, frozen=True):
    """One rank's block of one tensor: its elements, or positions (in the whole tensor) and differences of some."""

    name: str
    whole: bool
    count: int  # of elements
    wide: bool = False  # positions are 8 bytes, not 4


class Frame(msgspec.Struct, frozen=True):
    """What one rank sends of one batch; the arrays follow in this order."""

    sent: tuple[Sent, ...] = ()
    problem: str = ""


class Outcome(msgspec.Struct, frozen=True):
    """How it ended."""

    held: bool  # the leader holds the version now: the next one may be sent as changes
    problem: str = ""
