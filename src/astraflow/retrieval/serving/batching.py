"""Questions of many coroutines, answered together: while one batch is worked on, the next one gathers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from astraflow.retrieval.retriever import Hit

Q = TypeVar("Q")
A = TypeVar("A")


class Batcher(Generic[Q, A]):
    """Runs `answer(questions)` in a thread, one batch at a time, in the order in which questions came."""

    def __init__(
        self, answer: Callable[[list[Q]], Sequence[A]], *, window_s: float = 0.0, max_batch: int = 256
    ) -> None:
        """`window_s`: how long a batch that is not full waits for more, once the thread is free."""
        self._answer, self._window_s, self._max_batch = answer, window_s, max_batch
        self._waiting: list[tuple[Q, asyncio.Future[A]]] = []
        self._work: asyncio.Task[None] | None = None
        self.num_batches = 0

    @property
    def num_waiting(self) -> int:
        """Questions that no batch has taken yet."""
        return len(self._waiting)

    async def ask(self, questions: Sequence[Q]) -> list[A]:
        """The answers. Raises: what `answer` raised for the batch that holds one of them."""
        loop = asyncio.get_running_loop()
        futures = [loop.create_future() for _ in questions]
        self._waiting += zip(questions, futures, strict=True)
        if self._work is None or self._work.done() or self._work.get_loop() is not loop:
            self._work = loop.create_task(self._run(), name="batches")
        return list(await asyncio.gather(*futures))

    async def _run(self) -> None:
        while self._waiting:
            if self._window_s and len(self._waiting) < self._max_batch:
                await asyncio.sleep(self._window_s)
            batch, self._waiting = self._waiting[: self._max_batch], self._waiting[self._max_batch :]
            batch = [(question, future) for question, future in batch if not future.done()]  # who gave up wants none
            if not batch:
                continue
            self.num_batches += 1
            try:
                answers = await asyncio.to_thread(self._answer, [question for question, _ in batch])
            except Exception as error:
                for _, future in batch:
                    if not future.done():
                        future.set_exception(error)
            else:
                for (_, future), answer in zip(batch, answers, strict=True):
                    if not future.done():
                        future.set_result(answer)


class Searches(Protocol):
    """A retriever, here or elsewhere."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """The best passages of each query, best first."""


def search_each(retriever: Searches, asked: Sequence[tuple[str, int]]) -> list[list[Hit]]:
    """The passages of (query, topk), each pair with a number of its own."""
    found = retriever.search([query for query, _ in asked], max(topk for _, topk in asked))
    return [hits[:topk] for hits, (_, topk) in zip(found, asked, strict=True)]
