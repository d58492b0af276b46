"""An executor that pretends a device of a fixed speed: what remains is the host's own cost."""

from __future__ import annotations

import time
from dataclasses import dataclass

from jaxllm.engine.executor import Ticket
from jaxllm.types.step import SchedulerOutput, StepOutput

DEFAULT_STEP_S = 0.005
_TOKENS = tuple((97 + i,) for i in range(26))  # letters, as the byte tokenizer numbers them


@dataclass(frozen=True, slots=True)
class _Step:
    output: StepOutput
    ready_s: float


class PretendDevice:
    """Implements `Executor`. Mutable; owned by the engine core.

    It works like a device that is given steps ahead: a step starts when it is dispatched and the
    one before has ended, and takes `step_s` seconds whatever it computes; `collect` sleeps until
    then. Each sampled token follows from its position, and is never an end-of-sequence id. It knows
    no log probabilities.
    """

    def __init__(self, step_s: float = DEFAULT_STEP_S) -> None:
        self.step_s = step_s
        self.num_steps = 0
        self._ready_s: float | None = None  # when the last step ends

    def submit(self, plan: SchedulerOutput) -> Ticket:
        tokens = _answer(plan)
        now_s = time.monotonic()
        idle_s = 0.0 if self._ready_s is None else max(0.0, now_s - self._ready_s)
        self._ready_s = max(self._ready_s or now_s, now_s) + self.step_s
        self.num_steps += 1
        return Ticket(
            plan.step_id, _Step(StepOutput(plan.step_id, tokens, device_s=self.step_s, idle_s=idle_s), self._ready_s)
        )

    def collect(self, ticket: Ticket) -> StepOutput:
        step: _Step = ticket.handle
        wait_s = step.ready_s - time.monotonic()
        if wait_s > 0:
            time.sleep(wait_s)
        return step.output

    def close(self) -> None:
        """Nothing is held."""


def _answer(plan: SchedulerOutput) -> dict[str, tuple[int, ...]]:
    rows = plan.rows
    tokens = [_TOKENS[number] for number in ((rows.starts + rows.num_tokens) % len(_TOKENS)).tolist()]
    if rows.num_decode == rows.num_rows:
        return dict(zip(rows.request_ids, tokens, strict=True))
    samples = rows.samples.tolist()
    sampled = zip(rows.request_ids, tokens, samples, strict=True)
    return {request_id: ids for request_id, ids, is_sampled in sampled if is_sampled}
