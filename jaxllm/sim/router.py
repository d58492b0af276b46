"""Which replica a request goes to, by load reports that are some time old."""

from __future__ import annotations

import bisect
import random
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

from jaxllm.sim.workload import Arrival


@dataclass(slots=True)
class Load:
    """What a router knows of a replica. Mutable; owned by the fleet, which sets the first three at each report."""

    number: int  # of the replica
    num_open: int = 0  # requests that wait or run there, as last reported
    kv_usage: float = 0.0
    num_sent: int = 0  # requests sent there since

    @property
    def known(self) -> int:
        return self.num_open + self.num_sent


class Router(Protocol):
    """Chooses among the replicas that take requests. Mutable; what it draws comes from a seed."""

    def choose(self, arrival: Arrival, loads: Sequence[Load]) -> Load:
        """One of `loads`, which holds at least one, in the order of their numbers."""
        ...


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._turn = 0

    def choose(self, arrival: Arrival, loads: Sequence[Load]) -> Load:
        self._turn += 1
        return loads[(self._turn - 1) % len(loads)]


class LeastLoaded:
    """The fewest open requests, of equal ones the first."""

    def choose(self, arrival: Arrival, loads: Sequence[Load]) -> Load:
        return min(loads, key=_known)


class PowerOfTwo:
    """The less loaded of two drawn at random (Mitzenmacher, 2001)."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, arrival: Arrival, loads: Sequence[Load]) -> Load:
        if len(loads) == 1:
            return loads[0]
        return min(self._rng.sample(loads, 2), key=_known)


class PrefixHash:
    """Equal prompt beginnings to the same replica: consistent hashing with bounded loads (Mirrokni et al., 2018).

    The first `prefix_tokens` tokens are hashed to a ring on which each replica has `num_points` points; the
    next replica there takes the request, unless it has more than `bound` times the mean load: then the one
    after it, and so on.
    """

    def __init__(self, prefix_tokens: int = 256, bound: float = 1.25, num_points: int = 64) -> None:
        self._prefix_tokens = prefix_tokens
        self._bound = bound
        self._num_points = num_points
        self._members: tuple[int, ...] = ()
        self._ring: list[tuple[int, int]] = []  # (point, replica)

    def choose(self, arrival: Arrival, loads: Sequence[Load]) -> Load:
        by_number = {load.number: load for load in loads}
        if tuple(by_number) != self._members:
            self._members = tuple(by_number)
            points = ((_point(f"{n}/{i}".encode()), n) for n in by_number for i in range(self._num_points))
            self._ring = sorted(points)
        most = self._bound * (sum(map(_known, loads)) + 1) / len(loads)
        prefix = arrival.prompt_ids[: self._prefix_tokens]
        key = _point(struct.pack(f"<{len(prefix)}q", *prefix) + (arrival.cache_salt or "").encode())
        start = bisect.bisect(self._ring, (key, -1))
        seen: set[int] = set()
        for i in range(len(self._ring)):
            number = self._ring[(start + i) % len(self._ring)][1]
            if number not in seen and by_number[number].known < most:
                return by_number[number]
            seen.add(number)
        return min(loads, key=_known)


def _known(load: Load) -> int:
    return load.known


def _point(content: bytes) -> int:
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big")


ROUTERS: dict[str, Callable[[int], Router]] = {
    "round_robin": lambda seed: RoundRobin(),
    "least_loaded": lambda seed: LeastLoaded(),
    "power_of_two": PowerOfTwo,
    "prefix_hash": lambda seed: PrefixHash(),
}
