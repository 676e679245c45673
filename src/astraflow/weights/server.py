"""The weights server as a process of its own: `python -m astraflow.weights.server`, or `start_server` for a trainer.

The trainer never waits for a reader, and a reader never for the trainer: they share only immutable files.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from astraflow.config.env import child_environment, token_from_env
from astraflow.errors import AstraFlowError, LaunchError
from astraflow.observe.logs import setup_logging
from astraflow.observe.process import end_with_own_threads

_START_S = 30.0
_STOP_S = 5.0
_PORT_WAIT_S = 2.0


class ServerProcess:
    """A running weights server. Use `start_server`."""

    def __init__(self, root: Path, host: str, port: int, token: str | None) -> None:
        self._root, self._host, self._port, self._token = root, host, port, token
        self.num_restarts = 0
        self._start()

    @property
    def url(self) -> str:
        """http://host:port, the same after a restart."""
        return self._url

    @property
    def pid(self) -> int:
        """Process id of the child that runs now."""
        return self._child.pid

    def policy_url(self, policy: str) -> str:
        """What goes into `WeightVersion.urls`."""
        return f"{self._url}/weights/{policy}"

    def alive(self) -> bool:
        """Whether the child runs."""
        return self._child.poll() is None

    def ensure(self) -> bool:
        """Start the child again, on the same port, if it died; True if it had. Call after each publish."""
        if self.alive():
            return False
        self._start()
        self.num_restarts += 1
        return True

    def stop(self) -> None:
        """End the child and wait for it."""
        self._child.terminate()
        try:
            self._child.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait(_STOP_S)

    def _start(self) -> None:
        readable, writable = os.pipe()
        command = [
            sys.executable, "-m", "astraflow.weights.server", "--root", str(self._root), "--host", self._host,
            "--port", str(self._port), "--ready-fd", str(writable), "--parent", str(os.getpid()),
        ]  # fmt: skip
        try:
            self._child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, pass_fds=(writable,), env=child_environment(self._token)
            )
        finally:
            os.close(writable)
        try:
            line = _read_line(readable, time.monotonic() + _START_S)
        finally:
            os.close(readable)
        if not line.startswith("http"):
            code = self._child.poll()
            self.stop()
            silent = f"no answer in {_START_S:.0f} s" if code is None else f"it ended with exit code {code}"
            reason = line.removeprefix("error: ") or silent
            raise LaunchError(
                "weights server",
                f"{self._host}:{self._port}",
                f"did not start ({reason})",
                "see [weights] in the run file",
            )
        self._url = line
        self._port = int(line.rpartition(":")[2])


def start_server(root: Path, host: str = "127.0.0.1", port: int = 0, token: str | None = None) -> ServerProcess:
    """Serve the policies below `root` from a child process; returns once it answers.

    Raises: LaunchError: used port, a non-loopback host without a token.
    """
    return ServerProcess(Path(root), host, port, token)


def _read_line(fd: int, deadline: float) -> str:
    """One line, or what came before the other side closed or the deadline passed."""
    received = b""
    while not received.endswith(b"\n"):
        if not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return ""
        piece = os.read(fd, 4096)
        if not piece:
            break
        received += piece
    return received.decode().strip()


async def _serve(arguments: argparse.Namespace, token: str | None) -> None:
    # Here, as a trainer that starts this process has no other use for a web server (7 MB).
    from astraflow.weights.app import create_weights_app
    from astraflow.wire.app import check_bind, serve

    stop = asyncio.Event()
    check_bind(arguments.host, token, "weights.host")
    sock = await _bind(arguments.host, arguments.port)
    watch = asyncio.create_task(_watch_parent(arguments.parent, stop), name="parent watch")
    try:
        app = create_weights_app(arguments.root, token)
        await serve(app, sock, lambda url: _report(arguments, f"{url}\n"), stop)
    finally:
        watch.cancel()


async def _bind(host: str, port: int) -> socket.socket:
    """A fixed port may still be held, for a moment, by the server of a trainer that was just killed."""
    from astraflow.wire.app import bind

    deadline = time.monotonic() + _PORT_WAIT_S
    while True:
        try:
            return bind(host, port, "weights.port")
        except LaunchError:
            if port == 0 or time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)


async def _watch_parent(parent: int | None, stop: asyncio.Event) -> None:
    """End with the parent. Unlike PR_SET_PDEATHSIG this works on macOS and outlives the thread that started us."""
    while parent is None or os.getppid() == parent:
        await asyncio.sleep(0.5)
    stop.set()


def _report(arguments: argparse.Namespace, text: str) -> None:
    """Tell whoever started us the URL, or why there is none."""
    if arguments.ready_fd is not None:
        os.write(arguments.ready_fd, text.encode())
        os.close(arguments.ready_fd)
    elif arguments.ready_file is not None:
        temporary = arguments.ready_file.with_name(arguments.ready_file.name + ".tmp")
        temporary.write_text(text)
        temporary.rename(arguments.ready_file)
    else:
        sys.stderr.write(text)


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM, SIGINT, or the end of the parent. The token comes from ASTRAFLOW_TOKEN only."""
    import uvloop

    parser = argparse.ArgumentParser(prog="python -m astraflow.weights.server", description=main.__doc__)
    parser.add_argument("--root", type=Path, required=True, help="directory that holds <policy>/<version>/")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--ready-fd", type=int, help="file descriptor that gets the URL once it answers")
    parser.add_argument("--ready-file", type=Path, help="file that gets the URL once it answers")
    parser.add_argument("--parent", type=int, help="process id of the parent; its end is ours")
    arguments = parser.parse_args(argv)
    if arguments.parent:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent says when we end
    token = token_from_env()
    setup_logging("weights", secrets=(token,))
    end_with_own_threads()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_serve(arguments, token))
    except KeyboardInterrupt:
        return 0
    except AstraFlowError as error:
        _report(arguments, f"error: {error}\n")
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
