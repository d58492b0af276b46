"""Token ids for requests of which only lengths are known."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

VOCABULARY = 1 << 15  # ids are below it
POOL = 1 << 18  # ids in a pool, and prompts that begin at different ones
_STRIDE = 101_159  # odd, so that POOL prompts in a row begin at POOL places


class Prompts:
    """Slices of pools of random ids: two of them differ from the first tokens on. Mutable; of one workload.

    A prompt depends on the seed, its number and its length alone. A pool is made again when it is needed,
    so a pickled one is small.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._epoch = -1  # whose pool is there
        self._pool: tuple[int, ...] = ()
        self._shared: dict[str, tuple[int, ...]] = {}

    def fresh(self, number: int, length: int) -> tuple[int, ...]:
        """What no prompt of another number begins with, as far as it is longer than a few tokens."""
        epoch, place = divmod(number, POOL)
        if epoch != self._epoch:
            self._pool, self._epoch = _pool(self._seed, epoch), epoch
        offset = place * _STRIDE % POOL
        end = offset + length
        if end <= POOL:
            return self._pool[offset:end]
        num_again, rest = divmod(end - POOL, POOL)
        return self._pool[offset:] + self._pool * num_again + self._pool[:rest]

    def shared(self, name: str, length: int) -> tuple[int, ...]:
        """The same object for the same name and length; a longer one begins with the shorter."""
        known = self._shared.get(name, ())
        if len(known) < length:
            known = tuple(random.Random(f"{self._seed}/shared/{name}").choices(range(VOCABULARY), k=length))
            self._shared[name] = known
        return known[:length]  # the whole of a tuple is that tuple

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_pool": (), "_epoch": -1}


def _pool(seed: int, epoch: int) -> tuple[int, ...]:
    drawn = np.random.default_rng((abs(seed), int(seed < 0), epoch))
    return tuple(drawn.integers(VOCABULARY, size=POOL).tolist())
