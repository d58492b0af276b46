"""What was recorded, decided again with another device in its place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from jaxllm.engine.core import EngineCore
from jaxllm.engine.executor import Executor, Ticket
from jaxllm.engine.messages import AbortRequests, AddRequest
from jaxllm.engine.replay import read_trace
from jaxllm.engine.trace import Aborted, Arrived, CacheReset, Collected, Decision, Header, Planned
from jaxllm.memory.manager import KVManager
from jaxllm.scheduler.registry import create_policy
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stop import StopRules
from jaxllm.sim.clock import VirtualClock
from jaxllm.sim.executor import SimulatedExecutor
from jaxllm.types.step import SchedulerOutput, StepOutput


@dataclass(frozen=True, slots=True)
class Answers:
    """What each request of a trace was answered, in the order in which they came."""

    num_prompt: dict[str, int]
    token_ids: dict[str, list[int]]
    step_s: list[float]  # of each step, on the device

    def token(self, request_id: str, position: int) -> int:
        """A `TokenSource`: the token that was sampled for a position."""
        return self.token_ids[request_id][position - self.num_prompt[request_id]]


def read_answers(path: str | Path) -> Answers:
    """Raises ConfigError: the file cannot be read or is no trace."""
    _, lines = read_trace(path)
    answers = Answers({}, {}, [])
    for line in lines:
        if isinstance(line, Arrived):
            answers.num_prompt[line.request.request_id] = len(line.request.prompt_ids)
            answers.token_ids[line.request.request_id] = []
        elif isinstance(line, Collected):
            answers.step_s.append(line.device_s)
            for request_id, tokens in line.tokens.items():
                answers.token_ids[request_id].extend(tokens)
    return answers


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
    core = _core(header, executor, clock)
    for line in lines:
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
    """The simulator's device, with the recorded tokens and times."""
    answers = read_answers(path)

    def make(header: Header, clock: VirtualClock) -> Executor:
        return SimulatedExecutor(_Recorded(tuple(answers.step_s)), clock, tokens=answers.token)

    return make


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A cost model that knows how long each step took."""

    step_s: tuple[float, ...]

    def step_seconds(self, plan: SchedulerOutput) -> float:
        return self.step_s[plan.step_id] if plan.step_id < len(self.step_s) else 0.0


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


def _core(header: Header, executor: Executor, clock: VirtualClock) -> EngineCore:
    config, cache = header.scheduler, header.cache
    kv = KVManager(
        header.kv_plan,
        enable_prefix_caching=cache.enable_prefix_caching,
        enable_partial_page_reuse=cache.enable_partial_page_reuse,
    )
    policy = create_policy(config.policy, config.policy_options)
    scheduler = Scheduler(config, kv, policy, StopRules(frozenset(header.eos_ids), config.max_model_len))
    return EngineCore(executor, scheduler, kv, clock, async_scheduling=config.async_scheduling)
