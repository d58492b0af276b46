"""What requests come, and when."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, cast

from jaxllm.errors import ConfigError
from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams

MAX_TIME_S = 1e12  # on the simulation's clock: beyond it, steps are too short to move it


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request as it comes to an engine or a router."""

    at_s: float  # on the simulation's clock
    request_id: str  # unique in a run
    prompt_ids: tuple[int, ...]
    num_output: int  # tokens it is answered with, at least 1
    priority: int = 0
    service: ServiceParams = DEFAULT_SERVICE
    cache_salt: str | None = None
    session: str | None = None  # the conversation it belongs to

    def __post_init__(self) -> None:
        """Raises ConfigError: see `check_time`."""
        check_time(self.request_id, self.at_s)

    def without_prompt(self) -> Arrival:
        """The same with a prompt of no memory, which has the length and other tokens."""
        return replace(self, prompt_ids=cast("tuple[int, ...]", range(len(self.prompt_ids))))

    @property
    def num_prompt(self) -> int:
        return len(self.prompt_ids)


def until_none(arrivals: Iterable[Arrival | None]) -> Iterator[Arrival]:
    """Those before the first None."""
    for arrival in arrivals:
        if arrival is None:
            return
        yield arrival


def check_time(request_id: str, at_s: float) -> None:
    """Raises: ConfigError: a request comes later than a simulation can go."""
    if not at_s <= MAX_TIME_S:
        accepted = f"the first {MAX_TIME_S:g} s; look at rates, pauses and the speed of a trace"
        raise ConfigError(f"request {request_id!r} comes at {at_s:g} s; accepted: {accepted}")


class Workload(Protocol):
    """A source of requests. Mutable; of one use; all that is drawn comes from a seed."""

    def start(self) -> Iterable[Arrival]:
        """The requests that come whatever happens, in order of time; read lazily."""
        ...

    def ended(self, arrival: Arrival, at_s: float, output_ids: Sequence[int]) -> Sequence[Arrival]:
        """What follows when a request ends, at `at_s` or later: the next turn, the next of a closed loop."""
        ...
