"""Several policies trained by one process: a thread and a session for each, and one of them computes at a time.

```
 thread of a:  wait for a batch of a ─► [turn: step, audit] ─► acknowledge ─► ...
 thread of b:  wait for a batch of b ─────────────────────► [turn: step, audit] ─► ...
```
Nothing else is shared but the memory of a base (`bases`) and the server of weights: queues, versions, optimizers,
checkpoints and paces stay those of each policy. While one waits or acknowledges, another one computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait


def train_all(policies: Sequence[str], train: Callable[[str], None], stop: threading.Event) -> None:
    """`train` each of them until its end. Once one fails, `stop` is set and the others end too.

    Raises: what the first one failed of.
    """
    with ThreadPoolExecutor(len(policies), thread_name_prefix="trainer") as threads:
        futures = [threads.submit(train, policy) for policy in policies]
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = [future for future in done if future.exception() is not None]
        if failed:
            stop.set()
    for future in failed:
        future.result()
