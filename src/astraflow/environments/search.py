"""A question, a corpus to search and to read, and at last an answer in text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from astraflow.contracts import Environment
from astraflow.errors import Problem
from astraflow.retrieval.answers import accepted_of, exact_match, f1, final_answer
from astraflow.retrieval.corpus import Passage
from astraflow.retrieval.library import library
from astraflow.retrieval.ranking import clean
from astraflow.retrieval.retriever import MAX_TOPK
from astraflow.types import Action, Step, Task

PROMPT = (
    "Answer the question. Search for what you need, as often as it takes, then write the answer alone, in a few "
    "words.\nQuestion: {question}"
)


def _tool(name: str, about: str, argument: str, what: str) -> dict[str, Any]:
    text = {"type": "string", "description": what}
    parameters = {"type": "object", "properties": {argument: text}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": parameters}}


TOOLS: list[dict[str, Any]] = [
    _tool("search", "Find passages by words.", "query", "What to look for."),
    _tool("read", "Read a passage to its end.", "id", "As a search gave it."),
]


class Search(Environment):
    """Tools `search(query)` and `read(id)`; a reply that calls none is the answer and ends the episode.

    Reward: `for_search` for the first search that finds something, `for_support` x the share of the task's `support`
    passages that were found or read, and the rest x `score` (exact_match or f1) of the answer. Searching for the same
    words again is told, counted and never rewarded. A task without answers is unscored.
    """

    runs = "service"

    def __init__(
        self, *, index: Mapping[str, Any] | None = None, url: str = "", key_env: str = "ASTRAFLOW_TOKEN", topk: int = 3,
        prompt: str = PROMPT, hit: str = "[{id}] {title}: {text}", passage_chars: int = 0, max_searches: int = 0,
        score: Literal["exact_match", "f1"] = "exact_match", for_search: float = 0.0, for_support: float = 0.0,
        can_read: bool = True,
    ) -> None:  # fmt: skip
        """`index`: `astraflow.retrieval.retriever.Settings`, or `url` of a service with its token in the variable
        `key_env`. `hit`: how a found passage is told, its text cut to `passage_chars`. 0: no such limit.

        Raises: Problem: what cannot work; also of the corpus.
        """
        if not 1 <= topk <= MAX_TOPK:
            raise Problem("environment.topk", topk, f"must be in 1..{MAX_TOPK}", "use 3")
        if min(for_search, for_support) < 0 or for_search + for_support >= 1:
            shares = f"{for_search} and {for_support}"
            raise Problem(
                "environment.for_search and for_support", shares, "must be >= 0, and together < 1", "use 0 and 0"
            )
        if score not in ("exact_match", "f1"):
            raise Problem("environment.score", score, "is not known", "use 'exact_match' or 'f1'")
        for name, template, known in (("prompt", prompt, None), ("hit", hit, {"id": "", "title": "", "text": ""})):
            _check_template(f"environment.{name}", template, known)
        self._tools = TOOLS if can_read else TOOLS[:1]
        self._library = library(index or {}, url, key_env, "environment")
        self._topk, self._prompt, self._hit = topk, prompt, hit
        self._passage_chars, self._max_searches, self._score = passage_chars, max_searches, score
        self._for_search, self._for_support = for_search, for_support
        self._accepted: list[str] = []
        self._support: frozenset[str] = frozenset()
        self._found: set[str] = set()
        self._searched: set[frozenset[str]] = set()
        self._metrics = dict.fromkeys(
            ("success", "f1", "support_found", "searches", "duplicate_searches", "empty_searches", "reads"), 0.0
        )

    @property
    def tools(self) -> list[dict[str, Any]]:
        return self._tools

    def reset(self, task: Task) -> str:
        self._accepted = accepted_of(task.fields, "answers")
        self._support = frozenset(task.get("support") or ())
        return self._prompt.format_map(task.fields)

    async def step(self, action: Action) -> Step:
        if action.tool is None:
            return self._answered(action.text)
        names = [tool["function"]["name"] for tool in self._tools]
        if action.tool not in names:
            return self._told(f"There is no tool {action.tool}; use {' or '.join(names)}.")
        argument = "query" if action.tool == "search" else "id"
        value = action.arguments.get(argument)
        if not isinstance(value, str):
            return self._told(f"{action.tool} needs {argument}, a text.")
        return await (self._search(value) if action.tool == "search" else self._read(value))

    async def _search(self, query: str) -> Step:
        words = frozenset(clean(query).split())
        if words in self._searched:
            self._metrics["duplicate_searches"] += 1
            return self._told("You searched for this before.")
        if self._max_searches and self._metrics["searches"] >= self._max_searches:
            return self._told("No search is left; answer now.")
        self._searched.add(words)
        self._metrics["searches"] += 1
        hits = await self._library.search(query, self._topk)
        if not hits:
            self._metrics["empty_searches"] += 1
            return self._told("Nothing was found.")
        first = self._metrics["searches"] - self._metrics["empty_searches"] == 1
        reward = self._credited([hit.passage for hit in hits]) + (self._for_search if first else 0.0)
        return self._told("\n".join(self._shown(hit.passage) for hit in hits), reward)

    async def _read(self, name: str) -> Step:
        self._metrics["reads"] += 1
        passage = await self._library.read(name)
        if passage is None:
            return self._told("There is no passage of this id.")
        return self._told(f"{passage.title}: {passage.text}", self._credited([passage]))

    def _answered(self, text: str) -> Step:
        if not self._accepted:
            return Step("", None, done=True, metrics=dict(self._metrics))
        answer = final_answer(text)
        same, alike = exact_match(answer, self._accepted), f1(answer, self._accepted)
        self._metrics.update(success=same, f1=alike)
        # What a task cannot give (it names no support) is added to the answer.
        rest = 1.0 - self._for_search - (self._for_support if self._support else 0.0)
        return Step(
            "", rest * (same if self._score == "exact_match" else alike), done=True, metrics=dict(self._metrics)
        )

    def _credited(self, passages: Sequence[Passage]) -> float:
        """For support that is seen for the first time."""
        new = self._support.intersection(passage.id for passage in passages) - self._found
        self._found |= new
        self._metrics["support_found"] = len(self._found) / max(1, len(self._support))
        return self._for_support * len(new) / max(1, len(self._support))

    def _shown(self, passage: Passage) -> str:
        text = passage.text if not self._passage_chars else passage.text[: self._passage_chars]
        return self._hit.format(id=passage.id, title=passage.title, text=text)

    def _told(self, text: str, reward: float = 0.0) -> Step:
        return Step(text, reward, metrics=dict(self._metrics))


def _check_template(where: str, template: str, known: Mapping[str, str] | None) -> None:
    """Raises: Problem: braces that are not closed; `known` given: another name than these."""
    try:
        template.format_map(_Any() if known is None else known)
    except (ValueError, KeyError, IndexError, AttributeError) as error:
        names = "the task's fields" if known is None else ", ".join(known)
        raise Problem(
            where, template, f"is not a template of {names} ({error})", "write a brace as {{ or }}"
        ) from error


class _Any(dict[str, str]):
    def __missing__(self, key: str) -> str:
        return ""
