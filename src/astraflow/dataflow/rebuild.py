"""The machine as it was: the newest snapshot, and the commands after it applied once more.

```
 live:    journal command N ─► apply raises ─► journal "N is void" ─► answer 500, end the process (its state is spoiled)
 restart: snapshot ─► commands in order, without N ─► as if N had never come, but counted
```

A command is void when applying it raised what nobody expects. It was answered with an error, and so was whoever came
after it in the same turn, so leaving it out is exact. One that raises here without such a mark may have been answered
well: its code changed, or the process was killed between the two steps. That is for a person to decide.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from astraflow.dataflow.journal.log import Journal
from astraflow.dataflow.journal.recovery import JournalDamaged, Logged
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.state import Applied, Machine
from astraflow.errors import DataflowError

log = logging.getLogger("astraflow.dataflow")
encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(c.Command).decode
_TAG = b'{"type":"VoidCommand"'
_ERROR_CHARS = 300
Hear = Callable[[Logged, c.Command, Applied, Machine], None]
"""Told of each command right after it was applied."""


def rebuild(
    journal: Journal, fresh: Callable[[], Machine], hear: Hear, *, accept_damage: bool
) -> tuple[Machine, float]:
    """The machine after all commands, and its run time. `fresh`: makes that of the snapshot.

    Raises: JournalDamaged: a command raises and is not void. With `accept_damage` it becomes void instead.
    """
    logged, heard = list(journal.log()), 0
    while True:
        machine = fresh()
        mark = _apply_all(machine, logged, hear, heard)
        if mark is None:
            return machine, logged[-1].now if logged else journal.load()[1]
        if not accept_damage:
            raise JournalDamaged(
                str(journal.path), f"cannot be replayed: command {mark.seq} ({mark.kind}) raised {mark.error}",
                "mend its cause, or report it with the run directory; --accept-damage goes on without that command", 1,
            )  # fmt: skip
        heard = mark.seq
        now = logged[-1].now
        journal.append([(now, encode(mark))])
        logged.append(Logged(journal.seq, now, encode(mark)))


def void(seq: int, command: c.Command, error: BaseException) -> c.VoidCommand:
    """The mark of a command whose application raised `error`."""
    log.error("dataflow command %d (%s) raised", seq, type(command).__name__, exc_info=error)
    said = f"{type(error).__name__}: {error}"[:_ERROR_CHARS]
    return c.VoidCommand(seq, type(command).__name__, said.encode("utf-8", "replace").decode())


def fault_of(mark: c.VoidCommand) -> DataflowError:
    """What the sender of a void command is told, and what the service ends with."""
    return DataflowError(
        f"dataflow command {mark.seq} ({mark.kind})", mark.error, "was not expected, so the command is void",
        "the service starts again without it; report this with its log",
    )  # fmt: skip


def _apply_all(machine: Machine, logged: list[Logged], hear: Hear, heard: int) -> c.VoidCommand | None:
    """Apply what is not void; the mark of the first command that raises. Nobody hears of those up to `heard` again."""
    marks = [_decode(x.command) for x in logged if x.command.startswith(_TAG)]
    left_out = {mark.seq: mark for mark in marks if isinstance(mark, c.VoidCommand)}
    for item in logged:
        if (mark := left_out.get(item.seq)) is not None:
            log.warning("journal: command %d (%s) is left out: it raised %s", mark.seq, mark.kind, mark.error)
            continue
        command = _decode(item.command)
        try:
            applied = machine.apply(command, item.now)
        except c.Refusal:  # it was refused the first time too
            continue
        except (Exception, SystemExit) as error:
            return void(item.seq, command, error)
        if item.seq > heard:
            hear(item, command, applied, machine)
    return None
