"""What a run file may say of any engine that is a server, and the server that comes of it."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol, get_type_hints
from urllib.parse import urlsplit

from astraflow.config.env import secret_from_env
from astraflow.engines.fleet import one_of
from astraflow.engines.launching import Argument, Said, check_arguments, vocab_size
from astraflow.engines.requests import require
from astraflow.engines.served.keeper import Limits
from astraflow.engines.served.process import Attached, Command, Host, Launched
from astraflow.engines.served.server import Model, Server
from astraflow.engines.served.shadow import Shadow
from astraflow.models.chat import eos_ids
from astraflow.wire.streams.web import Web


class Argv(Protocol):
    """The command that starts a server."""

    def __call__(
        self, python: str, model: Path, port: int, settings: Mapping[str, Argument], args: Mapping[str, Argument]
    ) -> list[str]:
        """`settings`: decided by the engine; `args`: by the user."""


@dataclass(frozen=True)
class Kind:
    """How a kind of server is started."""

    name: str
    ours: frozenset[str]  # arguments that are not for users
    look_at: Callable[[str], str]  # raises EngineError: the environment of an interpreter cannot serve
    argv: Argv
    environment: Callable[[str, int, Mapping[str, str]], dict[str, str]]  # interpreter, threads, further variables
    said: Sequence[Said]  # what the lines of its log mean


@dataclass(frozen=True, kw_only=True)
class ServedOptions:
    """docs/engines.md says what each is. Raises: EngineError: one is out of its range, or cannot be with another."""

    model_dir: Path
    python: str = ""
    args: dict[str, Argument] = field(default_factory=dict)
    env: dict[str, str] = field(default_factory=dict)
    port: int = 0
    url: str = ""
    urls: list[str] = field(default_factory=list)
    key_env: str = ""
    share: str = ""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    max_concurrency: int = 64
    max_context: int = 0
    threads: int = 1  # of each server process, on a CPU
    seed: int = 0  # of requests that bring none
    delay_s: float = 0.0
    ready_s: float = 600.0
    hang_s: float = 300.0
    max_restarts: int = 3

    def __post_init__(self) -> None:
        concurrency, context = self.max_concurrency, self.max_context
        require("engine.max_concurrency", concurrency, concurrency >= 1, "must be >= 1", "use 64")
        require("engine.max_context", context, context == 0 or context >= 2, "must be >= 2", "use 0")
        require("engine.threads", self.threads, self.threads >= 1, "must be >= 1", "use 1")
        require("engine.delay_s", self.delay_s, 0 <= self.delay_s < math.inf, "must be >= 0", "use 0 for none")
        require("engine.ready_s", self.ready_s, 0 < self.ready_s < math.inf, "must be > 0", "use 600")
        require("engine.hang_s", self.hang_s, 0 < self.hang_s < math.inf, "must be > 0", "use 300")
        require("engine.max_restarts", self.max_restarts, self.max_restarts >= 0, "must be >= 0", "use 3")
        require(
            "engine.urls", self.urls, not (self.url and self.urls), "cannot be with url", "name all servers in urls"
        )
        require("engine.port", self.port, 0 <= self.port < 1 << 16, "must be in [0, 65535]", "use 0 for a free one")
        for url in self.replicas:
            parts = urlsplit(url)
            whole = parts.scheme in ("http", "https") and bool(parts.hostname)
            thing, fix = "engine.url" if self.url else "engine.urls", "write http://host:port"
            require(thing, url, whole, "must be http:// or https:// and a host", fix)
        if self.replicas:
            alone = not (self.args or self.env or self.port)
            rule, fix = "cannot be with args, env or port", "set them where the server starts"
            require("engine.url" if self.url else "engine.urls", self.url or self.urls, alone, rule, fix)

    @property
    def replicas(self) -> list[str]:
        """Where servers run already; none: one is to be started."""
        return [self.url] if self.url else self.urls

    @property
    def interpreter(self) -> str:
        """That has the server."""
        return self.python or sys.executable

    @property
    def limits(self) -> Limits:
        """How often and how long a server may fail."""
        return Limits(hang_s=self.hang_s, max_restarts=self.max_restarts)

    def model(self) -> Model:
        """Raises: EngineError, ModelError: the directory holds none."""
        return Model(
            stop_ids=eos_ids(self.model_dir), vocab_size=vocab_size(self.model_dir), max_context=self.max_context
        )

    def check_start(self, kind: Kind) -> None:
        """Before anything is made. Raises: EngineError: a server of this kind could not be started."""
        self._key()
        if not self.replicas:
            check_arguments(self.args, kind.ours)
            kind.look_at(self.interpreter)

    def host(
        self, kind: Kind, shadow: Shadow, settings: Mapping[str, Argument], open_server: Callable[[Web], Server]
    ) -> Host:
        """One that starts a server with these `settings`, or finds those that run."""
        if self.replicas:
            return one_of([Attached(kind.name, url, open_server, self.ready_s, self._key()) for url in self.replicas])
        command = Command(
            kind.name, lambda port: kind.argv(self.interpreter, shadow.directory, port, settings, self.args),
            kind.environment(self.interpreter, self.threads, self.env), open_server, kind.said,
        )  # fmt: skip
        return Launched(command, self.port, self.ready_s, self._key())

    def _key(self) -> str | None:
        return secret_from_env(self.key_env) if self.key_env else None


def signature_of(options: type[ServedOptions]) -> inspect.Signature:
    """As the signature of an engine that takes them, by which a run file is checked."""
    hints, signature = get_type_hints(options), inspect.signature(options)
    parameters = [each.replace(annotation=hints[name]) for name, each in signature.parameters.items()]
    return signature.replace(parameters=parameters)
