"""Errors in the shape of whoever asked."""

from __future__ import annotations

import secrets

from starlette.requests import Request
from starlette.responses import Response

from astraflow.errors import AstraFlowError
from astraflow.rollout.gateway import dialect
from astraflow.rollout.gateway.dialects.anthropic import reply as anthropic


def speaks_anthropic(request: Request) -> bool:
    """By the header that Anthropic's clients send, or by the path."""
    return "anthropic-version" in request.headers or "/messages" in request.url.path


def error_reply(request: Request, error: AstraFlowError, max_context: int = 0) -> Response:
    """Status and error object. `max_context`: of the policy, if it is known."""
    if not speaks_anthropic(request):
        status, body = dialect.failure(error)
        return Response(body, status, media_type="application/json")
    request_id = f"req_{secrets.token_hex(12)}"
    status, body = anthropic.failure(error, request_id, max_context)
    return Response(body, status, {"request-id": request_id}, media_type="application/json")
