"""Drives a scheduler and its memory against the pretend device, and checks everything on the way."""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import replace
from typing import Any

from jaxllm.config.engine import SchedulerConfig
from jaxllm.memory.manager import KVManager
from jaxllm.memory.plan import KVCachePlan, KVGroup
from jaxllm.memory.spec import FullKV
from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.scheduler.policy import SchedulingPolicy
from jaxllm.scheduler.scheduler import RequestUpdate, Scheduler
from jaxllm.scheduler.step_plan import StepPlan
from jaxllm.scheduler.stop import StopRules
from jaxllm.types.request import FinishReason, Request, RequestStatus
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import SchedulerOutput, StepOutput
from tests.scheduler.paged_device import VOCABULARY, PagedDevice, continuation, prompt_scores, solo_run

EOS = 7


def make_kv(
    num_pages: int, page_size: int, *, caching: bool = True, partial: bool = True, num_groups: int = 1
) -> KVManager:
    groups = tuple(KVGroup((i,), FullKV(page_size, 1, 4 * (i + 1))) for i in range(num_groups))
    plan = KVCachePlan(groups, num_pages, page_size)
    return KVManager(plan, enable_prefix_caching=caching, enable_partial_page_reuse=partial)


class Driver:
    def __init__(
        self,
        *,
        num_pages: int = 12,
        page_size: int = 4,
        max_num_seqs: int = 4,
        max_num_batched_tokens: int = 16,
        max_model_len: int = 64,
        chunked: bool = True,
        caching: bool = True,
        partial: bool = True,
        num_groups: int = 1,
        policy: SchedulingPolicy | None = None,
        max_num_queued_reqs: int | None = None,
        **limits: Any,
    ) -> None:
        self.config = SchedulerConfig(
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=max_model_len,
            enable_chunked_prefill=chunked,
            max_num_queued_reqs=max_num_queued_reqs,
            **limits,
        )
        self.kv = make_kv(num_pages, page_size, caching=caching, partial=partial, num_groups=num_groups)
        stop = StopRules(frozenset({EOS}), max_model_len)
        self.scheduler = Scheduler(self.config, self.kv, policy or FirstComeFirstServed(), stop)
        self.device = PagedDevice(page_size, num_groups)
        self.max_len = min(max_model_len, self.kv.capacity_tokens + 1)
        self.submitted: deque[tuple[SchedulerOutput, StepOutput]] = deque()
        self.all: list[Request] = []  # but the retired ones
        self._num_added = 0
        self.streamed: dict[Request, list[int]] = {}
        self.token_scores: dict[Request, list[float]] = {}
        self.prompt_scores: dict[Request, list[float]] = {}
        self.num_prompt_computed = 0  # prompt tokens in all plans: what a prompt costs, however it is shared
        self.num_copies = 0  # pages copied for siblings
        self.num_forks = 0  # requests that entered with all of another's prompt but its last token
        self.num_copied_tokens = 0  # of prompts, found in pages of requests that are no siblings
        self.num_drafts = 0
        self.num_accepted = 0
        self.num_steps = 0
        self._known: set[str] = set()  # ids the device was told of and not yet told are finished
        self._by_id: dict[str, Request] = {}

    # What happens

    def add(
        self,
        prompt: tuple[int, ...],
        params: SamplingParams | None = None,
        *,
        adapter_id: str | None = None,
        cache_salt: str | None = None,
        seed: int = 0,
        fork_of: Request | None = None,
        arrival_s: float = 0.0,
        **fields: Any,
    ) -> Request:
        request = Request(
            f"r{self._num_added}",
            prompt,
            params or SamplingParams(max_tokens=8, ignore_eos=True),
            arrival_s,
            seed=seed,
            adapter_id=adapter_id,
            cache_salt=cache_salt,
            fork_of=fork_of.request_id if fork_of else None,
            **fields,
        )
        self.scheduler.add(request)
        self._num_added += 1
        self.all.append(request)
        self.streamed[request] = []
        self.token_scores[request], self.prompt_scores[request] = [], []
        self._by_id[request.request_id] = request
        return request

    def add_family(
        self, num: int, prompt: tuple[int, ...], params: SamplingParams | None = None, **extra: Any
    ) -> list[Request]:
        """A request with n = `num`, as the front end sends it: only the first scores the prompt."""
        first = self.add(prompt, params, seed=1, **extra)
        other = replace(first.params, prompt_logprobs=None) if first.params.max_tokens != 0 else first.params
        return [first] + [self.add(prompt, other, seed=2 + i, fork_of=first, **extra) for i in range(num - 1)]

    def propose(self, rng: random.Random) -> None:
        """Drafts for most of those that run, right as far as chance has it."""
        drafts: dict[str, list[int]] = {}
        for request in self.scheduler.requests.values():
            if rng.random() < 0.8:
                num = rng.randrange(self.config.num_speculative_tokens + 2)
                keys = {"adapter_id": request.adapter_id, "seed": request.seed}
                drafts[request.request_id] = continuation(request.token_ids(), num, **keys)
                if num and rng.random() < 0.7:
                    wrong = rng.randrange(num)
                    drafts[request.request_id][wrong] = (drafts[request.request_id][wrong] + 1) % VOCABULARY
        self.scheduler.propose(drafts)

    def plan(self) -> SchedulerOutput | None:
        """Schedule and submit a step."""
        num_preemptions = self.scheduler.num_preemptions
        plan = self.scheduler.schedule(float(self.num_steps))
        if plan is None:
            return None
        self.num_steps += 1
        if self.scheduler.num_preemptions > num_preemptions and not self.scheduler._policy.is_preemptive:
            assert plan.new == (), "somebody was admitted in a step that preempted"
        self._check_plan(plan)
        output = self.device.run(plan)
        self.num_drafts += sum(map(len, plan.draft_ids))
        self.num_accepted += sum(output.num_accepted.values())
        self._check_tables(plan)
        self.submitted.append((plan, output))
        return plan

    def collect(self) -> dict[str, tuple[int, ...]]:
        plan, output = self.submitted.popleft()
        updates = self.scheduler.update(plan, output)
        assert len({u.request for u in updates}) == len(updates)
        for update in updates:
            self._take_in(update)
        return {u.request.request_id: u.new_ids for u in updates}

    def _take_in(self, update: RequestUpdate) -> None:
        request = update.request
        self.streamed[request].extend(update.new_ids)
        assert (update.logprobs is not None) == (request.params.logprobs is not None and bool(update.new_ids))
        if update.logprobs is not None:
            assert update.logprobs.token_ids == list(update.new_ids)
            self.token_scores[request].extend(update.logprobs.values)
        if update.prompt_logprobs is not None:
            start, columns = update.prompt_logprobs.start, update.prompt_logprobs.columns
            assert start == 1 + len(self.prompt_scores[request]), "a prompt's scores have a gap or come twice"
            assert tuple(columns.token_ids) == request.prompt_ids[start : start + len(columns.values)]
            self.prompt_scores[request].extend(columns.values)

    def preempt(self, request: Request) -> None:
        """As for want of memory."""
        self.scheduler._preempt(request, StepPlan(self.kv, self.scheduler._decodes, 0))

    def abort(self, *request_ids: str) -> list[Request]:
        return self.scheduler.abort(request_ids)

    def step(self) -> SchedulerOutput | None:
        """Plan, submit and collect, nothing left in flight."""
        plan = self.plan()
        if self.submitted:
            self.collect()
        return plan

    def drain(self) -> None:
        """Run with one step in flight until nothing is left; every request and page must come back."""
        for _ in range(100_000):
            if not self.scheduler.has_unfinished:
                break
            planned = len(self.submitted) < 2 and self.plan() is not None
            if self.submitted and (len(self.submitted) == 2 or not planned):
                self.collect()
            else:
                assert planned, "requests are left, nothing is in flight, and nothing is planned"
        assert not self.scheduler.has_unfinished and not self.submitted
        self.check()
        self.check_drained()

    # What must hold

    def check(self) -> None:
        self.kv.check()
        live = self.scheduler.requests
        assert {r.request_id: r for r in self.all if not r.is_finished} == live
        assert self.scheduler.num_running <= self.config.max_num_seqs
        assert self.scheduler.num_running + self.scheduler.num_waiting == len(live)
        slots = Counter(r.slot for r in self.all if r.slot is not None)
        assert not slots or max(slots.values()) == 1
        for request in self.all:
            self._check_request(request)

    def check_drained(self) -> None:
        assert self.kv.num_free_pages == self.kv.num_pages - 1
        assert self.kv.usage == 0.0
        assert all(r.is_finished and not r.pages and r.slot is None and r.num_pending == 0 for r in self.all)
        scheduler = self.scheduler
        records = (scheduler._forks, scheduler._scores, scheduler._repetition, scheduler._told, self.kv._records)
        assert [len(record) for record in records] == [0] * len(records)
        assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)
        assert len(scheduler._running.slots) == self.config.max_num_seqs

    def expected(self, request: Request) -> tuple[tuple[int, ...], FinishReason, int | str | None]:
        return solo_run(
            request.prompt_ids,
            request.params,
            eos_ids={EOS},
            max_len=self.max_len,
            adapter_id=request.adapter_id,
            seed=request.seed,
        )

    def _check_request(self, request: Request) -> None:
        assert 0 <= request.num_cached <= request.num_computed <= request.num_tokens
        assert tuple(self.streamed[request]) == tuple(request.output_ids)
        running = request.status is RequestStatus.RUNNING
        assert (request.slot is not None) == (running or (request.is_finished and request.num_in_flight > 0))
        if not request.is_finished:
            promised = request.num_tokens + request.num_pending
            num_dropped = request.params.max_tokens == 0  # what is sampled after a prompt that is only scored
            assert promised <= self.max_len + num_dropped
            assert request.num_computed + request.num_in_flight - request.num_placeholders <= promised
            assert request.num_in_flight == 0 or running

    def check_result(self, request: Request) -> None:
        """The request's output against its solo run; that of an aborted one is a beginning of it."""
        output, reason, stop_id = self.expected(request)
        if request.finish_reason is FinishReason.ABORT:
            assert tuple(request.output_ids) == output[: request.num_output_tokens]
        else:
            got = (tuple(request.output_ids), request.finish_reason, request.stop_reason)
            assert got == (output, reason, stop_id)
        self._check_scores(request)

    def _check_scores(self, request: Request) -> None:
        """Each token's score is that of the solo run, and so is each prompt token's, once and in order."""
        asked = (request.params.logprobs, request.params.prompt_logprobs)
        everything = prompt_scores(request.token_ids(), request.adapter_id)
        num_prompt = request.num_prompt_tokens
        assert self.token_scores[request] == (everything[num_prompt - 1 :] if asked[0] is not None else [])
        scores = everything[: num_prompt - 1] if asked[1] is not None else []
        got = self.prompt_scores[request]
        is_cut = request.finish_reason is FinishReason.ABORT
        assert got == (scores[: len(got)] if is_cut else scores)

    def retire(self) -> list[Request]:
        """Check and drop the requests that are done, so that a long run stays O(live requests) a step."""
        done = [r for r in self.all if r.is_finished and r.num_in_flight == 0 and r.num_pending == 0]
        for request in done:
            self.check_result(request)
            assert not request.pages and request.slot is None
            del self.streamed[request], self.token_scores[request], self.prompt_scores[request]
            del self._by_id[request.request_id]
            self.all.remove(request)
        return done

    def _check_plan(self, plan: SchedulerOutput) -> None:
        rows = plan.rows
        assert 0 < rows.num_rows <= self.config.max_num_seqs
        assert plan.total_tokens <= self.config.max_num_batched_tokens
        assert rows.num_tokens.min() >= 1
        assert len(set(rows.request_ids)) == len(set(rows.slots.tolist())) == rows.num_rows
        assert all(0 <= slot < self.config.max_num_seqs for slot in rows.slots.tolist())
        for i, request_id in enumerate(rows.request_ids):
            prompt = len(self._by_id[request_id].prompt_ids)
            self.num_prompt_computed += max(0, min(prompt - int(rows.starts[i]), int(rows.num_tokens[i])))
            assert (i < rows.num_decode) == (rows.num_tokens[i] == 1 and rows.starts[i] >= prompt)
        new_ids = {new.request_id for new in plan.new}
        assert new_ids <= set(rows.request_ids)
        assert len(set(plan.finished)) == len(plan.finished)
        assert set(plan.finished) | set(plan.preempted) <= self._known
        self._known = (self._known - set(plan.finished)) | new_ids
        assert set(rows.request_ids) <= self._known
        assert plan.page_copies == () or any(plan.page_copies)
        self.num_copies += sum(map(len, plan.page_copies))
        for new in plan.new:
            is_fork = self._by_id[new.request_id].fork_of is not None
            self.num_forks += is_fork and new.num_cached == new.num_prompt_tokens - 1 == len(new.token_ids) - 1
            self.num_copied_tokens += 0 if is_fork else new.num_cached % self.kv.page_size

    def _check_tables(self, plan: SchedulerOutput) -> None:
        for request_id, slot in zip(plan.rows.request_ids, plan.rows.slots.tolist(), strict=True):
            request = self.scheduler.requests[request_id]
            assert request.slot == slot
            for group, pages in enumerate(request.pages):
                assert self.device.table(group, slot, len(pages)) == pages
