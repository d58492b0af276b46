"""People who talk with a model, turn by turn."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.sim.lengths import Distribution, IntDistribution, Pairs
from jaxllm.sim.mix import RequestClass
from jaxllm.sim.prompts import Prompts
from jaxllm.sim.sessions import Script, Turn, within


@dataclass(frozen=True, slots=True)
class System:
    """The text that conversations begin with."""

    num_tokens: int = 0
    per_tenant: bool = False  # each tenant has its own; else it is one for all

    def token_ids(self, prompts: Prompts, kind: RequestClass) -> tuple[int, ...]:
        name = f"system of {kind.service.tenant}" if self.per_tenant else "system"
        return prompts.shared(name, self.num_tokens)


NO_SYSTEM = System()


@dataclass(frozen=True, slots=True)
class DrawnTurns:
    """Numbers of turns and lengths at random."""

    num_turns: IntDistribution
    pairs: Pairs

    def draw(self, rng: random.Random) -> Sequence[tuple[int, int]]:
        return [self.pairs.draw(rng) for _ in range(self.num_turns.draw(rng))]


@dataclass(frozen=True, slots=True)
class SeenTurns:
    """Conversations that were seen, each as likely; none is empty."""

    seen: tuple[tuple[tuple[int, int], ...], ...]

    def __deepcopy__(self, memo: object) -> SeenTurns:
        return self

    def draw(self, rng: random.Random) -> Sequence[tuple[int, int]]:
        return self.seen[int(rng.random() * len(self.seen))]


class ChatWriter:
    """Implements `Writer`: system text, then questions and answers with time to think between them. Mutable."""

    def __init__(
        self,
        prompts: Prompts,
        turns: DrawnTurns | SeenTurns,
        think_s: Distribution,
        *,
        seed: int,
        system: System = NO_SYSTEM,
        max_context: int | None = None,
    ) -> None:
        """`think_s`: seconds from an answer to the next question. A chat ends before it exceeds `max_context`."""
        self._prompts = prompts
        self._turns = turns
        self._think_s = think_s
        self._system = system
        self._max_context = max_context
        self._lengths_rng = random.Random(f"{seed}/lengths")
        self._think_rng = random.Random(f"{seed}/think")

    def write(self, number: int, kind: RequestClass) -> Script:
        del number
        system_ids = self._system.token_ids(self._prompts, kind)
        turns = [
            Turn(num_new, num_output, self._think_s.draw(self._think_rng))
            for num_new, num_output in self._turns.draw(self._lengths_rng)
        ]
        return Script(system_ids, within(turns, len(system_ids), self._max_context))
