"""The swarm protocol in plain JSON, as a client in any language speaks it, against a real door."""

from __future__ import annotations

import http.client
import json
import threading
import time

import pytest

from swarm_door import DoorBench, lease


class Plain:
    """Nothing but HTTP and JSON."""

    def __init__(self, url, client="c", token=None):
        self.address = url.removeprefix("http://")
        self.client, self.token = client, token

    def send(self, method, path, body=None, *, raw=None, headers=None):
        connection = http.client.HTTPConnection(self.address, timeout=60)
        data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
        head = {"content-type": "application/json", **(headers or {})}
        if self.token:
            head["authorization"] = f"Bearer {self.token}"
        connection.request(method, path, data, head)
        reply = connection.getresponse()
        content = reply.read()
        connection.close()
        return reply.status, json.loads(content) if content else None

    def lease(self, count=1, wait_s=5.0, **more):
        status, reply = self.send(
            "POST", "/swarm/leases", {"client": self.client, "count": count, "wait_s": wait_s, **more}
        )
        assert status == 200, reply
        return reply["leases"]

    def call(self, play, model="actor"):
        head = {"authorization": f"Bearer {play['api_key']}"}
        body = {"model": model, "messages": [{"role": "user", "content": "1+1=?"}]}
        return self.send("POST", "/v1/chat/completions", body, headers=head)

    def say(self, play, what, **body):
        path = f"/swarm/episodes/{play['episode_id']}/{what}"
        return self.send("POST", path, {"client": self.client, "attempt": play["attempt"], **body})


@pytest.fixture
def bench():
    with DoorBench([lease(n) for n in range(4)]) as opened:
        yield opened


@pytest.fixture
def plain(bench):
    return Plain(bench.url)


def test_an_episode_is_leased_played_and_handed_in(bench, plain):
    (play,) = plain.lease()
    assert play["task"]["fields"] == {"question": "1+1=?"} and play["policies"] == ["actor", "critic"]
    assert play["base_url"] == f"{bench.url}/v1" and play["attempt"] == 1 and 0 < play["timeout_s"] <= 20
    status, reply = plain.call(play)
    assert status == 200 and reply["choices"][0]["message"]["content"] == "2"
    assert plain.call(play, "critic")[0] == 200
    said = plain.say(play, "finish", rewards={"actor": 1, "critic": 0.5}, metrics={"success": 1}, code="abc")
    assert said == (200, {"result": "accepted", "error": None})
    (episode,) = bench.episodes
    assert {t.policy: t.reward for t in episode.trajectories} == {"actor": 1.0, "critic": 0.5}
    assert (episode.code, episode.error, episode.metrics) == ("abc", None, {"success": 1.0})
    assert plain.call(play)[0] == 410


def test_the_host_that_the_client_used_is_in_the_base_url(bench, plain):
    body = {"client": "c", "wait_s": 5}
    head = {"host": "far.example:9000", "x-forwarded-proto": "https"}
    _, reply = plain.send("POST", "/swarm/leases", body, headers=head)
    assert reply["leases"][0]["base_url"] == "https://far.example:9000/v1"


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "reward"),
        ({"reward": "good"}, "float"),
        ({"reward": True}, "float"),
        ({"reward": [1]}, "float"),
        ({"rewards": {"actor": "1"}}, "float"),
        ({"rewards": {"writer": 1.0}}, "known: actor, critic"),
        ({"rewards_per_call": {"writer": [1.0]}}, "known: actor, critic"),
        ({"rewards_per_call": [1.0]}, "must name a policy"),
        ({"reward": 1.0, "rewards": {"actor": 1.0}}, "one of them"),
        ({"reward": 1e39}, "3.4"),
        ({"rewards": {}}, "must be given"),
        ({"rewards_per_call": []}, "must be given"),
        ({"reward": 1.0, "metrics": {"a": None}}, "metrics"),
    ],
)
def test_a_finish_without_a_good_reward_is_refused_and_the_episode_goes_on(bench, plain, body, word):
    (play,) = plain.lease()
    plain.call(play)
    status, reply = plain.say(play, "finish", **body)
    assert status == 422 and word in reply["error"], reply
    assert not bench.episodes
    assert plain.call(play)[0] == 200
    assert plain.say(play, "finish", reward=1.0)[0] == 200
    assert bench.episodes[0].error is None


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999"])
def test_a_number_that_json_does_not_have_is_refused(bench, plain, number):
    (play,) = plain.lease()
    raw = f'{{"client": "c", "attempt": 1, "reward": {number}}}'.encode()
    status, reply = plain.send("POST", f"/swarm/episodes/{play['episode_id']}/finish", raw=raw)
    assert status == 422 and not bench.episodes, reply


def test_rewards_per_call_that_do_not_fit_are_the_error_of_the_episode(bench, plain):
    (play,) = plain.lease()
    plain.call(play)
    _, reply = plain.say(play, "finish", rewards_per_call={"actor": [1.0, 2.0]})
    assert "one per call (1 calls)" in reply["error"]
    assert bench.episodes[0].error.startswith("reward:")


def test_an_unscored_episode_says_so(bench, plain):
    (play,) = plain.lease()
    plain.call(play)
    assert plain.say(play, "finish", reward=None) == (200, {"result": "accepted", "error": None})
    assert bench.episodes[0].trajectories[0].reward is None


def test_an_episode_without_a_call_is_kept_as_an_error_and_the_client_hears_it(bench, plain):
    (play,) = plain.lease()
    _, reply = plain.say(play, "finish", reward=1.0)
    assert "without one answered call" in reply["error"]
    assert bench.episodes[0].error.startswith("workflow:")


def test_a_failure_is_an_error_by_its_kind(bench, plain):
    kinds = []
    for said in ("sandbox: no room", "it broke", "x: \x1b[31m\0"):
        (play,) = plain.lease()
        assert plain.say(play, "fail", error=said, code="v2")[0] == 200
        kinds.append((bench.episodes[-1].error, bench.episodes[-1].code))
    errors = ["sandbox: no room", "workflow: it broke", "x: \\x1b[31m\\x00"]  # nothing that a terminal obeys
    assert kinds == [(error, "v2") for error in errors]


def test_what_is_said_twice_counts_once(bench, plain):
    (play,) = plain.lease()
    plain.call(play)
    assert plain.say(play, "finish", reward=1.0)[1]["result"] == "accepted"
    assert plain.say(play, "finish", reward=1.0) == (200, {"result": "duplicate", "error": None})
    status, reply = plain.say(play, "finish", reward=0.0)
    assert status == 409 and "was handed in" in reply["error"]
    assert plain.say(play, "fail", error="x: y")[0] == 409
    assert plain.say(play, "abort")[0] == 409
    assert len(bench.episodes) == 1


def test_an_aborted_episode_is_offered_again_at_once(bench, plain):
    (play,) = plain.lease()
    plain.call(play)
    assert plain.say(play, "abort") == plain.say(play, "abort") == (200, {"ok": True})
    (again,) = plain.lease()
    assert (again["episode_id"], again["attempt"]) == (play["episode_id"], 2)
    assert bench.returned == [(play["episode_id"], 1, False)] and not bench.episodes
    status, reply = plain.say(play, "finish", reward=1.0)
    assert status == 409 and "gave it back" in reply["error"]
    assert plain.call(play)[0] == 410


def test_a_foreign_and_an_unknown_episode_are_refused_by_name(bench, plain):
    (play,) = plain.lease()
    other = Plain(bench.url, client="other")
    for what, body in (("finish", {"reward": 1.0}), ("fail", {"error": "x: y"}), ("abort", {})):
        status, reply = other.say(play, what, **body)
        assert status == 409 and "client=other does not play" in reply["error"]
        status, reply = plain.say({"episode_id": "train/0/99/0", "attempt": 1}, what, **body)
        assert status == 404 and "train/0/99/0" in reply["error"]
        status, reply = plain.say({**play, "attempt": 3}, what, **body)
        assert status == 409 and "must be 1" in reply["error"]
    assert not bench.episodes and plain.call(play)[0] == 200


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"client": ""}, 422),
        ({"client": "c", "count": 0}, 422),
        ({"client": "c", "count": 5000}, 422),
        ({"client": "c", "wait_s": -1}, 422),
        ({"client": "c", "wait_s": 1e9}, 422),
        ({"client": "c", "sources": "train"}, 422),
        ({}, 422),
        ([], 422),
    ],
)
def test_a_malformed_lease_request_is_refused(plain, body, status):
    got, reply = plain.send("POST", "/swarm/leases", body)
    assert got == status and "PlaysRequest" in reply["error"]


def test_json_that_is_nested_too_deeply_is_malformed(plain):
    status, reply = plain.send(
        "POST", "/swarm/leases", raw=b'{"client": "c", "more": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    )
    assert status == 422 and "PlaysRequest" in reply["error"]


def test_only_json_is_taken_and_other_paths_are_said_not_to_exist(plain):
    status, reply = plain.send("POST", "/swarm/leases", raw=b"{}", headers={"content-type": "text/plain"})
    assert status == 415 and reply["kind"] == "WireError"
    status, reply = plain.send("POST", "/swarm/nothing", {})
    assert status == 404 and "docs/protocol.md" in reply["error"]
    assert plain.send("GET", "/swarm/leases")[0] == 405


def test_a_pickle_is_refused_and_not_run(plain, tmp_path):
    bomb = f"cos\nmkdir\n(S'{tmp_path}/pwned'\ntR.".encode()
    for path in ("leases", "episodes/train/0/0/0/finish", "heartbeats"):
        status, _ = plain.send("POST", f"/swarm/{path}", raw=bomb, headers={"content-type": "application/json"})
        assert 400 <= status < 500
    assert not list(tmp_path.iterdir())


def test_a_lease_request_is_repeated_by_its_id(plain):
    first = plain.lease(2, request_id="r1")
    assert plain.lease(2, request_id="r1") == first
    plain.say(first[0], "abort")
    assert [p["episode_id"] for p in plain.lease(2, request_id="r1")] == [first[1]["episode_id"]]
    second = plain.lease(2, request_id="r2")
    assert {p["api_key"] for p in first}.isdisjoint(p["api_key"] for p in second)


def test_a_late_copy_of_a_request_leases_nothing(bench, plain):
    bench.pending.clear()
    assert plain.lease(wait_s=0.05, request_id="r1") == []
    bench.pending.append(lease(0))
    assert plain.lease(wait_s=0.5, request_id="r1") == []
    assert len(plain.lease(request_id="r2")) == 1


def test_a_client_that_hangs_up_before_it_is_told_holds_nothing(bench, plain):
    bench.pending.clear()
    connection = http.client.HTTPConnection(plain.address, timeout=60)
    body = json.dumps({"client": "c", "wait_s": 20})
    connection.request("POST", "/swarm/leases", body, {"content-type": "application/json"})
    bench.wait_for(lambda: bench.swarm.pool.asked == 1)
    connection.close()
    bench.wait_for(lambda: bench.swarm.pool.asked == 0)


def test_each_client_gets_only_what_it_can_play():
    leases = [lease(0, source="a"), lease(1, source="a"), lease(0, source="b")]
    with DoorBench(leases) as bench:
        (play,) = Plain(bench.url).lease(sources=["b"])
        assert play["task"]["source"] == "b"
        bench.wait_for(lambda: bench.swarm.runner.num_waiting == 2)
        _, status = Plain(bench.url).send("GET", "/swarm/status")
        assert status["waiting"] == {"a": 2} and status["playing"] == 1
        assert len(Plain(bench.url, "d").lease(2, sources=["a"])) == 2


def test_silence_gives_back_and_life_is_a_heartbeat_or_a_call():
    with DoorBench([lease(n) for n in range(3)], dead_after_s=1.5) as bench:
        plain = Plain(bench.url)
        silent, beating, calling = plain.lease(3)
        plain.send("POST", "/swarm/heartbeat", {"client": "c", "playing": [[silent["episode_id"], 1]]})
        end = time.monotonic() + 2.5
        while time.monotonic() < end:
            beat = {"client": "c", "playing": [[beating["episode_id"], 1]]}
            assert plain.send("POST", "/swarm/heartbeat", beat)[1]["cancelled"] == []
            assert plain.call(calling)[0] == 200
            threading.Event().wait(0.1)
        assert bench.returned == [(silent["episode_id"], 1, True)]
        status, reply = plain.say(silent, "finish", reward=1.0)
        assert status == 409 and "was given back after 1.5 s without a heartbeat" in reply["error"]
        beat = {"client": "c", "playing": [[silent["episode_id"], 1], [beating["episode_id"], 1]]}
        assert plain.send("POST", "/swarm/heartbeat", beat)[1]["cancelled"] == [[silent["episode_id"], 1]]


def test_an_answer_that_never_arrived_costs_no_attempt():
    with DoorBench([lease(0)], dead_after_s=0.2) as bench:
        (play,) = Plain(bench.url).lease()
        bench.wait_for(lambda: len(bench.returned) == 1)
        assert bench.returned == [(play["episode_id"], 1, False)]


def test_an_episode_has_a_deadline(bench):
    bench.pending[:] = [lease(0, timeout_s=0.4)]
    plain = Plain(bench.url)
    (play,) = plain.lease()
    plain.call(play)
    bench.wait_for(lambda: len(bench.episodes) == 1)
    assert bench.episodes[0].error.startswith("timeout:")
    status, reply = plain.say(play, "finish", reward=1.0)
    assert status == 409 and "ran longer" in reply["error"]


def test_a_cancelled_episode_is_not_kept_and_its_client_hears_so(bench, plain):
    (play,) = plain.lease()
    bench.call(lambda: bench.swarm.runner.cancel([(play["episode_id"], 1)]))
    beat = {"client": "c", "playing": [[play["episode_id"], 1]]}
    assert plain.send("POST", "/swarm/heartbeat", beat)[1]["cancelled"] == [[play["episode_id"], 1]]
    assert plain.say(play, "finish", reward=1.0)[0] == 409
    assert not bench.episodes and not bench.returned


def test_a_heartbeat_that_crosses_a_finish_cancels_nothing(bench, plain):
    done, failed = plain.lease(2)
    plain.call(done)
    plain.say(done, "finish", reward=1.0)
    plain.say(failed, "fail", error="tool: broken")
    beat = {"client": "c", "playing": [[done["episode_id"], 1], [failed["episode_id"], 1]]}
    assert plain.send("POST", "/swarm/heartbeat", beat)[1]["cancelled"] == []
    other = plain.send("POST", "/swarm/heartbeat", {**beat, "client": "d"})[1]["cancelled"]
    assert other == beat["playing"]


def test_the_end_of_the_run_is_said_to_who_waits_and_who_comes():
    with DoorBench() as bench:
        plain, answers = Plain(bench.url), []
        body = {"client": "c", "wait_s": 20}
        waiting = threading.Thread(target=lambda: answers.append(plain.send("POST", "/swarm/leases", body)))
        waiting.start()
        bench.wait_for(lambda: bench.swarm.pool.asked == 1)
        bench.say_over()
        waiting.join(60)
        assert answers[0][0] == 410 and "run=over" in answers[0][1]["error"]
        assert plain.send("POST", "/swarm/heartbeat", {"client": "d"})[0] == 410


def test_the_token_guards_the_swarm_and_a_key_does_not_open_it():
    with DoorBench([lease(0)], token="secret-of-this-run") as bench:
        status, reply = Plain(bench.url).send("POST", "/swarm/leases", {"client": "c", "wait_s": 1})
        assert status == 401 and reply["kind"] == "Unauthorized"
        plain = Plain(bench.url, token="secret-of-this-run")
        (play,) = plain.lease()
        keyed = Plain(bench.url, token=play["api_key"])
        assert keyed.send("GET", "/swarm/status")[0] == 401
        assert keyed.say(play, "finish", reward=1.0)[0] == 401
        assert plain.send("POST", "/v1/chat/completions", {"model": "actor", "messages": []})[0] == 401
        assert Plain(bench.url).call(play)[0] == 200


def test_status_and_stats_say_who_plays_what(bench, plain):
    plays = plain.lease(3, name="laptop", version="1.2", code="abc")
    plain.call(plays[0])
    plain.say(plays[0], "finish", reward=1.0, code="abc")
    plain.say(plays[1], "abort")
    _, status = plain.send("GET", "/swarm/status")
    (client,) = status["clients"]
    assert (client["name"], client["version"], client["code"], client["playing"]) == ("laptop", "1.2", "abc", 1)
    assert client["endings"] == status["endings"] == {"done": 1, "aborted": 1} and status["codes"] == {"abc": 1}
    stats = bench.call(bench.swarm.stats)
    assert stats["swarm/clients"] == stats["swarm/clients/1.2"] == stats["swarm/playing"] == 1.0
    assert stats["swarm/episodes_done"] == stats["swarm/episodes_aborted"] == 1.0


def test_the_document_of_the_door_names_every_route_and_no_other(bench, plain):
    _, document = plain.send("GET", "/swarm/openapi.json")
    asked = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    mount = bench.swarm.door._app.routes[0].app
    served = {
        (method, "/swarm" + route.path.replace(":path", ""))
        for route in mount.routes
        if route.path != "/health"
        for method in route.methods - {"HEAD"}
    }
    assert asked == served


def test_a_trial_waits_for_the_first_weights():
    with DoorBench(version=-1) as bench:
        status, reply = Plain(bench.url).send("POST", "/swarm/trials", {"row": 1})
    assert status == 503 and "policy=actor has no weights yet" in reply["error"]
