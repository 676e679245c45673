"""At what scale does taking the loop apart cost more than it gains? Arithmetic and the simulator, 1.7B, 8B and 70B.

Measured (docs/performance.md, lr 5e-6): bytes of a delta as a share of the whole version (1.7B: 24 of 3,400 MB, 8B: 114
of 16,400; 70B by the same share), encoding 2.6 and applying 6.2 GB/s of model on one core, 0.6 ms of the data service a
request, 95 us of a node's loop a call.

Assumed: GPUs of 400 TFLOP/s in training (6 FLOP a parameter and token), half of 3.35 TB/s of memory in decoding, a node
of as many GPUs as hold the weights; 64 groups of 8 episodes a batch, two calls of 1,000 sampled tokens on average
(log-normal, sigma 0.8) after prompts of 500, tools of 1 s (sigma 1.0); max_staleness 4 and places for all episodes that
it admits; twice the nodes as long as that shortens a step by a tenth; a round trip of 20 ms; 8 cores of a host for
coding. The synchronous loop pays nothing for weights: they are in place after a step.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from astraflow.config.schema import RunConfig
from astraflow.simulate.world import Plan, simulate
from benchmarks.scaling.cases import SIZE, config_of, mean_step_s, profile, step_s

STALENESS = 4
GROUPS, CALLS, TOKENS, PROMPT, SPREAD = 64, 2, 1000, 500, 0.8
MOST_NODES, STEPS = 64, 24
CORES = 8  # of a host, for encoding and applying
MBITS = (100, 1_000, 10_000)
RTT_S = 0.02
TRAIN_FLOPS, MEMORY_BYTES_S, GPU_BYTES = 4e14, 0.5 * 3.35e12, 60e9
ENCODE_BYTES_S, APPLY_BYTES_S = 2.6e9 * CORES, 6.2e9 * CORES


@dataclass(frozen=True)
class Model:
    """Parameters, bytes in bfloat16, share of them in a delta, GPUs of the trainer."""

    name: str
    parameters: float
    gpus: int
    kv_bytes: float  # of one token
    delta_share: float = 114 / 16_400

    @property
    def full_bytes(self) -> float:
        return 2 * self.parameters

    @property
    def gpus_of_node(self) -> int:
        """That hold the weights."""
        return max(1, round(self.full_bytes / GPU_BYTES + 0.49))

    def train_s(self) -> float:
        """Of one step."""
        tokens = GROUPS * SIZE * CALLS * (TOKENS + PROMPT)
        return 6 * self.parameters * tokens / (self.gpus * TRAIN_FLOPS)

    def costs(self, *, free: bool) -> dict[str, Any]:
        """A profile. `free`: as if nothing had to travel, be coded or be asked for."""
        bandwidth = self.gpus_of_node * MEMORY_BYTES_S
        weights = {} if free else {
            "full_bytes": self.full_bytes, "delta_bytes": self.delta_share * self.full_bytes,
            "publish_s": self.full_bytes / ENCODE_BYTES_S, "apply_s": self.full_bytes / APPLY_BYTES_S,
        }  # fmt: skip
        return {
            "engine": {
                "step_s": self.full_bytes / bandwidth, "row_s": self.kv_bytes * (PROMPT + TOKENS) / bandwidth,
                "prefill_token_s": 2 * self.parameters / (self.gpus_of_node * TRAIN_FLOPS),
                "swap_s": 0.0 if free else self.full_bytes / self.gpus_of_node / 50e9,  # from host memory, over PCIe
            },
            "trainer": {"step_s": self.train_s()},
            "weights": weights,
            "episode": {"calls": [{"tokens": TOKENS, "spread": SPREAD, "prompt_tokens": PROMPT, "delay_s": 1.0,
                                   "delay_spread": 1.0}] * CALLS},
            "serving": {} if free else {"call_s": 95e-6, "request_s": 0.6e-3},
        }  # fmt: skip


MODELS = (
    Model("1.7B", 1.7e9, 8, 114_688, 24 / 3_400),
    Model("8B", 8.2e9, 16, 147_456),
    Model("70B", 70e9, 128, 327_680),
)


def rows() -> Iterator[dict[str, Any]]:
    """One row of each model and bandwidth; `mbit` 0: nothing costs anything."""
    for model in MODELS:
        config, nodes = balanced(model)
        free = model.costs(free=True)
        barrier = mean_step_s(config, profile(config, free), barrier=True)
        ideal = mean_step_s(config, profile(config, free))
        base = {
            "part": "sizes", "model": model.name, "nodes": nodes, "gpus": model.gpus + nodes * model.gpus_of_node,
            "train_s": round(model.train_s(), 2), "barrier_s": round(barrier, 2), "free_s": round(ideal, 2),
            "delta_mb": round(model.delta_share * model.full_bytes / 1e6), "full_mb": round(model.full_bytes / 1e6),
            "encode_s": round(model.full_bytes / ENCODE_BYTES_S, 2),
            "apply_s": round(model.full_bytes / APPLY_BYTES_S, 2),
        }  # fmt: skip
        for mbit in MBITS:
            yield base | {"mbit": mbit} | _linked(model, config, nodes, mbit)


def _linked(model: Model, config: RunConfig, nodes: int, mbit: int) -> dict[str, Any]:
    found = {}
    for how, copies in (("", 1.0), ("_relay", 1.0 / nodes), ("_full", 1.0)):
        raw = model.costs(free=False)
        raw["network"] = {"rtt_s": RTT_S, "mbit": mbit}
        if how == "_full":
            raw["weights"]["delta_bytes"] = 0.0
        raw["weights"]["full_bytes"] *= copies  # of a relay, that sends each version once for all nodes of a region
        raw["weights"]["delta_bytes"] *= copies
        raw["serving"]["start_s"] = 0.0
        one = simulate(config, profile(config, raw), Plan())
        found[f"ours{how}_s"] = round(step_s(one), 2)
        if not how:
            found["mb_per_step"] = round(one.bytes_per_step / 1e6, 1)
            found["messages_per_step"] = round(one.messages_per_step)
            found["staleness"] = round(one.policies["p0"].staleness_mean, 2)
    return found


def balanced(model: Model) -> tuple[RunConfig, int]:
    """A run file with 1, 2, 4, ... nodes, as long as twice as many shorten a step by a tenth; and how many they are."""
    best, nodes = _with_nodes(model, 1), 1
    while nodes < MOST_NODES:
        more = _with_nodes(model, 2 * nodes)
        if more[1] > 0.9 * best[1]:
            break
        best, nodes = more, 2 * nodes
    return best[0], nodes


def _with_nodes(model: Model, nodes: int) -> tuple[RunConfig, float]:
    places = -(-(STALENESS + 1) * GROUPS * SIZE // nodes)
    config = config_of(groups=GROUPS, staleness=STALENESS, nodes=nodes, places=places, steps=STEPS)
    return config, step_s(simulate(config, profile(config, model.costs(free=True))))
