"""Model names become directories here: built-in names are made once into the cache, anything else is a path."""

from __future__ import annotations

import difflib
import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash
from transformers.utils import logging as transformers_logging

from astraflow.config.env import user_path
from astraflow.errors import ModelError
from astraflow.models.smollm2 import find_gguf, write_smollm2
from astraflow.models.stored import check_model_files
from astraflow.models.tiny_char import SIZES, write_tiny_char

BUILT_IN = (*SIZES, "smollm2-135m-instruct")
_FORMAT, _TINY_FORMAT = 1, 2  # raised when what is written changes, so an older cache is not used


def model_directory(name: str, cache: Path, seed: int) -> Path:
    """The Hugging Face directory of `name`. `seed` starts a model that has no pretrained weights. `nf4:<name>` is that
    model, its linear layers rounded to what 4 bits can say.

    Safe from many processes at once: one makes the directory, the others wait for it, and it appears whole.
    Raises: ModelError: not a built-in name and not a complete directory whose parts fit; or a built-in's package is not
    installed.
    """
    kind, _, rounded = name.partition(":")
    if kind == "nf4" and rounded:
        return _rounded(model_directory(rounded, cache, seed), cache)
    if name in SIZES:
        return _cached(cache / f"{name}-{_TINY_FORMAT}-seed{seed}", lambda into: write_tiny_char(into, seed, name))
    if name == "smollm2-135m-instruct":
        target = cache / f"smollm2-135m-instruct-{_FORMAT}"
        if target.is_dir():
            return target
        source = find_gguf()
        return _cached(target, lambda into: write_smollm2(into, source))
    return _checked(name)


def _rounded(source: Path, cache: Path) -> Path:
    """Made again when a file of `source` has changed."""
    from astraflow.models.lora.nf4 import write_rounded

    files = sorted(path for path in source.resolve().iterdir() if path.is_file())
    facts = [(str(path), (found := path.stat()).st_size, found.st_mtime_ns) for path in files]
    mark = xxhash.xxh3_64_hexdigest(repr(facts).encode())
    return _cached(cache / f"nf4-{_FORMAT}-{mark}", lambda into: write_rounded(into, source))


def _cached(target: Path, write: Callable[[Path], None]) -> Path:
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # The lock is the kernel's: it ends with its holder, so a process that dies while writing blocks nobody.
        with open(target.with_name(target.name + ".lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.is_dir():
                _write_whole(target, write)
    except OSError as error:
        raise ModelError(
            "model cache",
            str(target),
            f"cannot be written ({error})",
            "free some space, or set ASTRAFLOW_CACHE elsewhere",
        ) from error
    return target


def _write_whole(target: Path, write: Callable[[Path], None]) -> None:
    partial = target.with_name(target.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a process that died; the lock says nobody writes it now
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    write(partial)
    os.replace(partial, target)


def _checked(name: str) -> Path:
    directory = user_path(name)
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    hint = (f"did you mean '{near[0]}'? " if near else "") + (
        f"give a Hugging Face directory or one of: {', '.join(BUILT_IN)}"
    )
    try:
        there = set(os.listdir(directory))
    except (FileNotFoundError, NotADirectoryError):
        raise ModelError("model", name, "is neither a directory nor a built-in name", hint) from None
    except OSError as error:
        raise ModelError("model", name, f"cannot be read ({error.strerror})", "let this user read it") from error
    if "config.json" not in there:
        raise ModelError("model", name, "holds no config.json", hint)
    if not any(file.endswith(".safetensors") for file in there):
        raise ModelError("model", name, "holds no weights (*.safetensors)", f"save the model as safetensors, or {hint}")
    if "tokenizer.json" not in there:
        raise ModelError(
            "model", name, "holds no tokenizer.json", f"save its fast tokenizer beside the weights, or {hint}"
        )
    check_model_files(directory)
    return directory
