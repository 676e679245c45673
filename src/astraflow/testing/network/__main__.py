"""`python -m astraflow.testing.network URL [URL ...] --mbit 100 --delay-ms 75`: services behind a link of that kind.

Prints the URL that stands for each, then follows the words on its standard input, one a line:

| word              | what happens                                          |
|-------------------|-------------------------------------------------------|
| `cut`             | all connections break                                 |
| `refuse SECONDS`  | new connections are reset for so long                 |
| `stall`, `go on`  | nothing passes, until it does again                   |
| `mbit NUMBER`     | another bandwidth of each direction; 0: no limit      |
| `delay MS`        | another delay, one way                                |
| `traffic`         | bytes so far, up from clients to services, as JSON    |

It ends with Ctrl-C, SIGTERM or `end`; when its input is closed it goes on.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections.abc import Iterable
from dataclasses import replace

import msgspec

from astraflow.errors import AstraFlowError, LaunchError
from astraflow.observe.process import stop_signals
from astraflow.testing.network.pacing import Conditions
from astraflow.testing.network.shaper import Shaper


def main(argv: list[str] | None = None) -> int:
    """0 at its end; 2 for what it cannot do."""
    parser = argparse.ArgumentParser(prog="python -m astraflow.testing.network", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("urls", nargs="+", metavar="URL", help="http://host:port of a service")
    parser.add_argument("--ports", default="", help="a port for each URL, 7800,7801; default: any free ones")
    parser.add_argument("--mbit", type=float, default=0.0, help="bandwidth, Mbit/s of each direction; 0: no limit")
    parser.add_argument("--delay-ms", type=float, default=0.0, help="one way; a round trip takes it twice")
    parser.add_argument("--connection-kbit", type=float, default=0.0, help="limit of each connection; 0: none")
    given = parser.parse_args(argv)
    try:
        with Shaper(Conditions(given.mbit * 1e6, given.delay_ms / 1e3)) as link, stop_signals() as stop:
            ports = [int(port) for port in given.ports.split(",")] if given.ports else [0] * len(given.urls)
            for url, port in zip(given.urls, ports, strict=True):
                _say(f"{url} -> {link.forward(url, connection_bits_per_s=1e3 * given.connection_kbit, port=port)}")

            def listen() -> None:
                if follow(sys.stdin, link):
                    stop.set()

            threading.Thread(target=listen, name="words", daemon=True).start()
            stop.wait()
    except (AstraFlowError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def follow(lines: Iterable[str], link: Shaper) -> bool:
    """Do what each line says; True: it said `end`."""
    for line in lines:
        try:
            if not _obey(line.split(), link):
                return True
        except (AstraFlowError, ValueError, IndexError) as error:
            _say(f"error: {error}")
    return False


def _obey(words: list[str], link: Shaper) -> bool:
    match words:
        case []:
            pass
        case ["end"]:
            return False
        case ["cut"]:
            link.cut()
        case ["refuse", seconds]:
            link.refuse(float(seconds))
        case ["stall"]:
            link.stall()
        case ["go", "on"]:
            link.go_on()
        case ["mbit", number]:
            link.change(replace(link.conditions, bits_per_s=1e6 * float(number)))
        case ["delay", number]:
            link.change(replace(link.conditions, delay_s=float(number) / 1e3))
        case ["traffic"]:
            _say(msgspec.json.encode(link.traffic()).decode())
        case _:
            raise LaunchError("word", " ".join(words), "is not known", "see --help")
    return True


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
