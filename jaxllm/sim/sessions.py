"""Conversations: each request carries all that was said before."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxllm.sim.arrivals import Process, Until
from jaxllm.sim.mix import Mix, RequestClass
from jaxllm.sim.open_loop import REFUSED_S
from jaxllm.sim.workload import Arrival, until_none
from jaxllm.types.service import ServiceParams


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
    """Implements `Workload`: conversations that follow scripts. Mutable; each start gives the same first turns.

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
        """`writer` and `mix` are the workload's from now on."""
        self._beginner = _Beginner(writer, mix, until)
        self._process = process
        self._seed = seed
        self._open: dict[str, _Session] = {}
        self._num_begun = 0
        first = (self._begin(0.0) for _ in range(concurrency if process is None else 0))
        self._first = tuple(until_none(first))

    def start(self) -> Iterable[Arrival]:
        if self._process is None:
            return self._first
        return _Begun(self, self._process, copy.deepcopy(self._beginner), random.Random(f"{self._seed}/arrivals"))

    def ended(self, arrival: Arrival, at_s: float, output_ids: Sequence[int]) -> Sequence[Arrival]:
        assert arrival.session is not None
        session = self._open[arrival.session]
        following = session.follow(arrival, at_s, output_ids) if output_ids else None
        if following is None:
            del self._open[arrival.session]
            if self._process is None:
                following = self._begin(at_s if output_ids else at_s + REFUSED_S)
        return () if following is None else (following,)

    def note(self, session: _Session) -> None:
        """A conversation begins; one that has begun before, in an earlier start, goes on as it is."""
        if session.number >= self._num_begun:
            self._num_begun = session.number + 1
            self._open[session.name] = session

    def _begin(self, at_s: float) -> Arrival | None:
        begun = self._beginner.begin(at_s)
        if begun is None:
            return None
        session, arrival = begun
        self.note(session)
        return arrival


class _Begun:
    """The first turns of conversations that begin by a process, picklable. Mutable."""

    def __init__(self, sessions: Sessions, process: Process, beginner: _Beginner, rng: random.Random) -> None:
        self._sessions = sessions
        self._process = process
        self._beginner = beginner
        self._rng = rng
        self._now_s = 0.0

    def __iter__(self) -> Iterator[Arrival]:
        return self

    def __next__(self) -> Arrival:
        self._now_s = self._process.next_s(self._now_s, self._rng)
        begun = self._beginner.begin(self._now_s)
        if begun is None:
            raise StopIteration
        session, arrival = begun
        self._sessions.note(session)
        return arrival


class _Beginner:
    """Makes conversations, one after the other. Mutable."""

    def __init__(self, writer: Writer, mix: Mix, until: Until) -> None:
        self._writer = writer
        self._mix = mix
        self._until = until
        self._number = 0

    def begin(self, at_s: float) -> tuple[_Session, Arrival] | None:
        """The next one and its first turn; None: none comes any more."""
        if self._until.is_over(self._number, at_s):
            return None
        number, self._number = self._number, self._number + 1
        kind = self._mix.pick_class()
        script = self._writer.write(number, kind)
        own_ids = self._mix.prompts.fresh(number, sum(turn.num_new for turn in script.turns))
        services = [self._mix.service(kind, turn.num_output) for turn in script.turns]
        session = _Session(number, kind, script, services, own_ids)
        return session, session.say(at_s, script.system_ids)


class _Session:
    """A conversation that is held. Mutable; owned by `Sessions`."""

    __slots__ = ("_kind", "_num_said", "_own_ids", "_script", "_services", "_turn", "number")

    def __init__(
        self,
        number: int,
        kind: RequestClass,
        script: Script,
        services: Sequence[ServiceParams],
        own_ids: tuple[int, ...],
    ) -> None:
        """`services`: by turn. `own_ids`: what the turns add, one after the other."""
        self.number = number
        self._kind = kind
        self._script = script
        self._services = services
        self._own_ids = own_ids
        self._turn = 0  # the next
        self._num_said = 0  # of `own_ids`

    @property
    def name(self) -> str:
        return f"s{self.number}"

    def follow(self, arrival: Arrival, at_s: float, output_ids: Sequence[int]) -> Arrival | None:
        """The turn after an answer; None: it was the last."""
        if self._turn == len(self._script.turns):
            return None
        pause_s = self._script.turns[self._turn].pause_s
        return self.say(at_s + pause_s, (*arrival.prompt_ids, *output_ids))

    def say(self, at_s: float, history: tuple[int, ...]) -> Arrival:
        number, kind = self._turn, self._kind
        turn = self._script.turns[number]
        prompt_ids = history + self._own_ids[self._num_said : self._num_said + turn.num_new]
        self._turn += 1
        self._num_said += turn.num_new
        return Arrival(
            at_s,
            f"{self.name}.{number}",
            prompt_ids,
            turn.num_output,
            kind.priority,
            self._services[number],
            kind.cache_salt,
            self.name,
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
