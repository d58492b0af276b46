"""An executor whose steps take as long as a cost model says, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from itertools import compress

import numpy as np

from jaxllm.engine.executor import Ticket
from jaxllm.errors import ConfigError
from jaxllm.sim.clock import VirtualClock
from jaxllm.sim.cost import CostModel
from jaxllm.types.step import ScheduledRows, SchedulerOutput, StepOutput

TokenSource = Callable[[str, int], int]  # (request id, position) -> the token that is sampled for that position

_VOCABULARY = 1 << 15
_MOST_STEP_S = 86_400.0  # one that takes longer is a mistake in the cost model


def any_token(request_id: str, position: int) -> int:
    """A token that tells positions apart and not requests: equal prompts have equal answers, as greedy ones do."""
    del request_id
    return position * 40503 % _VOCABULARY


class SimulatedExecutor:
    """Implements `Executor`: one device that works on one step after the other. Mutable; owned by its replica.

    `host_s` is what the host spends on a step before the device can start it: hidden behind the step in
    flight where there is one, as in the real engine. With `loads_kv` the device is handed the KV of prompts
    and computes only the last token of each, with its decodes; loading was waited for before. Collecting
    moves the clock to the end of the step.
    """

    def __init__(
        self,
        cost: CostModel,
        clock: VirtualClock,
        *,
        host_s: float = 0.0,
        loads_kv: bool = False,
        tokens: TokenSource = any_token,
    ) -> None:
        self.num_tokens = 0  # computed in all steps
        self.plan_hash = b""  # of all plans: equal for runs that decided the same
        self.busy_s = 0.0
        self._cost = cost
        self._clock = clock
        self._host_s = host_s
        self._loads_kv = loads_kv
        self._tokens = tokens
        self._free_s = 0.0  # when the device has done what it was given

    def submit(self, plan: SchedulerOutput) -> Ticket:
        self._clock.advance_to(self._clock.now_s() + self._host_s)
        computed = _without_prompts(plan) if self._loads_kv else plan
        seconds = self._cost.step_seconds(computed) if computed.rows.num_rows else 0.0
        if not 0 <= seconds <= _MOST_STEP_S:
            raise ConfigError(
                f"cost: a step of {computed.total_tokens} tokens takes {seconds:g} s; accepted: 0 to {_MOST_STEP_S:g}"
            )
        started_s = max(self._clock.now_s(), self._free_s)
        self._free_s = started_s + seconds
        self.busy_s += seconds
        self.num_tokens += computed.total_tokens
        self.plan_hash = _chained(self.plan_hash, plan)
        return Ticket(plan.step_id, (plan, self._free_s, seconds))

    def collect(self, ticket: Ticket) -> StepOutput:
        plan, done_s, seconds = ticket.handle
        self._clock.advance_to(done_s)
        rows = plan.rows
        ends = (rows.starts + rows.num_tokens).tolist()
        sampled = zip(rows.request_ids, ends, rows.samples.tolist(), strict=True)
        tokens = {request_id: (self._tokens(request_id, end),) for request_id, end, samples in sampled if samples}
        return StepOutput(plan.step_id, tokens, device_s=seconds)

    def close(self) -> None:
        """Nothing to release."""


def _without_prompts(plan: SchedulerOutput) -> SchedulerOutput:
    """The rows that sample, each with its last token alone."""
    rows, computed = plan.rows, plan.rows.samples
    num = int(computed.sum())
    return replace(
        plan,
        rows=ScheduledRows(
            request_ids=tuple(compress(rows.request_ids, computed.tolist())),
            slots=rows.slots[computed],
            starts=(rows.starts + rows.num_tokens - 1)[computed],
            num_tokens=np.ones(num, np.int32),
            samples=np.ones(num, np.bool_),
            num_decode=num,
        ),
    )


def _chained(before: bytes, plan: SchedulerOutput) -> bytes:
    rows = plan.rows
    columns = (rows.slots, rows.starts, rows.num_tokens, *(diff.pages for diff in plan.page_diffs))
    ids = "\n".join(rows.request_ids).encode()
    return blake2b(b"".join((before, ids, *(column.tobytes() for column in columns))), digest_size=16).digest()
