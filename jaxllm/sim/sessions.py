"""Conversations: each request carries all that was said before."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxllm.sim.arrivals import Process, Until
from jaxllm.sim.mix import Mix, RequestClass
from jaxllm.sim.open_loop import REFUSED_S
from jaxllm.sim.workload import Arrival


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    num_new: int  # tokens that it adds to what was said
    num_output: int  # tokens of its answer
    pause_s: float = 0.0  # since the answer before it; means nothing in the first one


@dataclass(frozen=True, slots=True)
class Script:
    """A conversation before it is held. It has at least one turn."""

    system_ids: tuple[int, ...]
    turns: tuple[Turn, ...]


class Writer(Protocol):
    """Writes scripts. Mutable; asked for each number once and in order."""

    def write(self, number: int, kind: RequestClass) -> Script: ...


class Sessions:
    """Implements `Workload`: conversations that follow scripts. Mutable; its own iterator.

    A turn follows the answer before it, whatever that was; a conversation ends early where a request
    got no answer. The n-th conversation has the same script whatever the engine does. They begin by a
    process, or, where there is none, so many are held at a time and the next begins when one ends.
    """

    def __init__(
        self,
        writer: Writer,
        mix: Mix,
        until: Until,
        *,
        seed: int,
        process: Process | None = None,
        concurrency: int = 0,
    ) -> None:
        self._writer = writer
        self._mix = mix
        self._until = until
        self._process = process
        self._rng = random.Random(f"{seed}/arrivals")
        self._num_at_start = concurrency
        self._number = 0
        self._now_s = 0.0
        self._open: dict[str, _Session] = {}

    def start(self) -> Iterator[Arrival]:
        return self

    def __iter__(self) -> Iterator[Arrival]:
        return self

    def __next__(self) -> Arrival:
        if self._process is not None:
            self._now_s = self._process.next_s(self._now_s, self._rng)
        elif self._num_at_start == 0:
            raise StopIteration
        else:
            self._num_at_start -= 1
        arrival = self._begin(self._now_s)
        if arrival is None:
            raise StopIteration
        return arrival

    def ended(self, arrival: Arrival, at_s: float, output_ids: Sequence[int]) -> Sequence[Arrival]:
        assert arrival.session is not None
        session = self._open[arrival.session]
        following = session.follow(arrival, at_s, output_ids, self._mix) if output_ids else None
        if following is None:
            del self._open[arrival.session]
            if self._process is None:
                following = self._begin(at_s if output_ids else at_s + REFUSED_S)
        return () if following is None else (following,)

    def _begin(self, at_s: float) -> Arrival | None:
        if self._until.is_over(self._number, at_s):
            return None
        number, self._number = self._number, self._number + 1
        kind = self._mix.pick_class()
        script = self._writer.write(number, kind)
        own_ids = self._mix.prompts.fresh(number, sum(turn.num_new for turn in script.turns))
        session = self._open[f"s{number}"] = _Session(f"s{number}", kind, script, own_ids)
        return session.say(at_s, script.system_ids, self._mix)


class _Session:
    """A conversation that is held. Mutable; owned by `Sessions`."""

    __slots__ = ("_kind", "_name", "_num_said", "_own_ids", "_script", "_turn")

    def __init__(self, name: str, kind: RequestClass, script: Script, own_ids: tuple[int, ...]) -> None:
        self._name = name
        self._kind = kind
        self._script = script
        self._own_ids = own_ids  # what the turns add, one after the other
        self._turn = 0  # the next
        self._num_said = 0  # of `own_ids`

    def follow(self, arrival: Arrival, at_s: float, output_ids: Sequence[int], mix: Mix) -> Arrival | None:
        """The turn after an answer; None: it was the last."""
        if self._turn == len(self._script.turns):
            return None
        pause_s = self._script.turns[self._turn].pause_s
        return self.say(at_s + pause_s, (*arrival.prompt_ids, *output_ids), mix)

    def say(self, at_s: float, history: tuple[int, ...], mix: Mix) -> Arrival:
        turn, kind = self._script.turns[self._turn], self._kind
        new_ids = self._own_ids[self._num_said : self._num_said + turn.num_new]
        request_id = f"{self._name}.{self._turn}"
        self._turn += 1
        self._num_said += turn.num_new
        service = mix.service(kind, turn.num_output)
        return Arrival(
            *(at_s, request_id, history + new_ids, turn.num_output, kind.priority, service, kind.cache_salt),
            session=self._name,
        )


def within(turns: Sequence[Turn], num_system: int, max_context: int | None) -> tuple[Turn, ...]:
    """The turns up to the first one whose history and answer exceed a context; the first turn in any case."""
    if max_context is None:
        return tuple(turns)
    num_tokens = num_system
    for index, turn in enumerate(turns):
        num_tokens += turn.num_new + turn.num_output
        if num_tokens > max_context:
            return tuple(turns[: max(1, index)])
    return tuple(turns)
