"""Chat templates of three families with a tokenizer of bytes, and agents that talk to the gateway through them.

Texts of tests: `⟦...⟧` was sampled, `·` parts two tokens that the tokenizer would join (`he·llo`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from astraflow.engines.scripted import ScriptedEngine
from astraflow.models.chat import ChatTokenizer
from astraflow.rollout.context.trie import full_sequence, trajectories
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialect import ChatRequest
from astraflow.rollout.gateway.endpoint import PolicyEndpoint
from astraflow.rollout.gateway.tools import HermesParser, LlamaParser, ToolParser
from astraflow.types import Call, EpisodeLease, Sampling, Task, Trajectory

TEMPLATES = Path(__file__).parent / "templates"
SPECIALS = {
    "chatml": ("<|im_end|>", "<|im_start|>"),
    "llama3": ("<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    "moving": ("</s>", "<s>", "[INST]", "[/INST]", "[TOOLS]", "[RESULT]", "[/RESULT]"),
}  # the first ends a turn
FAMILIES = tuple(SPECIALS)
_MERGES = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]


def chat_of(family: str, directory: Path) -> ChatTokenizer:
    """Tokenizer and template, written to `directory`."""
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*symbols, *("".join(pair) for pair in _MERGES)]
    core = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, _MERGES))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS[family]])
    core.save(str(directory / "tokenizer.json"))
    (directory / "chat_template.jinja").write_text((TEMPLATES / f"{family}.jinja").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIALS[family][0]}))
    return ChatTokenizer(directory)


def tool(name: str) -> dict[str, Any]:
    """A tool with one argument."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {"x": {}}}}}


class Scene:
    """One episode of one policy; its engine says what it is told, in this order."""

    def __init__(self, family: str, chat: ChatTokenizer) -> None:
        parser: ToolParser = LlamaParser() if family == "llama3" else HermesParser()
        self.family, self.chat = family, chat
        self.replies: list[list[int]] = []
        self.engine = ScriptedEngine(lambda _ids, _number: self.replies.pop(0))
        self.gateway = Gateway({"actor": PolicyEndpoint(self.engine, chat, parser)})
        sampling = {"actor": Sampling(max_tokens=1000)}
        self.key = self.gateway.open_episode(EpisodeLease(
            episode_id="t/0/0/0", group_id="t/0/0", attempt=1, task=Task("t", 0, 0, {}), timeout_s=9.0,
            min_versions={}, sampling=sampling,
        ))  # fmt: skip

    def say(self, text: str) -> int:
        """The next reply, ended by an EOS; how many tokens it has before that."""
        ids = self.ids(text)
        self.replies.append([*ids, self.chat.eos_ids[0]])
        return len(ids)

    def call_text(self, **arguments: dict[str, Any]) -> str:
        """Tool calls as policies of this family write them, with spaces that the template would not write."""
        if self.family == "llama3":
            return "; ".join(
                json.dumps({"name": n, "parameters": a}, separators=(",", ":")) for n, a in arguments.items()
            )
        texts = [json.dumps({"name": n, "arguments": a}, separators=(",", ":")) for n, a in arguments.items()]
        return "".join(f"<tool_call>{text}</tool_call>" for text in texts)

    async def ask(self, messages: list[dict[str, Any]], model: str = "actor", **options: Any) -> dict[str, Any]:
        """The reply, as an agent sends it back."""
        completion = await self.gateway.chat(self.key, ChatRequest(model=model, messages=messages, **options))
        message: dict[str, Any] = msgspec.to_builtins(completion.choices[0].message)
        return message

    def close(self) -> list[Call]:
        """The calls of the episode."""
        return self.gateway.close_episode(self.key).calls["actor"]

    def ids(self, text: str) -> list[int]:
        """Token by token where `·` parts them."""
        return [i for piece in text.split("·") for i in self.chat.encode(piece)]

    def expected(self, text: str) -> tuple[list[int], list[bool]]:
        """ids and mask of a text with marks."""
        ids: list[int] = []
        mask: list[bool] = []
        for number, piece in enumerate(text.replace("⟧", "⟦").split("⟦")):
            found = self.ids(piece) if piece else []
            ids, mask = ids + found, mask + [number % 2 == 1] * len(found)
        return ids, mask

    def check(self, wanted: list[tuple[int, str, str]]) -> list[Trajectory]:
        """End the episode; its branches are `wanted`: (parent, the text that it shares, what is its own)."""
        seen = {request_id: ids for request_id, ids, _ in self.engine.seen}
        calls = self.close()
        branches = trajectories(calls, "actor", 1.0)
        found = [(b.parent_branch, self.marked(branches, b)) for b in branches]
        assert [(parent, own) for parent, (_, own) in found] == [(parent, own) for parent, _, own in wanted]
        for branch, (_, shared, own) in zip(branches, wanted, strict=True):
            ids, mask = self.expected(own)
            assert (branch.token_ids.tolist(), branch.loss_mask.tolist()) == (ids, mask)
            path = full_sequence(branches, branch.branch)[: branch.fork_at]
            assert self.chat.decode(path, skip_special_tokens=False) == shared
        check_prefixes(calls, branches, seen)
        return branches

    def marked(self, branches: list[Trajectory], branch: Trajectory) -> tuple[str, str]:
        """The text that a branch shares, and its own with marks where the tokenizer would have chosen other tokens."""
        shared = full_sequence(branches, branch.branch)[: branch.fork_at]
        own, start = "", 0
        for end in [*(np.flatnonzero(np.diff(branch.loss_mask)) + 1).tolist(), len(branch.token_ids)]:
            ids = branch.token_ids[start:end].tolist()
            text = self.chat.decode(ids, skip_special_tokens=False)
            if self.chat.encode(text) != ids:
                text = "·".join(self.chat.decode([i], skip_special_tokens=False) for i in ids)
            own += f"⟦{text}⟧" if branch.loss_mask[start] else text
            start = end
        return self.chat.decode(shared, skip_special_tokens=False), own


def check_prefixes(calls: list[Call], branches: list[Trajectory], seen: dict[str, np.ndarray]) -> None:
    """As many tokens are trained as were sampled, each after exactly the ids that the engine saw before it."""
    assert sum(int(b.loss_mask.sum()) for b in branches) == sum(len(c.generation.token_ids) for c in calls)
    assert len(seen) == len(calls)
    prompts = list(seen.values())
    for call in calls:
        (branch,) = [b for b in branches if (b.call_index == call.index).any()]
        at = np.flatnonzero(branch.call_index == call.index) + branch.fork_at
        path = full_sequence(branches, branch.branch)
        assert branch.loss_mask[at - branch.fork_at].all()
        assert path[at].tolist() == call.generation.token_ids.tolist()
        assert at.tolist() == list(range(int(at[0]), int(at[0]) + len(at)))
        assert path[: at[0]].tolist() == prompts[call.index].tolist() == call.prompt_ids.tolist()
