"""From the events of a call to the bytes of a stream, the same way in every dialect."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from astraflow.errors import AstraFlowError
from astraflow.rollout.gateway.calls.events import Event


async def written(
    first: Event,
    events: AsyncGenerator[Event, None],
    write: Callable[[Event], Iterable[bytes]],
    fail: Callable[[AstraFlowError], Iterable[bytes]],
) -> AsyncGenerator[bytes, None]:
    """What `write` makes of `first` and the events after it; `fail`: of an error, with which the stream then ends.

    Closing it closes the call, and the engine stops.
    """
    async with aclosing(events):
        for frame in write(first):
            yield frame
        try:
            async for event in events:
                for frame in write(event):
                    yield frame
        except AstraFlowError as error:
            for frame in fail(error):
                yield frame
