"""What the host costs without a model: the real scheduler and engine against a pretended device.

Figures are process CPU time where one thread does the work alone, since wall time on a shared
machine says more about the neighbours; each is measured several times, and the spread is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.config.engine import SchedulerConfig
from jaxllm.engine.engine import Engine
from jaxllm.engine.inputs import TokensPrompt
from jaxllm.engine.parts import EngineParts
from jaxllm.memory.manager import KVManager
from jaxllm.memory.plan import KVCachePlan, KVGroup
from jaxllm.memory.spec import FullKV, pages_for
from jaxllm.scheduler.registry import create_policy
from jaxllm.scheduler.scheduler import Scheduler
from jaxllm.scheduler.stop import StopRules
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.testing.pretend_device import DEFAULT_STEP_S, PretendDevice
from jaxllm.types.profile import ProfileSummary
from jaxllm.types.request import Request
from jaxllm.types.sampling import OutputKind, SamplingParams
from jaxllm.types.service import ServiceParams
from jaxllm.types.step import SchedulerOutput, StepOutput

_MAX_MODEL_LEN = 4096
_EOS_ID = 2


@dataclass(frozen=True, slots=True)
class Spread:
    """Of several measurements of one thing."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class SchedulerCost:
    """Process CPU time of a decode step, in microseconds: the mean of a run's steps, spread over the runs."""

    num_requests: int
    schedule_us: Spread
    update_us: Spread
    total_us: Spread


@dataclass(frozen=True, slots=True)
class BusyShare:
    """How much of the time a device of a fixed speed had work."""

    num_requests: int
    async_scheduling: bool
    step_s: float  # of the pretended device
    num_steps: int
    wall_s: float  # from the first dispatch to the end of the last step
    busy_share: float  # of the wall time
    median_busy_share: float  # of the median step, which leaves out those in which another process had the CPU
    cpu_s_per_step: float  # process CPU time, all threads
    profile: ProfileSummary


@dataclass(frozen=True, slots=True)
class PrefixCacheCost:
    """`schedule` and `update` with and without prefix caching, where no prompt has anything in common.

    Process CPU time per step over whole runs (prompts, decodes and ends), in microseconds.
    """

    num_requests: int
    num_steps: int
    with_us: Spread
    without_us: Spread
    difference_us: Spread  # of runs made one after the other
    share_of_step: float  # the median difference, of a step of `step_s` on the device and the host's own time
    step_s: float


def scheduler_cost(
    num_requests: int,
    *,
    num_steps: int = 200,
    num_runs: int = 5,
    page_size: int = 16,
    prefix_caching: bool = True,
    prompt_tokens: int = 64,
    policy: str = "fcfs",
    num_waiting: int = 0,
) -> SchedulerCost:
    """`schedule` and `update` of steps in which `num_requests` requests decode, one step left in flight.

    `num_waiting` more wait for a slot all the while, in eight tenants and three priorities.
    """
    pairs: list[tuple[float, float]] = []
    for _ in range(num_runs):
        bench = _Bench(
            num_requests, page_size, prompt_tokens, num_steps + 20, prefix_caching=prefix_caching, policy=policy
        )
        while bench.num_decoding < num_requests:
            bench.step()
        bench.add_waiting(num_waiting, prompt_tokens)  # not earlier: some policies would have them run first
        bench.step()
        bench.schedule_ns = bench.update_ns = 0
        for _ in range(num_steps):
            bench.step()
        pairs.append((bench.schedule_ns / num_steps / 1e3, bench.update_ns / num_steps / 1e3))
    schedule, update = zip(*pairs, strict=True)
    return SchedulerCost(num_requests, Spread.of(schedule), Spread.of(update), Spread.of([a + b for a, b in pairs]))


def prefix_cache_cost(
    num_requests: int = 128,
    *,
    num_runs: int = 15,
    prompt_tokens: int = 256,
    output_tokens: int = 128,
    page_size: int = 64,
    step_s: float = DEFAULT_STEP_S,
) -> PrefixCacheCost:
    """Runs with and without prefix caching in turn.

    The cost is one of pages; a device as fast as the pretended one is an accelerator, so their size is
    that of a GPU by default.
    """
    costs: dict[bool, list[float]] = {True: [], False: []}
    num_steps = 0
    for run in range(2 * num_runs + 2):
        bench = _Bench(num_requests, page_size, prompt_tokens, output_tokens, prefix_caching=run % 2 == 0)
        num_steps = bench.drain()
        if run >= 2:  # the first pair warms up
            costs[run % 2 == 0].append((bench.schedule_ns + bench.update_ns) / num_steps / 1e3)
    differences = Spread.of([a - b for a, b in zip(costs[True], costs[False], strict=True)])
    step_us = step_s * 1e6 + statistics.median(costs[True])
    return PrefixCacheCost(
        num_requests,
        num_steps,
        Spread.of(costs[True]),
        Spread.of(costs[False]),
        differences,
        differences.median / step_us,
        step_s,
    )


def device_busy_share(
    num_requests: int = 128,
    *,
    step_s: float = DEFAULT_STEP_S,
    num_tokens: int = 200,
    async_scheduling: bool = True,
    prompt_tokens: int = 64,
) -> BusyShare:
    """The whole engine, each token shown to the caller as it comes, on a device that takes `step_s` a step."""
    device = PretendDevice(step_s)
    engine = Engine(_engine_parts(device, num_requests, prompt_tokens + num_tokens, async_scheduling=async_scheduling))
    prompts = [TokensPrompt(_prompt(number, prompt_tokens, 200)) for number in range(num_requests)]
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, output_kind=OutputKind.DELTA)
    with engine:
        engine.generate([TokensPrompt(_prompt(num_requests, prompt_tokens, 200))], [params], lambda _: None)  # warm
        engine.step_profiles()
        first_step = device.num_steps
        started_cpu_s = time.process_time()
        engine.generate(prompts, [params] * num_requests, lambda _: None)
        cpu_s = time.process_time() - started_cpu_s
        profiles = engine.step_profiles()
    num_steps = device.num_steps - first_step
    busy_s, idle_s = num_steps * step_s, sum(profile.idle_s for profile in profiles[1:])
    return BusyShare(
        num_requests=num_requests,
        async_scheduling=async_scheduling,
        step_s=step_s,
        num_steps=num_steps,
        wall_s=busy_s + idle_s,
        busy_share=busy_s / (busy_s + idle_s),
        median_busy_share=step_s / (step_s + statistics.median([profile.idle_s for profile in profiles])),
        cpu_s_per_step=cpu_s / num_steps,
        profile=ProfileSummary.of(profiles),
    )


class _Bench:
    """A scheduler with requests that nobody else has, stepped with one step left in flight. Mutable."""

    def __init__(
        self,
        num_requests: int,
        page_size: int,
        prompt_tokens: int,
        output_tokens: int,
        *,
        prefix_caching: bool,
        step_tokens: int = 2048,
        policy: str = "fcfs",
    ) -> None:
        longest = prompt_tokens + page_size + output_tokens
        kv = _kv(num_requests * pages_for(longest + 1, page_size) + 1, page_size, prefix_caching)
        self.scheduler = _scheduler(kv, num_requests, max(num_requests, step_tokens), policy=policy)
        self.num_decoding = 0  # in the latest step
        self.schedule_ns = self.update_ns = 0  # process CPU time
        self._in_flight: list[tuple[SchedulerOutput, StepOutput]] = []
        self._device = PretendDevice(0.0)
        params = SamplingParams(max_tokens=output_tokens)
        for number in range(num_requests):  # of different lengths, so that pages fill in different steps
            prompt = _prompt(number, prompt_tokens + number % page_size, 30_000)
            service = ServiceParams(tenant=f"tenant {number % 8}")
            self.scheduler.add(Request(f"{number}#{number}", prompt, params, 0.0, service=service))

    def add_waiting(self, num: int, prompt_tokens: int) -> None:
        """Requests that find no slot and may not take one."""
        for number in range(num):
            prompt = _prompt(20_000 + number, prompt_tokens, 30_000)
            service = ServiceParams(tenant=f"tenant {number % 8}")
            self.scheduler.add(
                Request(f"w#{number}", prompt, SamplingParams(), 1.0, priority=number % 3, service=service)
            )

    def step(self) -> bool:
        """Plan a step and take in the one before; False when nothing is left."""
        before_ns = time.process_time_ns()
        plan = self.scheduler.schedule(0.0)
        self.schedule_ns += time.process_time_ns() - before_ns
        if plan is not None:
            self.num_decoding = plan.rows.num_decode
            self._in_flight.append((plan, self._device.collect(self._device.submit(plan))))
        if len(self._in_flight) == 2 or (plan is None and self._in_flight):
            oldest = self._in_flight.pop(0)
            before_ns = time.process_time_ns()
            self.scheduler.update(*oldest)
            self.update_ns += time.process_time_ns() - before_ns
        return self.scheduler.has_unfinished

    def drain(self) -> int:
        """Steps until all have ended."""
        while self.step():
            pass
        return self._device.num_steps


def _prompt(number: int, num_tokens: int, vocab_size: int) -> tuple[int, ...]:
    """Ids from 3 on; the prompts of two numbers differ from their first page on."""
    return tuple((number * 7919 + position * (2 * number + 1)) % (vocab_size - 3) + 3 for position in range(num_tokens))


def _kv(num_pages: int, page_size: int, prefix_caching: bool) -> KVManager:
    plan = KVCachePlan((KVGroup((0,), FullKV(page_size, 1, 8)),), num_pages, page_size)
    return KVManager(plan, enable_prefix_caching=prefix_caching)


def _scheduler(
    kv: KVManager, num_requests: int, num_tokens: int, *, async_scheduling: bool = True, policy: str = "fcfs"
) -> Scheduler:
    config = SchedulerConfig(
        max_num_seqs=num_requests,
        max_num_batched_tokens=num_tokens,
        max_model_len=_MAX_MODEL_LEN,
        async_scheduling=async_scheduling,
    )
    return Scheduler(config, kv, create_policy(policy), StopRules(frozenset({_EOS_ID}), _MAX_MODEL_LEN))


def _engine_parts(
    device: PretendDevice, num_requests: int, num_tokens: int, *, async_scheduling: bool, page_size: int = 16
) -> EngineParts:
    tokenizer = ByteLevelTokenizer()
    kv = _kv(num_requests * pages_for(num_tokens + 1, page_size) + 1, page_size, True)
    return EngineParts(
        executor=device,
        scheduler=_scheduler(kv, num_requests, num_requests * num_tokens, async_scheduling=async_scheduling),
        kv=kv,
        tokenizer=tokenizer,
        max_model_len=_MAX_MODEL_LEN,
        vocab_size=tokenizer.vocab_size,
        model_name="pretended",
        async_scheduling=async_scheduling,
    )
