"""A client of the swarm in the drills: plays digits until the run is over, at times badly, by seed."""

from __future__ import annotations

import http.client
import json
import logging
import random
import signal
import threading
from contextlib import closing

from astraflow.errors import AstraFlowError, EpisodeError
from astraflow.swarm import Play, Swarm

_GIVE_UP_S = 30.0
_FAILS_EVERY = 41
_LONGEST_S = 0.03  # between two calls
_BAD = 0.05  # share of episodes that end in another way than they should


def play_forever(url: str, name: str, seed: int, give_up_s: float = _GIVE_UP_S) -> None:
    """Until the run is over, or the door is away for so long. Ends with 0 in both cases: whoever started it watches."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.disable(logging.CRITICAL)
    chance = random.Random(seed)
    try:
        with Swarm(url, name=name, code=f"seed-{seed % 3}", give_up_s=give_up_s) as swarm:
            for play in swarm.plays():
                with play:
                    _play(play, chance)
    except AstraFlowError:
        return


def _play(play: Play, chance: random.Random) -> None:
    first = ask(play)
    threading.Event().wait(chance.uniform(0.0, _LONGEST_S))
    if play.task.row % _FAILS_EVERY == _FAILS_EVERY - 1:
        raise EpisodeError("drill: this task fails")
    fate = chance.random()
    if fate < 0.2 * _BAD:
        play.abort()
    elif fate < 0.4 * _BAD:
        return  # without a word
    elif fate < 0.6 * _BAD:
        play.finish("a text")  # refused before it is sent; the block makes an error of it
    elif fate < 0.8 * _BAD:
        play.finish({"nobody": 1.0})
    else:
        ask(play)
        play.finish(float(first[:1] in set("56789")))


def ask(play: Play) -> str:
    """One call, as an agent in any language makes it; like most of those it tries a few times."""
    host, _, path = play.base_url.partition("://")[2].partition("/")
    body = json.dumps({"model": "actor", "messages": [{"role": "user", "content": "1+1?"}]})
    head = {"authorization": f"Bearer {play.api_key}", "content-type": "application/json"}
    problem: Exception | None = None
    for _ in range(3):
        try:
            with closing(http.client.HTTPConnection(host, timeout=10.0)) as connection:
                connection.request("POST", f"/{path}/chat/completions", body, head)
                reply = connection.getresponse()
                said = json.loads(reply.read())
        except (OSError, http.client.HTTPException) as error:
            problem = error
            continue
        if reply.status == 200:
            return str(said["choices"][0]["message"]["content"])
        problem = EpisodeError(f"gateway: status {reply.status}")
        break
    raise EpisodeError(f"call: {problem}")
