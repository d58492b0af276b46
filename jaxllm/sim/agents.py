"""Programs that let a model call tools until it has an answer."""

from __future__ import annotations

import random
from dataclasses import dataclass

from jaxllm.sim.chats import NO_SYSTEM, System
from jaxllm.sim.lengths import Distribution, IntDistribution
from jaxllm.sim.mix import RequestClass
from jaxllm.sim.prompts import Prompts
from jaxllm.sim.sessions import Script, Turn, within


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentShape:
    """What agents do; lengths in tokens."""

    task: IntDistribution  # what the first request adds to the system text
    calls: IntDistribution  # tool calls of one agent
    call: IntDistribution  # the model's text of one
    result: IntDistribution  # what a tool returns
    answer: IntDistribution  # the model's last text
    pause_s: Distribution  # seconds that a tool takes


class AgentWriter:
    """Implements `Writer`: a task, calls and results in turns, an answer. Mutable.

    With n calls an agent sends n + 1 requests, each with all that went before.
    """

    def __init__(
        self,
        prompts: Prompts,
        shape: AgentShape,
        *,
        seed: int,
        system: System = NO_SYSTEM,
        max_context: int | None = None,
    ) -> None:
        self._prompts = prompts
        self._shape = shape
        self._system = system
        self._max_context = max_context
        self._lengths_rng = random.Random(f"{seed}/lengths")
        self._pause_rng = random.Random(f"{seed}/think")

    def write(self, number: int, kind: RequestClass) -> Script:
        del number
        system_ids = self._system.token_ids(self._prompts, kind)
        shape, rng = self._shape, self._lengths_rng
        num_calls = shape.calls.draw(rng)
        turns: list[Turn] = []
        for turn in range(num_calls + 1):
            num_new = (shape.result if turn else shape.task).draw(rng)
            num_output = (shape.call if turn < num_calls else shape.answer).draw(rng)
            turns.append(Turn(num_new, num_output, shape.pause_s.draw(self._pause_rng)))
        return Script(system_ids, within(turns, len(system_ids), self._max_context))
