"""Every recipe and every run file of the examples trains two steps, here or in the test that `ELSEWHERE` names."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from astraflow.config.load import load_run
from astraflow.config.recipes import examples, recipe_names, recipe_path
from astraflow.launch.checks import check_start
from astraflow.observe.summary import law_holds
from sandboxed import needs_sandbox

pytestmark = [pytest.mark.flow, pytest.mark.slow, pytest.mark.timeout(240)]
ROOT = Path(__file__).parents[2]
ELSEWHERE = {  # test, and its words for what it runs
    "algo-*": ("tests/flow/test_algorithm_recipes.py", 'startswith("algo-")'),
    "quickstart": ("tests/flow/test_run.py", '"quickstart"'),
    "examples/teams/*": ("tests/flow/test_teams.py", 'TEAMS.glob("*.toml")'),
    "examples/agents/agents.toml": ("tests/flow/test_agents.py", '"agents.toml"'),
    "examples/mixed-pool/mixed-pool.toml": ("tests/vllm/test_mixed.py", "mixed-pool.toml"),
}
MARKS = {
    "code-snippets": [needs_sandbox],
    "reasoning-gym": [
        pytest.mark.skipif(
            importlib.util.find_spec("reasoning_gym") is None,
            reason="reasoning-gym is not here: pip install 'astraflow[reasoning-gym]'",
        )
    ],
    "search": [pytest.mark.faults],  # half a minute each: `make faults`
    "smollm2-arithmetic": [pytest.mark.faults],
    "smollm2-gsm8k": [pytest.mark.faults],
    "smollm2-svamp": [pytest.mark.faults],
}
SMALL = (
    "--run.steps=2", "--dataflow.heartbeat_s=0.2", "--workflow.group_size=2", "--policies.actor.batch.groups=2",
    "--policies.actor.operators=['keep_all']",
)  # fmt: skip
WARM = ("--policies.actor.warm_start.steps=1", "--policies.actor.warm_start.batch=1")
SOON = ("--rollout.nodes.0.kill_after_s=0", "--rollout.nodes.1.start_after_s=0")


def shipped() -> list[str]:
    return [*recipe_names(), *(str(path.relative_to(ROOT)) for path in examples())]


HERE = [name for name in shipped() if not any(Path(name).match(pattern) for pattern in ELSEWHERE)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=MARKS.get(name, [])) for name in HERE])
def test_a_shipped_run_trains_two_steps(
    name: str, tmp_path: Path, run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ROOT / name if name.endswith(".toml") else recipe_path(name)
    monkeypatch.chdir(path.parent)
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setenv("PYTHONPATH", str(path.parent))
    config = load_run(path)
    check_start(config, here=True)
    small = [*SMALL, *(WARM if config.policies["actor"].warm_start is not None else ())]
    small += ["--evaluation.num_tasks=2", "--evaluation.samples=1"] if config.evaluation is not None else []
    small += SOON if name == "two-nodes" else ()
    small += ["--policies.actor.sampling.max_tokens=4"] if name.startswith("smollm2") else []
    ended = run(tmp_path, str(path), *small)
    assert ended.code == 0, ended.words()
    assert [row["step"] for row in ended.steps()] == [1, 2]
    assert all(row["tokens/sampled"] > 0 for row in ended.steps())
    assert law_holds(ended.summary()["accounting"])


def test_what_is_run_elsewhere_is_run_there() -> None:
    for pattern, (file, words) in ELSEWHERE.items():
        assert any(Path(name).match(pattern) for name in shipped()), f"{pattern} is not shipped any more"
        assert words in (ROOT / file).read_text(), f"{file} does not run {pattern}"
