"""The Executor on the device: places, packs and dispatches steps, and brings their tokens back."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxllm.engine.executor import Ticket
from jaxllm.runner.batch_builder import BatchBuilder, HostBatch, HostScores
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.compile_guard import CompileGuard
from jaxllm.runner.kv_buffers import DeviceState
from jaxllm.runner.logprob_columns import SampledRow, prompt_logprobs, sampled_logprobs
from jaxllm.runner.memory_plan import MemoryPlan
from jaxllm.runner.slots import Slots
from jaxllm.runner.step import SampleVariant
from jaxllm.runner.warmup import Programs
from jaxllm.sampling.logprobs import DeviceLogprobs
from jaxllm.sampling.tables import pack_tables
from jaxllm.types.step import Logprobs, NewRequest, PromptLogprobs, SchedulerOutput, StepOutput

if TYPE_CHECKING:
    from jaxllm.memory.plan import KVCachePlan
    from jaxllm.models.base import SplitModel

_Results = tuple[dict[str, tuple[int, ...]], dict[str, Logprobs], dict[str, PromptLogprobs]]


@dataclass(frozen=True, slots=True)
class RunnerStats:
    """Counts that need no quiet machine: the same work gives the same numbers everywhere."""

    num_forward_programs: int
    num_sample_programs: int
    num_programs: int
    num_steps: int  # submitted
    num_host_to_device: int  # arrays sent; one a step, and one a call of a side program
    num_syncs: int  # waits for the device; one a collected step
    compilations_after_ready: int
    temporary_bytes: dict[str, int]  # by program


@dataclass(frozen=True, slots=True, eq=False)
class _Handle:
    """A dispatched step. `result`: tokens [N], or, where none is sampled, hidden rows to wait for."""

    sampled_ids: tuple[str, ...]
    hidden: jax.Array  # ready when the forward program has run
    result: jax.Array
    dispatched_s: float
    logprob_rows: tuple[SampledRow, ...] = ()
    logprobs: DeviceLogprobs | None = None  # of the sample rows; None where none is asked for
    scores: HostScores | None = None
    scored: tuple[DeviceLogprobs, ...] = ()  # of each slice of `scores`

    @property
    def is_plain(self) -> bool:
        return self.logprobs is None and not self.scored


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
        vocab_size: int,
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
        self._vocab_size = vocab_size
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
                self._place(new)
            started_s = time.perf_counter()
            batch = self._builder.build(plan, self._slots)
            build_s = time.perf_counter() - started_s
            handle = self._dispatch(batch)
        self._num_steps += 1
        self._in_flight.append(plan.step_id)
        return Ticket(plan.step_id, handle, build_s)

    def _place(self, new: NewRequest) -> None:
        """Steps in flight write to the old tables before these calls: the device keeps the order."""
        self._slots.place(new)
        state, side = self._state, self._programs.side
        packed, history = pack_tables(new, self._vocab_size)
        if packed is not None:
            state.tables = side.set_tables(state.tables, packed)
            self._num_sent += 1
        for chunk in history:
            state.history = side.set_history(state.history, chunk)
        self._num_sent += len(history)

    def _dispatch(self, batch: HostBatch) -> _Handle:
        state, programs = self._state, self._programs
        started_s = time.perf_counter()
        for chunk in batch.overflow:
            state.page_table = programs.side.set_pages(state.page_table, chunk)
        for chunk in batch.copies:
            state.kv = programs.side.copy_pages(state.kv, chunk)
        hidden, sample_rows, state.kv, state.page_table, state.hidden = programs.forward[batch.bucket](
            self._leaves, state.kv, state.page_table, state.hidden, state.last_tokens, batch.packed
        )
        self._num_sent += 1 + len(batch.overflow) + len(batch.copies)
        result, logprobs = hidden, None
        if batch.sampled_ids:
            result, logprobs = self._sample(batch, hidden, sample_rows)
            result.copy_to_host_async()
        if not batch.logprob_rows and batch.scores is None:
            return _Handle(batch.sampled_ids, hidden, result, started_s)
        scored = self._score(batch.scores)
        for array in jax.tree.leaves((logprobs, scored)):
            array.copy_to_host_async()
        rows, scores = batch.logprob_rows, batch.scores
        return _Handle(batch.sampled_ids, hidden, result, started_s, rows, logprobs, scores, scored)

    def _sample(
        self, batch: HostBatch, hidden: jax.Array, sample_rows: jax.Array
    ) -> tuple[jax.Array, DeviceLogprobs | None]:
        state = self._state
        num_rows = self.buckets.num_logit_rows(batch.bucket)
        wanted = bool(batch.logprob_rows)
        variant = SampleVariant(num_rows, greedy=batch.all_greedy and not wanted, with_logprobs=wanted)
        tokens, logprobs, state.last_tokens, state.history = self._programs.sample[variant](
            self._head, hidden, sample_rows, state.tables, state.last_tokens, state.history
        )
        return tokens, logprobs

    def _score(self, scores: HostScores | None) -> tuple[DeviceLogprobs, ...]:
        """Before the next step overwrites the hidden rows."""
        if scores is None:
            return ()
        self._num_sent += len(scores.slices)
        score = self._programs.side.score
        return tuple(score(self._head, self._state.hidden, packed) for packed in scores.slices)

    def collect(self, ticket: Ticket) -> StepOutput:
        """Wait for the oldest step: for its forward program, then for its tokens, then for their way to the host.

        What each took is seen from here: a host that comes late counts a step's device time too long,
        and that of the next too short by as much.

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
            handle.hidden.block_until_ready()
            computed_s = time.perf_counter()
            handle.result.block_until_ready()
            ready_s = time.perf_counter()
            tokens, logprobs, prompt = self._fetch(handle)
        before_s, self._last_ready_s = self._last_ready_s, ready_s
        return StepOutput(
            ticket.step_id,
            tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt,
            device_s=computed_s - max(handle.dispatched_s, before_s),
            sample_s=ready_s - computed_s,
            copy_back_s=time.perf_counter() - ready_s,
            idle_s=max(0.0, handle.dispatched_s - before_s),
        )

    def _fetch(self, handle: _Handle) -> _Results:
        self._num_syncs += 1
        if not handle.is_plain:
            return _with_logprobs(handle)
        if not handle.sampled_ids:
            return {}, {}, {}
        return _tokens(handle, np.asarray(handle.result)), {}, {}

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
        self._state.delete()
        self._leaves = self._head = ()  # whoever loaded the weights may still use them


def _tokens(handle: _Handle, tokens: np.ndarray[Any, Any]) -> dict[str, tuple[int, ...]]:
    values: list[int] = tokens.tolist()
    return {request_id: (values[i],) for i, request_id in enumerate(handle.sampled_ids)}


def _with_logprobs(handle: _Handle) -> _Results:
    """Tokens and log probabilities, in one wait."""
    result, logprobs, scored = jax.device_get((handle.result, handle.logprobs, handle.scored))
    scores = handle.scores
    return (
        _tokens(handle, result) if handle.sampled_ids else {},
        {} if logprobs is None else sampled_logprobs(handle.logprob_rows, result, logprobs),
        {} if scores is None else prompt_logprobs(scores.pieces, scores.tokens, scored),
    )


def _check_plan(plan: SchedulerOutput) -> None:
    if any(plan.draft_ids) or plan.encoder_items or plan.num_steps != 1 or len(plan.page_copies) > 1:
        raise ValueError(
            f"step {plan.step_id}: draft_ids, encoder_items, page_copies of {len(plan.page_copies)} KV groups and "
            f"num_steps={plan.num_steps} are not computed here; accepted: none of the first two, one group, num_steps=1"
        )
