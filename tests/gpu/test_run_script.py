"""`run.sh` itself: it parses, and a dry run on the CPU goes through all of its parts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "run.sh"
KEYS = {
    "tests": {"exit_code", "said"},
    "packing": {"kernel", "float32_max_error", "bfloat16_mean_error", "bfloat16_mean_error_alone"},
    "update": {"device", "matmul_tflops", "rows"},
    "delta": {"encode_gb_s", "host_encode_gb_s", "rows"},
    "engine": {"device", "tokens_per_s"},
    "quickstart": {"steps", "reward", "tokens_per_s", "logprob_gap"},
}
KEYS_OF_UPDATE = {"model", "gradient_checkpointing", "tokens_per_s", "perf/mfu", "perf/tflops", "peak_gb", "loss"}


def run(out: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    """The script under this interpreter."""
    environment = {**os.environ, "OUT": str(out), "PYTHON": sys.executable, "OMP_NUM_THREADS": "1", **more}
    return subprocess.run(
        ["bash", str(SCRIPT), *words], capture_output=True, text=True, env=environment, timeout=280, cwd=out
    )  # fmt: skip


def summary_of(out: Path) -> dict:
    """What the script left."""
    return json.loads((out / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_dry_run_goes_through_all_parts(tmp_path):
    done = run(tmp_path, "--dry-run")
    assert done.returncode == 0, done.stdout + done.stderr
    summary = summary_of(tmp_path)
    assert summary["dry_run"] and summary["parts"].keys() == KEYS.keys()
    for name, keys in KEYS.items():
        assert summary["parts"][name]["ok"] and keys | {"seconds"} <= summary["parts"][name].keys(), name
    rows = summary["parts"]["update"]["rows"]
    assert [(row["model"], row["gradient_checkpointing"]) for row in rows] == [
        ("qwen3-0.6b", False), ("qwen3-0.6b", True), ("qwen3-1.7b", False), ("qwen3-1.7b", True),
    ]  # fmt: skip
    assert all(row.keys() >= KEYS_OF_UPDATE for row in rows)


@pytest.mark.slow
def test_a_part_that_fails_fails_the_script_and_stops_no_other(tmp_path):
    (tmp_path / "rich.py").write_text("raise ImportError('broken on purpose')\n")  # only one of the two needs it
    done = run(tmp_path, "--dry-run", PARTS="delta engine", PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    assert "broken on purpose" in done.stdout
    parts = summary_of(tmp_path)["parts"]
    assert {name: part["ok"] for name, part in parts.items()} == {"delta": False, "engine": True}


@pytest.mark.parametrize(
    ("words", "more", "said"),
    [(["--fast"], {}, "only --dry-run is known"), (["--dry-run"], {"PARTS": "nothing"}, "nothing is not one of")],
)
def test_what_it_does_not_know_is_said(tmp_path, words, more, said):
    done = run(tmp_path, *words, **more)
    assert done.returncode == 2
    assert said in done.stderr
