"""Indexes: made once, whole, and the same rankings everywhere."""

from __future__ import annotations

import fcntl
import itertools
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from astraflow.config import rooms
from astraflow.errors import Problem, SourceError
from astraflow.retrieval import store
from astraflow.retrieval.ranking import MAX_WORDS, ByVectors, clean
from astraflow.retrieval.retriever import Settings, open_retriever, settings_of
from astraflow.retrieval.store import open_index
from small_corpus import ROWS, write_corpus

AXES = {"film": 0, "director": 1, "born": 2}


def encode(texts):
    """Three axes: which of three words a text has."""
    return [[float(word in text.lower()) for word in AXES] for text in texts]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    corpus = write_corpus(root / "c.jsonl")
    return open_retriever(Settings(corpus=str(corpus)), cache_root=root)


def found(retriever, query, topk=5):
    return [hit.passage.id for hit in retriever.search([query], topk)[0]]


def test_the_best_passage_comes_first(small):
    assert found(small, "Who directed Red Harbor?")[0] == "a"
    hits = small.search(["harbor", "born director"], 10)
    assert [{hit.passage.id for hit in each} for each in hits] == [{"a", "c"}, {"b", "d"}]
    assert all(a.score >= b.score > 0 for each in hits for a, b in itertools.pairwise(each))


def test_accents_and_case_do_not_matter(small):
    assert found(small, "CREME") == found(small, "crème") == found(small, "cafe") == ["g"]


@pytest.mark.parametrize("query", ["", "   ", "?!", '"', "zebra", "\u4e2d"])
def test_nothing_is_found_for_nothing(small, query):
    assert small.search([query], 5) == [[]]


@pytest.mark.parametrize(
    "query",
    ['"red harbor', "title:harbor", "harbor AND (", "harbor^9 ~", "-red +harbor", "a OR NOT harbor", "[a TO z] harbor"],
)
def test_signs_of_a_query_language_mean_nothing(small, query):
    assert set(found(small, query)) >= {"a", "c"}


@given(query=st.text(max_size=200), topk=st.integers(1, 10))
def test_any_text_may_be_searched_for(small, query, topk):
    assert len(small.search([query], topk)[0]) <= topk


def test_a_query_is_its_distinct_words_and_not_too_many():
    assert clean("Red  red, RED_harbor") == "red harbor"
    assert len(clean(" ".join(map(str, range(1000)))).split()) == MAX_WORDS


def test_equal_scores_are_in_the_order_of_the_corpus(tmp_path):
    rows = [
        {"id": f"n{i}", "title": "", "text": "same words here" if i % 3 else "same words here here"} for i in range(300)
    ]
    retriever = open_retriever(Settings(corpus=str(write_corpus(tmp_path / "c.jsonl", rows))), cache_root=tmp_path)
    twice, once = [f"n{i}" for i in range(0, 300, 3)], [f"n{i}" for i in range(300) if i % 3]
    for topk in (1, 7, 100, 150):
        assert found(retriever, "here", topk) == (twice + once)[:topk]


def test_passages_are_read_by_id(small):
    assert [passage and passage.title for passage in small.read(["d", "nobody", "a", ""])] == [
        "Bo Dahl", None, "Red Harbor", None,
    ]  # fmt: skip


def test_a_changed_corpus_has_another_index_and_the_same_one_is_opened_again(tmp_path):
    path = write_corpus(tmp_path / "c.jsonl")
    first = open_index(path, settings_of({}, "x").fields, tmp_path / "cache").directory
    assert open_index(path, settings_of({}, "x").fields, tmp_path / "cache").directory == first
    moved = write_corpus(tmp_path / "other.jsonl")
    assert open_index(moved, settings_of({}, "x").fields, tmp_path / "cache").directory == first
    write_corpus(path, ROWS[:3])
    again = open_index(path, settings_of({}, "x").fields, tmp_path / "cache")
    assert again.directory != first and len(again) == 3


def test_a_malformed_corpus_leaves_no_index(tmp_path):
    path = write_corpus(tmp_path / "c.jsonl", [*ROWS, {"id": "a", "text": "again"}])
    for _ in range(2):
        with pytest.raises(SourceError, match="row 7"):
            open_index(path, settings_of({}, "x").fields, tmp_path / "cache")
    write_corpus(path)
    assert len(open_index(path, settings_of({}, "x").fields, tmp_path / "cache")) == len(ROWS)


@pytest.mark.parametrize("part", ["passages.bin", "offsets.npy", "words/meta.json", "facts.json"])
def test_a_damaged_index_says_what_to_do(tmp_path, part):
    path = write_corpus(tmp_path / "c.jsonl")
    directory = open_index(path, settings_of({}, "x").fields, tmp_path / "cache").directory
    (directory / part).write_bytes((directory / part).read_bytes()[:-9])
    with pytest.raises(Problem, match=r"is damaged \(.*remove that directory"):
        open_index(path, settings_of({}, "x").fields, tmp_path / "cache")


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(Problem, match=r"cannot be written .*ASTRAFLOW_CACHE"):
        open_index(write_corpus(tmp_path / "c.jsonl"), settings_of({}, "x").fields, tmp_path / "cache")


def test_who_comes_while_an_index_is_made_waits_for_it(tmp_path, monkeypatch):
    path, fields = write_corpus(tmp_path / "c.jsonl"), settings_of({}, "x").fields
    at_the_lock = threading.Semaphore(0)
    writes, flock, write = [], fcntl.flock, store._write

    def told(file, kind):
        at_the_lock.release()
        flock(file, kind)

    def slow(directory, path, fields):
        writes.append(directory)
        for _ in range(2):  # both threads are there
            assert at_the_lock.acquire(timeout=60)
        return write(directory, path, fields)

    monkeypatch.setattr(store.fcntl, "flock", told)
    monkeypatch.setattr(store, "_write", slow)
    with ThreadPoolExecutor(2) as pool:
        opened = list(pool.map(lambda _: open_index(path, fields, tmp_path / "cache"), range(2)))
    assert len(writes) == 1 and opened[0].directory == opened[1].directory


SEVERAL = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO, stream=sys.stderr)
from astraflow.retrieval.retriever import Settings, open_retriever
retriever = open_retriever(Settings(), cache_root=Path(sys.argv[1]))
hits = retriever.search(["Who directed the film Diary of a Maniac?", "born in 1901"], 20)
print([(hit.passage.id, hit.score) for each in hits for hit in each])
"""


def test_processes_that_start_together_make_one_index(tmp_path):
    started = [
        subprocess.Popen(
            [sys.executable, "-c", SEVERAL, str(tmp_path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            env={"PYTHONHASHSEED": str(seed), "PATH": "/usr/bin:/bin"},
        )
        for seed in range(3)
    ]  # fmt: skip
    ended = [process.communicate(timeout=60) for process in started]
    assert [process.returncode for process in started] == [0, 0, 0], ended
    assert len({out for out, _ in ended}) == 1 and "p1328" in ended[0][0]
    assert sum("indexed 6119 passages" in err for _, err in ended) == 1


def vectors_of(tmp_path, rows=ROWS, dtype=np.float16):
    path = tmp_path / "v.npy"
    np.save(path, np.array(encode([f"{row['title']}. {row['text']}" for row in rows]), dtype))
    return path


def test_vectors_rank_by_inner_product_and_ties_by_row(tmp_path):
    ranker = ByVectors(vectors_of(tmp_path), encode, len(ROWS))
    (ranking,) = ranker.rank(["born director"], 4)
    assert ranking == [(1, 2.0), (3, 2.0), (0, 0.0), (2, 0.0)]


def test_many_rows_are_ranked_as_few_are(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    matrix = rng.integers(-3, 4, (1000, 4)).astype(np.float32)
    np.save(tmp_path / "v.npy", matrix)
    asked = rng.integers(-3, 4, (5, 4)).astype(np.float32)
    monkeypatch.setattr("astraflow.retrieval.ranking._ROWS_AT_ONCE", 64)
    ranked = ByVectors(tmp_path / "v.npy", lambda texts: asked, 1000).rank(["?"] * 5, 20)
    for query, ranking in zip(asked, ranked, strict=True):
        scores = matrix @ query
        assert [row for row, _ in ranking] == np.lexsort((np.arange(1000), -scores))[:20].tolist()


def test_both_rankings_are_fused(tmp_path):
    settings = Settings(
        corpus=str(write_corpus(tmp_path / "c.jsonl")), vectors=str(vectors_of(tmp_path)), encoder=f"{__name__}:encode"
    )
    retriever = open_retriever(settings, cache_root=tmp_path)
    hits = retriever.search(["born director harbor"], 4)[0]
    assert [hit.passage.id for hit in hits][:2] == ["b", "d"]
    assert hits[0].score == pytest.approx(1 / 61 + 1 / 61, abs=1e-3)
    assert retriever.search(["born director harbor"], 2)[0] == hits[:2]


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda path: path.write_text("no"), "cannot be read"),
        (lambda path: np.save(path, np.zeros((7, 3), np.int32)), r"holds int32 \[7, 3\]"),
        (lambda path: np.save(path, np.zeros(7, np.float32)), r"holds float32 \[7\]"),
        (lambda path: np.save(path, np.zeros((6, 3), np.float32)), "holds 6 rows for 7 passages"),
        (lambda path: np.save(path, np.array([{}], object), allow_pickle=True), "cannot be read"),
    ],
)
def test_wrong_vectors_are_named(tmp_path, write, said):
    write(tmp_path / "v.npy")
    with pytest.raises(SourceError, match=said):
        ByVectors(tmp_path / "v.npy", encode, 7)


def test_an_encoder_of_another_model_is_named(tmp_path):
    with pytest.raises(Problem, match=r"encoder=\[1, 2\] must give vectors of shape \[1, 3\]"):
        ByVectors(vectors_of(tmp_path), lambda texts: [[1.0, 2.0]], 7).rank(["x"], 1)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"corpse": "x"}, "unknown field `corpse`"),
        ({"mode": "dense"}, "Invalid enum value 'dense'"),
        ({"vectors": "v.npy"}, "encoder= goes with vectors"),
        ({"encoder": "m:f"}, "encoder=m:f goes with vectors"),
        ({"mode": "both"}, "mode=both needs vectors"),
        ({"fields": {"ident": "x"}}, "unknown field `ident`"),
    ],
)
def test_settings_are_checked(given, said):
    with pytest.raises(Problem, match=said):
        settings_of(given, "environment.index")


def test_without_its_package_the_fix_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tantivy", None)
    with pytest.raises(Problem, match=r"is not installed; run: pip install 'astraflow\[search\]'"):
        open_retriever(Settings(), cache_root=tmp_path)
    assert rooms.required("json", "search")
