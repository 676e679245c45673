"""Token-exact raw prompts: what a prompt repeats of an earlier prompt and its reply keeps its ids.

A prompt given as ids is those ids. A text is compared with the earlier ones of its episode and policy; of the one that
it goes along with furthest it takes the ids, up to the last sampled token that the text still has, and only the rest is
encoded:

    earlier   Q: 2*3? A:| 2| *| 3| is| 6| <eos>         prompt | sampled
    now       Q: 2*3? A: 2*3 is 6.\\nQ: 3*4? A:
    ids       ^^^^^^^^^^^^^^^^^^^^^^^ kept ^^^^ encoded ^^^

An EOS that the agent never saw is not in its text, so it is left out, unless the agent writes it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from astraflow.errors import GatewayError
from astraflow.rollout.gateway.contexts import Prompt
from astraflow.rollout.gateway.endpoint import PolicyEndpoint


class _Known:
    __slots__ = ("ids", "prompt", "sampled", "text")

    def __init__(self, prompt: str, ids: np.ndarray, sampled: np.ndarray, text: str) -> None:
        self.prompt, self.ids = prompt, ids  # as the agent wrote it, and its ids [P] int32
        self.sampled, self.text = sampled, text  # [T] int32, and all that they say, special tokens too


class RawContexts:
    """The raw prompts of one episode and policy. Not thread-safe: lives on the gateway's event loop."""

    __slots__ = ("_endpoint", "_known")

    def __init__(self, endpoint: PolicyEndpoint) -> None:
        self._endpoint = endpoint
        self._known: list[_Known] = []

    def prompt(self, given: str | Sequence[int]) -> Prompt:
        """Ids for a raw prompt.

        Raises: GatewayError: no token, or an id that is none of the model's.
        """
        if not isinstance(given, str):
            ids = self._checked(given)
            return Prompt(ids, "", None, False, 0)
        for known, common in self._candidates(given):
            count, covered = self._kept(known, given, common)
            if count or given == known.prompt:
                rest = self._endpoint.encode(given[covered:])
                ids = np.concatenate((known.ids, known.sampled[:count], rest))
                return Prompt(ids, given, None, False, len(rest))
        ids = self._endpoint.encode(given)
        if not len(ids):
            raise GatewayError("prompt", given, "must not be empty", "send at least one token")
        return Prompt(ids, given, None, False, len(ids))

    def remember(self, prompt: Prompt, sampled: np.ndarray) -> None:
        """A finished call. Prompts that were ids need no memory: what follows them comes as ids."""
        if prompt.text:
            text = self._endpoint.chat.decode(sampled, skip_special_tokens=False)
            self._known.append(_Known(prompt.text, prompt.ids, sampled, text))

    def _checked(self, given: Sequence[int]) -> np.ndarray:
        size = self._endpoint.chat.vocab_size
        for position, token in enumerate(given):
            if not 0 <= token < size:
                raise GatewayError(f"prompt[{position}]", token, f"must be a token id below {size}", "check the ids")
        if not given:
            raise GatewayError("prompt", "[]", "must not be empty", "send at least one token")
        return np.asarray(given, dtype=np.int32)

    def _candidates(self, text: str) -> list[tuple[_Known, int]]:
        """The earlier calls whose reply `text` has too, and how many characters of it; furthest in `text` first.

        A shared prompt alone is no reason to keep ids: the text is then encoded as a whole, as any model reads it.
        """
        found = []
        for number, known in enumerate(self._known):
            at = len(known.prompt)
            if text.startswith(known.prompt):
                common = _common(text, known.text, at)
                if common or len(text) == at:
                    found.append((at + common, common, number))
        return [(self._known[number], common) for _, common, number in sorted(found, reverse=True)]

    def _kept(self, known: _Known, text: str, common: int) -> tuple[int, int]:
        """How many sampled tokens lie within the first `common` characters of the reply, and the characters of `text`
        that prompt and those stand for."""
        decode, start = self._endpoint.chat.decode, len(known.prompt)
        low, high = 0, len(known.sampled)
        if common < len(known.text):
            while low < high:  # the largest count whose text is not longer
                middle = (low + high + 1) // 2
                if len(decode(known.sampled[:middle], skip_special_tokens=False)) <= common:
                    low = middle
                else:
                    high = middle - 1
        for count in range(high, 0, -1):  # half a character decodes to one that the text has not
            said = decode(known.sampled[:count], skip_special_tokens=False)
            if text.startswith(said, start):
                return count, start + len(said)
        return 0, start


def _common(text: str, other: str, start: int) -> int:
    """Length of the prefix that `text[start:]` and `other` share."""
    low, high = 0, min(len(text) - start, len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(other[:middle], start):
            low = middle
        else:
            high = middle - 1
    return low
