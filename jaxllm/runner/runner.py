"""The Executor on the device: places, packs and dispatches steps, and brings their tokens back."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

from jaxllm.engine.executor import Ticket
from jaxllm.runner.batch_builder import BatchBuilder, HostBatch
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.compile_guard import CompileGuard
from jaxllm.runner.kv_buffers import DeviceState
from jaxllm.runner.memory_plan import MemoryPlan
from jaxllm.runner.slots import Slots
from jaxllm.runner.warmup import Programs
from jaxllm.types.step import SchedulerOutput, StepOutput

if TYPE_CHECKING:
    from jaxllm.memory.plan import KVCachePlan
    from jaxllm.models.base import SplitModel


@dataclass(frozen=True, slots=True)
class RunnerStats:
    """Counts that need no quiet machine: the same work gives the same numbers everywhere."""

    num_forward_programs: int
    num_sample_programs: int
    num_programs: int
    num_steps: int  # submitted
    num_host_to_device: int  # arrays sent; one a step, and one per chunk of a page table overflow
    num_syncs: int  # waits for the device; one a collected step
    compilations_after_ready: int
    temporary_bytes: dict[str, int]  # by program


@dataclass(frozen=True, slots=True, eq=False)
class _Handle:
    """A dispatched step. `result`: tokens [N], or, where none is sampled, hidden rows to wait for."""

    sampled_ids: tuple[str, ...]
    result: jax.Array
    dispatched_s: float


class Runner:
    """Implements `Executor`. Mutable; owned by the engine core's thread after start-up.

    Device order makes overlap safe: programs run in the order of dispatch, so a step reads the
    pages and last tokens that the step before it left, whether or not the host has seen them.
    """

    def __init__(
        self,
        model: SplitModel,
        weights: dict[str, jax.Array],
        programs: Programs,
        state: DeviceState,
        builder: BatchBuilder,
        buckets: Buckets,
        slots: Slots,
        kv_plan: KVCachePlan,
        memory: MemoryPlan,
    ) -> None:
        self.model = model
        self.kv_plan = kv_plan
        self.memory = memory
        self.buckets = buckets
        self._programs = programs
        self._leaves = tuple(weights[name] for name in model.names)
        self._head = tuple(weights[name] for name in model.head_names)
        self._state = state
        self._builder = builder
        self._slots = slots
        self._guard = CompileGuard()
        self._in_flight: deque[int] = deque()
        self._num_steps = self._num_sent = self._num_syncs = 0
        self._last_ready_s = 0.0
        self._closed = False

    def ready(self) -> None:
        """Start-up is over: from here each compilation counts."""
        self._guard.arm()

    def submit(self, plan: SchedulerOutput) -> Ticket:
        """Dispatch a step; returns before the device has run it.

        Raises:
            ValueError: the plan holds something that this runner does not compute.
        """
        _check_plan(plan)
        with self._guard.watching("submit"):
            for new in plan.new:
                self._slots.place(new)
            batch = self._builder.build(plan, self._slots)
            handle = self._dispatch(batch)
        self._num_steps += 1
        self._in_flight.append(plan.step_id)
        return Ticket(plan.step_id, handle)

    def _dispatch(self, batch: HostBatch) -> _Handle:
        state, programs = self._state, self._programs
        started_s = time.monotonic()
        for chunk in batch.overflow:
            state.page_table = programs.set_pages(state.page_table, chunk)
        hidden, state.kv, state.page_table, sample_rows = programs.forward[batch.bucket](
            self._leaves, state.kv, state.page_table, state.last_tokens, batch.packed
        )
        self._num_sent += 1 + len(batch.overflow)
        result = hidden
        if batch.sampled_ids:
            program = programs.sample[self.buckets.num_logit_rows(batch.bucket), batch.all_greedy]
            result, state.last_tokens = program(self._head, hidden, sample_rows, state.last_tokens)
            result.copy_to_host_async()
        return _Handle(batch.sampled_ids, result, started_s)

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for the oldest step. `device_s` is the time it had the device for itself, as the host saw it.

        Raises:
            ValueError: the ticket is not of the oldest uncollected step.
        """
        if not self._in_flight or self._in_flight[0] != ticket.step_id:
            raise ValueError(
                f"step {ticket.step_id} is not the oldest in flight; accepted: {list(self._in_flight)[:1]}"
            )
        self._in_flight.popleft()
        handle: _Handle = ticket.handle
        with self._guard.watching("collect"):
            tokens = self._wait(handle)
        started_s = max(handle.dispatched_s, self._last_ready_s)
        self._last_ready_s = time.monotonic()
        return StepOutput(ticket.step_id, tokens, device_s=self._last_ready_s - started_s)

    def _wait(self, handle: _Handle) -> dict[str, tuple[int, ...]]:
        self._num_syncs += 1
        if not handle.sampled_ids:
            handle.result.block_until_ready()
            return {}
        values: list[int] = np.asarray(handle.result).tolist()
        return {request_id: (values[i],) for i, request_id in enumerate(handle.sampled_ids)}

    def stats(self) -> RunnerStats:
        programs = self._programs
        return RunnerStats(
            num_forward_programs=len(programs.forward),
            num_sample_programs=len(programs.sample),
            num_programs=programs.num_programs,
            num_steps=self._num_steps,
            num_host_to_device=self._num_sent,
            num_syncs=self._num_syncs,
            compilations_after_ready=self._guard.num_compilations,
            temporary_bytes=dict(programs.temporary_bytes),
        )

    @property
    def compilations_after_ready(self) -> int:
        return self._guard.num_compilations

    def close(self) -> None:
        """Give the device memory back. Safe to call twice, and with steps in flight."""
        if self._closed:
            return
        self._closed = True
        self._guard.disarm()
        self._in_flight.clear()
        for array in (*self._state.kv, self._state.page_table, self._state.last_tokens):
            array.delete()
        self._leaves = self._head = ()  # whoever loaded the weights may still use them


def _check_plan(plan: SchedulerOutput) -> None:
    if plan.page_copies or any(plan.draft_ids) or plan.encoder_items or plan.num_steps != 1:
        raise ValueError(
            f"step {plan.step_id}: page_copies, draft_ids, encoder_items and num_steps={plan.num_steps} are not "
            "computed here; accepted: none of them, and num_steps=1"
        )
