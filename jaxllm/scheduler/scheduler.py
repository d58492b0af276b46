"""Who runs in the next step, and what its result means for each request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable

import msgspec

from jaxllm.config.engine import SchedulerConfig
from jaxllm.errors import ConfigError, EngineDead
from jaxllm.memory.manager import KVManager
from jaxllm.scheduler.answers import PromptScores, read_answer
from jaxllm.scheduler.decode_rows import DecodeRows, DecodeStep
from jaxllm.scheduler.forks import Forks
from jaxllm.scheduler.guard import GuardedPolicy
from jaxllm.scheduler.limits import Deadlines, PromptLimits, QueueLimits
from jaxllm.scheduler.policy import SchedulerView, SchedulingPolicy
from jaxllm.scheduler.queues import FreeSlots, WaitingQueue
from jaxllm.scheduler.repetition import RepetitionWatches
from jaxllm.scheduler.step_plan import Piece, PlannedStep, StepPlan, decode_piece
from jaxllm.scheduler.stop import Stop, StopRules
from jaxllm.types.request import DEADLINE, FinishReason, Request, RequestStatus
from jaxllm.types.step import Logprobs, PromptLogprobs, SchedulerOutput, StepOutput


class RequestUpdate(msgspec.Struct, frozen=True, gc=False):
    """What a collected step added to a request, which may have finished with it. Cheap to make: hundreds a step.

    Without tokens if the step only scored prompt tokens, or ended a prompt that is only scored.
    """

    request: Request
    new_ids: tuple[int, ...]
    logprobs: Logprobs | None = None  # of `new_ids`, if asked for
    prompt_logprobs: PromptLogprobs | None = None  # each position once, in order, whatever was preempted


class Scheduler:
    """Plans steps and takes in their results. Mutable; owned by the engine core's thread.

    `schedule` may be called again while steps it planned are uncollected; `update` is called once a
    step, in the order of planning, as the device runs them. That order is what makes early reuse safe:
    pages of a preempted request are given away at once, because a later step cannot write them
    before an earlier one has read them.

    A request that ends (a late stop, an abort) while a step in flight still holds a piece of it keeps
    its pages and slot until that step is collected, and what that piece sampled is dropped. Its id
    may come again at once: the next plan names it in `finished`, which counts before `new`.

    A sequence never outgrows the pool: once pages of the whole pool are full it ends with
    FinishReason.LENGTH, as at max_model_len. So any request fits alone, and none waits for ever.

    A sibling (`Request.fork_of`) is passed over until a plan before this one has computed the prompt
    of the first; then it shares its pages and computes the last prompt token alone, prefix cache or
    not. It waits for nobody who waits for it, and for nobody who has ended: so none waits for ever.
    """

    def __init__(self, config: SchedulerConfig, kv: KVManager, policy: SchedulingPolicy, stop: StopRules) -> None:
        if not config.enable_chunked_prefill and config.max_num_batched_tokens < stop.max_model_len:
            raise ConfigError(
                f"max_num_batched_tokens={config.max_num_batched_tokens} is too small without chunked prefill; "
                f"accepted: at least max_model_len={stop.max_model_len}, or enable_chunked_prefill"
            )
        self.requests: dict[str, Request] = {}  # all that are not finished
        self.num_preemptions = 0
        self.prefix_queries = 0  # tokens of requests at their first admission,
        self.prefix_hits = 0  # and those of them found cached
        self._config = config
        self._kv = kv
        self._policy = policy if isinstance(policy, GuardedPolicy) else GuardedPolicy(policy)
        self._queue_limits = QueueLimits(config, kv, stop.max_model_len)
        self._prompt_limits = PromptLimits(config)
        self._deadlines = Deadlines(config.default_deadline_s)
        # The last token of a sequence is sampled but needs no page.
        self._stop = StopRules(stop.eos_ids, min(stop.max_model_len, kv.capacity_tokens + 1))
        self._forks = Forks()
        self._scores = PromptScores()
        self._repetition = RepetitionWatches()
        self._waiting = WaitingQueue()
        # All that run, in order of admission, are in one of two ways: with tokens left to compute, or decoding
        # (those whose last token is on its way too). Dictionaries serve as ordered sets.
        self._running: dict[Request, None] = {}
        self._prefilling: dict[Request, None] = {}
        self._running_view: tuple[Request, ...] | None = None  # of `_running`, until somebody joins or leaves
        self._decodes = DecodeRows(kv, self._stop)
        self._slots = FreeSlots(config.max_num_seqs)
        self._in_flight: deque[PlannedStep] = deque()
        self._next_step_id = 0
        self._told: set[Request] = set()  # those the executor was told of, until they finish
        self._preempted: dict[str, None] = {}  # since the last plan, as an ordered set
        self._finished: list[str] = []  # since the last plan

    @property
    def has_unfinished(self) -> bool:
        """Whether anything is left to do: requests that wait or run, or steps to collect."""
        return bool(self.requests or self._in_flight)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_policy_faults(self) -> int:
        """Questions that the policy answered with an exception or nonsense."""
        return self._policy.num_faults

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            RequestError: its id is in use, its prompt is empty or leaves no room for a token (one that is
                only scored needs none), or is not that of the request it is a fork of.
            CapacityError: the queue is full, or the prompt is larger than all of KV memory.
        """
        self._queue_limits.check(request, self.requests.keys(), self._waiting)
        if request.fork_of is not None:
            self._forks.add(request, self.requests.get(request.fork_of))
        self.requests[request.request_id] = request
        self._waiting.push_back(request)
        self._deadlines.add(request)

    def expire(self, now_s: float) -> list[Request]:
        """End requests whose deadline has passed; they keep what they have, which is nothing for who never ran."""
        expired = self._deadlines.take(now_s)
        for request in expired:
            self._finish(request, Stop(FinishReason.ABORT, DEADLINE))
        return expired

    def abort(self, request_ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> list[Request]:
        """End requests at whatever stage they are; ids that are unknown or finished are ignored."""
        aborted = [self.requests[i] for i in dict.fromkeys(request_ids) if i in self.requests]
        for request in aborted:
            self._finish(request, Stop(reason))
        return aborted

    def schedule(self, now_s: float) -> SchedulerOutput | None:
        """Decide one step; None if no request can be given a token now.

        Decodes come first, one token each; then requests with more to compute, in order of admission;
        then waiting ones, unless somebody was preempted: what is short of memory admits nobody. The
        last two share what `PromptLimits` leaves them.
        O(running requests + siblings passed over), little for each.
        """
        plan = StepPlan(self._kv, self._decodes, self._token_budget(now_s))
        try:
            num_preemptions = self.num_preemptions
            self._give_decodes(plan, now_s)
            if self._prefilling or self._waiting:
                self._limit_prompts(plan)
                self._give_prefilling(plan, now_s)
                if self.num_preemptions == num_preemptions:
                    self._admit_waiting(plan, now_s)
        except Exception:
            self._undo(plan)
            raise
        return None if plan.is_empty else self._seal(plan, now_s)

    def update(self, plan: SchedulerOutput, output: StepOutput) -> list[RequestUpdate]:
        """Take in a collected step; steps come in the order in which they were planned.

        Raises:
            EngineDead: the executor answered for another step, or not with one token for each row
                that samples, or without log probabilities that were asked for.
        """
        expected = self._in_flight[0].output.step_id if self._in_flight else None
        if not expected == plan.step_id == output.step_id:
            raise EngineDead(f"step {expected} is next to collect; got step {plan.step_id}, output {output.step_id}")
        step = self._in_flight.popleft()
        updates = self._collect_decodes(step.decodes, output)
        for piece in step.pieces:
            updates += self._collect(piece, output)
        return updates

    # Planning

    def _token_budget(self, now_s: float) -> int:
        budget = self._policy.token_budget(self._view(now_s))
        return max(0, min(budget, self._config.max_num_batched_tokens))

    def _give_decodes(self, plan: StepPlan, now_s: float) -> None:
        """A token for each; most need no page for it, and so nothing of their own."""
        decodes = self._decodes
        for row in decodes.begin(plan.budget):
            request = decodes.request(row)
            if request in decodes:  # else preempted for one before it
                self._give(request, lambda row=row: decodes.grow(row), plan, now_s)
        plan.give_decodes()

    def _limit_prompts(self, plan: StepPlan) -> None:
        budget = self._prompt_limits.budget(plan.budget + plan.num_decodes, plan.num_decodes)
        is_shared = len(self._running) + len(self._waiting) > 1
        plan.limit_pieces(budget, self._prompt_limits.longest_piece(is_shared=is_shared))

    def _give_prefilling(self, plan: StepPlan, now_s: float) -> None:
        for request in tuple(self._prefilling):
            if request.status is not RequestStatus.RUNNING:
                continue  # preempted for one before it
            num_tokens = plan.tokens_for(request.num_uncomputed)
            if num_tokens == 0:
                return
            if not self._give(request, lambda r=request, n=num_tokens: plan.add(r, n), plan, now_s):
                return

    def _give(self, request: Request, take_pages: Callable[[], bool], plan: StepPlan, now_s: float) -> bool:
        """Find pages for a running request, at the cost of others if need be; False if it had to yield itself."""
        while not take_pages():
            victim = self._policy.victim(self._view(now_s), request)
            self._preempt(victim, plan)
            if victim is request:
                return False
        return True

    def _preempt(self, victim: Request, plan: StepPlan) -> None:
        """Take all memory from a running request; it will be computed again from its known tokens.

        Pieces in flight stay valid as far as their samples go, and will be appended when collected;
        the new epoch says that what they wrote to memory no longer counts.
        """
        plan.withdraw(victim)
        self._free_slot(victim)
        self._stop_running(victim)
        self._waiting.push_front(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed = victim.num_cached = victim.num_in_flight = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        if victim in self._told:
            self._preempted[victim.request_id] = None

    def _admit_waiting(self, plan: StepPlan, now_s: float) -> None:
        blocked = self._admit_in_order(plan, now_s)
        for _ in range(self._config.max_num_seqs):  # no policy may go on for ever
            victim = self._policy.preempt(blocked, self._view(now_s)) if blocked is not None else None
            if victim is None:
                return
            self._preempt(victim, plan)
            blocked = self._admit_in_order(plan, now_s)

    def _admit_in_order(self, plan: StepPlan, now_s: float) -> Request | None:
        """Admit who fits; returns the first that finds no slot or no memory, for whom somebody may give way."""
        may_preempt = self._policy.is_preemptive
        if not self._waiting or plan.tokens_for(1) == 0 or not (self._slots or may_preempt):
            return None
        admitted: list[Request] = []
        view = self._view(now_s)
        try:
            for request in self._policy.order(view):
                if not self._may_start(request, view, plan):
                    continue
                if not self._slots or not self._admit(request, plan):
                    return request if may_preempt and request.num_pending == 0 else None
                admitted.append(request)
                if plan.tokens_for(1) == 0 or not (self._slots or may_preempt):
                    break
                view = self._view(now_s)
        finally:
            self._waiting.remove(admitted)  # not earlier: the policy may be reading the queue
        return None

    def _may_start(self, request: Request, view: SchedulerView, plan: StepPlan) -> bool:
        """Whether it is one to choose, and nothing but room is in its way."""
        if request not in self._waiting or request.status is RequestStatus.RUNNING:
            return False
        if self._waits_for_prompt(request, plan) or self._waits_for_prefix(request):
            return False
        return self._policy.admit(request, view) and self._takes_partial(request, plan)

    def _admit(self, request: Request, plan: StepPlan) -> bool:
        """Start a request if its whole sequence fits now; its first piece may be smaller."""
        if request.num_pending > 0:
            return False  # its turn, but tokens sampled before its preemption are not here yet
        first = self._forks.first_of(request)
        is_admitted = self._admit_alone(request, plan) if first is None else self._admit_fork(request, first, plan)
        if is_admitted:
            request.slot = self._slots.take()
            request.status = RequestStatus.RUNNING
            self._running[request] = self._prefilling[request] = None
            self._running_view = None
        return is_admitted

    def _waits_for_prompt(self, request: Request, plan: StepPlan) -> bool:
        first = self._forks.first_of(request)
        # One that waits itself, at first or after a preemption, has nothing computed.
        return first is not None and plan.num_tokens_before(first) < first.num_prompt_tokens

    def _waits_for_prefix(self, request: Request) -> bool:
        """Whether half or more of what it has to compute is on its way, for others, in steps not planned yet."""
        if not self._config.in_batch_prefix_sharing or self._forks.first_of(request) is not None:
            return False
        num_pending = self._kv.pending_prefix(request)
        return num_pending > 0 and 2 * num_pending >= request.num_tokens - self._kv.match_prefix(request)

    def _takes_partial(self, request: Request, plan: StepPlan) -> bool:
        """False if it would be left half computed beside as many as may be."""
        if not self._prompt_limits.limits_partial:
            return True
        num_wanted = request.num_tokens - self._kv.match_prefix(request)
        if plan.tokens_for(num_wanted) == num_wanted:
            return True
        return self._prompt_limits.takes_partial(request, [r for r in self._prefilling if r.num_uncomputed > 0])

    def _admit_fork(self, request: Request, first: Request, plan: StepPlan) -> bool:
        page_copies = self._kv.fork(request, first)
        return page_copies is not None and plan.add(request, 1, is_new=True, page_copies=page_copies)

    def _admit_alone(self, request: Request, plan: StepPlan) -> bool:
        if not self._config.enable_chunked_prefill:
            num_wanted = request.num_tokens - self._kv.match_prefix(request)
            if num_wanted > plan.tokens_for(num_wanted):
                return False
        if not self._kv.can_fit(request, request.num_tokens):
            return False
        num_cached = self._kv.adopt_prefix(request)
        if not plan.add(request, plan.tokens_for(request.num_tokens - num_cached), is_new=True):
            plan.withdraw(request)
            return False
        if request.num_preemptions == 0:
            self.prefix_queries += request.num_tokens
            self.prefix_hits += num_cached
        return True

    def _seal(self, plan: StepPlan, now_s: float) -> SchedulerOutput:
        step = plan.seal(self._next_step_id, preempted=self._preempted, finished=self._finished)
        self._in_flight.append(step)
        if step.pieces:
            self._note_pieces(step.pieces, now_s)
        self._next_step_id += 1
        self._preempted = {}
        self._finished = []
        return step.output

    def _note_pieces(self, pieces: Iterable[Piece], now_s: float) -> None:
        """Who is known to the executor from now on, and who has only the next token to wait for."""
        for piece in pieces:
            request = piece.request
            if piece.is_new:
                self._told.add(request)
            if request.scheduled_s is None:
                request.scheduled_s = now_s
                request.num_hits = 0 if request.fork_of is not None else request.num_cached
            self._kv.commit_planned(request, piece.start + piece.num_tokens)
            if piece.samples:
                del self._prefilling[request]
        self._decodes.join([piece.request for piece in pieces if piece.samples])

    def _undo(self, plan: StepPlan) -> None:
        """Leave a step half decided: who had a piece of it starts again, so no page table is half sent."""
        for piece in reversed(tuple(plan.pieces)):
            self._preempt(piece.request, plan)

    def _view(self, now_s: float) -> SchedulerView:
        if self._running_view is None:
            self._running_view = tuple(self._running)
        return SchedulerView(
            now_s=now_s,
            waiting=self._waiting.view(),
            running=self._running_view,
            free_pages=self._kv.num_free_pages,
            page_size=self._kv.page_size,
            token_cap=self._config.max_num_batched_tokens,
            cached_prefix=self._kv.match_prefix,
            pending_prefix=self._kv.pending_prefix,
        )

    # Results

    def _collect_decodes(self, step: DecodeStep, output: StepOutput) -> list[RequestUpdate]:
        """What `_collect` does for a piece, for one token each, with a look at what is rare only where it may be."""
        updates: list[RequestUpdate] = []
        tokens = output.tokens
        starts = step.starts.tolist()
        fills = ((step.starts + 1) % self._kv.page_size == 0).tolist()
        for row, start, fills_page in zip(step.rows, starts, fills, strict=True):
            request, request_id, epoch, end_ids, full_length, is_watched = row
            new_ids = tokens.get(request_id, ())
            if is_watched or len(new_ids) != 1 or request.finish_reason is not None:
                updates += self._collect(decode_piece(row, start), output)
                continue
            token = new_ids[0]
            request.num_pending -= 1
            if epoch == request.num_preemptions:
                request.num_in_flight -= 1
                request.num_computed = start + 1
                if fills_page:
                    self._kv.commit(request)
            request.output_ids.append(token)
            if start + 2 >= full_length or token in end_ids:
                stop = self._stop.check(request)
                if stop is not None:
                    self._finish(request, stop)
            updates.append(RequestUpdate(request, new_ids))
        return updates

    def _collect(self, piece: Piece, output: StepOutput) -> Iterable[RequestUpdate]:
        """Take in a piece; nothing comes of it if it means nothing for its request, or that ended before."""
        request = piece.request
        answer = read_answer(piece, output)
        request.num_pending -= piece.samples
        self._note_computed(piece)
        if request.is_finished:
            return ()
        scored = self._scores.unseen(request, answer.prompt_logprobs)
        is_kept = request.params.max_tokens != 0  # else the prompt is only scored
        new_ids = answer.new_ids if is_kept else ()
        request.output_ids.extend(new_ids)
        if piece.samples:
            repeats = bool(new_ids) and self._repetition.push(request, new_ids[0])
            stop = self._stop.check(request, repeats=repeats)
            if stop is not None:
                self._finish(request, stop)
        if not piece.samples and scored is None:
            return ()
        return (RequestUpdate(request, new_ids, answer.logprobs if is_kept else None, scored),)

    def _note_computed(self, piece: Piece) -> None:
        """Count what a collected piece wrote to memory, unless it was taken away meanwhile."""
        request = piece.request
        if piece.epoch != request.num_preemptions:
            return
        request.num_in_flight -= piece.num_tokens
        # A finished request may have computed tokens that were dropped, and so are not known.
        request.num_computed = min(request.num_computed + piece.num_tokens, request.num_tokens)
        self._kv.commit(request)
        if request.is_finished and request.num_in_flight == 0:
            self._free(request)

    def _finish(self, request: Request, stop: Stop) -> None:
        del self.requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._stop_running(request)
        else:
            self._waiting.remove((request,))
        request.status = RequestStatus.FINISHED
        request.finish_reason = stop.reason
        request.stop_reason = stop.cause
        for kept in (self._forks, self._scores, self._repetition):
            kept.forget(request)
        if request in self._told:
            self._told.remove(request)
            self._finished.append(request.request_id)
        if request.num_in_flight == 0:
            self._free(request)

    def _stop_running(self, request: Request) -> None:
        del self._running[request]
        self._running_view = None
        self._prefilling.pop(request, None)
        self._decodes.leave(request)

    def _free(self, request: Request) -> None:
        """Give back what a finished request held; no step in flight has a piece of it."""
        self._kv.release(request)
        self._free_slot(request)

    def _free_slot(self, request: Request) -> None:
        if request.slot is not None:
            self._slots.give_back(request.slot)
            request.slot = None
