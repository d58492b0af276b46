"""Whether an output has begun to repeat itself."""

from __future__ import annotations

import numpy as np

from jaxllm.types.request import Request
from jaxllm.types.sampling import RepetitionDetection


class _Watch:
    """Counts, for each pattern size, how many of the latest tokens equal the one that many before.

    O(pattern sizes) a token, however long the output is: a caller may ask for 4,096 of 4,096.
    """

    __slots__ = ("_matches", "_needed", "_recent")

    def __init__(self, rule: RepetitionDetection) -> None:
        sizes = np.arange(rule.min_pattern_size, rule.max_pattern_size + 1, dtype=np.int64)
        self._needed = sizes * (rule.min_count - 1)
        self._matches = np.zeros(len(sizes), np.int64)
        self._recent = np.full(rule.max_pattern_size, -1, np.int64)  # newest first; -1 matches no id

    def push(self, token_id: int) -> bool:
        """Take in the next token; True if the output now ends in `min_count` copies of a pattern."""
        before = self._recent[len(self._recent) - len(self._matches) :]
        self._matches += 1
        self._matches *= before == token_id
        self._recent[1:] = self._recent[:-1].copy()
        self._recent[0] = token_id
        return bool((self._matches >= self._needed).any())


class RepetitionWatches:
    """A watch for each request that asks for one. Mutable; owned by the scheduler."""

    def __init__(self) -> None:
        self._watches: dict[Request, _Watch] = {}

    def __len__(self) -> int:
        return len(self._watches)

    def push(self, request: Request, token_id: int) -> bool:
        """Take in a request's next output token; True if its output repeats itself enough."""
        rule = request.params.repetition_detection
        if rule is None:
            return False
        watch = self._watches.get(request)
        if watch is None:
            watch = self._watches[request] = _Watch(rule)
        return watch.push(token_id)

    def forget(self, request: Request) -> None:
        self._watches.pop(request, None)
