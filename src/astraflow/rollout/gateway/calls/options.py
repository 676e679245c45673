"""Options of a request that are refused: what would change the reply and is not served is named, never left out."""

from __future__ import annotations

import re
from typing import Any

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.dialect import ChatRequest

MAX_N = 128
MAX_STOPS = 16
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_UNSERVED = {
    "audio": "policies write text only",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "logit_bias": "leave it out",
    "prediction": "leave it out",
    "web_search_options": "give the agent a search tool of its own",
    "chat_template_kwargs": "change the chat template of the model",
    "structured_outputs": "check the reply in the agent, as response_format is not served",
    "guided_json": "check the reply in the agent, as response_format is not served",
    "guided_regex": "check the reply in the agent",
    "guided_choice": "check the reply in the agent",
    "guided_grammar": "check the reply in the agent",
}
"""What an agent may send in vain, and what it is to do instead."""


def has_options(request: ChatRequest) -> bool:
    """False: model, messages and tools are all that it says, as with most requests."""
    bare = ChatRequest(model=request.model, messages=request.messages, tools=request.tools, stream=request.stream)
    return request != bare


def check_options(request: ChatRequest) -> None:
    """Raises: GatewayError (400): an option that is out of its range, or not served."""
    if request.n is not None and not 1 <= request.n <= MAX_N:
        raise GatewayError("n", request.n, f"must be from 1 to {MAX_N}", "send more requests")
    if request.temperature is not None and not 0 <= request.temperature <= 2:
        raise GatewayError("temperature", request.temperature, "must be from 0 to 2", "leave it out")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise GatewayError("top_p", request.top_p, "must be above 0, at most 1", "leave it out")
    if request.stop is not None:
        _check_stops(request.stop)
    if request.top_logprobs:
        raise GatewayError(
            "top_logprobs", request.top_logprobs, "must be 0: engines keep the logprob of the sampled token only",
            "use logprobs=true without it",
        )  # fmt: skip
    if request.tool_choice not in (None, "auto", "none"):
        raise GatewayError(
            "tool_choice", request.tool_choice, "must be 'auto' or 'none': a policy cannot be forced to call a tool",
            "ask for the call in the messages, and let the reward teach it",
        )  # fmt: skip
    if request.response_format is not None and request.response_format.get("type") != "text":
        raise GatewayError(
            "response_format", request.response_format.get("type"),
            "must be 'text': replies are sampled freely and cannot be forced into a form",
            "ask for the form in the messages and check the reply in the agent, whose reward teaches it",
        )  # fmt: skip
    if request.stream_options is not None and not request.stream:
        raise GatewayError("stream_options", request.stream_options, "needs stream=true", "leave it out")
    if request.modalities is not None and request.modalities != ["text"]:
        raise GatewayError("modalities", request.modalities, "must be ['text']", "leave it out")
    for name, fix in _UNSERVED.items():
        value = getattr(request, name)  # a field of the record
        if value:
            raise GatewayError(name, value, "is not served", fix)


def _check_stops(stop: str | list[str]) -> None:
    texts = [stop] if isinstance(stop, str) else stop
    if len(texts) > MAX_STOPS or not all(texts):
        raise GatewayError("stop", stop, f"must be at most {MAX_STOPS} non-empty strings", "send fewer")


def check_tools(tools: list[dict[str, Any]]) -> None:
    """Raises: GatewayError (400): a tool that is none, or whose parameters are no JSON schema."""
    from jsonschema.exceptions import SchemaError  # a tenth of a second, for agents with tools only
    from jsonschema.validators import Draft202012Validator, validator_for

    for position, tool in enumerate(tools):
        where = f"tools[{position}]"
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict):
            raise GatewayError(where, tool, "must be {type: 'function', function: {...}}", "send functions only")
        name = function.get("name")
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise GatewayError(
                f"{where}.function.name", name, "must be 1 to 64 letters, digits, '_' or '-'", "rename the tool"
            )
        schema = function.get("parameters")
        if schema is None:
            continue
        if not isinstance(schema, dict):
            raise GatewayError(f"{where}.function.parameters", schema, "must be an object", "send a JSON schema")
        try:
            if not isinstance(schema.get("$schema", ""), str):
                raise SchemaError("must be a string", path=["$schema"])
            validator_for(schema, default=Draft202012Validator).check_schema(schema)
        except (SchemaError, RecursionError) as error:
            reason = f"{error.json_path}: {error.message}" if isinstance(error, SchemaError) else "nested too deeply"
            raise GatewayError(
                f"{where}.function.parameters", schema, f"is no JSON schema ({reason})",
                "correct the schema of the tool",
            ) from error  # fmt: skip
