"""The only reader of environment variables.

| variable          | meaning                                                                       |
|-------------------|-------------------------------------------------------------------------------|
| ASTRAFLOW_TOKEN   | bearer token of every service of a run; needed as soon as one is not loopback |
| ASTRAFLOW_CACHE   | where converted models are kept (default: the user's cache directory)         |
| ASTRAFLOW_SHARED_MEMORY | "0": bulk bodies and weights go over TCP even on one host               |
| RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR | set by `torchrun`: which rank of a trainer this is |
| named by `key_env` of a stage or engine | the key of the service that it asks                   |
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from astraflow.errors import Problem

TOKEN_VARIABLE = "ASTRAFLOW_TOKEN"
KEPT_KERNELS = "256"


def token_from_env() -> str | None:
    """The bearer token, or None.

    Raises: Problem: as `checked_token`.
    """
    return checked_token(os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE) or None


def checked_token(text: str, where: str) -> str:
    """`text` without the white space around it, as it travels in an HTTP header.

    Raises: Problem: naming `where`, never the token.
    """
    token = text.strip()
    if not all("!" <= character <= "~" for character in token):
        raise Problem(
            where, "***", "must be printable ASCII without spaces", "make one with: openssl rand -hex 16"
        )  # fmt: skip
    return token


def secret_from_env(name: str) -> str | None:
    """The secret in the variable that a run file names, or None."""
    return os.environ.get(name) or None


def torchrun_rank() -> tuple[int, int, int] | None:
    """Rank, number of ranks, and rank on this host, where `torchrun` started this process."""
    found = os.environ
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= set(found):
        return None
    return int(found["RANK"]), int(found["WORLD_SIZE"]), int(found.get("LOCAL_RANK", "0"))


def user_path(text: str) -> Path:
    """A path as a person writes it: `~` is the home directory, and a plain name where there is none."""
    return Path(os.path.expanduser(text))


def cache_dir() -> Path:
    """Where converted models are kept; not created here.

    Raises: Problem: nothing says where.
    """
    if given := os.environ.get("ASTRAFLOW_CACHE") or "":
        return user_path(given)
    home = user_path("~")
    if sys.platform == "darwin":
        caches = home / "Library" / "Caches"
    else:
        caches = Path(os.environ.get("XDG_CACHE_HOME") or home / ".cache")
    if not caches.is_absolute():
        raise Problem("ASTRAFLOW_CACHE", given, "must say where models are kept, as this user has no home", "set it")
    return caches / "astraflow"


def shared_memory_allowed() -> bool:
    """False when ASTRAFLOW_SHARED_MEMORY is "0"."""
    return os.environ.get("ASTRAFLOW_SHARED_MEMORY") != "0"


def settle_torch() -> None:
    """What torch's libraries read when they are loaded, unless the user set it: call it before.

    OpenMP threads wait by sleeping, not by spinning: spinning threads of two processes on one core stall each other by
    two orders of magnitude. oneDNN keeps a quarter of the kernels that it would: each takes 0.6 MB, and a trainer meets
    hundreds of shapes (docs/performance.md for both).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    for cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):  # oneDNN's own, and that of torch beside it
        os.environ.setdefault(cache, KEPT_KERNELS)


def child_environment(token: str | None, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a child process: ours, the token if any, one thread for libraries that read it at import."""
    env = dict(os.environ)
    env.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})
    env.pop(TOKEN_VARIABLE, None)
    if token:
        env[TOKEN_VARIABLE] = token
    env.update(extra or {})
    return env


def become(env: Mapping[str, str]) -> None:
    """A forked process takes this environment instead of the one of whoever forked it."""
    os.environ.clear()
    os.environ.update(env)
