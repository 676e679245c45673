"""Tools of an MCP server, and a reward function for the answer."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from astraflow.config.rooms import choose
from astraflow.contracts import Environment
from astraflow.environments.adapters.mcp.servers import Server, Settings, mcp, servers_of
from astraflow.errors import Problem
from astraflow.types import Action, Message, Outcome, Step, Task


class Mcp(Environment):
    """The policy is asked `prompt`, calls the server's tools, and answers in plain text, which `reward` grades.

    What a tool says is told, errors of the tool too. A call past `call_s` ends the server and fails the episode.
    """

    runs = "service"

    def __init__(
        self, *, reward: str | Mapping[str, Any], command: Sequence[str] = (), url: str = "",
        env: Mapping[str, str] | None = None, prompt: str = "{question}", system: str = "", servers: int = 1,
        share: bool = True, recycle_after: int = 0, start_s: float = 60.0, call_s: float = 10.0,
        max_chars: int = 10_000,
    ) -> None:  # fmt: skip
        """`command` with `env`, or `url`: see `Settings` of the servers, as the others. `max_chars`: of a result.

        Raises: Problem: none or both of them, a number out of its range, or a wrong reward.
        """
        if bool(command) == bool(url):
            raise Problem("mcp.command", list(command), "or mcp.url must be given, not both", "give how it is reached")
        for name, value in {"servers": servers, "start_s": start_s, "call_s": call_s, "max_chars": max_chars}.items():
            if value <= 0:
                raise Problem(f"mcp.{name}", value, "must be > 0", "leave it out for the default")
        self._settings = Settings(
            command=tuple(command), env=tuple(sorted((env or {}).items())), url=url, servers=servers, share=share,
            recycle_after=recycle_after, start_s=start_s, call_s=call_s,
        )  # fmt: skip
        self._reward = choose("rewards", reward, "workflow.environment.reward").make()
        self._prompt, self._system, self._max_chars = prompt, system, max_chars
        self._tools: list[dict[str, Any]] = []
        self._server: Server | None = None
        self._task: Task | None = None

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self._tools

    async def reset(self, task: Task) -> list[Message]:
        self._task = task
        self._server = await servers_of(self._settings).lease()
        self._tools = await self._server.ready
        opening: list[Message] = [{"role": "system", "content": self._system}] if self._system else []
        return [*opening, {"role": "user", "content": self._prompt.format_map(task.fields)}]

    async def step(self, action: Action) -> Step:
        assert self._server is not None and self._task is not None
        if action.tool is None:
            return await self._graded(action.text, self._task)
        known = [tool["function"]["name"] for tool in self._tools]
        if action.tool not in known:
            return Step(f"There is no tool {action.tool}. There are: {', '.join(known)}.")
        try:
            result = await servers_of(self._settings).call(self._server, action.tool, action.arguments)
        except mcp.MCPError as error:  # of the arguments, as a rule
            return Step(f"error: {error}", metrics={"tool_errors": 1.0})
        return Step(self._text(result), metrics={"tool_errors": 1.0} if result.is_error else {})

    async def close(self) -> None:
        if self._server is not None:
            await servers_of(self._settings).release(self._server)

    async def _graded(self, answer: str, task: Task) -> Step:
        said = self._reward(answer, task)
        said = await said if inspect.isawaitable(said) else said
        if not isinstance(said, Outcome):
            return Step("", None if said is None else float(said), done=True)
        if isinstance(said.reward, dict):
            raise TypeError("the reward must be a number or None")
        return Step("", said.reward, done=True, metrics=dict(said.metrics))

    def _text(self, result: Any) -> str:
        parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
        text = "\n".join(parts)
        if not text and result.structured_content is not None:
            text = str(result.structured_content)
        left = len(text) - self._max_chars
        return text if left <= 0 else f"{text[: self._max_chars]}\n[{left} more characters]"
