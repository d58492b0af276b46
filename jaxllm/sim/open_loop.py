"""Requests that stand alone: sent whatever happens, or each when another has ended."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sequence

from jaxllm.sim.arrivals import Process, Until
from jaxllm.sim.lengths import Constant, Distribution
from jaxllm.sim.mix import Mix
from jaxllm.sim.workload import Arrival, until_none

REFUSED_S = 0.01  # a client that got nothing waits at least so long
NO_PAUSE = Constant(0.0)


class OpenLoop:
    """Implements `Workload`: moments of a process, requests of a mix. Frozen: each start gives the same requests."""

    def __init__(self, process: Process, mix: Mix, until: Until, *, seed: int) -> None:
        self._process = process
        self._mix = mix
        self._until = until
        self._seed = seed

    def start(self) -> Iterator[Arrival]:
        return _Sent(self._process, copy.deepcopy(self._mix), self._until, random.Random(f"{self._seed}/arrivals"))

    def ended(self, arrival: Arrival, at_s: float, output_ids: Sequence[int]) -> Sequence[Arrival]:
        del arrival, at_s, output_ids
        return ()


class _Sent:
    """The requests of an open loop, picklable. Mutable."""

    def __init__(self, process: Process, mix: Mix, until: Until, rng: random.Random) -> None:
        self._process = process
        self._mix = mix
        self._until = until
        self._rng = rng
        self._number = 0
        self._now_s = 0.0

    def __iter__(self) -> Iterator[Arrival]:
        return self

    def __next__(self) -> Arrival:
        at_s = self._process.next_s(self._now_s, self._rng)
        if self._until.is_over(self._number, at_s):
            raise StopIteration
        number, self._number, self._now_s = self._number, self._number + 1, at_s
        return self._mix.request(number, at_s)


class ClosedLoop:
    """Implements `Workload`: so many clients, each with one request at a time. Mutable.

    The n-th request is the same whoever sends it; when it comes depends on the engine.
    """

    def __init__(
        self, concurrency: int, mix: Mix, until: Until, *, seed: int, think_s: Distribution = NO_PAUSE
    ) -> None:
        """`think_s`: seconds from the end of a client's request to its next one. `mix` is the loop's from now on."""
        self._mix = mix
        self._until = until
        self._think_s = think_s
        self._rng = random.Random(f"{seed}/think")
        self._number = 0
        first = (self._next(0.0) for _ in range(concurrency))
        self._first = tuple(until_none(first))

    def start(self) -> Iterable[Arrival]:
        return self._first

    def ended(self, arrival: Arrival, at_s: float, output_ids: Sequence[int]) -> Sequence[Arrival]:
        del arrival
        pause_s = self._think_s.draw(self._rng)
        following = self._next(at_s + (pause_s if output_ids else max(pause_s, REFUSED_S)))
        return () if following is None else (following,)

    def _next(self, at_s: float) -> Arrival | None:
        if self._until.is_over(self._number, at_s):
            return None
        self._number += 1
        return self._mix.request(self._number - 1, at_s)
