"""A weight store over HTTP that misbehaves as told."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any


class Faults:
    """What it does wrong. `ranges` are the Range headers it was sent for parts."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cut_at: list[int] = []  # each part request in turn: close the connection after so many bytes
        self.flip: list[bool] = []  # each part request in turn: damage a byte
        self.lies: dict[str, bytes] = {}  # end of a path -> answered instead
        self.trickles = 0  # part requests that get a few bytes now and then
        self.drips = ""  # end of a path -> answered a byte at a time, 20 in a second
        self.knows_ranges = True
        self.ranges: list[str | None] = []
        self.requests: list[str] = []


@contextmanager
def faulty(faults: Faults) -> Iterator[str]:
    gone = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            faults.requests.append(self.path)
            lie = next((body for end, body in faults.lies.items() if self.path.endswith(end)), None)
            path = faults.directory.joinpath(*self.path.split("/")[3:])
            if lie is not None:
                self.send_response(200)
                self.send_header("content-length", str(len(lie)))
                self.end_headers()
                self.wfile.write(lie)
                return
            if not path.is_file():
                self.send_error(404)
                return
            content = path.read_bytes()
            start = 0
            if path.suffix == ".safetensors":
                asked = self.headers.get("range")
                faults.ranges.append(asked)
                start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and faults.knows_ranges else 0
                if faults.flip and faults.flip.pop(0):
                    content = content[:-3] + bytes([content[-3] ^ 1]) + content[-2:]
            body = content[start:]
            self.send_response(206 if start else 200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            if faults.drips and self.path.endswith(faults.drips):
                self.close_connection = True
                with suppress(OSError):
                    for at in range(len(body)):
                        self.wfile.write(body[at : at + 1])
                        gone.wait(0.05)
                return
            if path.suffix == ".safetensors" and faults.trickles:
                faults.trickles -= 1
                self.close_connection = True
                with suppress(OSError):
                    for at in range(0, len(body), 200):  # 4 kB/s
                        self.wfile.write(body[at : at + 200])
                        gone.wait(0.05)
                return
            if path.suffix == ".safetensors" and faults.cut_at:
                body = body[: faults.cut_at.pop(0)]
                self.close_connection = True
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None: ...

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}/weights/actor"
        finally:
            gone.set()
            server.shutdown()
            thread.join()
