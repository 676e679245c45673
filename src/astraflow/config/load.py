"""TOML file + `--a.b=c` overrides -> RunConfig, with all problems at once and nearest-name hints."""

from __future__ import annotations

import copy
import difflib
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from astraflow.config.checks.policies import policy_problems
from astraflow.config.rooms import check_options, find, resolve
from astraflow.config.schema import Component, RunConfig
from astraflow.config.secrets import is_secret, unfit_to_save
from astraflow.config.sections.base import NAME
from astraflow.config.stages import consumer_problems, stage_problems
from astraflow.errors import ConfigError, Problem


def load_run(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read, override and check a run file.

    Raises: ConfigError: everything that is wrong with it, in one list.
    """
    raw = _read(path)
    problems = _apply(raw, overrides)
    if problems:
        raise ConfigError(str(path), problems)
    try:
        return check_run(raw, str(path), path.parent)
    except ConfigError as error:
        if hint := _elsewhere(error.problems, path.parent):
            raise ConfigError(str(path), [*error.problems, hint]) from error
        raise


def _read(path: Path) -> dict[str, Any]:
    """Raises: ConfigError: no file, no text, no TOML; shows the line."""
    text = ""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a byte order mark
        return tomllib.loads(text)
    except OSError as error:
        problem = f"cannot be read ({error.strerror}); give the path of a run file, see `astraflow recipes`"
    except UnicodeDecodeError as error:
        problem = f"is not text in UTF-8 (byte {error.start}: {error.reason}); save it as UTF-8"
    except tomllib.TOMLDecodeError as error:
        found = re.search(r"at line (\d+)", str(error))
        line = text.splitlines()[int(found[1]) - 1].strip() if found else ""
        shown = f": {line[:80]}" if line and not is_secret(line.partition("=")[0].strip(), line) else ""
        problem = f"is not valid TOML: {error}{shown}; how TOML is written: https://toml.io"
    raise ConfigError(str(path), [problem])


def _elsewhere(problems: Sequence[str], folder: Path) -> str:
    """Modules are searched where the command is run. Those that lie beside the run file instead, in one sentence."""
    if folder.resolve() == Path.cwd():
        return ""
    missing = [name for problem in problems for name in re.findall(r"No module named '(\w+)'", problem)]
    there = [f"{name}.py" for name in dict.fromkeys(missing) if (folder / f"{name}.py").is_file()]
    return f"directory={Path.cwd()} is not where {' and '.join(there)} lies; first: cd {folder}" if there else ""


def config_from_json(text: str | bytes, origin: str = "run file") -> RunConfig:
    """A resolved run file (as saved in the run directory, or sent by the dataflow service).

    Raises: ConfigError: it is damaged, or not one.
    """
    try:
        return RunConfig.model_validate_json(text)
    except ValidationError as error:
        raise ConfigError(origin, [_sentence(e) for e in error.errors()]) from None


def resolved_json(config: RunConfig) -> str:
    """Every setting with its value, defaults included. No secret is ever part of a run file."""
    return config.model_dump_json(indent=2)


def check_run(raw: dict[str, Any], origin: str, base: Path | None = None) -> RunConfig:
    """Validate a raw mapping; relative `path` options are taken from `base`.

    Raises: ConfigError: everything that is wrong with it; secrets first and alone, as no message may show one.
    """
    from astraflow.config.checks.swarm import without_idle_workers

    if problems := list(unfit_to_save(raw)):
        raise ConfigError(origin, problems)
    try:
        config = without_idle_workers(RunConfig.model_validate(_rebase(raw, base)))
    except ValidationError as error:
        problems = [_sentence(e) for e in error.errors()]
        if (known := _without_unknown(raw, error)) is not None:
            try:
                check_run(known, origin, base)
            except ConfigError as more:
                problems += more.problems
        raise ConfigError(origin, problems) from None
    problems = [*_check_names(config), *_check_components(config), *stage_problems(config), *consumer_problems(config)]
    if problems:
        raise ConfigError(origin, problems)
    return config


def _without_unknown(raw: dict[str, Any], error: ValidationError) -> dict[str, Any] | None:
    """The same without the settings that nobody knows; None: something else is wrong, too."""
    known = copy.deepcopy(raw)
    try:
        for each in error.errors():
            *parents, last = each["loc"]
            node: Any = known
            for key in parents:
                node = node[key]
            if each["type"] != "extra_forbidden":
                return None
            del node[last]
    except (LookupError, TypeError):  # pydantic names the form of a union on the way
        return None
    return known


def _rebase(raw: dict[str, Any], base: Path | None) -> dict[str, Any]:
    """Paths in a run file are relative to the file, wherever the command is run."""
    if base is None:
        return raw
    policies = _tables(raw.get("policies"))
    named = [(table, key) for table in [*_tables(raw.get("sources")), *policies] for key in ("path", "model")]
    named += [(kl, "reference") for policy in policies if (kl := _table(_table(policy, "algorithm"), "kl"))]
    named += [(own, "teacher") for policy in policies if (own := _table(_table(policy, "algorithm"), "distill"))]
    named += [(critic, "model") for policy in policies if (critic := _table(policy, "critic"))]
    for table, key in named:
        value = table.get(key)
        if isinstance(value, str) and value and not Path(value).is_absolute() and (base / value).exists():
            table[key] = str((base / value).resolve())
    return raw


def _tables(section: Any) -> list[dict[str, Any]]:
    return [t for t in section.values() if isinstance(t, dict)] if isinstance(section, dict) else []


def _table(section: dict[str, Any], key: str) -> dict[str, Any]:
    value = section.get(key)
    return value if isinstance(value, dict) else {}


def _apply(raw: dict[str, Any], overrides: Sequence[str]) -> list[str]:
    """Write `--a.b.c=value` into `raw`; values are TOML, else plain strings; list items are addressed by number."""
    problems = []
    for item in overrides:
        key, equals, text = item.removeprefix("--").partition("=")
        if not item.startswith("--") or not equals or not key:
            problems.append(f"override={item!r} must look like --section.key=value; put overrides after the recipe")
            continue
        try:
            _assign(raw, key.split("."), _value(text))
        except (LookupError, TypeError, ValueError) as error:
            problems.append(f"override={item!r} does not fit the run file ({error}); name an existing section")
    return problems


def read_overrides(words: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """`--a.b=value` as nested tables, and what is wrong with the others."""
    raw: dict[str, Any] = {}
    return raw, _apply(raw, words)


def _assign(node: Any, path: list[str], value: Any) -> None:
    for part in path[:-1]:
        if isinstance(node, list):
            node = node[int(part)]
            continue
        if not isinstance(node, dict):
            raise LookupError(f"{node!r} has no {part!r} in it")
        if isinstance(node.get(part), str):  # a component given by its bare name gains options
            node[part] = {"type": node[part]}
        node = node.setdefault(part, {})
    if isinstance(node, list):
        node[int(path[-1])] = value
    elif not isinstance(node, dict):
        raise LookupError(f"{node!r} has no {path[-1]!r} in it")
    elif (
        isinstance(table := node.get(path[-1]), dict)
        and isinstance(value, str)
        and ("type" in table or value != "none")
    ):
        table["type"] = value  # a component keeps its options; "none" takes an optional table out
    else:
        node[path[-1]] = value


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text


def _sentence(error: ErrorDetails) -> str:
    where = ".".join(str(p) for p in error["loc"])
    value = error.get("input")
    match error["type"]:
        case "extra_forbidden":
            known = _known_keys(error["loc"])
            near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known here: {', '.join(known)}"
            return f"{where}={value!r} is not a setting; {hint}"
        case "missing" if len(error["loc"]) == 1:
            return f"{where} is missing; every run file has this section, see `astraflow recipes show quickstart`"
        case "missing":
            return f"{where} is missing; this setting has no default"
        case "greater_than_equal" if where.endswith("max_staleness"):
            return f"{where}={value!r} must be >= 0; use 0 for synchronous training"
        case "dict_type" | "model_type":
            return f"{where}={value!r} must be a table; write [{where}]"
        case "string_pattern_mismatch" if error["ctx"]["pattern"] == NAME:
            rule = "must be a name: a letter, then letters, digits and _ . -, 64 at most"
            return f"{where.removesuffix('.[key]')}={value!r} {rule}; choose another"
        case _:
            message = error["msg"].replace("Input should be", "must be").replace("Value error, ", "")
            return f"{where}={value!r} {message}; see docs/configuration.md"


def _known_keys(loc: tuple[int | str, ...]) -> list[str]:
    """Settings beside the unknown one, found by walking the schema along its path."""
    model: Any = RunConfig
    for part in loc[:-1]:
        fields = model.model_fields if isinstance(model, type) and issubclass(model, BaseModel) else {}
        annotation = fields[part].annotation if part in fields else None
        model = _inner_model(annotation) or model
    return sorted(model.model_fields) if isinstance(model, type) and issubclass(model, BaseModel) else []


def _inner_model(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        if (found := _inner_model(argument)) is not None:
            return found
    return None


def _check_names(config: RunConfig) -> list[str]:
    """Names that refer to other parts of the file, and combinations that cannot work."""
    problems = []
    known = ", ".join(sorted(config.sources)) or "none"
    if config.mix is None:
        wanted = [("train_source", config.train_source)]
    else:
        wanted = [(f"mix.ratios.{name}", name) for name in config.mix.ratios]
    if config.evaluation is not None:
        wanted.append(("evaluation.source", config.evaluation.source))
    for name, policy in config.policies.items():
        if policy.warm_start is not None:
            wanted.append((f"policies.{name}.warm_start.source", policy.warm_start.source))
    for where, source in wanted:
        if source not in config.sources:
            near = difflib.get_close_matches(source, config.sources, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"known sources: {known}"
            problems.append(f"{where}={source!r} names no source; {hint}")
    problems += _check_mix(config)
    if config.weights.port and len(config.trained) > 1:
        problems.append(
            f"weights.port={config.weights.port} must be 0 with {len(config.trained)} policies; "
            "each trainer serves its own weights on a port of its own"
        )
    problems += policy_problems(config)
    names = [n.name for n in config.rollout.nodes]
    for name in sorted({n for n in names if names.count(n) > 1}):
        problems.append(f"rollout.nodes.name={name!r} is used twice; give each node its own name")
    return problems


def _check_mix(config: RunConfig) -> list[str]:
    """Where training tasks come from, and settings of sources that give none."""
    problems, mix = [], config.mix
    if mix is not None:
        if "train_source" in config.model_fields_set:
            problems.append(
                f"train_source={config.train_source!r} cannot be given beside [mix], which says where training tasks "
                "come from; remove one of the two"
            )
        for i, when in enumerate(("start", "end")):
            if sum(ratio[i] for ratio in mix.ratios.values()) <= 0:
                shown = ", ".join(f"{name} = {ratio[i]:g}" for name, ratio in mix.ratios.items()) or "{}"
                problems.append(f"mix.ratios={shown} leave no share at the {when}; give at least one source some")
    for name, source in config.sources.items():
        for key, given in (("operators", source.operators), ("group_size", source.group_size)):
            if given and name not in config.train_sources:
                problems.append(
                    f"sources.{name}.{key} has no effect: training tasks come from {', '.join(config.train_sources)}; "
                    f"remove it, or name {name!r} in [mix] or as train_source"
                )
    return problems


def _check_components(config: RunConfig) -> list[str]:
    """Every `type` exists and takes the options given; rooms that load torch are checked when they are built."""
    problems: list[str] = []
    for name, source in config.sources.items():
        problems += _check("sources", source, f"sources.{name}", set())
    if ":" not in config.workflow.type:
        problems += _check("workflows", config.workflow, "workflow", {"policies"})
    for where, room, component in torch_components(config):
        try:
            find(room, component.type, where)
        except Problem as error:
            problems.append(str(error))
    from astraflow.config.checks.engines import engine_problems
    from astraflow.config.checks.ranks import rank_problems
    from astraflow.config.checks.swarm import swarm_problems
    from astraflow.config.checks.training import training_problems
    from astraflow.config.operators import check_operators  # loads numpy, which --help must not
    from astraflow.config.serving import serving_problems

    problems += check_operators(config) + serving_problems(config) + engine_problems(config)
    return problems + training_problems(config) + rank_problems(config) + swarm_problems(config)


def torch_components(config: RunConfig) -> Iterator[tuple[str, str, Component]]:
    """(setting, room, component) of what lies in rooms that load torch, which only `launch.checks` may do."""
    from astraflow.config.checks.engines import engines_of

    for setting, _, engine in engines_of(config):
        yield setting, "engines", engine
    for name, policy in config.policies.items():
        if policy.tool_parser != "auto":
            yield f"policies.{name}.tool_parser", "tool_parsers", Component(type=policy.tool_parser)
        if not policy.trained:
            continue
        yield f"policies.{name}.algorithm.loss", "losses", policy.algorithm.loss
        for setting, corrections in policy.algorithm.all_corrections.items():
            for i, correction in enumerate(corrections):
                yield f"policies.{name}.algorithm.{setting}.{i}", "corrections", correction


def _check(room: str, component: Component, where: str, given: set[str]) -> list[str]:
    try:
        target = resolve(room, component.type, f"{where}.type")
    except Problem as error:
        return [str(error)]
    return check_options(target, component.options, where, given, type(component).model_fields)
