"""A byte that flips in a segment: the groups that need it are dropped by name, everything else goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from astraflow.dataflow.client import DataflowClient
from astraflow.dataflow.machine import commands as c
from astraflow.dataflow.shell import Shell
from astraflow.dataflow.storage.segments import ReadRowsDamaged
from astraflow.testing.dataflow import Desk, check_law, episode, policy_section, small_config, sources, trajectory
from astraflow.testing.stages import EchoStage
from astraflow.types import Episode, EpisodeLease
from astraflow.wire import messages as m

CONFIG = small_config(run__steps=100, policies__actor__operators=["keep_all"])


def flip(run_dir: Path, at: int = 700) -> None:
    """One bit of the newest segment with rows."""
    path = max((p for p in (run_dir / "dataflow" / "segments").iterdir() if p.stat().st_size > at), key=str)
    content = bytearray(path.read_bytes())
    content[at] ^= 4
    with path.open("r+b") as file:
        file.write(content)


def play(client: DataflowClient, n: int, version: int = 0) -> None:
    """Lease and commit, one request for each group of two episodes."""
    leases = client.lease("n", n, wait_s=1.0).leases
    for i in range(0, len(leases), 2):
        client.commit([episode(x, "n", float(k), version) for k, x in enumerate(leases[i : i + 2])])


def test_a_damaged_group_is_dropped_when_its_batch_is_read_and_the_batch_is_filled_up(
    serve: Any, tmp_path: Path
) -> None:
    service = serve(CONFIG)
    client = service.start()
    play(client, 2)
    flip(tmp_path)  # in the only group so far
    play(client, 2)
    header, table = client.batch("actor", "t", 0)
    assert header.num_groups == 1 and table.num_rows == header.num_rows == 2
    status = client.status()
    assert status["policies"]["actor"]["accounting"]["dropped"] == {"damaged": 1}
    assert status["imbalance"] == {"tasks": 0, "groups": {"actor": 0}} and status["failure"] is None
    client.ack(header, "t")
    for version in (1, 2, 3):
        play(client, 8, version)
        header, _ = client.batch("actor", "t", version, wait_s=5.0)
        assert header.num_groups == 2
        client.ack(header, "t")


def test_a_batch_that_is_damaged_altogether_is_formed_anew(serve: Any, tmp_path: Path) -> None:
    service = serve(CONFIG)
    client = service.start()
    leases = client.lease("n", 4).leases
    client.commit([episode(x, "n", float(i % 2)) for i, x in enumerate(leases)])  # two groups in one body
    flip(tmp_path)
    assert client.batch("actor", "t", 0) is None
    assert client.status()["policies"]["actor"]["accounting"]["dropped"] == {"damaged": 2}
    play(client, 8)
    header, _ = client.batch("actor", "t", 0, wait_s=5.0)
    assert header.step == 1 and header.num_groups == 2


def test_what_was_trained_stays_trained_when_its_rows_cannot_be_served_again(serve: Any, tmp_path: Path) -> None:
    service = serve(CONFIG)
    client = service.start()
    play(client, 2)
    play(client, 2)
    header, _ = client.batch("actor", "t", 0)
    client.ack(header, "t")
    service.close()
    flip(tmp_path)
    again = serve(CONFIG)
    client = again.start()  # the trainer resumes at version 0, before the batch
    header, table = client.batch("actor", "t", 0)
    assert header.replay and header.num_groups == 1 and table.num_rows == 2
    account = client.status()["policies"]["actor"]["accounting"]
    assert (account["trained"], account["dropped"]) == (2, {})
    again.call(lambda: check_law(again.shell.machine, damaged=True))


def test_a_trained_batch_of_which_nothing_is_left_fails_the_run_with_advice() -> None:
    desk = Desk(small_config(run__steps=5, policies={"actor": policy_section(1, 1, operators=["keep_all"])}))
    desk.start("n")
    desk.play(2)
    desk.step(0)
    (key,) = desk.machine.state.puts
    desk.do(c.DropDamaged([key], "segment 1"))
    failure = desk.machine.state.failure
    assert failure is not None and "resume the trainer from a newer checkpoint" in str(failure)
    check_law(desk.machine, damaged=True)


def test_stages_and_consumers_go_on_without_the_damaged_group(serve: Any, tmp_path: Path) -> None:
    config = small_config(
        run__steps=100, policies__actor__operators=["keep_all"], consumers={"log": {}},
        stages={"echo": {"type": "astraflow.testing.stages:EchoStage"}},
    )  # fmt: skip
    client = serve(config).start()
    play(client, 2)
    flip(tmp_path)
    play(client, 2)
    rows, table = client.stage_lease("echo", "w", 10)
    assert len(rows.leases) == table.num_rows == 2, "those of the other group"
    columns = EchoStage().run(table)
    leases = [(x.entry_id, x.attempt) for x in rows.leases]
    header = m.ColumnsHeader(worker_id="w", request_id="q", leases=leases, row_ids=rows.row_ids)
    assert set(client.stage_columns("echo", header, columns).values()) == {"accepted"}
    flip(tmp_path, at=300)
    got = client.consume("log", "actor", 10)
    assert got is not None and client.status()["policies"]["actor"]["accounting"]["dropped"]["damaged"] >= 1


@pytest.mark.parametrize("at", [65, 900])
def test_damage_is_told_as_an_alarm(serve: Any, tmp_path: Path, at: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    client = serve(CONFIG).start()
    play(client, 4)
    flip(tmp_path, at)
    client.batch("actor", "t", 0)
    assert "alarm damaged=" in caplog.text and ".arrow: is damaged between byte" in caplog.text


DEDUP = small_config(run__steps=100, policies__actor__operators=["keep_all", "dedup"])


def killed(service: Any, run_dir: Path, to: Path) -> Path:
    """What a kill of the service would leave behind now."""
    service.call(lambda: shutil.copytree(run_dir, to))
    return to


def unlike(lease: EpisodeLease) -> Episode:
    """Another answer than that of its sibling."""
    return episode(lease, "n", trajectories=[trajectory(1.0, marker=10 + int(lease.episode_id[-1]))])


def trained_once(serve: Any, run_dir: Path) -> Any:
    service = serve(DEDUP, run_dir)
    client = service.start()
    client.commit([unlike(x) for x in client.lease("n", 4).leases])
    header, _ = client.batch("actor", "t", 0)
    client.ack(header, "t")
    return service


def account_of(shell: Shell) -> tuple[int, int, dict[str, int]]:
    policy = shell.machine.state.policies["actor"]
    return policy.latest, policy.trained, policy.dropped


@pytest.mark.parametrize("what", ["flipped", "cut", "gone"])
def test_a_start_that_cannot_read_what_operators_read_refuses_and_changes_nothing(
    serve: Any, tmp_path: Path, what: str
) -> None:
    image = killed(trained_once(serve, tmp_path / "run"), tmp_path / "run", tmp_path / "image")
    (segment,) = (p for p in (image / "dataflow" / "segments").iterdir() if p.stat().st_size)
    content = segment.read_bytes()
    if what == "gone":
        segment.unlink()
    else:
        segment.write_bytes(content[: len(content) // 2] if what == "cut" else content[:700] + b"!" + content[701:])
    for _ in range(2):
        with pytest.raises(ReadRowsDamaged, match=r"an operator reads tokens there .*--accept-damage") as refusal:
            Shell(DEDUP, image, sources())
        assert refusal.value.exit_code == 2 and segment.exists() is (what != "gone")
    segment.write_bytes(content)
    shell = Shell(DEDUP, image, sources())
    assert account_of(shell) == (1, 2, {})
    shell.close()


def test_with_accept_damage_a_start_goes_on_without_what_operators_read(serve: Any, tmp_path: Path) -> None:
    image = killed(trained_once(serve, tmp_path / "run"), tmp_path / "run", tmp_path / "image")
    flip(image)
    for accept_damage in (True, False):  # once is enough
        shell = Shell(DEDUP, image, sources(), accept_damage=accept_damage)
        assert account_of(shell) == (0, 0, {"damaged": 2})
        check_law(shell.machine)
        shell.close()


def test_groups_that_could_not_be_judged_the_first_time_stop_no_start(serve: Any, tmp_path: Path) -> None:
    service = serve(DEDUP, tmp_path / "run")
    client = service.start()
    leases = client.lease("n", 2).leases
    client.commit([unlike(leases[0])])
    flip(tmp_path / "run")
    client.commit([unlike(leases[1])])
    image = killed(service, tmp_path / "run", tmp_path / "image")
    shell = Shell(DEDUP, image, sources())
    assert account_of(shell) == (0, 0, {"damaged": 1})
    shell.close()
