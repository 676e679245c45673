"""Runs in a Python environment that has verifiers, and needs nothing of AstraFlow: `python inside.py <JSON of Begin>`.

Plays tasks of one taskset, many at once. Lines of JSON in: `{"id", "task", "url", "key", "model"}`, `{"id", "cancel"}`;
out: `{"tasks": n}` or `{"problem"}` once, then `{"id", "reward", "metrics", "error"}` for each.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any


class Player:
    """One taskset."""

    def __init__(self, begin: dict[str, Any]) -> None:
        import verifiers.v1 as vf
        from verifiers.v1.utils.loaders import load_taskset, taskset_config_type

        self._vf, self._begin = vf, begin
        name = begin["taskset"]
        taskset = load_taskset(taskset_config_type(name)(id=name, **begin["config"]))
        self.tasks = list(taskset if taskset.bounded else taskset.take(begin["limit"]))
        self._running: dict[int, asyncio.Task[None]] = {}

    async def serve(self, out: Any) -> None:
        """Until standard input ends."""
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=1 << 24)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            asked = json.loads(line)
            number = asked["id"]
            if asked.get("cancel"):
                if (running := self._running.get(number)) is not None:
                    running.cancel()
                continue
            self._running[number] = asyncio.create_task(self._answer(asked, out))
        for running in self._running.values():
            running.cancel()
        await asyncio.gather(*self._running.values(), return_exceptions=True)

    async def _answer(self, asked: dict[str, Any], out: Any) -> None:
        number = asked["id"]
        try:
            told = await self._play(asked)
        except asyncio.CancelledError:
            told = {"error": "cancelled"}
        except Exception as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        del self._running[number]
        out.write(json.dumps({"id": number, **told}) + "\n")
        out.flush()

    async def _play(self, asked: dict[str, Any]) -> dict[str, Any]:
        variable = f"ASTRAFLOW_EPISODE_{asked['id']}"  # its client takes keys from variables alone
        os.environ[variable] = asked["key"]
        try:
            vf = self._vf
            client = vf.EvalClientConfig(base_url=asked["url"], api_key_var=variable)
            agent = vf.AgentConfig(
                harness=self._begin["harness"], runtime=self._begin["runtime"], model=asked["model"], client=client,
                max_turns=self._begin["max_turns"] or None,
            )  # fmt: skip
            trace = await vf.make_agent(agent).run(self.tasks[asked["task"] % len(self.tasks)])
        finally:
            del os.environ[variable]
        if not trace.ok:
            last = trace.errors[-1] if trace.errors else None
            return {"error": f"{last.type}: {last.message}" if last is not None else "the rollout did not end well"}
        parts = {f"reward_{name}": float(reward.value) for name, reward in trace.rewards.items()}
        metrics = {name: float(value) for name, value in trace.metrics.items() if isinstance(value, int | float)}
        return {"reward": float(trace.reward), "metrics": {**metrics, **parts}, "error": ""}


def main() -> None:
    """`sys.argv[1]`: taskset, config, harness, runtime, max_turns, limit."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what tasksets print is no answer
    sys.path[0] = os.getcwd()  # not the folder of this file, whose names are no packages
    try:
        player = Player(json.loads(sys.argv[1]))
        if not player.tasks:
            raise ValueError("the taskset has no tasks")
    except Exception as error:
        out.write(json.dumps({"problem": f"{type(error).__name__}: {error}"}) + "\n")
        out.flush()
        return
    out.write(json.dumps({"tasks": len(player.tasks)}) + "\n")
    out.flush()
    asyncio.run(player.serve(out))


if __name__ == "__main__":
    main()
