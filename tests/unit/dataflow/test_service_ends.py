"""The service stops, dies, has no room, or starts again, with the same settings or others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import Unreachable, WireError
from astraflow.testing.dataflow import Rows, episode, small_config, sources
from astraflow.wire import messages as m
from astraflow.wire.codec import CONTENT_TYPE
from service_steps import play, reward_of, status_of, step

Serve = Callable[..., Any]
ARROW = {"content-type": CONTENT_TYPE}


def test_a_service_that_stops_asks_who_waits_to_come_back_after_a_pause(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = {"type": "astraflow.testing.stages:EchoStage", "workers": 0, "rows": 1024}
    service = serve(small_config(consumers={"log": {}}, stages={"s": stage}))
    client = service.start()
    play(client, 4)
    calls: list[Callable[[DataflowClient], Any]] = [
        lambda x: x.batch("actor", "t", 0, wait_s=30),
        lambda x: x.consume("log", "actor", wait_s=30),
        lambda x: x.stage_lease("s", "w2", 4, wait_s=30),
    ]
    assert len(client.stage_lease("s", "w", 1024)[0].leases) == 4  # nothing is left for w2
    arrived, wait = threading.Semaphore(0), service.shell.wait

    def waits(topic: str, timeout_s: float) -> Any:
        arrived.release()
        return wait(topic, timeout_s)

    monkeypatch.setattr(service.shell, "wait", waits)
    with ThreadPoolExecutor() as pool:
        waiting = [pool.submit(call, service.client(give_up_s=0.0)) for call in calls]
        assert all(arrived.acquire(timeout=60) for _ in calls)
        service.close()
        errors = [future.exception(10) for future in waiting]
    for error in errors:
        assert isinstance(error, Unreachable) and (error.status, error.pause_s) == (503, 1.0), error
        assert "dataflow=stopping answers nobody who waits; ask again" in str(error)


def test_a_restart_goes_on_where_the_service_was(serve: Serve, tmp_path: Path) -> None:
    config = small_config(dataflow__snapshot_every=10)
    first = serve(config)
    client = first.start()
    run_id = client.run().run_id
    play(client, 4)
    seen = step(client, 0)
    leases = client.lease("n", 2).leases
    before = client.status()
    first.close()
    second = serve(config)
    client = second.client()
    assert client.run().run_id == run_id
    after = client.status()
    for key in ("accounting", "episodes", "sources"):
        assert after[key] == before[key]
    assert after["time_s"] >= before["time_s"]
    assert set(client.commit([episode(x, "n", reward_of(x), 1) for x in leases]).values()) == {"accepted"}
    assert set(client.commit([episode(x, "n", reward_of(x), 1) for x in leases]).values()) == {"duplicate"}
    client.resume("actor", m.Resume(trainer_id="t", version=0, urls=(), run_id=run_id))
    got = client.batch("actor", "t", 0)
    assert got is not None and got[0].replay and got[1].column("episode_id").to_pylist() == seen
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 1


def test_changed_settings_that_are_allowed_apply_after_a_restart(serve: Serve) -> None:
    first = serve(small_config(run__steps=1))
    client = first.start()
    play(client, 4)
    step(client, 0)
    assert client.run().finished
    first.close()
    client = serve(small_config(run__steps=2)).start(version=1)
    assert not client.run().finished
    play(client, 4, 1)
    assert len(step(client, 1)) == 4
    assert client.run().finished


def test_a_full_disk_is_507_and_nothing_is_lost(serve: Serve) -> None:
    service = serve(small_config())
    client = service.start()
    leases = client.lease("n", 2).leases
    database = service.shell.journal._db
    service.call(lambda: database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall())
    pages = service.call(lambda: database.execute("PRAGMA page_count").fetchone()[0])
    service.call(lambda: database.execute(f"PRAGMA max_page_count={pages}").fetchall())
    episodes = [episode(x, "n", reward_of(x)) for x in leases]
    hasty = DataflowClient(service.url, give_up_s=0.1)
    assert status_of(lambda: hasty.commit(_padded(episodes))) == 507
    assert client.status()["episodes"]["committed"] == 0
    before = client._http.num_retries
    with ThreadPoolExecutor(1) as sender:
        results = sender.submit(client.commit, _padded(episodes))
        while client._http.num_retries < before + 2:
            assert not results.done()
            threading.Event().wait(0.01)
        service.call(lambda: database.execute("PRAGMA max_page_count=100000").fetchall())
        assert set(results.result(60).values()) == {"accepted"}
    hasty.close()


def _padded(episodes: list[Any]) -> list[Any]:
    return [type(e)(**{**{f: getattr(e, f) for f in e.__struct_fields__}, "metrics": {"x" * 9000: 1.0}})
            for e in episodes]  # fmt: skip


def test_a_background_task_that_dies_ends_the_service_by_name(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    service = serve(small_config(dataflow__heartbeat_s=0.05))

    def broken(now: float) -> None:
        raise ZeroDivisionError("tick is broken")

    monkeypatch.setattr(service.shell.machine, "due", broken)
    service.wait_for_end()
    assert isinstance(service.error, ZeroDivisionError)
    assert "dataflow tick died" in service.error.__notes__


def test_a_machine_that_dies_ends_the_service_by_name_with_the_command_it_died_of(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = serve(small_config())
    client = service.start()

    def broken(command: Any) -> None:
        raise ZeroDivisionError("the machine is broken")

    monkeypatch.setattr(service.shell.machine.leases, "commit", broken)
    leases = client.lease("n", 2).leases
    with pytest.raises(WireError):
        client.commit([episode(x, "n") for x in leases])
    service.wait_for_end()
    error = service.error
    assert isinstance(error.__cause__, ZeroDivisionError) and "dataflow machine died" in error.__notes__
    assert "command 4 (CommitEpisodes)=ZeroDivisionError: the machine is broken" in str(error)


def test_other_data_is_refused_at_a_restart(serve: Serve, tmp_path: Path) -> None:
    from astraflow.errors import JournalError

    serve(small_config()).close()
    with pytest.raises(JournalError, match=r"sources\.train="):
        serve(small_config(), rows=sources(salt="changed"))
    with pytest.raises(JournalError, match=r"workflow\.group_size="):
        serve(small_config(workflow__group_size=4))
    serve(small_config(), rows={"train": Rows(), "held": Rows(3)}).close()


def test_a_list_of_operators_cannot_change_within_a_run_directory(serve: Serve) -> None:
    from astraflow.errors import JournalError

    greso = {"type": "sums", "operators": ["greso"]}
    serve(small_config(sources__train=greso)).close()
    with pytest.raises(JournalError, match=r"sources\.train\.operators="):
        serve(small_config())
    serve(small_config(sources__train=greso)).close()
