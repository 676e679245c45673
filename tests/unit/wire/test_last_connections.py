"""Connections that are accepted while a service ends: each is closed by it, none is left to the collector."""

from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import closing

import pytest

from astraflow.wire.app import bind, create_app, serve


def knock(client: socket.socket, port: int) -> None:
    """Connect without waiting for it."""
    client.setblocking(False)
    client.connect_ex(("127.0.0.1", port))


@pytest.mark.parametrize("turns", range(10))
async def test_who_comes_last_is_not_left_open(turns: int) -> None:
    stop, urls = asyncio.Event(), asyncio.Queue[str]()
    serving = asyncio.create_task(
        serve(create_app([], token=None), bind("127.0.0.1", 0, "port"), urls.put_nowait, stop)
    )
    port = int((await urls.get()).rpartition(":")[2])
    stop.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    with closing(socket.socket()) as client:
        knock(client, port)
        await serving
        client.setblocking(True)
        client.settimeout(5.0)
        with pytest.raises(OSError):  # refused, or closed; never left open
            client.sendall(b"GET /health HTTP/1.1\r\n\r\n")
            raise ConnectionResetError if client.recv(1) == b"" else AssertionError("it was answered")
    gc.collect()  # what nobody closed fails the test here
