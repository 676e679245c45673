"""The services by hand, with a token, on two network namespaces."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from astraflow.config.env import child_environment

SCRIPT = Path(__file__).parents[2] / "scripts" / "two_hosts.sh"


@pytest.mark.flow
@pytest.mark.slow
@pytest.mark.skipif(
    platform.system() != "Linux" or os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("ss") is None,
    reason="NOT TESTED: two hosts need Linux, root and iproute2; run `sudo make two-hosts`",
)
def test_a_node_on_another_host_trains_with_a_token_and_is_refused_without(tmp_path: Path) -> None:
    command = [
        "bash", str(SCRIPT), "--steps", "40", "--keep", str(tmp_path / "run"), "--", "--workflow.group_size=4",
        "--policies.actor.batch.groups=6", "--policies.actor.warm_start.steps=20", "--evaluation.num_tasks=8",
    ]  # fmt: skip
    environment = child_environment(None, {"ASTRAFLOW": f"{sys.executable} -m astraflow"})
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in ("loopback needs no token", "nothing listens on host B", "done: the run of host A"):
        assert words in done.stdout
    assert done.stdout.count("refused as it must be") == 4
