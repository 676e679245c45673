"""A trainer without a model, as a process: join, pull, note what came, publish, acknowledge, checkpoint. Torch-free.

python -m astraflow.testing.faults.fake_trainer URL RUN_DIR POLICY

What it was given is in `<run_dir>/trained-<policy>.jsonl`, its checkpoint in `checkpoint-<policy>.json`.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import uuid
from pathlib import Path

import msgspec
import xxhash

from astraflow.dataflow.client import DataflowClient
from astraflow.errors import WireError
from astraflow.weights.files.layout import write_part
from astraflow.weights.manifest import MANIFEST, Manifest, TensorEntry
from astraflow.wire.messages import Resume

GONE = 410
_GIVE_UP_S = 60.0
_BYTES = b"\0" * 64


def train(url: str, run_dir: Path, policy: str) -> None:
    """All steps of the run, from the last checkpoint on."""
    client = DataflowClient(url, give_up_s=_GIVE_UP_S)
    run = client.run()
    steps, every = run.config["run"]["steps"], run.config["run"]["checkpoint_every"]
    saved, trainer_id = run_dir / f"checkpoint-{policy}.json", uuid.uuid4().hex
    version = json.loads(saved.read_text()) if saved.exists() else 0
    weights = run_dir / "weights"
    publish(weights, policy, version)
    urls = (f"file://{weights.absolute() / policy}",)
    client.resume(policy, Resume(trainer_id=trainer_id, version=version, urls=urls, run_id=run.run_id))
    with (run_dir / f"trained-{policy}.jsonl").open("a") as notes:
        while version < steps:
            try:
                got = client.batch(policy, trainer_id, version, wait_s=2.0)
            except WireError as error:
                if error.status == GONE:
                    break
                raise
            if got is None:
                continue
            header, table = got
            notes.write(json.dumps({"step": header.step, "episodes": table.column("episode_id").to_pylist()}) + "\n")
            notes.flush()
            publish(weights, policy, header.step)
            client.ack(header, trainer_id)
            version = header.step
            if version % every == 0 or version == steps:
                draft = saved.with_suffix(".new")
                draft.write_text(json.dumps(version))
                draft.replace(saved)
                client.checkpoint(policy, trainer_id, version)
    pause = threading.Event()
    while not client.run().finished:
        pause.wait(0.05)
    client.close()


def publish(root: Path, policy: str, version: int) -> None:
    """A version of one small tensor of zeros, in the layout of `weights`."""
    directory = root / policy / str(version)
    if (directory / MANIFEST).exists():
        return
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "model.safetensors").unlink(missing_ok=True)  # left by one that was killed here
    entry = TensorEntry("w", "F32", (len(_BYTES) // 4,), xxhash.xxh3_128_hexdigest(_BYTES))
    part = write_part(directory, "model.safetensors", [entry], {"w": memoryview(_BYTES)}, sync=False)
    manifest = Manifest(policy=policy, version=version, parent=version - 1, tensors=(entry,), parts=(part,))
    draft = directory / f"{MANIFEST}.{os.getpid()}"
    draft.write_bytes(msgspec.json.encode(manifest))
    draft.replace(directory / MANIFEST)


if __name__ == "__main__":
    train(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
