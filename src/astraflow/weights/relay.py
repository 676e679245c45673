"""A relay: fetches each version once and serves it to the nodes of its region.

```
 trainer's store ──one copy──► relay's directory ──► weights server ──► nodes nearby
                                     └─ POST /relays/{id}: dataflow tells nodes of it ─┘
```
A version travels on as it came, whole or as changes; the relay needs neither torch nor the model.
"""

from __future__ import annotations

import logging
import threading
import uuid
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec

from astraflow.config.load import config_from_json
from astraflow.config.secrets import masked_url
from astraflow.dataflow.client import DataflowClient
from astraflow.errors import AstraFlowError, LaunchError, WeightError
from astraflow.types import WeightVersion
from astraflow.weights.client import ANNOUNCED_WAIT_S, WeightClient
from astraflow.weights.manifest import is_policy_name
from astraflow.weights.plan import full_is_due
from astraflow.weights.server import start_server
from astraflow.weights.store import FileStore, since_full
from astraflow.wire import messages as m
from astraflow.wire.patience import FIRST_ANSWER_S, RETRY_S, Stopped, ask_patiently

log = logging.getLogger("astraflow.relay")
_PAUSE_S, _MAX_PAUSE_S = 0.5, 8.0


@dataclass(frozen=True)
class RelayOptions:
    """Where a relay keeps and serves what it copies."""

    directory: Path
    host: str = "127.0.0.1"  # beyond loopback needs a token
    port: int = 0
    url: str = ""  # by which nodes reach the server; empty: as it listens


class _Told(NamedTuple):
    newest: WeightVersion
    trainer: str  # who announced it; another one may have taken its steps again


class Follower:
    """Copies the newest version of one policy, again and again, in a thread of its own."""

    def __init__(self, store: FileStore, client: WeightClient, stop: threading.Event) -> None:
        self.store, self._client, self._stop = store, client, stop
        self._told = _Told(WeightVersion(store.policy, -1), "")
        self._sure_of: str | None = None  # whose versions `store` has
        self._news = threading.Event()
        self.num_failures = 0
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=f"relay-{store.policy}", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """The newest that can be fetched here; -1: none."""
        return max(self.store.versions(), default=-1)

    @property
    def trainer(self) -> str | None:
        """Whose versions these are; "": not known yet; None: there are none."""
        return (self._sure_of or "") if self.store.versions() else None

    def announce(self, newest: WeightVersion, trainer: str) -> None:
        """There is this version, and `trainer` (`RelayReply.trainers`) made it."""
        told = _Told(newest, trainer)
        if told != self._told:
            self._told = told
            self._news.set()

    def join(self, seconds: float) -> None:
        """Wait for the thread, after `stop`."""
        self._news.set()
        self._thread.join(seconds)

    def check(self) -> None:
        """Raises: WeightError: the thread has ended, and nothing more would come."""
        if self._failure is not None:
            what = f"stopped with {type(self._failure).__name__}: {self._failure}"
            raise WeightError("relay of policy", self.store.policy, what, "start it again") from self._failure

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:  # of no store: handed to the thread of the relay, which ends
            self._failure = error

    def _follow(self) -> None:
        pause_s, done = _PAUSE_S, -1
        while not self._stop.is_set():
            newest, trainer = self._told
            unsure = trainer != self._sure_of or newest.version < done
            if newest.version < 0 or (newest.version <= self.version and not unsure):
                self._news.wait(1.0)
                self._news.clear()
                continue
            try:
                url = self._client.copy(newest, self.store, partial(self._is_sure, trainer) if unsure else None)
                done = newest.version
                self._complete(newest, url)
            except (AstraFlowError, OSError) as error:
                self.num_failures += 1
                log.warning("%s", error)
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, _MAX_PAUSE_S)
            else:
                pause_s = _PAUSE_S

    def _is_sure(self, trainer: str) -> None:
        self._sure_of = trainer

    def _complete(self, wanted: WeightVersion, url: str) -> None:
        """Now and then all tensors, after the changes are there for the nodes: else the chain here would never end."""
        chain = since_full(self.store.infos(), wanted.version)
        full = chain[0].full_nbytes if chain else 0
        if len(chain) > 1 and full_is_due(chain, 0, full, self.store.full_every):
            self._client.complete(wanted, url, self.store)


def run_relay(dataflow: str, options: RelayOptions, *, token: str | None, stop: threading.Event) -> None:
    """Relay the policies of the run that the service at URL `dataflow` serves, until that is over or `stop` is set.

    Raises: AstraFlowError: no answer, a used port, a non-loopback host without a token, a fault in a thread.
    """
    try:
        options.directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(
            "directory", str(options.directory), f"cannot be written ({error.strerror})", "give another --directory"
        ) from error
    client = DataflowClient(dataflow, token, give_up_s=RETRY_S)
    weights = WeightClient(token, wait_s=ANNOUNCED_WAIT_S, spool=options.directory / "spool")
    relay_id, followers = f"relay-{uuid.uuid4().hex[:12]}", dict[str, Follower]()
    try:
        run = ask_patiently(client.run, stop, FIRST_ANSWER_S)
        kept = config_from_json(msgspec.json.encode(run.config)).weights
        root = options.directory / run.run_id
        root.mkdir(parents=True, exist_ok=True)
        server = start_server(root, options.host, options.port, token)
        log.info("relays run %s at %s", run.run, masked_url(options.url or server.url))
        known, wait_s = dict[str, int](), 0.0

        def follow(policy: str) -> Follower:
            store = FileStore(root, policy, keep=kept.keep, full_every=kept.full_every, durable=False)
            return followers.setdefault(policy, Follower(store, weights, stop))

        try:
            for item in root.iterdir():  # of a relay that starts again
                if item.is_dir() and is_policy_name(item.name):
                    follow(item.name)
            while not stop.is_set():
                server.ensure()
                for follower in followers.values():
                    follower.check()
                told = m.Relay(
                    run_id=run.run_id, url=options.url or server.url, known=known, wait_s=wait_s,
                    holds={name: f.trainer for name, f in followers.items() if f.trainer is not None},
                )  # fmt: skip
                reply = ask_patiently(lambda: client.relay(relay_id, told), stop)  # noqa: B023
                if reply.finished:
                    log.info("run %s is over", run.run)
                    return
                for name, newest in reply.versions.items():
                    follower = followers.get(name) or follow(name)
                    follower.announce(newest, reply.trainers.get(name, ""))
                known = {name: newest.version for name, newest in reply.versions.items()}
                wait_s = min(reply.heartbeat_s, 1.0)  # a stop is seen after that
        finally:
            server.stop()
    except Stopped:
        return
    finally:
        stop.set()
        weights.close()
        for follower in followers.values():
            follower.join(5.0)
        client.close()
