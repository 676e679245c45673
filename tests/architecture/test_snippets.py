"""Snippets of docs/: Python plays, TOML reads, commands exist with their options and settings."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
import shlex
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer.main

from astraflow.cli.app import app
from astraflow.config.schema import RunConfig
from astraflow.contracts import Environment, Operator
from astraflow.testing.operators import check_operator, group
from astraflow.testing.stages import check_stage
from astraflow.types import Action, Task

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
PAGES = sorted((ROOT / "docs").rglob("*.md"))
PLAYED_ELSEWHERE = "bring-your-agent.md"  # tests/flow/test_bring_your_agent.py
TASK = Task("train", 0, 0, {"question": "What is 1+1?", "answer": "2"})


def blocks(language: str) -> list[Any]:
    pages = [page for page in PAGES if language != "python" or page.name != PLAYED_ELSEWHERE]
    found = [(page, text) for page in pages for kind, text in BLOCK.findall(page.read_text()) if kind == language]
    return [pytest.param(text, id=f"{page.name}-{place}") for place, (page, text) in enumerate(found)]


class FakeLLM:
    base_url, api_key = "http://127.0.0.1:9/v1", "key"

    async def chat(self, messages: list[dict[str, Any]], **options: Any) -> Any:
        assert messages and all("role" in m for m in messages)
        return SimpleNamespace(content="2", tool_calls=[], finish_reason="stop", message={"role": "assistant"})


def _check_loss(loss: Any) -> None:
    torch = pytest.importorskip("torch")
    from astraflow.algorithms.losses.contract import TrainedTokens

    policy = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    tokens = TrainedTokens.of(policy, torch.full((3,), -1.0), torch.tensor([1.0, 1.0, -1.0]), torch.tensor([2, 1]))
    losses, sums = loss(tokens, loss.prepare(tokens))
    losses.sum().backward()
    assert losses.shape == (3,) and policy.grad is not None and all(value.ndim == 0 for value in sums.values())


@pytest.mark.parametrize("text", blocks("python"))
def test_python_plays(text: str) -> None:
    names: dict[str, Any] = {}
    exec(compile(text, "snippet", "exec"), names)  # noqa: S102
    own = [v for v in names.values() if getattr(v, "__module__", "builtins") == "builtins" and callable(v)]
    for thing in own:
        if thing.__name__ == "solve" and "OpenAI" not in text:
            reward = asyncio.run(thing(TASK, {"actor": FakeLLM(), "verifier": FakeLLM()}))
            assert isinstance(reward, float | dict)
        elif inspect.isclass(thing) and Operator in thing.__mro__:
            check_operator(thing, [group([1.0, 0.0]), group([0.0, 1.0, 1.0], row=1), group([0.0, 1.0], row=2)])
        elif inspect.isclass(thing) and "adds" in vars(thing):
            check_stage(thing())
        elif inspect.isclass(thing) and "aggregation" in vars(thing()):
            _check_loss(thing())
        elif inspect.isclass(thing) and Environment in thing.__mro__:
            world = thing()
            assert world.reset(Task("train", 0, 0, {"number": "2"})) and world.step(Action(text="2")).done
        elif inspect.isclass(thing):
            source = thing()
            assert len(source) > 0 and json.dumps(source.row(0)) and source.fingerprint()
        elif thing.__name__ != "solve":
            assert isinstance(thing("It is.", TASK), float)


@pytest.mark.parametrize("text", blocks("toml"))
def test_toml_reads_and_names_known_sections(text: str) -> None:
    assert set(tomllib.loads(text)) <= set(RunConfig.model_fields)


@pytest.mark.parametrize("text", blocks("bash"))
def test_commands_exist_with_their_options_and_settings(text: str, settings: dict[str, str]) -> None:
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for line in text.splitlines():
        if not line.startswith("astraflow "):
            continue
        words = shlex.split(line, comments=True)
        words = words[: words.index("--")] if "--" in words else words  # what follows is the user's own command
        assert words[1] in verbs
        options = {flag for parameter in verbs[words[1]].params for flag in parameter.opts}
        for word, _, value in (w.partition("=") for w in words[2:] if w.startswith("--")):
            known = re.sub(
                r"^policies\.\w+", "policies.*", re.sub(r"^rollout\.nodes\.\d+", "rollout.nodes[]", word[2:])
            )
            taken_out = value == "none" and any(name.startswith(f"{known}.") for name in settings)
            assert word in options or known in settings or taken_out, word
