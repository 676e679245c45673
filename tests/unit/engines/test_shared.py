"""Several policies on one base: each row is computed with its own adapter, as if that were merged into the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from astraflow.config.schema import LoraSection
from astraflow.contracts import Engine
from astraflow.engines.local import LocalEngine
from astraflow.errors import ModelError
from astraflow.models.load import content_checksum, effective_checksum, load_model, state_tensors
from astraflow.models.lora.merge import load_adapter, merged_checksum
from astraflow.testing.engines.effective import POLICIES, EffectiveWeightsSuite, run_config, write_model
from astraflow.training.learner import Learner
from astraflow.types import Adapter, Generation, Sampling
from decoding import TOLERANCE, adapter_of, fresh_logprobs

LORAS = (
    LoraSection(rank=2, alpha=5),
    LoraSection(rank=5, alpha=3, targets=["q_proj", "down_proj"]),
    LoraSection(rank=3, alpha=7, targets=["gate_proj"]),
)
PROMPTS = [[1, 5, 9, 3], [7], [1, 5, 9, 3, 30, 2, 8, 11, 4], [6, 6]]
WAIT_S = 60.0


def merged_model(directory: Path, tensors: Mapping[str, torch.Tensor], lora: LoraSection) -> PreTrainedModel:
    model = load_model(directory).requires_grad_(False)
    load_adapter(model, tensors, lora.alpha / lora.rank, {})
    return model


class Shared:
    """An engine for three policies of `LORAS`, each at version `10 * policy`, and what each must compute with."""

    def __init__(self, directory: Path, **settings: Any) -> None:
        self.directory, self.base = directory, content_checksum(directory)
        self.whole = LocalEngine(directory, **settings)
        self.engines = self.whole.adapters(len(LORAS))
        self.models: dict[tuple[int, int], PreTrainedModel] = {}
        for policy in range(len(LORAS)):
            self.load(policy, 10 * policy)

    def load(self, policy: int, version: int) -> None:
        tensors = adapter_of(self.directory, LORAS[policy], version)
        adapter = Adapter(LORAS[policy].alpha / LORAS[policy].rank, self.base)
        assert self.engines[policy].load_weights(version, tensors, adapter).result(WAIT_S) == version
        self.models[policy, version] = merged_model(self.directory, tensors, LORAS[policy])

    def close(self) -> None:
        self.whole.close()


@pytest.fixture(params=[{}, {"max_concurrency": 5, "prefill_chunk": 4}], ids=["", "crowded"])
def shared(request: pytest.FixtureRequest, endless_dir: Path) -> Iterator[Shared]:
    with closing(Shared(endless_dir, **request.param)) as made:
        yield made


def asked(shared: Shared, tokens: int, **sampling: Any) -> dict[tuple[int, int], Future[Generation]]:
    """Every prompt of every policy, in one crowd."""
    return {
        (policy, number): engine.submit(f"r{number}", prompt, Sampling(max_tokens=tokens, **sampling))
        for number, prompt in enumerate(PROMPTS)
        for policy, engine in enumerate(shared.engines)
    }


def test_rows_of_all_policies_have_the_logprobs_of_merged_weights(shared: Shared) -> None:
    for (policy, number), future in asked(shared, 24).items():
        generation = future.result(WAIT_S)
        assert set(generation.versions.tolist()) == {10 * policy}
        expected = fresh_logprobs(shared.models[policy, 10 * policy], PROMPTS[number], generation, 1.0)
        np.testing.assert_allclose(generation.logprobs, expected, atol=TOLERANCE)


def test_they_say_what_an_engine_with_merged_weights_says(shared: Shared, endless_dir: Path) -> None:
    found = {key: future.result(WAIT_S) for key, future in asked(shared, 16, seed=3).items()}
    assert len({tuple(found[policy, 0].token_ids.tolist()) for policy in range(3)}) == 3
    with ExitStack() as stack:
        for policy, lora in enumerate(LORAS):
            alone = stack.enter_context(closing(LocalEngine(endless_dir)))
            tensors = adapter_of(endless_dir, lora, 10 * policy)
            alone.load_weights(0, tensors, Adapter(lora.alpha / lora.rank, shared.base)).result(WAIT_S)
            for number, prompt in enumerate(PROMPTS):
                wanted = alone.submit(f"{number}", prompt, Sampling(max_tokens=16, seed=3)).result(WAIT_S)
                np.testing.assert_array_equal(found[policy, number].token_ids, wanted.token_ids)


def test_a_swap_of_one_leaves_the_rows_of_others_as_they_are(shared: Shared) -> None:
    futures = asked(shared, 200)
    shared.engines[1].submit("probe", [3], Sampling(max_tokens=3)).result(WAIT_S)
    before = shared.engines[0].stats()["prefill_tokens"]
    shared.load(1, 11)
    for (policy, number), future in futures.items():
        generation = future.result(WAIT_S)
        versions = generation.versions
        assert set(versions.tolist()) <= ({10, 11} if policy == 1 else {10 * policy})
        model = shared.models[policy, int(versions[-1])]
        expected = fresh_logprobs(model, PROMPTS[number], generation, 1.0)
        newest = versions == versions[-1]  # what came before the swap was sampled under other weights
        np.testing.assert_allclose(generation.logprobs[newest], expected[newest], atol=TOLERANCE)
    assert {version for future in futures.values() for version in future.result(0).versions} >= {0, 11, 20}
    assert shared.engines[0].stats()["prefill_tokens"] > before, "the rows of policy 1 were read again"
    assert [engine.version for engine in shared.engines] == [0, 11, 20]


def test_an_adapter_on_the_output_layer_which_sees_the_last_tokens_alone(llama_dir: Path) -> None:
    """Our trainer makes none; one of peft may be there."""
    lora, base = LoraSection(rank=3, alpha=6), content_checksum(llama_dir)
    vocabulary, hidden = load_model(llama_dir).get_output_embeddings().weight.shape  # type: ignore[no-untyped-call]
    with closing(LocalEngine(llama_dir)) as whole:
        engines, models = whole.adapters(2), list[PreTrainedModel]()
        for policy, engine in enumerate(engines):
            generator = torch.Generator().manual_seed(policy)
            tensors = {
                "base_model.model.lm_head.lora_A.weight": torch.randn(3, hidden, generator=generator) * 0.4,
                "base_model.model.lm_head.lora_B.weight": torch.randn(vocabulary, 3, generator=generator) * 0.4,
            }
            engine.load_weights(policy, tensors, Adapter(lora.alpha / lora.rank, base)).result(WAIT_S)
            models.append(merged_model(llama_dir, tensors, lora))
        futures = {
            (policy, number): engine.submit(f"r{number}", prompt, Sampling(max_tokens=12))
            for number, prompt in enumerate(PROMPTS)
            for policy, engine in enumerate(engines)
        }
        for (policy, number), future in futures.items():
            generation = future.result(WAIT_S)
            expected = fresh_logprobs(models[policy], PROMPTS[number], generation, 1.0)
            np.testing.assert_allclose(generation.logprobs, expected, atol=TOLERANCE)


def test_what_one_policy_has_read_is_not_taken_for_another(shared: Shared) -> None:
    prompt = PROMPTS[2]
    for _ in range(2):  # the second time it is on the shelf
        for policy, engine in enumerate(shared.engines):
            generation = engine.submit("a", prompt, Sampling(max_tokens=6)).result(WAIT_S)
            expected = fresh_logprobs(shared.models[policy, 10 * policy], prompt, generation, 1.0)
            np.testing.assert_allclose(generation.logprobs, expected, atol=TOLERANCE)


def test_the_base_is_there_once_and_stays_as_it_is(shared: Shared, endless_dir: Path) -> None:
    model = shared.whole._core._passes.model
    assert effective_checksum(state_tensors(model)) == effective_checksum(state_tensors(load_model(endless_dir)))
    for policy, lora in enumerate(LORAS):
        said = shared.engines[policy].effective_weights().result(WAIT_S)
        tensors = adapter_of(endless_dir, lora, 10 * policy)
        assert said.checksum == merged_checksum(endless_dir, tensors, lora.alpha / lora.rank, "float32")


def test_without_tensors_a_policy_is_the_base(shared: Shared, endless_dir: Path) -> None:
    shared.engines[0].load_weights(1, {}, Adapter(1.0, shared.base)).result(WAIT_S)
    base = load_model(endless_dir)
    said = shared.engines[0].effective_weights().result(WAIT_S)
    assert said.checksum == effective_checksum(state_tensors(base))
    generation = shared.engines[0].submit("a", PROMPTS[0], Sampling(max_tokens=9)).result(WAIT_S)
    np.testing.assert_allclose(generation.logprobs, fresh_logprobs(base, PROMPTS[0], generation, 1.0), atol=TOLERANCE)


def test_the_checksum_shows_what_was_changed_behind_its_back(shared: Shared) -> None:
    before = [engine.effective_weights().result(WAIT_S) for engine in shared.engines]
    layer = shared.whole._core._passes.model.model.layers[0].self_attn.q_proj
    with torch.inference_mode():
        layer.high[3, 0] += 1.0  # one of policy 1
    after = [engine.effective_weights().result(WAIT_S) for engine in shared.engines]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False, True]


@pytest.mark.parametrize("how", ["whole", "other base", "embedding", "not finite", "half a pair"])
def test_what_does_not_fit_changes_nothing(shared: Shared, endless_dir: Path, how: str) -> None:
    before = [engine.effective_weights().result(WAIT_S) for engine in shared.engines]
    tensors = adapter_of(endless_dir, LORAS[0], 1)
    adapter: Adapter | None = Adapter(1.0, shared.base)
    prefix = "base_model.model.model.embed_tokens.lora_"
    if how == "whole":
        tensors, adapter = state_tensors(load_model(endless_dir)), None
    elif how == "other base":
        adapter = Adapter(1.0, "0" * 32)
    elif how == "embedding":
        tensors = {f"{prefix}A.weight": torch.ones(1, 32), f"{prefix}B.weight": torch.ones(40, 1)}
    elif how == "not finite":
        next(iter(tensors.values()))[0, 0] = torch.nan
    else:
        del tensors[next(iter(tensors))]
    with pytest.raises(ModelError):
        shared.engines[0].load_weights(1, tensors, adapter).result(WAIT_S)
    assert [engine.effective_weights().result(WAIT_S) for engine in shared.engines] == before


def test_sums_of_stats_are_those_of_the_engine(shared: Shared) -> None:
    for future in asked(shared, 5).values():
        future.result(WAIT_S)
    stats = [engine.stats() for engine in shared.engines]
    assert [s["sampled_tokens"] for s in stats] == [20, 20, 20]
    assert [s["requests"] for s in stats] == [4, 4, 4] and [s["swaps"] for s in stats] == [1, 1, 1]
    assert sum(s["decode_steps"] for s in stats) == pytest.approx(shared.whole._core.decoder.decode_steps)


def test_they_end_together(shared: Shared) -> None:
    future = shared.engines[2].submit("a", [3], Sampling(max_tokens=400))
    shared.engines[0].close()
    assert "closed" in str(future.exception(WAIT_S))
    assert all(engine.ended.done() for engine in shared.engines)


class TestWeights(EffectiveWeightsSuite):
    @pytest.fixture
    def start(self) -> Callable[[Path, str], Engine]:
        return lambda directory, dtype: LocalEngine(directory, dtype=dtype).adapters(2)[1]

    @pytest.fixture(params=[name for name, settings in POLICIES.items() if "lora" in settings])
    def learner(self, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Learner]:
        model = write_model(tmp_path / "model", tied="untied" not in request.param)
        with closing(Learner(run_config(model, POLICIES[request.param]), "actor", tmp_path)) as made:
            yield made
