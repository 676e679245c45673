"""Ranks publish together what one process would have published: the same bytes."""

from __future__ import annotations

import re

import pytest
import torch

import sharded_models
from astraflow.errors import WeightError
from astraflow.testing.weights import same_bits
from astraflow.weights.publisher import Publisher
from astraflow.weights.shards.publisher import ShardedPublisher
from astraflow.weights.store import FileStore
from ranks import run_ranks

VERSIONS = 6


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> FileStore:
    """The same versions, published by one process that holds all of the model."""
    store = FileStore(tmp_path_factory.mktemp("plain"), "actor", full_every=3)
    publisher = Publisher(store)
    for version in range(VERSIONS):
        publisher.submit(version, sharded_models.model(version))
        publisher.flush()
    publisher.close()
    return store


def content(store: FileStore) -> dict[str, bytes]:
    """All files of all versions."""
    return {
        str(path.relative_to(store.directory)): path.read_bytes()
        for version in store.versions()
        for path in sorted((store.directory / str(version)).iterdir())
    }


@pytest.mark.parametrize(("num_ranks", "on_device"), [(2, False), (3, False), (3, True)])
def test_versions_are_those_of_a_model_in_one_place(plain, tmp_path, num_ranks, on_device):
    copied = run_ranks(num_ranks, sharded_models.publish_versions, tmp_path, VERSIONS, on_device)
    store = FileStore(tmp_path / "sharded", "actor")
    assert content(store) == content(plain)
    assert [info.base for info in store.infos().values()] == [-1, 0, 1, 2, 3, 4]
    assert [info.full_nbytes >= 0 for info in store.infos().values()].count(True) == 2
    for version in range(VERSIONS):
        assert same_bits(store.fetch(version), sharded_models.model(version))
    whole = sum(tensor.nbytes for tensor in sharded_models.model(VERSIONS - 1).values())
    assert all(0 < rank[-1] < whole / (num_ranks - 0.5) + 1000 for rank in copied), "a rank copies its own part"


def test_versions_without_deltas_travel_whole(tmp_path):
    run_ranks(2, sharded_models.publish_versions, tmp_path, 3, False, False)
    store = FileStore(tmp_path / "sharded", "actor")
    assert [(info.base, info.full_nbytes >= 0) for info in store.infos().values()] == [(-1, True)] * 3
    assert same_bits(store.fetch(2), sharded_models.model(2))


def test_one_process_that_holds_all_of_it_needs_no_group(plain, tmp_path):
    store = FileStore(tmp_path, "actor", full_every=3)
    publisher = ShardedPublisher(store, on_device=True)
    for version in range(VERSIONS):
        tensors = sharded_models.model(version)
        publisher.submit(version, tensors)
        for tensor in tensors.values():
            tensor.zero_()  # they are the trainer's: it goes on with them
    publisher.flush()
    publisher.close()
    assert content(store) == content(plain)


def test_fsdp_with_tied_weights_publishes_what_it_trains(tmp_path):
    seen = run_ranks(2, sharded_models.train_with_fsdp, tmp_path, 4)
    store = FileStore(tmp_path / "sharded", "actor")
    assert seen[0] == seen[1]
    for version, whole in enumerate(seen[0]):
        fetched = store.fetch(version)
        assert fetched.keys() == whole.keys() - {"head.weight"}
        for name, tensor in fetched.items():
            assert tensor.dtype == torch.bfloat16
            assert tensor.view(torch.int16).reshape(-1).tolist() == whole[name], (version, name)
    assert [info.base for info in store.infos().values()] == [-1, 0, 1, 2]


@pytest.mark.parametrize(
    ("trouble", "said"),
    [
        ("dtype", r"tensor embed\.dtype=torch\.complex64 cannot be published"),
        ("none", "'NoneType' object has no attribute"),
        ("partial", r"tensor embed\.placements=.*cannot be published"),
        ("shape", r"rank 1: tensor scale=F32 \(7,\) must be F32 \(\) as on rank 0"),
        ("missing", r"tensor embed: elements on ranks \[0\]=2416 must be 4816"),
        ("version", r"version of rank 1=5 must be that of rank 0 \(1\)"),
        ("disk", r"rank 0: "),
    ],
)
def test_what_is_wrong_on_one_rank_is_said_on_all_and_the_next_version_comes(tmp_path, trouble, said):
    ended = run_ranks(2, sharded_models.publish_with, tmp_path, trouble)
    for rank in ended:
        assert [bool(error) for error in rank] == [False, True, False], rank
        assert re.search(said, rank[1]), rank[1]
    store = FileStore(tmp_path / "sharded", "actor")
    assert store.versions() == [0, 2]
    assert same_bits(store.fetch(2), sharded_models.model(2))


def test_a_rank_that_dies_is_named_at_once(tmp_path):
    leader, dead, _ = run_ranks(3, sharded_models.publish_with, tmp_path, "dies", limit_s=15)
    assert dead == 9
    assert "rank 0: rank 1 of the trainer=" in leader[1]
    assert "rank 0: rank 1 of the trainer=" in leader[2]


def test_a_rank_that_never_publishes_is_named_after_the_timeout(tmp_path):
    leader, _, third = run_ranks(3, sharded_models.publish_with, tmp_path, "silent", limit_s=15)
    assert "rank 0: rank 1 of the trainer=sent nothing" in leader[1]
    assert "timeout_s=2" in leader[1]
    assert "rank 0 of the trainer=" in third[1]
    assert "rank 0: rank 1 of the trainer=" in leader[2], "and stays so"


def test_some_ranks_of_a_group_hold_different_layers(tmp_path):
    ended = run_ranks(3, sharded_models.publish_alone, tmp_path)
    assert ended[1:] == [[], []]
    assert "must contain rank 0" in ended[0][0]
    tensors = FileStore(tmp_path / "sharded", "actor").fetch(0)
    assert {name: tensor[0].item() for name, tensor in tensors.items()} == {"a": 1.0, "b": 1.0, "c": 2.0}


def test_the_lowest_rank_needs_a_store():
    with pytest.raises(WeightError, match="store=None must be given on the lowest rank"):
        ShardedPublisher(None)
