"""The events of one call as the events of a response, which they build up on the way.

response.created, response.in_progress,
per item: output_item.added, [content_part.added], deltas, done, [content_part.done], output_item.done
response.completed | response.incomplete | response.failed
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from astraflow.errors import AstraFlowError, GatewayError
from astraflow.rollout.gateway.calls.events import ChoiceEnded, Event, Finished, Reasoning, Text, ToolDelta
from astraflow.rollout.gateway.dialect import ChatCompletion
from astraflow.rollout.gateway.dialects.responses.records import (
    FunctionCallOut,
    ItemOut,
    MessageOut,
    OutputText,
    ReasoningOut,
    ReasoningText,
    ResponseError,
    ResponseRecord,
    usage_of,
)

Happening = tuple[str, dict[str, Any]]  # type of an event, and its fields


class ResponseBuilder:
    """Fills one response with what a call says; tells what happens to it."""

    def __init__(self, response: ResponseRecord) -> None:
        self.response = response
        self._open: ItemOut | None = None

    def start(self) -> Iterator[Happening]:
        """Before anything is said."""
        yield "response.created", {"response": self.response}
        yield "response.in_progress", {"response": self.response}

    def on(self, event: Event) -> Iterator[Happening]:
        """After `start`."""
        if isinstance(event, Text):
            yield from self._text(event)
        elif isinstance(event, Reasoning):
            yield from self._reasoning(event)
        elif isinstance(event, ToolDelta):
            yield from self._tool(event)
        elif isinstance(event, ChoiceEnded):
            if isinstance(self._open, MessageOut):
                self._open.content[0].logprobs += event.logprobs
        elif isinstance(event, Finished):
            yield from self._finish(event.completion)

    def fail(self, error: AstraFlowError) -> Iterator[Happening]:
        """The call failed after its start."""
        code = error.code if isinstance(error, GatewayError) else None
        self.response.status = "failed"
        self.response.error = ResponseError(code or "server_error", str(error))
        yield "response.failed", {"response": self.response}

    def _text(self, event: Text) -> Iterator[Happening]:
        item = self._open
        if not isinstance(item, MessageOut):
            item = MessageOut(self._item_id("msg"), [])
            yield from self._added(item)
            item.content.append(OutputText(logprobs=[]))
            yield "response.content_part.added", {**self._at(item), "part": item.content[0]}
        part = item.content[0]
        part.text += event.text
        part.logprobs += event.logprobs
        yield "response.output_text.delta", {**self._at(item), "delta": event.text, "logprobs": event.logprobs}

    def _reasoning(self, event: Reasoning) -> Iterator[Happening]:
        item = self._open
        if not isinstance(item, ReasoningOut):
            item = ReasoningOut(self._item_id("rs"), [])
            yield from self._added(item)
            item.content.append(ReasoningText())
            yield "response.content_part.added", {**self._at(item), "part": item.content[0]}
        item.content[0].text += event.text
        yield "response.reasoning_text.delta", {**self._at(item), "delta": event.text}

    def _tool(self, event: ToolDelta) -> Iterator[Happening]:
        item = self._open
        if event.id or not isinstance(item, FunctionCallOut):
            item = FunctionCallOut(self._item_id("fc"), event.id, event.name)
            yield from self._added(item)
        item.arguments += event.arguments
        yield "response.function_call_arguments.delta", {**self._of(item), "delta": event.arguments}

    def _added(self, item: ItemOut) -> Iterator[Happening]:
        yield from self._close("completed")
        self.response.output.append(item)
        self._open = item
        yield "response.output_item.added", {"output_index": self._index, "item": item}

    def _close(self, status: str) -> Iterator[Happening]:
        item, self._open = self._open, None
        if item is None:
            return
        item.status = status
        if isinstance(item, FunctionCallOut):
            done = {**self._of(item), "name": item.name, "arguments": item.arguments}
            yield "response.function_call_arguments.done", done
        elif isinstance(item, MessageOut):
            part = item.content[0]
            yield "response.output_text.done", {**self._at(item), "text": part.text, "logprobs": part.logprobs}
            yield "response.content_part.done", {**self._at(item), "part": part}
        else:
            yield "response.reasoning_text.done", {**self._at(item), "text": item.content[0].text}
            yield "response.content_part.done", {**self._at(item), "part": item.content[0]}
        yield "response.output_item.done", {"output_index": self._index, "item": item}

    def _finish(self, completion: ChatCompletion) -> Iterator[Happening]:
        response = self.response
        if not response.output:  # an empty turn is one too, and comes back as one
            yield from self._text(Text(0, ""))
        cut = completion.choices[0].finish_reason == "length"
        yield from self._close("incomplete" if cut else "completed")
        response.usage = usage_of(completion.usage)
        response.status = "incomplete" if cut else "completed"
        if cut:
            response.incomplete_details = {"reason": "max_output_tokens"}
        yield f"response.{response.status}", {"response": response}

    def _item_id(self, prefix: str) -> str:
        return f"{prefix}_{self.response.id.removeprefix('resp_')}_{len(self.response.output)}"

    @property
    def _index(self) -> int:
        return len(self.response.output) - 1

    def _of(self, item: ItemOut) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": self._index}

    def _at(self, item: ItemOut) -> dict[str, Any]:
        return {"item_id": item.id, "output_index": self._index, "content_index": 0}


def fill(response: ResponseRecord, completion: ChatCompletion) -> None:
    """The whole answer at once, as its stream would build it."""
    builder, message = ResponseBuilder(response), completion.choices[0].message
    events: list[Event] = []
    if message.reasoning_content:
        events.append(Reasoning(0, message.reasoning_content))
    if message.content:
        logprobs = completion.choices[0].logprobs
        events.append(Text(0, message.content, logprobs.content if logprobs is not None else []))
    for index, call in enumerate(message.tool_calls or ()):
        events.append(ToolDelta(0, index, call.id, call.function.name, call.function.arguments))
    for event in (*events, Finished(completion)):
        for _ in builder.on(event):
            pass  # only the response counts


def frame(number: int, happening: Happening) -> bytes:
    """One server-sent event. `number`: of the event in its stream, from 0."""
    kind, fields = happening
    body = msgspec.json.encode({"type": kind, "sequence_number": number, **fields})
    return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"
