"""What is asked of every server: the same requests at the same times, whatever answers them.

Lengths and arrival times are fixed; a seed changes the text alone, so that the repetitions of a
comparison do equal work and find nothing of each other in a prefix cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from scripts.bench.words import Texts

ONLINE_RATE = 0.5  # requests a second
ONLINE_S = 60.0


@dataclass(frozen=True, slots=True)
class Request:
    id: str
    prompt: str
    num_prompt_tokens: int
    max_tokens: int  # generated exactly: the end of a sequence is ignored
    arrival_s: float = 0.0  # after the start of the workload; counts where `concurrency` is None


@dataclass(frozen=True, slots=True)
class Workload:
    name: str
    requests: tuple[Request, ...]
    concurrency: int | None  # requests in flight at most; None: each is sent at its own arrival

    def first(self, num_requests: int | None) -> Workload:
        return self if num_requests is None else replace(self, requests=self.requests[:num_requests])


Lengths = tuple[int, int]  # tokens of the prompt and of the answer


def mixed_lengths(num_requests: int, seed: int) -> list[Lengths]:
    """Lognormal around 200 and 128 tokens, cut to 16 to 800 and 16 to 256."""
    draw = random.Random(seed)

    def length(median: int, sigma: float, largest: int) -> int:
        return int(min(largest, max(16, math.exp(draw.gauss(math.log(median), sigma)))))

    return [(length(200, 0.7, 800), length(128, 0.5, 256)) for _ in range(num_requests)]


def poisson_arrivals(rate: float, seconds: float) -> list[float]:
    draw, now, arrivals = random.Random(99), 0.0, list[float]()
    while (now := now + draw.expovariate(rate)) < seconds:
        arrivals.append(now)
    return arrivals


def _requests(name: str, texts: Texts, lengths: Sequence[Lengths]) -> tuple[Request, ...]:
    return tuple(
        Request(f"{name}-{i}", texts.draw(num_tokens), num_tokens, max_tokens)
        for i, (num_tokens, max_tokens) in enumerate(lengths)
    )


def first_token(texts: Texts) -> Workload:
    """What a server that has just started is asked."""
    return Workload("first", _requests("first", texts, [(16, 1)]), 1)


def warm_up(texts: Texts, concurrency: int) -> Workload:
    """Short, long and many at once; not counted."""
    lengths = [(n, 24) for n in (16, 40, 100, 200, 300, 500, 700, 790)]
    return Workload("warm-up", _requests("warm-up", texts, lengths), concurrency)


def single_stream(texts: Texts) -> Workload:
    return Workload("single", _requests("single", texts, [(128, 128)] * 3), 1)


def long_prompts(texts: Texts) -> Workload:
    return Workload("prefill", _requests("prefill", texts, [(2000, 1)] * 3), 1)


def shared_prefix(texts: Texts) -> Workload:
    """32 requests at once: 512 tokens in common, 32 of their own, 32 to answer."""
    lead = texts.draw(512)
    requests = tuple(Request(f"prefix-{i}", texts.draw(544, lead), 544, 32) for i in range(32))
    return Workload("prefix", requests, len(requests))


def offline(texts: Texts) -> Workload:
    """64 requests of mixed lengths, all at once."""
    return Workload("offline", _requests("offline", texts, mixed_lengths(64, 1234)), 64)


def online(texts: Texts, rate: float = ONLINE_RATE, seconds: float = ONLINE_S) -> Workload:
    """Mixed lengths at random times; a longer run begins like a shorter one."""
    arrivals = poisson_arrivals(rate, seconds)
    requests = _requests("online", texts, mixed_lengths(len(arrivals), 4321))
    return Workload("online", tuple(replace(r, arrival_s=t) for r, t in zip(requests, arrivals, strict=True)), None)


WORKLOADS: dict[str, Callable[[Texts], Workload]] = {
    "single": single_stream,
    "prefill": long_prompts,
    "prefix": shared_prefix,
    "offline": offline,
    "online": online,
}
