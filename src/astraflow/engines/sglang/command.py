"""How an SGLang server is started, what is looked at before, and what its last words mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from astraflow.engines import launching
from astraflow.engines.launching import Argument
from astraflow.engines.served.options import Kind
from astraflow.errors import EngineError

OLDEST, NEWEST = (0, 5, 23), (0, 5, 99)
INSTALL = "python -m pip install sglang==0.5.23 (docs/engines.md)"
MODULE = "sglang.launch_server"
OURS = frozenset((
    "model_path", "model", "host", "port", "dtype", "random_seed", "max_running_requests", "skip_tokenizer_init",
    "incremental_streaming_output", "stream_output", "stream_interval", "sampling_defaults", "weight_version",
    "load_format", "weight_cache_mode", "quantization", "enable_lora", "lora_paths", "speculative_algorithm",
    "enable_deterministic_inference", "disaggregation_mode", "tokenizer_worker_num", "api_key", "admin_api_key",
))  # fmt: skip
"""Arguments that are set here, or that would make the server compute with something else than the weights it is given,
or speak otherwise."""
_LOOK = """
import importlib.metadata as m, importlib.util as u, json
try:
    version = m.version("sglang")
except m.PackageNotFoundError:
    version = ""
print(json.dumps({"version": version if u.find_spec("sglang") else ""}))
"""
LIFELINE = """
import os, runpy, signal, sys, threading

def end_with_the_node():
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)

threading.Thread(target=end_with_the_node, name="lifeline", daemon=True).start()
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""
"""Runs a module as long as the node lives. Standard input is a pipe whose other end the node holds and never writes to;
when it closes, the server and all its processes end. Astraflow need not be installed where it runs."""
_SAID: tuple[launching.Said, ...] = (
    (r"address already in use|port .* (is )?(already )?(in use|occupied)", "its port is taken",
     "leave engine.port out for a free one"),
    (
        r"out of memory|outofmemoryerror|not enough memory|memory pool size is too small|cannot allocate memory"
        r"|memoryerror|mem-fraction-static",
        "there is not enough memory",
        "lower engine.args.mem_fraction_static or the concurrency of the node, or give it more GPUs "
        "(engine.args.tp_size)",
    ),
    (r"was killed by sigkill", "the kernel ended it, most likely for memory", "give the host more memory"),
    (
        r"unrecognized arguments?: ?(.*)|ambiguous option|invalid choice", "it does not know an argument",
        "correct engine.args: they are the options of `sglang serve` with _ for -",
    ),
    (
        r"architectures? .*not supported|does not recognize this architecture|are not supported for now"
        r"|not supported by sglang",
        "it cannot load this model", "use a model that this SGLang serves, or engine = { type = \"local\" }",
    ),
    (
        r"no (nvidia )?(gpu|cuda)|cuda driver|no accelerator", "it finds no GPU",
        "run the node where there is one, or use engine = { type = \"local\" }",
    ),
)  # fmt: skip


class _Found(msgspec.Struct):
    version: str


def look_at(python: str) -> str:
    """The version of SGLang in the environment of an interpreter. Raises: EngineError: none, or one not known here."""
    found = launching.look_into(python, _LOOK, _Found, "SGLang").version
    if not found:
        raise EngineError(
            "engine.python", python, "has no SGLang", f"name an interpreter that has, or make an environment: {INSTALL}"
        )
    check_version(found, INSTALL)
    return found


def check_version(found: str, fix: str) -> None:
    """Raises: EngineError: its endpoints are not known here."""
    if not OLDEST <= tuple(int(part) for part in re.findall(r"\d+", found)[:3]) <= NEWEST:
        known = f"{'.'.join(map(str, OLDEST))} and later ones of {'.'.join(map(str, OLDEST[:2]))}"
        raise EngineError("sglang", found, f"is not a version that this engine knows ({known})", fix)


def environment(python: str, threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Of the server. Logprobs are those at the temperature; `/health` answers without sampling a token."""
    own = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0", "DO_NOT_TRACK": "1"}
    return launching.environment(python, threads, {**own, **extra, "SGLANG_RETURN_ORIGINAL_LOGPROB": "0"})


def argv(
    python: str, model: Path, port: int, settings: Mapping[str, Argument], args: Mapping[str, Argument]
) -> list[str]:
    """The command. `settings`: decided by the engine; `args`: by the user, options of `sglang serve` with _ for -."""
    fixed: dict[str, Argument] = {
        "model_path": str(model), "host": "127.0.0.1", "port": port, "load_format": "safetensors",
        "skip_tokenizer_init": True, "incremental_streaming_output": True, "stream_interval": 1,
        "sampling_defaults": "openai",
    }  # fmt: skip
    return [python, "-c", LIFELINE, MODULE, *launching.options({**fixed, **settings, **args}, negated=False)]


SGLANG = Kind("sglang", OURS, look_at, argv, environment, _SAID)
