"""Fault drills of the weight plane: readers, publishers, relays and links that fail in the middle of a version.

Each drill gives one line of the table of `make faults`: what was done, what was seen, and what was wrong with it.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from astraflow.errors import WeightError
from astraflow.testing import forked
from astraflow.testing.faults.weight_actors import KEEP, LIMIT_S, POLICY, Popen, known, model, relaying, start
from astraflow.testing.network.pacing import Conditions
from astraflow.testing.network.shaper import Shaper
from astraflow.testing.runs import wait_until
from astraflow.testing.services import serving_weights
from astraflow.testing.weights import same_bits
from astraflow.types import WeightVersion
from astraflow.weights.client import Fetched, WeightClient
from astraflow.weights.files.build import Base
from astraflow.weights.store import FileStore

ELEMENTS = 6 << 20  # bfloat16: 12 MiB
_WINDOW = 1 << 18
LINK = Conditions(bits_per_s=200e6, delay_s=0.005, window_bytes=_WINDOW)


@dataclass
class Outcome:
    """One drill. `seen`: in words, with figures; `problems`: sentences about what is wrong."""

    name: str
    seen: str = ""
    problems: list[str] = field(default_factory=list)
    wall_s: float = 0.0

    def must(self, holds: bool, rule: str) -> None:
        """Note a broken rule."""
        if not holds:
            self.problems.append(rule)


Drill = Callable[[Path], Outcome]


def reader_killed(place: Path, popen: Popen = forked.popen, kills: int = 2) -> Outcome:
    """`kill -9` of a reader at a third and two thirds of a version; the next process goes on where it was."""
    outcome = Outcome(f"reader killed {kills} times mid-fetch, started again")
    store = _publish(place, 0)
    nbytes = store.infos()[0].full_nbytes
    with serving_weights(place) as direct, Shaper(LINK) as link:
        url = link.forward(f"{direct}/weights/{POLICY}")
        words = ("read", url, "0", str(place / "spool"), str(place / "result.json"))
        for kill in range(1, kills + 1):
            reader = _actor(popen, place, *words)
            wait_until(lambda k=kill: link.traffic().down >= nbytes * k // (kills + 1), "bytes to come", LIMIT_S)  # type: ignore[misc]
            reader.kill()
            outcome.must(reader.wait(LIMIT_S) == -signal.SIGKILL, "the reader was done before it was killed")
        reader = _actor(popen, place, *words)
        outcome.must(reader.wait(LIMIT_S) == 0, f"the last reader failed: {_log(place)}")
        more = link.traffic().down - nbytes
    result = json.loads((place / "result.json").read_text())
    outcome.must(result["checksums"] == known(store.manifest(0).tensors), "the content differs")
    allowed = kills * (_WINDOW + (1 << 20))  # what was under way: on the link, in the buffers of sockets
    outcome.must(more <= allowed, f"{more} bytes came twice, {allowed} were under way at most")
    outcome.seen = f"{nbytes / 1e6:.1f} MB needed, {more / 1e6:.2f} MB more passed the link (under way at a kill)"
    return outcome


def publisher_killed(place: Path, popen: Popen = forked.popen, kills: int = 24, seed: int = 0) -> Outcome:
    """`kill -9` of a publisher at random moments; all that is visible stays whole, and the next one goes on."""
    outcome, chance, halfway, newest = Outcome(f"publisher killed {kills} times"), random.Random(seed), 0, -1
    store, log = FileStore(place, POLICY), place / "began"
    log.touch()
    for kill in range(kills):
        begun = len(log.read_text().splitlines())
        publisher = _actor(popen, place, "publish", str(place), str(newest + 1), "100000", str(log))
        wait_until(lambda n=begun: len(log.read_text().splitlines()) > n, "a version to begin", LIMIT_S)  # type: ignore[misc]
        if kill % 2:
            threading.Event().wait(chance.uniform(0.0, 0.12))
        else:
            _until_halfway(store.directory)
        publisher.kill()
        publisher.wait(LIMIT_S)
        halfway += bool(_half_done(store.directory))
        before, newest = newest, max(store.versions(), default=-1)
        outcome.must(newest >= before, f"version {before} was there and is gone")
        for version in store.versions()[-KEEP:]:
            outcome.must(same_bits(store.fetch(version), model(version)), f"version {version} is not what it was")
    last = _actor(popen, place, "publish", str(place), str(newest + 1), str(newest + 1), str(log))
    outcome.must(last.wait(LIMIT_S) == 0, f"the last publisher failed: {_log(place)}")
    outcome.must(halfway > 0, "no kill came in the middle of a version: nothing was tried")
    left = _half_done(store.directory)
    outcome.must(not left, f"{left} stayed behind")
    outcome.must(store.versions()[-1] == newest + 1, "the publisher that came back did not go on")
    outcome.seen = f"{newest + 2} versions, {halfway} kills left something half done; all visible ones are whole"
    return outcome


def byte_flipped(place: Path) -> Outcome:
    """A wrong bit in transit, in a delta on disk, and in a full part on disk."""
    outcome = Outcome("byte flipped: in transit, in a delta, in a full part")
    store = _publish(place, 0, 1, full_every=1)
    client = WeightClient()
    with serving_weights(place) as direct, Shaper() as link:
        url = link.forward(f"{direct}/weights/{POLICY}")
        link.flip(url, store.infos()[0].full_nbytes // 2)
        held = client.fetch(WeightVersion(POLICY, 0, (url,)))
        outcome.must(same_bits(held.tensors, model(0, ELEMENTS)), "a bit that was flipped in transit stayed")
        outcome.must(client.counts["torn_parts"] == 1, "the flip in transit was not counted")
        _flip(store.directory / "1" / "delta-00000.bin")
        held = client.fetch(WeightVersion(POLICY, 1, (url,)), held)
        outcome.must(same_bits(held.tensors, model(1, ELEMENTS)), "a damaged delta was applied")
        outcome.must(client.counts["refused_deltas"] == 1, "the damaged delta was not counted")
        _flip(store.directory / "1" / "model.safetensors")
        error = _error(lambda: client.fetch(WeightVersion(POLICY, 1, (url,))))
        outcome.must("checksum" in error, f"the damaged part is not what the error says: {error}")
    outcome.seen = "read again; fetched in full instead; refused by its checksum"
    client.close()
    return outcome


def wrong_base(place: Path) -> Outcome:
    """A reader that holds something else than the base of a delta gets the version whole."""
    outcome = Outcome("reader with a wrong base")
    _publish(place, 0, 1, full_every=1)
    client = WeightClient()
    with serving_weights(place) as url:
        wanted = WeightVersion(POLICY, 1, (f"{url}/weights/{POLICY}",))
        held = client.fetch(WeightVersion(POLICY, 0, wanted.urls))
        held.tensors["w"][7] += 1
        fetched = client.fetch(wanted, held)
    outcome.must(same_bits(fetched.tensors, model(1, ELEMENTS)), "the delta was applied to a wrong base")
    outcome.must(client.counts["refused_deltas"] == 1, "the refusal was not counted")
    outcome.seen = "refused, counted, fetched in full"
    client.close()
    return outcome


def version_deleted(place: Path) -> Outcome:
    """A version with a reader is not retired; of one that is removed by force the reader is told, and goes on."""
    outcome = Outcome("version deleted under a reader")
    store = _publish(place, 0, keep=2)
    client = WeightClient(give_up_s=0.5)
    with serving_weights(place) as direct, Shaper(Conditions(20e6, 0.0, _WINDOW)) as link:
        url = link.forward(f"{direct}/weights/{POLICY}")
        with _fetching(client, WeightVersion(POLICY, 0, (url,))) as found:
            wait_until(lambda: link.traffic().down > 1 << 20, "bytes to come", LIMIT_S)
            for version in range(1, 5):
                store.publish(version, model(version, ELEMENTS))
            outcome.must(0 in store.versions(), "a version was retired while it was read")
            link.change(Conditions())
        outcome.must(same_bits(found[0].tensors, model(0, ELEMENTS)), "what it read is not what was published")
        store.publish(5, model(5, ELEMENTS))
        outcome.must(0 in store.versions(), "its lease ended before its time")
        for lease in (store.directory / ".readers").glob("0.*"):  # a minute later
            os.utime(lease, (0.0, 0.0))
        store.publish(5, model(5, ELEMENTS))
        outcome.must(0 not in store.versions(), "a version that nobody reads any more stayed")
        link.change(Conditions(20e6, 0.0, _WINDOW))
        before = link.traffic().down
        with _fetching(client, WeightVersion(POLICY, 4, (url,))) as found:
            wait_until(lambda: link.traffic().down > before + (1 << 20), "bytes to come", LIMIT_S)
            shutil.rmtree(store.directory / "4")
            link.cut()
            link.change(Conditions())
        outcome.must("fetch the newest version" in str(found[1]), f"a deletion by force is not said: {found[1]}")
        newest = client.fetch(WeightVersion(POLICY, 5, (url,)))
        outcome.must(same_bits(newest.tensors, model(5, ELEMENTS)), "the newest version did not come afterwards")
    outcome.seen = "kept while read, retired after; by force: one sentence, and the newest comes"
    client.close()
    return outcome


def relay_lost(place: Path, popen: Popen = forked.popen, readers: int = 3) -> Outcome:
    """`kill -9` of `astraflow relay` and its server amid parts: its readers go on with the trainer where they were."""
    outcome = Outcome(f"astraflow relay lost mid-fetch of {readers} readers")
    nbytes = readers * _publish(place / "origin", 0).infos()[0].full_nbytes
    with serving_weights(place / "origin") as direct, Shaper(LINK) as near, ExitStack() as more:
        far = more.enter_context(Shaper(Conditions(LINK.bits_per_s, 0.1)))
        origin = far.forward(f"{direct}/weights/{POLICY}")
        told, relay = more.enter_context(relaying(place, origin, near, popen))
        before, wanted = far.traffic().down, told()
        clients = [WeightClient(spool=place / f"spool{i}", give_up_s=0.5) for i in range(readers)]
        with ExitStack() as fetches:
            found = [fetches.enter_context(_fetching(client, wanted)) for client in clients]
            wait_until(lambda: near.traffic().down > nbytes // 2, "half of it to come from the relay", LIMIT_S)
            os.killpg(relay.pid, signal.SIGKILL)
            outcome.must(relay.wait(LIMIT_S) == -signal.SIGKILL, f"the relay had ended: {_log(place)}")
        by_relay, by_trainer = near.traffic().down, far.traffic().down - before
        wait_until(lambda: told().urls == (origin,), "the relay to be forgotten", LIMIT_S)
        failed = sum(client.counts["failed_stores"] for client in clients)
        for client in clients:
            client.close()
    for fetched, error in found:
        outcome.must(error is None, f"a fetch failed: {error}")
        outcome.must(bool(fetched) and same_bits(fetched.tensors, model(0, ELEMENTS)), "the content differs")
    outcome.must(failed == readers, f"{failed} readers lost the relay: not all were tried")
    allowed = nbytes - by_relay + readers * (_WINDOW + (1 << 20))
    outcome.must(by_trainer <= allowed, f"{by_trainer} bytes came from the trainer, at most {allowed} were missing")
    outcome.seen = f"{by_relay / 1e6:.1f} MB from the relay, the other {by_trainer / 1e6:.1f} MB from the trainer"
    return outcome


def slow_reader(place: Path, readers: int = 8) -> Outcome:
    """One reader at 1 kB/s beside eight others: they are as fast as without it, and it is not cut."""
    outcome = Outcome(f"a reader at 1 kB/s beside {readers} others")
    _publish(place, 0)
    with serving_weights(place) as direct, Shaper() as link:
        url = f"{direct}/weights/{POLICY}"
        slow = link.forward(url, connection_bits_per_s=8000.0)
        alone = _times(url, readers)
        client = WeightClient()
        with _fetching(client, WeightVersion(POLICY, 0, (slow,))) as found:
            wait_until(lambda: link.traffic().down > 1000, "the slow one to be served", LIMIT_S)
            beside, began = _times(url, readers), link.traffic()
            wait_until(lambda: link.traffic().down > began.down + 1000, "the slow one to go on", LIMIT_S)
            outcome.must(link.traffic().connections == 1, "the slow reader had to connect again")
            client.close()
            link.refuse(3600.0)
            link.cut()
    outcome.must(found[0] is None, "the slow reader was not slow")
    allowed = 4 * max(alone) + 2.0  # of a machine that does other things too; a reader that waits for it takes minutes
    outcome.must(max(beside) <= allowed, f"beside it a fetch took {max(beside):.1f} s, {allowed:.1f} s are allowed")
    shown = " ".join(f"{seconds:.2f}" for seconds in beside)
    outcome.seen = f"the others: {shown} s; without it {max(alone):.2f} s at most"
    return outcome


def stalled_link(place: Path) -> Outcome:
    """Nothing comes any more: the reader says so after its limit without a byte (30 s, four times, in a run)."""
    outcome = Outcome("link stalls for good")
    _publish(place, 0)
    with serving_weights(place) as direct, Shaper(LINK) as link:
        url = link.forward(f"{direct}/weights/{POLICY}")
        client = WeightClient(timeout_s=0.3, give_up_s=0.3)
        begin = time.monotonic()
        with _fetching(client, WeightVersion(POLICY, 0, (url,))) as found:
            wait_until(lambda: link.traffic().down > 1 << 20, "bytes to come", LIMIT_S)
            link.stall()
        took = time.monotonic() - begin
        outcome.must("no byte came" in str(found[1]), f"the error does not say it: {found[1]}")
        link.go_on()
        fetched = client.fetch(WeightVersion(POLICY, 0, (url,)))
        outcome.must(same_bits(fetched.tensors, model(0, ELEMENTS)), "it does not go on after the stall")
        client.close()
    outcome.seen = f"with a limit of 0.3 s an error after {took:.1f} s; in a run 30 s without a byte, 4 times"
    return outcome


DRILLS: tuple[Drill, ...] = (
    reader_killed, publisher_killed, byte_flipped, wrong_base, version_deleted, relay_lost, slow_reader, stalled_link,
)  # fmt: skip


def run(drill: Drill, place: Path) -> Outcome:
    """One drill in a directory of its own."""
    place.mkdir(parents=True)
    begin = time.monotonic()
    outcome = drill(place)
    outcome.wall_s = time.monotonic() - begin
    return outcome


def _publish(root: Path, *versions: int, keep: int = 0, full_every: int = 50) -> FileStore:
    store, base = FileStore(root, POLICY, keep=keep, full_every=full_every, durable=False), None
    for version in versions:
        tensors = model(version, ELEMENTS)
        content = store.publish(version, tensors, base=base)
        base = Base(version, tensors, known(content.tensors))
    return store


def _actor(popen: Popen, place: Path, *words: str) -> Any:
    return start(popen, place, [sys.executable, "-m", "astraflow.testing.faults.weight_actors", *words])


def _log(place: Path) -> str:
    return (place / "actors.log").read_text(errors="replace")[-500:]


@contextmanager
def _fetching(client: WeightClient, wanted: WeightVersion) -> Iterator[list[Any]]:
    """A fetch in a thread while the block runs, then waited for: [what came or None, the error or None]."""
    found: list[Any] = [None, None]

    def fetch() -> None:
        try:
            found[0] = client.fetch(wanted)
        except WeightError as error:
            found[1] = error

    thread = threading.Thread(target=fetch, name="reader")
    thread.start()
    yield found
    thread.join(LIMIT_S)
    if thread.is_alive():
        raise WeightError("fetch", wanted.version, f"did not end in {LIMIT_S:g} s", "see the drill")


def _error(fetch: Callable[[], Fetched]) -> str:
    try:
        fetch()
    except WeightError as error:
        return str(error)
    return "none"


def _times(url: str, readers: int) -> list[float]:
    """Seconds of so many fetches at once. Raises: WeightError: one failed. TimeoutError: one did not end."""

    def fetch(client: WeightClient) -> float:
        begin = time.monotonic()
        client.fetch(WeightVersion(POLICY, 0, (url,)))
        return time.monotonic() - begin

    clients = [WeightClient() for _ in range(readers)]
    pool = ThreadPoolExecutor(readers, "reader")
    try:
        return list(pool.map(fetch, clients, timeout=LIMIT_S))
    finally:
        for client in clients:
            client.close()
        pool.shutdown(wait=False)


def _half_done(directory: Path) -> list[str]:
    return [item.name for item in directory.glob(".tmp-*")]


def _until_halfway(directory: Path) -> None:
    """A version takes a few milliseconds, so this looks without a pause."""
    before, deadline = _half_done(directory), time.monotonic() + LIMIT_S
    while set(_half_done(directory)) <= set(before):
        if time.monotonic() > deadline:
            raise WeightError("directory", str(directory), f"had no half version in {LIMIT_S:g} s", "see the drill")


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.unlink()  # a reader may have it mapped
    path.write_bytes(content)
