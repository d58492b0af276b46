"""What was recorded, decided again with another device in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from jaxllm.engine.core import EngineCore
from jaxllm.engine.executor import Executor, Ticket
from jaxllm.engine.messages import AbortRequests, AddRequest
from jaxllm.engine.replay import decided_by
from jaxllm.engine.trace import Aborted, Arrived, CacheReset, Decision, Header, Planned
from jaxllm.engine.trace_file import read_trace
from jaxllm.sim.clock import VirtualClock
from jaxllm.sim.executor import SimulatedExecutor
from jaxllm.sim.linear import Linear
from jaxllm.sim.recorded import read_recorded
from jaxllm.types.step import SchedulerOutput, StepOutput

MakeExecutor = Callable[[Header, VirtualClock], Executor]


def plan_hashes(path: str | Path, make_executor: MakeExecutor) -> tuple[list[str], list[str]]:
    """Hashes of the plans that were recorded, and of those that the same arrivals lead to on another device.

    Requests, aborts and resets come before the same steps as they did; the clock shows what it showed. Log
    probabilities are not asked for, since only a model has them.

    Raises:
        ConfigError: the file cannot be read or is no trace.
    """
    header, lines = read_trace(path)
    recorded: list[str] = []
    clock = VirtualClock()
    executor = _Watched(make_executor(header, clock))
    scheduler, kv = decided_by(header)
    core = EngineCore(executor, scheduler, kv, clock, async_scheduling=header.scheduler.async_scheduling)
    for _, line in lines:
        match line:
            case Arrived():
                core.add(_without_logprobs(line.request))
            case Aborted():
                core.abort(AbortRequests(line.request_ids))
            case CacheReset():
                core.reset_prefix_cache()
            case Planned():
                clock.advance_to(line.now_s)
                core.step()
                if line.hash is not None:
                    recorded.append(line.hash)
            case _:
                pass
    return recorded, executor.hashes


def simulated(path: str | Path) -> MakeExecutor:
    """The simulator's device with the recorded tokens. Steps take no time: the clock has the recorded one."""
    tokens = read_recorded(path).tokens

    def make(header: Header, clock: VirtualClock) -> Executor:
        return SimulatedExecutor(Linear(step_s=0.0), clock, tokens=tokens)

    return make


class _Watched:
    """An executor that notes the plans it is given. Mutable; of one core."""

    def __init__(self, executor: Executor) -> None:
        self.hashes: list[str] = []
        self._executor = executor

    def submit(self, plan: SchedulerOutput) -> Ticket:
        self.hashes.append(Decision.of(plan).hash)
        return self._executor.submit(plan)

    def collect(self, ticket: Ticket) -> StepOutput:
        return self._executor.collect(ticket)

    def close(self) -> None:
        self._executor.close()


def _without_logprobs(request: AddRequest) -> AddRequest:
    if request.params.prompt_logprobs is None and request.params.logprobs is None:
        return request
    params = replace(request.params, logprobs=None, prompt_logprobs=None, logprob_token_ids=None)
    if request.params.prompt_logprobs is not None:
        params = replace(params, skip_reading_prefix_cache=True)  # as the prompt's scores had it
    return msgspec.structs.replace(request, params=params)
