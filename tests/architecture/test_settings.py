"""Changing any setting of the run file changes what all processes are given, or is refused; and somebody reads it."""

from __future__ import annotations

import ast
import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel

from astraflow.config.load import check_run, resolved_json
from astraflow.config.schema import RunConfig
from astraflow.errors import ConfigError

KEYS = ("sources", "ratios", "policies", "engines", "engine_corrections", "stages", "consumers")  # with names of a user
FULL: dict[str, Any] = {
    "run": {"name": "full", "steps": 9},
    "sources": {name: {"type": "sums", "group_size": 4, "operators": ["accept_all"]} for name in ("train", "more")},
    "mix": {"ratios": {"train": 1.0, "more": 2.0}},
    "workflow": {"type": "single_turn", "reward": "sums"},
    "policies": {
        "actor": {
            "model": "tiny-char", "algorithm": {"kl": {}, "engine_corrections": {"local-float32": ["mask"]}},
            "warm_start": {"source": "more"}, "lora": {},
        },
        "critical": {"model": "tiny-char", "algorithm": {"advantage": "gae"}, "operators": [], "critic": {}},
        "pupil": {"model": "tiny-char", "algorithm": {"advantage": "distill", "distill": {"teacher": "tiny-char"}}},
        "past": {"model": "tiny-char", "copy_of": {"policy": "critical"}},
    },
    "rollout": {"swarm": {}, "nodes": [{"engines": {"actor": {"type": "local"}}}]},
    "evaluation": {"source": "more"},
    "stages": {"ref": {"type": "ref_logprobs", "policies": ["critical"]}},
    "consumers": {"log": {}},
}  # fmt: skip


def test_everything_is_in_the_full_file(settings: dict[str, str]) -> None:
    named = {where.removesuffix(".*") for where in settings}
    assert not {where for where in named if not any(known.startswith(where) for known in walked())}


def walked() -> set[str]:
    """The settings of `FULL` as docs write them."""
    found = set()
    for path, _ in leaves(json.loads(resolved_json(check_run(copy.deepcopy(FULL), "full")))):
        words = ["*" if before in KEYS else word for before, word in zip(("", *path), path, strict=False)]
        found.add(re.sub(r"\.\d+", "[]", ".".join(map(str, words))))
    return found


def leaves(node: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], Any]]:
    inner = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in inner:
        if isinstance(value, dict | list) and value:
            yield from leaves(value, (*path, key))
        else:
            yield (*path, key), value


def words_of(annotation: Any) -> Iterator[str]:
    """All that a `Literal` anywhere in a schema allows."""
    if get_origin(annotation) is Literal:
        yield from (word for word in get_args(annotation) if isinstance(word, str))
    for inner in get_args(annotation):
        yield from words_of(inner)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for field in annotation.model_fields.values():
            yield from words_of(field.annotation)


WORDS = sorted(set(words_of(RunConfig)))


def others(value: Any) -> list[Any]:
    """Values of which one at least is of the same kind and another one."""
    match value:
        case bool():
            return [not value]
        case int():
            return [value + 1, value - 1, value + 0.5]
        case float():
            return [value + 0.25, value / 2, value + 1]
        case str():
            return [f"{value}x", f"http://{value or 'h'}", "file:///x", "127.0.0.1:7001", *WORDS]
        case None:
            return [1, 0.5, "k2", {}]
        case list():
            return [["lm_head"], ["keep_all"], ["temperature"], ["actor"], ["tensorboard"], ["mask"]]
        case _:
            return [{"local-float32": ["mask"]}, {"actor": "local"}]


def changed(path: tuple[str | int, ...], value: Any) -> Any:
    """The full file with another value at `path`, as all processes would get it; None: it is refused."""
    raw = json.loads(WHOLE)
    if path != ("train_source",):
        del raw["train_source"]  # which [mix] takes the place of
    *parents, last = path
    node = raw
    for key in parents:
        node = node[key]
    node[last] = value
    try:
        return json.loads(resolved_json(check_run(raw, "full")))
    except ConfigError:
        return None


def at(node: Any, path: tuple[str | int, ...]) -> Any:
    for key in path:
        node = node[key]
    return node


WHOLE = resolved_json(check_run(copy.deepcopy(FULL), "full"))


PATHS = [
    path for path, _ in leaves(json.loads(WHOLE))
    if path[0] != "policies" or path[1] == "actor" or path[2] in ("critic", "copy_of") or "distill" in path
]  # fmt: skip
REFUSED = {  # by these values, or in this file
    "type", "source", "policy", "0", "train_source", "distill", "critic", "copy_of", "frozen", "momentum",
    "decay_steps", "min_lr_ratio", "tensor_parallel", "context_parallel", "port",
}  # fmt: skip


@pytest.mark.parametrize("path", PATHS, ids=lambda path: ".".join(map(str, path)))
def test_a_changed_setting_changes_what_is_resolved_or_is_refused(path: tuple[str | int, ...]) -> None:
    before = at(json.loads(WHOLE), path)
    values = (changed(path, value) for value in others(before) if value != before)
    taken = next((resolved for resolved in values if resolved is not None), None)
    assert taken is not None or str(path[-1]) in REFUSED, "no other value is taken"
    assert taken is None or at(taken, path) != before, "it is dropped without a word"


SOURCE = Path(__file__).parents[2] / "src" / "astraflow"
DECLARE = ("config/schema.py", "config/sections", "config/checks")  # what reads settings only to refuse them
BY_SECTIONS = {"kl", "teacher"}  # properties of their sections read them


def names_of(schema: Any) -> Iterator[str]:
    """Of all settings below a schema."""
    for inner in get_args(schema):
        yield from names_of(inner)
    if isinstance(schema, type) and issubclass(schema, BaseModel):
        for name, field in schema.model_fields.items():
            yield name
            yield from names_of(field.annotation)


def test_every_setting_is_read() -> None:
    files = [path for path in SOURCE.rglob("*.py") if not path.relative_to(SOURCE).as_posix().startswith(DECLARE)]
    nodes = (node for path in files for node in ast.walk(ast.parse(path.read_text())))
    read = {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}
    assert set(names_of(RunConfig)) - read == BY_SECTIONS, "settings that nothing reads"
