"""The ranks of one trainer: processes that hold a part of the model each and do every step together.

Rank 0 alone speaks with the dataflow service; what it got and decided it tells the others. All of them compute from
the same batch, so sizes, coefficients and decisions are equal without asking. One that dies takes all of them along:
nothing can be computed without its part, and a checkpoint has all that is needed to start again, with any number of
ranks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from astraflow.config.schema import TrainerSection
from astraflow.errors import TrainingError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

TIMEOUT_S = 1800.0  # for a step, a checkpoint, or word of rank 0, which sends some every few seconds while it waits

T = TypeVar("T")


class RankLost(TrainingError):
    """Another rank is gone, or does not do its part."""

    exit_code = 3


@dataclass(frozen=True)
class RankPlace:
    """Which rank this process is. `rendezvous`: where they find each other, a URL as `torch.distributed` takes it."""

    rank: int  # 0 <= rank < ranks
    ranks: int
    rendezvous: str  # env:// (torchrun), file:///path on one host, tcp://host:port
    local_rank: int = 0  # among those of this host: the number of its GPU


class Meshes(NamedTuple):
    """The ranks with whom this one does what."""

    context: DeviceMesh  # divides attention by heads
    tensor: DeviceMesh  # divides linear layers
    team: DeviceMesh  # context x tensor: divides the tokens of a pack
    parts: DeviceMesh  # data x context: shares its part of linear layers
    ranks: DeviceMesh  # shares all other weights


class Ranks:
    """This process among the ranks. As it is made without arguments: the only one.

    They are data x context x tensor, the last one fastest: `context` * `tensor` neighbours are a team, which computes a
    pack together.
    """

    def __init__(self, rank: int = 0, size: int = 1, tensor: int = 1, context: int = 1) -> None:
        """Raises: TrainingError: teams of that size do not make up all ranks."""
        self.rank, self.size, self.tensor, self.context = rank, size, tensor, context
        self._meshes: Meshes | None = None
        if size % (tensor * context):
            raise TrainingError(
                "ranks", size, f"must be a multiple of trainer.tensor_parallel={tensor} times "
                f"trainer.context_parallel={context}", "start another number of ranks, or lower one of these",
            )  # fmt: skip

    def arranged(self, trainer: TrainerSection) -> Ranks:
        """These ranks in teams, as `trainer` says."""
        return Ranks(self.rank, self.size, trainer.tensor_parallel, trainer.context_parallel)

    @property
    def num_teams(self) -> int:
        """How many packs are computed at once."""
        return self.size // (self.tensor * self.context)

    @property
    def team(self) -> int:
        """The number of this rank's team."""
        return self.rank // (self.tensor * self.context)

    @property
    def speaks(self) -> bool:
        """What this rank's team found counts once: as this rank has it."""
        return self.rank % (self.tensor * self.context) == 0

    def meshes(self, device_type: str) -> Meshes:
        """Made at the first call, which all ranks make at once."""
        if self._meshes is None:
            from torch.distributed.device_mesh import init_device_mesh

            shape = (self.num_teams, self.context, self.tensor)
            mesh = init_device_mesh(device_type, shape, mesh_dim_names=("data", "context", "tensor"))
            self._meshes = Meshes(
                context=mesh["context"], tensor=mesh["tensor"], team=mesh["context", "tensor"]._flatten("team"),
                parts=mesh["data", "context"]._flatten("parts"), ranks=mesh._flatten("ranks"),
            )  # fmt: skip
        return self._meshes

    @property
    def leads(self) -> bool:
        """This is rank 0."""
        return self.rank == 0

    @property
    def many(self) -> bool:
        """There are others."""
        return self.size > 1

    def any(self, flag: bool) -> bool:
        """True on all ranks when it is on one."""
        if not self.many:
            return flag
        value = torch.tensor([float(flag)])
        return bool(self._together(lambda: dist.all_reduce(value, dist.ReduceOp.MAX), value).item())

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """`values` of all ranks added up, in place."""
        return self._together(lambda: dist.all_reduce(values), values) if self.many else values

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """The largest of all ranks, in place."""
        if not self.many:
            return values
        return self._together(lambda: dist.all_reduce(values, dist.ReduceOp.MAX), values)

    def tell(self, payload: bytes | None = None) -> bytes:
        """What rank 0 gives as `payload`, on every rank."""
        assert (payload is not None) == self.leads
        if not self.many:
            return payload or b""
        size = torch.tensor([len(payload or b"")])
        self._together(lambda: dist.broadcast(size, 0), size)
        content = bytearray(payload or bytes(int(size)))
        if content:
            flat: torch.Tensor = torch.frombuffer(content, dtype=torch.uint8)
            self._together(lambda: dist.broadcast(flat, 0), flat)
        return bytes(content)

    def _together(self, work: Callable[[], Any], result: torch.Tensor) -> torch.Tensor:
        with self.watched():
            work()
        return result

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Raises: RankLost: what was raised inside says that another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            if not self.many or not _is_loss(error):
                raise
            raise RankLost(
                f"rank {self.rank}: another rank of {self.size}", "gone",
                f"so this one cannot go on ({str(error).splitlines()[0]})",
                "look at the logs of the others; started again together they go on from the newest checkpoint",
            ) from error  # fmt: skip


ALONE = Ranks()


def device_of(name: str) -> torch.device:
    """`policies.*.trainer.device`; of several GPUs, the one of this rank."""
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise TrainingError("policies.*.trainer.device", name, "is not here", "use auto, or cpu")
    return torch.device("cuda", torch.cuda.current_device()) if there and name != "cpu" else torch.device("cpu")


@contextlib.contextmanager
def joined(place: RankPlace) -> Iterator[Ranks]:
    """Meet the other ranks, and leave them.

    Raises: RankLost: not all of them came.
    """
    ranks = Ranks(place.rank, place.ranks)
    if torch.cuda.is_available():
        torch.cuda.set_device(place.local_rank % torch.cuda.device_count())
    with ranks.watched():
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", init_method=place.rendezvous,
            rank=place.rank, world_size=place.ranks, timeout=timedelta(seconds=TIMEOUT_S),
        )  # fmt: skip
    try:
        yield ranks
    finally:
        dist.destroy_process_group()


def _is_loss(error: RuntimeError) -> bool:
    """torch says it by classes of its own, gloo in the text only."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower() or "closed by peer" in str(error)
