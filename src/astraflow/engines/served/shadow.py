"""The node's own copy of the weights, in a file that a server on this host reads: always whole, always verified.

The file is mapped, and versions are applied to it in place: a whole version, a version that came as a delta, an adapter
merged with its base. Names and shapes are checked before anything is changed. Beside it lie the config and the
tokenizer, so a server that starts again starts with the newest version.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import torch
from safetensors.torch import save_file

from astraflow.engines.local.weights import LiveWeights
from astraflow.errors import EngineError
from astraflow.models.load import DTYPES, load_model, state_tensors
from astraflow.types import Adapter, EffectiveWeights

_SHARED = Path("/dev/shm")
_PREFIX = "astraflow-served-"
_WEIGHTS = "model.safetensors"
_LENGTH_BYTES = 8  # of the header's length; https://github.com/huggingface/safetensors#format
_OTHER_WEIGHTS = re.compile(r".*\.(safetensors|bin|pt|pth|gguf|h5|msgpack)(\.index\.json)?$")


class Shadow:
    """Of one model, in the dtype of its engine. Not thread-safe."""

    def __init__(self, model_dir: Path, dtype: str, share: str = "") -> None:
        """`share`: a directory that node and server see, "": shared memory if it has room, else the temporary one.

        Raises: ModelError: no model. EngineError: no room for its copy.
        """
        model = load_model(model_dir, dtype).requires_grad_(False)
        tensors = state_tensors(model)
        nbytes = sum(tensor.nbytes for tensor in tensors.values())
        self.directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=_place(share, nbytes)))
        self.path = self.directory / _WEIGHTS
        for file in model_dir.iterdir():
            if file.is_file() and not _OTHER_WEIGHTS.match(file.name):
                shutil.copyfile(file, self.directory / file.name)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, self.path, {"format": "pt"})
        shared = dict(_mapped(self.path))
        for name, tensor in model.state_dict(keep_vars=True).items():
            if name in tensors:
                tensor.data = shared[name]
        self._weights = LiveWeights(model, model_dir)

    def load(self, tensors: Mapping[str, torch.Tensor], adapter: Adapter | None) -> None:
        """The next version. Raises: ModelError: it does not fit; nothing was changed."""
        self._weights.load(tensors, adapter)

    def effective(self, version: int) -> EffectiveWeights:
        """What it holds, as `version`."""
        return self._weights.effective(version)

    def close(self) -> None:
        """Remove the files; who has them mapped keeps what they held."""
        shutil.rmtree(self.directory, ignore_errors=True)


def _place(share: str, nbytes: int) -> Path:
    """Where there is room for the weights. Copies of nodes that are gone are removed there."""
    if share and not Path(share).is_dir():
        raise EngineError("engine.share", share, "is no directory", "create it, where node and server both see it")
    candidates = [Path(share)] if share else [_SHARED, Path(tempfile.gettempdir())]
    for place in candidates:
        if not place.is_dir() or not os.access(place, os.W_OK):
            continue
        _sweep(place)
        if shutil.disk_usage(place).free > nbytes * 1.05:
            return place
    raise EngineError(
        "engine.share", share or ", ".join(map(str, candidates)), f"has no room for {nbytes / 2**30:.1f} GiB of "
        "weights that node and server share", "name a directory that has: engine = { share = ... }",
    )  # fmt: skip


def _sweep(place: Path) -> None:
    for left in place.glob(f"{_PREFIX}*"):
        pid = left.name.removeprefix(_PREFIX).partition("-")[0]
        try:
            os.kill(int(pid), 0)
        except ProcessLookupError:
            shutil.rmtree(left, ignore_errors=True)
        except (PermissionError, ValueError):  # of another user, or none of ours
            continue


def _mapped(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a safetensors file as views of it: what is written to them is in the file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = msgspec.json.decode(file.read(length), type=dict[str, dict[str, object]])
    whole = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=path.stat().st_size)
    dtypes = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        tensor = msgspec.convert(entry, _Entry)
        dtype = DTYPES[dtypes[tensor.dtype]]
        start = _LENGTH_BYTES + length + tensor.data_offsets[0]
        empty = torch.empty(0, dtype=dtype)
        view = empty.set_(whole, start // dtype.itemsize, tensor.shape)  # type: ignore[call-overload]
        yield name, view


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]
