"""wiki2hop: kinds, splits that share no passage, and answers that stand in their support."""

from __future__ import annotations

import hashlib
from collections import Counter
from importlib.resources import files

import pytest

from astraflow.errors import SourceError
from astraflow.retrieval.corpus import Fields, corpus_path, read_corpus
from astraflow.sources.wiki2hop import KINDS, Wiki2HopSource


def rows(**options):
    source = Wiki2HopSource(**options)
    return [source.row(i) for i in range(len(source))]


def test_splits_and_kinds():
    counts = {split: Counter(row["kind"] for row in rows(split=split)) for split in ("train", "heldout", "all")}
    assert [[counts[split][kind] for kind in KINDS] for split in counts] == [
        [150, 236, 287, 126], [50, 64, 65, 23], [200, 300, 352, 150],
    ]  # fmt: skip
    assert {row["kind"] for row in rows(kinds=["single", "bridge"])} == {"single", "bridge"}
    assert len(rows(limit=7)) == 7


def test_no_passage_supports_both_splits():
    train, heldout = ({name for row in rows(split=split) for name in row["support"]} for split in ("train", "heldout"))
    assert train and heldout and not train & heldout


def test_all_support_is_in_the_corpus_and_single_answers_stand_in_it():
    passages = {passage.id: passage for passage in read_corpus(corpus_path("wiki2hop"), Fields())}
    for row in rows(split="all"):
        assert set(row["support"]) <= set(passages) and row["answers"] and row["hops"] == len(row["support"])
        if row["kind"] == "single":
            assert any(answer in passages[row["support"][0]].text for answer in row["answers"])


def test_fingerprints_tell_the_rows_apart():
    made = [{}, {"split": "heldout"}, {"kinds": ["single"]}, {"limit": 150}]
    assert len({Wiki2HopSource(**options).fingerprint() for options in made}) == len(made)
    assert (
        Wiki2HopSource(kinds=["bridge", "single"]).fingerprint()
        == Wiki2HopSource(kinds=["single", "bridge"]).fingerprint()
    )


@pytest.mark.parametrize(
    "options", [{"split": "test"}, {"kinds": ["hard"]}, {"kinds": []}, {"kinds": "single"}, {"limit": -1}]
)
def test_options_are_checked(options):
    with pytest.raises(SourceError, match=r"sources\.wiki2hop\."):
        Wiki2HopSource(**options)


def test_the_files_are_those_that_were_checked():
    place = files("astraflow.retrieval") / "data" / "wiki2hop"
    for line in (place / "SHA256SUMS").read_text().splitlines():
        digest, name = line.split()
        assert hashlib.sha256((place / name).read_bytes()).hexdigest() == digest, name
