"""The search environment: what is told, rewarded and counted; oracle 1, null 0, random; the same in every process."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest

from astraflow.environments.search import TOOLS, Search
from astraflow.errors import Problem
from astraflow.sources.wiki2hop import Wiki2HopSource
from astraflow.types import Action, Task
from recorded import recorded
from small_corpus import TASK, write_corpus


@pytest.fixture(scope="module")
def index(tmp_path_factory, request):
    root = tmp_path_factory.mktemp("corpus")
    patch = pytest.MonkeyPatch()
    patch.setenv("ASTRAFLOW_CACHE", str(root / "cache"))
    request.addfinalizer(patch.undo)
    return {"corpus": str(write_corpus(root / "c.jsonl"))}


def search(query):
    return Action(tool="search", arguments={"query": query})


def read(name):
    return Action(tool="read", arguments={"id": name})


def say(text):
    return Action(text=text)


async def play(world, task, *actions):
    """Rewards of the steps, the last step, and all that was told."""
    told = [world.reset(Task("t", 0, 0, task))]
    rewards = []
    for action in actions:
        step = await world.step(action)
        told.append(step.text)
        rewards.append(step.reward)
        if step.done:
            break
    return rewards, step, told


async def test_two_searches_and_the_answer(index):
    rewards, step, told = await play(
        Search(index=index, topk=1, for_search=0.1, for_support=0.4), TASK,
        search("film Red Harbor"), search("Ana Cole director"), say("<answer>3 May 1901</answer>"),
    )  # fmt: skip
    assert told[0].endswith("Question: When was the director of Red Harbor born?")
    assert told[1:3] == [
        "[a] Red Harbor: Red Harbor is a 1950 film directed by Ana Cole.",
        "[b] Ana Cole: Ana Cole (born 3 May 1901) was a director of films.",
    ]
    assert rewards == pytest.approx([0.1 + 0.2, 0.2, 0.5]) and step.done
    assert step.metrics == {
        "success": 1, "f1": 1, "support_found": 1, "searches": 2, "duplicate_searches": 0, "empty_searches": 0,
        "reads": 0,
    }  # fmt: skip


async def test_the_same_search_again_is_told_counted_and_not_rewarded(index):
    world = Search(index=index, topk=1, for_search=0.1, for_support=0.4)
    rewards, step, told = await play(
        world, TASK, search("Red Harbor"), search("  HARBOR?? red harbor"), search("red harbor"), say("?")
    )
    assert rewards == pytest.approx([0.3, 0.2 * 0, 0, 0])
    assert told[2] == told[3] == "You searched for this before."
    assert step.metrics["searches"] == 1 and step.metrics["duplicate_searches"] == 2


async def test_support_is_rewarded_once_however_it_is_found(index):
    world = Search(index=index, topk=5, for_support=0.4)
    rewards, step, _ = await play(world, TASK, read("a"), search("Red Harbor"), read("a"), read("b"), say("none"))
    assert rewards == pytest.approx([0.2, 0, 0, 0.2, 0]) or rewards == pytest.approx([0.2, 0.2, 0, 0, 0])
    assert step.metrics["support_found"] == 1 and step.metrics["reads"] == 3


async def test_what_finds_nothing_is_told_and_counted(index):
    world = Search(index=index, for_search=0.5)
    rewards, step, told = await play(world, TASK, search("zebra"), search("?!"), search("cole"))
    assert told[1:3] == ["Nothing was found.", "Nothing was found."] and step.metrics["empty_searches"] == 2
    assert rewards == [0, 0, 0.5]


async def test_wrong_calls_are_told_what_is_right(index):
    _, _, told = await play(
        Search(index=index), TASK, Action(tool="browse"), Action(tool="search", arguments={"q": "x"}),
        Action(tool="search", arguments={"query": ["x"]}), Action(tool="read", arguments={}), read("nobody"),
    )  # fmt: skip
    assert told[1:] == [
        "There is no tool browse; use search or read.", "search needs query, a text.", "search needs query, a text.",
        "read needs id, a text.", "There is no passage of this id.",
    ]  # fmt: skip


async def test_searches_have_a_budget_and_passages_a_length(index):
    world = Search(index=index, topk=1, max_searches=1, passage_chars=10, hit="{title}|{text}")
    _, step, told = await play(world, TASK, search("Red Harbor"), search("Ana Cole"), read("b"))
    assert told[1:3] == ["Red Harbor|Red Harbor", "No search is left; answer now."]
    assert told[3] == "Ana Cole: Ana Cole (born 3 May 1901) was a director of films."  # read is to the end
    assert step.metrics["searches"] == 1


async def test_a_task_without_answers_is_unscored_and_without_support_all_is_for_the_answer(index):
    rewards, step, _ = await play(Search(index=index), {"question": "?"}, say("x"))
    assert rewards == [None] and step.done
    rewards, _, _ = await play(Search(index=index, for_support=0.4), {"question": "?", "answers": ["x"]}, say("x"))
    assert rewards == [1.0]


async def test_f1_pays_for_a_part_of_the_answer(index):
    task = {"question": "?", "answers": ["Ana Cole"]}
    rewards, step, _ = await play(Search(index=index, score="f1"), task, say("Ana"))
    assert rewards == pytest.approx([2 / 3]) and step.metrics["success"] == 0
    assert (await play(Search(index=index), task, say("Ana")))[0] == [0]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"topk": 0}, r"environment\.topk=0 must be in 1\.\.100"),
        ({"for_search": 0.5, "for_support": 0.5}, "together < 1"),
        ({"for_search": -0.1}, "must be >= 0"),
        ({"score": "bleu"}, r"environment\.score=bleu is not known"),
        ({"prompt": "{question"}, r"environment\.prompt=.* is not a template"),
        ({"hit": "{titel}"}, r"environment\.hit=.* is not a template of id, title, text"),
        ({"index": {"corpus": "nowhere"}}, r"corpus=nowhere is neither a file"),
        ({"url": "localhost:1"}, "must begin with http"),
    ],
)
def test_options_are_checked_before_anything_is_played(index, options, said):
    with pytest.raises(Problem, match=said):
        Search(**{"index": {} if "url" in options else index, **options})


def test_the_tools_are_functions_of_one_text():
    assert [tool["function"]["name"] for tool in TOOLS] == ["search", "read"]


async def test_reading_may_be_left_out(index):
    world = Search(index=index, can_read=False)
    assert [tool["function"]["name"] for tool in world.tools] == ["search"]
    _, _, told = await play(world, TASK, read("a"))
    assert told[1] == "There is no tool read; use search."


# The whole of wiki2hop, as three policies that need no model. Run below in processes of their own too.


def oracle(task, titles, rng):
    """Searches for the title of each passage of support, reads it, says the answer."""
    actions = []
    for name in task["support"]:
        actions += [search(titles[name]), read(name)]
    return [*actions, say(rng.choice(task["answers"]))]


def null(task, titles, rng):
    return [say("")]


def at_random(task, titles, rng):
    """Searches for two words of the question and says a title of the corpus."""
    words = task["question"].split()
    return [search(" ".join(rng.sample(words, 2))), say(rng.choice(list(titles.values())))]


async def outcomes(policy, split="heldout", **options):
    from astraflow.retrieval.corpus import Fields, corpus_path, read_corpus

    titles = {passage.id: passage.title for passage in read_corpus(corpus_path("wiki2hop"), Fields())}
    source, rng = Wiki2HopSource(split=split), random.Random(0)
    found = []
    for row in range(len(source)):
        task = source.row(row)
        rewards, step, told = await play(Search(**options), task, *policy(task, titles, rng))
        found.append((sum(rewards), step.metrics, told))
    return found


def mean(found):
    return sum(reward for reward, _, _ in found) / len(found)


@pytest.mark.usefixtures("index")
async def test_the_oracle_gets_everything():
    found = await outcomes(oracle, for_search=0.1, for_support=0.4)
    assert len(found) == 202 and mean(found) == pytest.approx(1.0)
    assert all(metrics["success"] == metrics["support_found"] == 1 for _, metrics, _ in found)


@pytest.mark.usefixtures("index")
async def test_who_says_nothing_gets_nothing():
    assert mean(await outcomes(null, for_search=0.1, for_support=0.4)) == 0.0


@pytest.mark.usefixtures("index")
async def test_chance_is_recorded():
    by_oracle, by_null, by_chance = [await outcomes(who, for_support=0.5) for who in (oracle, null, at_random)]
    assert sum(metrics["success"] for _, metrics, _ in by_chance) == 0  # two words of the question find support alone
    recorded(
        "`search`, half of the reward for support", "202 of wiki2hop, held out", oracle=mean(by_oracle),
        null=mean(by_null), random=mean(by_chance),
    )  # fmt: skip


ALONE = """
import asyncio, sys
sys.path[:0] = sys.argv[1:3]
from test_search import at_random, oracle, outcomes
from xxhash import xxh3_64_hexdigest
played = [asyncio.run(outcomes(policy, for_search=0.1)) for policy in (oracle, at_random)]
print(*[xxh3_64_hexdigest(repr(episodes).encode()) for episodes in played])
"""


def test_processes_and_hash_seeds_play_alike(tmp_path, index, pytestconfig):
    folders = [
        str(pytestconfig.rootpath / "tests" / "unit" / "environments"),
        str(pytestconfig.rootpath / "tests" / "support"),
    ]
    said = []
    for seed in ("0", "1"):
        environment = {"PYTHONHASHSEED": seed, "ASTRAFLOW_CACHE": str(tmp_path / seed), "PATH": "/usr/bin:/bin"}
        done = subprocess.run(
            [sys.executable, "-c", ALONE, *folders],
            capture_output=True,
            text=True,
            timeout=100,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert said[0] == said[1] and len(set(said[0].split())) == 2
