"""Run vLLM's API server as long as the node lives: `python -m astraflow.engines.vllm.inside.serve ARGUMENTS`.

Standard input is a pipe whose other end the node holds and never writes to. When it closes, however the node ended, the
server and all its processes end with it.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading

_SERVER = "vllm.entrypoints.openai.api_server"


def _end_with_the_node() -> None:
    while os.read(0, 4096):
        pass
    os.killpg(0, signal.SIGKILL)  # the node started it as the leader of a group of its own


def main() -> None:
    """Only where the file is run: vLLM's own processes import it again."""
    threading.Thread(target=_end_with_the_node, name="lifeline", daemon=True).start()
    runpy.run_module(_SERVER, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    sys.argv[0] = _SERVER
    main()
