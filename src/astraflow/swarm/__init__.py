"""Play episodes of a run from a script or notebook, on any machine, with the base package only.

from astraflow.swarm import Swarm

with Swarm("http://10.0.0.1:7800") as swarm:
    for play in swarm.plays():  # until the run is over
        with play:
            client = OpenAI(base_url=play.base_url, api_key=play.api_key)
            ...
            play.finish(reward)
"""

from __future__ import annotations

from astraflow.swarm.client import Swarm
from astraflow.swarm.play import Lost, Play, RunOver

__all__ = ["Swarm", "Play", "Lost", "RunOver"]
