"""`/v1/models`: the policies, in the shape of whoever asks."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.gateway.dialects.errors import speaks_anthropic
from astraflow.rollout.gateway.dialects.http import key_of


def routes(gateway: Gateway) -> list[Route]:
    """The list, and one of it; errors are those of the app."""

    async def models(request: Request) -> Response:
        gateway.check_key(key_of(request))
        rows = [_model(request, name, gateway.max_context(name)) for name in gateway.policies]
        if not speaks_anthropic(request):
            return _json({"object": "list", "data": rows})
        first, last = (rows[0]["id"], rows[-1]["id"]) if rows else (None, None)
        return _json({"data": rows, "has_more": False, "first_id": first, "last_id": last})

    async def model(request: Request) -> Response:
        gateway.check_key(key_of(request))
        name = request.path_params["name"]
        if not gateway.max_context(name):
            known = ", ".join(gateway.policies)
            raise GatewayError("model", name, "is not a policy of this node", f"known: {known}", 404, "model_not_found")
        return _json(_model(request, name, gateway.max_context(name)))

    return [
        route
        for base in ("/v1/models", "/v1/v1/models")  # the second: Anthropic's SDK with a base URL that ends in /v1
        for route in (Route(base, models), Route(f"{base}/{{name:path}}", model))
    ]


def _model(request: Request, name: str, max_context: int) -> dict[str, Any]:
    if not speaks_anthropic(request):
        return {"id": name, "object": "model", "created": 0, "owned_by": "astraflow"}
    return {
        "type": "model", "id": name, "display_name": name, "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active",
        "max_input_tokens": max_context, "max_tokens": max_context,
    }  # fmt: skip


def _json(body: dict[str, Any]) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
