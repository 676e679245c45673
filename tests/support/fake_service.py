"""A service that speaks as OpenAI's chat completions do, in a thread, and refuses every request that it would not take.
It answers what `replies` says, then `reply`."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

FIELDS: dict[str, tuple[type, ...]] = {
    "model": (str,), "messages": (list,), "tools": (list,), "temperature": (int, float), "top_p": (int, float),
    "max_tokens": (int,), "max_completion_tokens": (int,), "seed": (int,), "top_k": (int,), "min_p": (float,),
    "reasoning_effort": (str,),
}  # fmt: skip
ROLES = {
    "system": {"role", "content"}, "user": {"role", "content", "name"},
    "assistant": {"role", "content", "tool_calls", "name"}, "tool": {"role", "content", "tool_call_id", "name"},
}  # fmt: skip
Reply = dict[str, Any]
"""status (200), headers, and one of: content, calls, finish, usage; body (bytes); cut (bytes, then the end); hang."""


class FakeService:
    """`seen`: the bodies that it took."""

    def __init__(self, key: str | None = None) -> None:
        self.key, self.seen, self.keys = key, list[dict[str, Any]](), list[str | None]()
        self.replies: deque[Reply] = deque()
        self.reply: Callable[[dict[str, Any]], Reply] = lambda body: {"content": "well"}
        self.lock, self.released = threading.Lock(), threading.Event()
        self.held = 0  # requests that hang
        self.most_at_once = self._at_once = 0
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """What hangs ends too."""
        self.released.set()
        self.server.shutdown()
        self.server.server_close()
        self._thread.join()

    def answer(self, path: str, key: str | None, raw: bytes) -> Reply:
        body = json.loads(raw)
        if wrong := problem(path, body):
            return {"status": 400, "body": json.dumps({"error": {"message": wrong}}).encode()}
        with self.lock:
            self.keys.append(key)
            if self.key is not None and key != f"Bearer {self.key}":
                said = f"Incorrect API key provided: {key}"
                return {"status": 401, "body": json.dumps({"error": {"message": said}}).encode()}
            self.seen.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
            return self.replies.popleft() if self.replies else self.reply(body)

    def done(self) -> None:
        with self.lock:
            self._at_once -= 1


def problem(path: str, body: dict[str, Any]) -> str:
    """Why the request is none, or ""."""
    if path != "/v1/chat/completions":
        return f"path {path}"
    for name, value in body.items():
        if name not in FIELDS or not isinstance(value, FIELDS[name]) or isinstance(value, bool):
            return f"{name}={value!r}"
    if not {"model", "messages"} <= body.keys() or not body["messages"]:
        return "no messages"
    known: set[str] = set()
    for message in body["messages"]:
        if not message.keys() <= ROLES.get(message.get("role"), set()) or not isinstance(message.get("content"), str):
            return f"message {message}"
        for call in message.get("tool_calls", []):
            if call.keys() != {"id", "type", "function"} or not isinstance(call["function"]["arguments"], str):
                return f"call {call}"
            known.add(call["id"])
        if message["role"] == "tool" and message["tool_call_id"] not in known:
            return f"no call {message['tool_call_id']}"
    return ""


def completion(reply: Reply) -> bytes:
    calls = [
        {"id": f"theirs-{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
        for n, (name, arguments) in enumerate(reply.get("calls", []))
    ]
    message: dict[str, Any] = {"role": "assistant", "content": reply.get("content")}
    if calls:
        message["tool_calls"] = calls
    finish = reply.get("finish", "tool_calls" if calls else "stop")
    whole: dict[str, Any] = {"id": "x", "object": "chat.completion", "choices": [
        {"index": 0, "message": message, "finish_reason": finish}
    ]}  # fmt: skip
    if (usage := reply.get("usage", 10)) is not None:
        whole["usage"] = {"prompt_tokens": usage - 1, "completion_tokens": 1, "total_tokens": usage}
    return json.dumps(whole).encode()


def _handler(service: FakeService) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            reply = service.answer(self.path, self.headers["authorization"], raw)
            try:
                self.write(reply)
            finally:
                service.done()

        def write(self, reply: Reply) -> None:
            if reply.get("hang"):
                with service.lock:
                    service.held += 1
                service.released.wait(60)
                return
            content = reply["body"] if "body" in reply else completion(reply)
            self.send_response(reply.get("status", 200))
            for name, value in reply.get("headers", {}).items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(reply.get("cut", content))

        def log_message(self, format: str, *args: Any) -> None:
            return

    return Handler
