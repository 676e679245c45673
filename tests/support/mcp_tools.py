"""A tool server for tests, on its standard input and output; `pure`: with `add` alone; `8000`: over HTTP."""

import os
import sys
import time

from mcp.server.mcpserver import MCPServer

server, pure = MCPServer("numbers"), MCPServer("sums")
seen: list[str] = []


@pure.tool()
@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def fault(kind: str) -> str:
    """Hang, crash, flood or raise."""
    if kind == "hang":
        time.sleep(600)
    if kind == "crash":
        os._exit(3)
    if kind == "raise":
        raise ValueError("no such number")
    return "x" * 50_000


@server.tool()
def whoami(word: str) -> str:
    """The process, and what it was told before."""
    seen.append(word)
    return f"{os.getpid()} {' '.join(seen)}"


if __name__ == "__main__":
    if "pure" in sys.argv:
        pure.run()
    elif len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]), json_response=True)
    else:
        server.run()
