"""Chat templates as Hugging Face renders them, compiled once; torch-free and transformers-free.

The environment gives a template what `tokenizer.apply_chat_template` gives it (sandbox, trimmed blocks, `tojson`
without HTML escapes, `raise_exception`, `strftime_now`, `{% generation %}`), at the cost of the template alone.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2 import nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from astraflow.types import Message


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks what an assistant wrote; here it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class _Environment(ImmutableSandboxedEnvironment):
    """The sandbox, with a short way to `message.role`: for a dict and a name that no dict method has, `getattr` of the
    sandbox raises and catches an AttributeError first and then gives the same item."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute in obj and attribute not in _DICT_NAMES:
            return obj[attribute]
        return super().getattr(obj, attribute)


_DICT_NAMES = frozenset(dir(dict))


@lru_cache(maxsize=64)
def compile_template(source: str) -> jinja2.Template:
    """Raises: jinja2.TemplateSyntaxError: the template is not valid."""
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(source)


def normalised(messages: Sequence[Message]) -> list[Message]:
    """Messages as templates expect them: no None values, text parts joined, tool arguments as objects.

    OpenAI sends tool arguments as JSON text; a text that is not a JSON object stays text.
    """
    return [_normalised(message) for message in messages]


def _normalised(message: Message) -> Message:
    plain = {key: value for key, value in message.items() if value is not None}
    content = plain.get("content")
    if isinstance(content, list):
        plain["content"] = "".join(part.get("text", "") for part in content)
    else:
        plain.setdefault("content", "")
    if "tool_calls" in plain:
        plain["tool_calls"] = [_normalised_call(call) for call in plain["tool_calls"]]
    return plain


def _normalised_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = dict(call["function"])
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return {**call, "function": function}
