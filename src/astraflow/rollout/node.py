"""A rollout node: joins the pool of a run, plays episodes, and only ever opens connections outward.

                     ┌───────────── leases ──────────────┐              versions
    dataflow service │                                   ▼                 │
          ▲   ▲      └── lease loop   runner ─► workers ─► gateway ─► engine ◄── weight loops ──► weight stores
          │   │                         │
          │   └──────── commit loop ◄───┘ finished episodes
          └──────────── heartbeat loop: I live, what I have done; cancelled episodes, new versions, the end

| loop      | waits for                      | woken by                                            | limit         |
|-----------|--------------------------------|-----------------------------------------------------|---------------|
| lease     | an eighth of the places free   | an episode ends; the service has one (long poll)    | 20 s a poll   |
| heartbeat | `heartbeat_s`                  | a timer                                             | -             |
| weights   | a version newer than in force  | a heartbeat or lease reply that announces one       | backoff 8 s   |
| commit    | a finished episode             | an episode ends                                     | -             |
| pool      | a worker that hangs or is gone | a timer                                             | `PoolLimits`  |

A loop that ends by an error ends the node, by name. The service may be away for `give_up_s`: episodes in play go on and
are committed afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from astraflow.config.env import cache_dir
from astraflow.config.schema import RunConfig
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import AstraFlowError, Unreachable, WireError
from astraflow.rollout.commit import Committer, Reach
from astraflow.rollout.gateway.app import create_app
from astraflow.rollout.gateway.core import Gateway
from astraflow.rollout.loop import in_thread, run_loop
from astraflow.rollout.policies import PolicyOptions, Weights, start_policy
from astraflow.rollout.pool import PoolLimits, WorkerPool
from astraflow.rollout.runner import Runner, RunnerOptions
from astraflow.rollout.worker.channel import Hello
