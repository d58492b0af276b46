"""Who runs in the next step, and what its result means for each request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from jaxllm.config.engine import SchedulerConfig
from jaxllm.errors import ConfigError, EngineDead
from jaxllm.memory.manager import KVManager
from jaxllm.scheduler.admission import Admission
from jaxllm.scheduler.answers import PromptScores, read_answer
from jaxllm.scheduler.decode_rows import DecodeStep
from jaxllm.scheduler.forks import Forks
from jaxllm.scheduler.guard import GuardedPolicy
from jaxllm.scheduler.limits import Deadlines, PromptLimits, QueueLimits
from jaxllm.scheduler.policy import SchedulerView, SchedulingPolicy
from jaxllm.scheduler.queues import WaitingQueue
from jaxllm.scheduler.repetition import RepetitionWatches
from jaxllm.scheduler.running import Running
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
        self._running = Running(kv, self._stop, config.max_num_seqs, drafts=config.num_speculative_tokens > 0)
        self._decodes = self._running.decodes
        self._admission = Admission(
            config, kv, self._policy, self._waiting, self._running, self._forks, self._prompt_limits
        )
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
    def prefix_queries(self) -> int:
        """Tokens of requests at their first admission."""
        return self._admission.prefix_queries

    @property
    def prefix_hits(self) -> int:
        """Those of them that were found cached."""
        return self._admission.prefix_hits

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

    def propose(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Draft tokens that may follow what is known of requests, by id; they count for the next step alone.

        Dropped: those of requests that decode no more, or of which a token is still on its way; all beyond
        `num_speculative_tokens`, and beyond what a step has room for.
        """
        for request_id, draft_ids in drafts.items():
            request = self.requests.get(request_id)
            if request in self._running.drafting and self._running.wants_draft_step(request):
                request.draft_ids = tuple(draft_ids[: self._config.num_speculative_tokens])

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
            if self._running.drafting:
                self._give_drafting(plan, now_s)
            if self._running.prefilling or self._waiting:
                self._limit_prompts(plan)
                self._give_prefilling(plan, now_s)
                if self.num_preemptions == num_preemptions:
                    self._admit_waiting(plan, now_s)
        except Exception:
            self._undo(plan)
            raise
        finally:
            self._kv.let_go_of_copied()
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

    def _give_drafting(self, plan: StepPlan, now_s: float) -> None:
        """The next token and its drafts, for whom no token is on its way; drafts never cost another its pages."""
        for request in tuple(self._running.drafting):
            if request not in self._running.drafting or not self._running.wants_draft_step(request):
                continue  # preempted for one before it, or it waits for an answer
            if plan.budget == 0:
                return
            num_most = min(plan.budget, self._stop.max_tokens(request) - request.num_tokens) - 1
            drafts, request.draft_ids = request.draft_ids[:num_most], ()
            if not drafts or not plan.add_decode(request, drafts):
                self._give(request, lambda r=request: plan.add_decode(r), plan, now_s)

    def _limit_prompts(self, plan: StepPlan) -> None:
        budget = self._prompt_limits.budget(plan.budget + plan.num_given, plan.num_given)
        is_shared = len(self._running) + len(self._waiting) > 1
        plan.limit_pieces(budget, self._prompt_limits.longest_piece(is_shared=is_shared))

    def _give_prefilling(self, plan: StepPlan, now_s: float) -> None:
        for request in tuple(self._running.prefilling):
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
        self._running.free_slot(victim)
        self._running.stop(victim)
        self._waiting.push_front(victim)
        victim.status = RequestStatus.PREEMPTED
        victim.num_computed = victim.num_cached = victim.num_in_flight = victim.num_placeholders = 0
        victim.num_preemptions += 1
        self.num_preemptions += 1
        if victim in self._told:
            self._preempted[victim.request_id] = None

    def _admit_waiting(self, plan: StepPlan, now_s: float) -> None:
        blocked = self._admission.in_order(plan, lambda: self._view(now_s))
        for _ in range(self._config.max_num_seqs):  # no policy may go on for ever
            victim = self._policy.preempt(blocked, self._view(now_s)) if blocked is not None else None
            if victim is None:
                return
            self._preempt(victim, plan)
            blocked = self._admission.in_order(plan, lambda: self._view(now_s))

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
        self._running.decode([piece.request for piece in pieces if piece.samples])

    def _undo(self, plan: StepPlan) -> None:
        """Leave a step half decided: who had a piece of it starts again, so no page table is half sent."""
        for piece in reversed(tuple(plan.pieces)):
            self._preempt(piece.request, plan)
        for request in self._waiting.view():
            if request.pages:  # of one that was about to start
                plan.withdraw(request)
                request.num_computed = request.num_cached = 0

    def _view(self, now_s: float) -> SchedulerView:
        return SchedulerView(
            now_s=now_s,
            waiting=self._waiting.view(),
            running=self._running.view(),
            free_pages=self._kv.num_free_pages,
            page_size=self._kv.page_size,
            token_cap=self._config.max_num_batched_tokens,
            cached_prefix=self._kv.match_prefix,
            pending_prefix=self._kv.pending_prefix,
            waiting_version=self._waiting.num_changes,
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
        new_ids, stop = ((), None) if request.is_finished else self._append(piece, answer.new_ids)
        self._note_computed(piece, len(answer.new_ids))
        if request.is_finished:
            return ()
        scored = self._scores.unseen(request, answer.prompt_logprobs)
        if stop is not None:
            self._finish(request, stop)
        if not piece.samples and scored is None:
            return ()
        return (RequestUpdate(request, new_ids, answer.first_logprobs(len(new_ids)), scored),)

    def _append(self, piece: Piece, new_ids: tuple[int, ...]) -> tuple[tuple[int, ...], Stop | None]:
        """Add what was sampled, up to the token that ends the request."""
        request = piece.request
        if not piece.samples:
            return (), None
        if request.params.max_tokens == 0:  # the prompt is only scored
            return (), self._stop.check(request)
        request.draft_ids = ()
        for count, token in enumerate(new_ids, 1):
            request.output_ids.append(token)
            stop = self._stop.check(request, repeats=self._repetition.push(request, token))
            if stop is not None:
                return new_ids[:count], stop
        return new_ids, None

    def _note_computed(self, piece: Piece, num_sampled: int) -> None:
        """Count what a collected piece wrote to memory, unless it was taken away meanwhile.

        What it wrote for drafts that were rejected does not count, and is written over.
        """
        request = piece.request
        if piece.epoch != request.num_preemptions:
            return
        num_drafts = len(piece.draft_ids)
        request.num_in_flight -= piece.num_tokens
        request.num_placeholders -= num_drafts
        num_kept = piece.num_tokens - num_drafts + (num_sampled - 1 if num_drafts else 0)
        # A finished request may have computed tokens that were dropped, and so are not known.
        request.num_computed = min(request.num_computed + num_kept, request.num_tokens)
        self._kv.commit(request)
        if request.is_finished and request.num_in_flight == 0:
            self._free(request)

    def _finish(self, request: Request, stop: Stop) -> None:
        del self.requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._running.stop(request)
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

    def _free(self, request: Request) -> None:
        """Give back what a finished request held; no step in flight has a piece of it."""
        self._kv.release(request)
        self._running.free_slot(request)
