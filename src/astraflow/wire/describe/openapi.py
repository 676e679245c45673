"""OpenAPI 3.1 of a service, made of its operations and the structs of its messages.

Descriptions are those of the code: the docstring of a struct, the comment behind a field. Arrow bodies are described by
the struct in their schema metadata (`x-arrow-header`) and their columns (`x-arrow-columns`).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import msgspec
import pyarrow as pa

from astraflow import __version__
from astraflow.wire.codec import CONTENT_TYPE
from astraflow.wire.messages import PROTOCOL, PROTOCOL_HEADER, Failure

STATUSES = {
    400: "the body was cut; send the request again",
    401: "the token is missing or wrong",
    404: "the id is unknown (a node: join again)",
    409: "refused by the state of the run (an episode of the swarm: over, or somebody else's)",
    410: "the run is over for this policy",
    413: "the body is larger than dataflow.max_body_bytes",
    415: "the body is of another content type",
    416: "the range lies outside of the file",
    422: "the body is malformed; the error names the field, or the column and row",
    426: "another version of the protocol",
    503: "the service stops; send the request again after the pause that Retry-After says",
    507: "the journal cannot be written; send the request again after a pause",
}
_EVERYWHERE = (401, 426)
_COMMENT = re.compile(r"^    (\w+):[^#\n]*#\s*(.+)$", re.MULTILINE)
_PARAMETER = re.compile(r"\{(\w+)(?::\w+)?\}")


@dataclass(frozen=True)
class Arrow:
    """A body that is an Arrow IPC stream."""

    header: type[msgspec.Struct]
    columns: pa.Schema | None  # None: as `about` says
    about: str = ""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One request of a service."""

    method: str
    path: str  # as the route of the app
    name: str  # operationId
    sender: str  # tag
    about: str
    body: type[msgspec.Struct] | Arrow | None = None
    reply: type[msgspec.Struct] | Arrow | str  # str: a media type
    empty: str = ""  # what 204 means
    refusals: tuple[int, ...] = ()  # beside those that every request may meet
    partial: bool = False  # 206 is possible


def document(title: str, about: str, operations: Sequence[Operation], *, bare: bool = False) -> dict[str, Any]:
    """The whole document. `bare`: requests need no header of the protocol."""
    structs: dict[type[msgspec.Struct], None] = {Failure: None}
    for operation in operations:
        for part in (operation.body, operation.reply):
            kind = part.header if isinstance(part, Arrow) else part
            if isinstance(kind, type):
                structs[kind] = None
    _, schemas = msgspec.json.schema_components(list(structs), ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        path = _PARAMETER.sub(r"{\1}", operation.path)
        paths.setdefault(path, {})[operation.method.lower()] = _operation(operation, bare=bare)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": __version__, "description": about},
        "security": [{"token": []}, {}],
        "paths": paths,
        "components": {
            "schemas": dict(sorted(_described(schemas, structs).items())),
            "securitySchemes": {
                "token": {"type": "http", "scheme": "bearer", "description": "needed when the service has a token"}
            },
            "parameters": {
                "protocol": {
                    "name": PROTOCOL_HEADER, "in": "header", "required": True,
                    "description": f"{PROTOCOL}; another number, or none, is refused with 426 (a GET may go without)",
                    "schema": {"type": "string", "const": str(PROTOCOL)},
                }
            },
        },
    }  # fmt: skip


def to_json(document: dict[str, Any]) -> str:
    """As it lies in docs/."""
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def _operation(operation: Operation, *, bare: bool) -> dict[str, Any]:
    names = _PARAMETER.findall(operation.path)
    found: dict[str, Any] = {
        "operationId": operation.name,
        "tags": [operation.sender],
        "summary": operation.about,
        "parameters": [
            *([] if bare or operation.method == "GET" else [{"$ref": "#/components/parameters/protocol"}]),
            *({"name": n, "in": "path", "required": True, "schema": {"type": "string"}} for n in names),
        ],
        "responses": _responses(operation),
    }
    if operation.body is not None:
        found["requestBody"] = {"required": True, "content": _content(operation.body)}
    return found


def _responses(operation: Operation) -> dict[str, Any]:
    found: dict[str, Any] = {"200": {"description": "done", "content": _content(operation.reply)}}
    if operation.empty:
        found["204"] = {"description": operation.empty}
    if operation.partial:
        found["206"] = {"description": "the range that was asked for", "content": _content(operation.reply)}
    for status in sorted({*_EVERYWHERE, *operation.refusals}):
        found[str(status)] = {"description": STATUSES[status], "content": _content(Failure)}
    return found


def _content(body: type[msgspec.Struct] | Arrow | str) -> dict[str, Any]:
    if isinstance(body, str):
        return {body: {"schema": {"type": "object" if body == "application/json" else "string"}}}
    if not isinstance(body, Arrow):
        return {"application/json": {"schema": _reference(body)}}
    schema: dict[str, Any] = {
        "type": "string",
        "contentMediaType": CONTENT_TYPE,
        "description": "An Arrow IPC stream; its schema metadata holds the header as JSON under `astraflow.header`. "
        + body.about,
        "x-arrow-header": _reference(body.header),
    }
    if body.columns is not None:
        schema["x-arrow-columns"] = [
            {"name": f.name, "type": str(f.type).replace("item: ", ""), "nullable": f.nullable} for f in body.columns
        ]
    return {CONTENT_TYPE: {"schema": schema}}


def _reference(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _described(schemas: dict[str, Any], structs: Iterable[type]) -> dict[str, Any]:
    """Schemas with what the comments behind the fields say."""
    by_name = {kind.__name__: kind for kind in _all_structs(structs)}
    for name, schema in schemas.items():
        if (kind := by_name.get(name)) is None:
            continue
        comments = dict(_COMMENT.findall(inspect.getsource(kind)))
        for field, text in comments.items():
            if (member := schema.get("properties", {}).get(field)) is not None:
                member["description"] = text.strip()
    return schemas


def _all_structs(roots: Iterable[type]) -> set[type]:
    """The structs and those in their fields."""
    found: set[type] = set()
    todo: list[Any] = list(roots)
    while todo:
        kind = todo.pop()
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
            if kind in found:
                continue
            found.add(kind)
            todo += [field.type for field in msgspec.structs.fields(kind)]
        else:
            todo += get_args(kind)
    return found
