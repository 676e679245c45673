"""What a call says while it runs: the records from which every dialect writes its own stream.

    Started (Text | Reasoning | ToolDelta)* ChoiceEnded ... Finished

One Started comes first, once the engine has taken the request: what fails before it is raised by the first `anext`, so
a dialect can still answer with a status. What fails later is raised by the iterator after the events so far. The pieces
of one choice joined are exactly the message that `Gateway.chat` gives; pieces of different choices interleave.
"""

from __future__ import annotations

import msgspec

from astraflow.rollout.gateway.dialect import ChatCompletion, TokenLogprob


class Started(msgspec.Struct, frozen=True):
    """The first event."""

    id: str  # of the completion
    created: int  # Unix seconds
    model: str
    prompt_tokens: int
    num_choices: int


class Text(msgspec.Struct, frozen=True):
    """A piece of the content: whole characters, never the start of a stop string or of a tool call."""

    choice: int
    text: str
    logprobs: list[TokenLogprob] = []  # of the tokens since the piece before, when the request asks for logprobs


class Reasoning(msgspec.Struct, frozen=True):
    """A piece of what the policy thought, where its template names a field for that."""

    choice: int
    text: str
    logprobs: list[TokenLogprob] = []


class ToolDelta(msgspec.Struct, frozen=True):
    """A piece of tool call number `index` of a choice: id and name in its first piece, empty later; arguments (JSON
    text) are to be joined. A call starts only after the calls before it are complete."""

    choice: int
    index: int
    id: str
    name: str
    arguments: str
    logprobs: list[TokenLogprob] = []


class ChoiceEnded(msgspec.Struct, frozen=True):
    """No more pieces of this choice."""

    choice: int
    finish_reason: str  # "stop" | "length" | "tool_calls"
    stop: str | None  # the stop string that was met
    logprobs: list[TokenLogprob] = []  # of the tokens that no piece brought


class Finished(msgspec.Struct, frozen=True):
    """The last event: the whole answer, as a request without streaming gets it, with its usage."""

    completion: ChatCompletion


Event = Started | Text | Reasoning | ToolDelta | ChoiceEnded | Finished
