"""Token-exact prompts: a follow-up call reuses the ids of the longest context it continues and tokenises the rest.

The contexts of one episode, policy and agent (`model = "<policy>@<agent>"`) are a tree of messages; where a reply of
ours ended there is a `Context`. A request walks down the tree message by message. The deepest context it passes gives
the ids, exactly as they were given and sampled; only the text after them is encoded:

    text of the request   <user>2*3?</user> <assistant>[2*3]<eos> <tool>6</tool> <assistant>
    stored ids            ^^^^^^ prompt ^^^^^^^^^^^^^^^^^ sampled^ ^^^^^ encoded now ^^^^^^^

If the template does not write a request as a continuation (thinking removed, tools folded), the next shallower context
is tried, and the call counts as forked.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from astraflow.errors import GatewayError, ModelError
from astraflow.rollout.gateway.endpoint import PolicyEndpoint, Tools
from astraflow.rollout.gateway.messages import MessageKey, read_messages
from astraflow.types import Message


def policy_of(model: str) -> str:
    """The policy that a request names."""
    return model.partition("@")[0]


def agent_of(model: str) -> str:
    """The agent that asks; empty: it has no name."""
    return model.partition("@")[2] if "@" in model else ""


class Reply(msgspec.Struct, eq=False):
    """What a context needs to know of a finished call."""

    key: MessageKey  # under which the agent will send it back
    sampled: np.ndarray  # [T] int32
    text: str  # as the agent got it, with the EOS if it ended by one
    ended: bool  # by an EOS of the model
    call_index: int


class Context(msgspec.Struct, eq=False):
    """A finished call: its exact ids and the text they stand for, in two parts each, so that nothing is copied before
    somebody goes on with it."""

    ids: np.ndarray  # [P] int32, of the prompt
    text: str  # of the prompt, as rendered
    reply: Reply

    def rest_of(self, text: str) -> str | None:
        """What `text` says after it; None: it does not begin so."""
        end = len(self.text)
        if not (text.startswith(self.text) and text.startswith(self.reply.text, end)):
            return None
        return text[end + len(self.reply.text) :]


class _Node(msgspec.Struct, eq=False):
    children: dict[MessageKey, _Node] = {}
    context: Context | None = None


class Prompt(msgspec.Struct, eq=False):
    """The ids of one request and where its reply will be remembered."""

    ids: np.ndarray  # [P] int32
    text: str  # the whole request as rendered
    node: _Node | None  # None: a raw prompt, which has no messages
    forked: bool  # a known context was not continued by the template
    encoded: int  # how many of the ids were tokenised now


class Contexts:
    """All contexts of one episode, policy and agent. Not thread-safe: lives on the gateway's event loop."""

    __slots__ = ("_chat", "_endpoint", "_root")

    def __init__(self, endpoint: PolicyEndpoint) -> None:
        self._endpoint, self._chat = endpoint, endpoint.chat
        self._root = _Node()

    def prompt(self, messages: Sequence[Message], tools: Tools) -> Prompt:
        """Ids for a request.

        Raises: GatewayError: messages that cannot be read or that the template refuses.
        """
        keys, plain = read_messages(messages)
        node, known = self._walk(keys)
        try:
            text = self._endpoint.render(tuple(keys), plain, tools)
            if not known:
                ids = self._endpoint.encode(text)
                return Prompt(ids, text, node, False, len(ids))
            for count, context in reversed(known):
                deepest = context is known[-1][1]
                tail = context.rest_of(text)
                if tail is None and deepest:
                    tail = self._tail(context, text, plain[:count], tools)
                if tail is not None:
                    rest = self._endpoint.encode(tail)
                    ids = np.concatenate((context.ids, context.reply.sampled, rest))
                    return Prompt(ids, text, node, not deepest, len(rest))
            ids = self._endpoint.encode(text)
        except ModelError as error:
            raise GatewayError(
                "messages", error.value, f"cannot be written by the chat template ({error})",
                "send roles and an order of messages that the model's template knows",
            ) from error  # fmt: skip
        return Prompt(ids, text, node, True, len(ids))

    def remember(self, prompt: Prompt, reply: Reply) -> None:
        """Store the context that `reply` completes."""
        assert prompt.node is not None
        node = prompt.node.children.get(reply.key)
        if node is None:
            node = prompt.node.children[reply.key] = _Node()
        elif node.context is not None and node.context.reply.call_index > reply.call_index:
            return  # of two equal replies the later call stands, whichever ended first
        node.context = Context(prompt.ids, prompt.text, reply)

    def _walk(self, keys: Sequence[MessageKey]) -> tuple[_Node, list[tuple[int, Context]]]:
        """The node of the whole request, and the contexts on the way with their number of messages."""
        node, known = self._root, []
        for count, key in enumerate(keys, 1):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node()
            node = child
            if node.context is not None:
                known.append((count, node.context))
        return node, known

    def _tail(self, context: Context, text: str, messages: list[Message], tools: Tools) -> str | None:
        """What `text` says after `context`, whose reply the template writes differently than the policy did (JSON
        spacing, trimmed content): the ids stay as emitted, and the text goes on where the template ends that reply.

        None: the text does not continue the context. `messages`: those of the context.
        """
        prefix = self._chat.render(messages, tools, add_generation_prompt=False)
        start = len(context.text)
        if not text.startswith(prefix) or not prefix.startswith(context.text):
            return None
        end, eos = max(
            ((prefix.rfind(eos, start), eos) for eos in self._endpoint.eos_texts.values() if eos), default=(-1, "")
        )
        if end < 0:
            return None
        # A reply cut by length has no EOS of its own; the template's EOS is then given text, never trained.
        return text[end + len(eos) if context.reply.ended else end :]
