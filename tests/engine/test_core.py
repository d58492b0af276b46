"""The core's order of work, and what it says of each request."""

from __future__ import annotations

import msgspec
import pytest

from jaxllm.engine.clock import ManualClock
from jaxllm.engine.core import EngineCore
from jaxllm.engine.executor import Ticket
from jaxllm.engine.messages import AbortRequests, AddRequest, CoreFailed, ErrorKind, StepDeltas, TokenDelta
from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.testing.logprobs import scripted_columns
from jaxllm.testing.scripted import Script, ScriptedExecutor
from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import PromptLogprobs, SchedulerOutput, StepOutput
from tests.helpers.scripted_engine import Settings, make_parts, script, scripted


class RecordingExecutor:
    """Writes down the order of calls."""

    def __init__(self, inner: ScriptedExecutor) -> None:
        self.inner = inner
        self.calls: list[tuple[str, int]] = []

    def submit(self, plan: SchedulerOutput) -> Ticket:
        self.calls.append(("submit", plan.step_id))
        return self.inner.submit(plan)

    def collect(self, ticket: Ticket) -> StepOutput:
        self.calls.append(("collect", ticket.step_id))
        return self.inner.collect(ticket)

    def close(self) -> None:
        self.inner.close()


def make_core(executor: RecordingExecutor, settings: Settings) -> EngineCore:
    parts = make_parts(executor, settings)
    return EngineCore(executor, parts.scheduler, parts.kv, ManualClock(), async_scheduling=settings.async_scheduling)


def add_message(request_id: str, prompt: str = "abc", **params: object) -> AddRequest:
    sampling = SamplingParams(**{"max_tokens": 3, **params})  # type: ignore[arg-type]
    return AddRequest(request_id, tuple(prompt.encode()), sampling, arrival_s=0.0, seed=1)


def run(core: EngineCore) -> dict[str, list[int]]:
    tokens: dict[str, list[int]] = {}
    while core.has_work:
        step = core.step()
        for delta in step.deltas if step else ():
            tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
    return tokens


def test_one_step_is_in_flight_while_the_next_is_planned() -> None:
    executor = RecordingExecutor(scripted())
    core = make_core(executor, Settings())
    core.add(add_message("a"))
    assert run(core) == {"a": list(b"Hel")}
    assert executor.calls == [
        *(("submit", 0), ("submit", 1), ("collect", 0), ("submit", 2), ("collect", 1), ("collect", 2)),
    ]


def test_without_async_scheduling_each_step_is_collected_at_once() -> None:
    executor = RecordingExecutor(scripted())
    core = make_core(executor, Settings(async_scheduling=False))
    core.add(add_message("a"))
    assert run(core) == {"a": list(b"Hel")}
    assert executor.calls == [(call, step) for step in range(3) for call in ("submit", "collect")]


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_tokens_survive_preemption(async_scheduling: bool) -> None:
    """Pages for about two of four sequences: the script follows positions, so order errors show."""
    text = "0123456789abcdefghij"
    settings = Settings(num_pages=13, max_num_batched_tokens=16, async_scheduling=async_scheduling)
    executor = RecordingExecutor(scripted(default=script(text)))
    parts = make_parts(executor, settings)
    core = EngineCore(executor, parts.scheduler, parts.kv, ManualClock(), async_scheduling=async_scheduling)
    for name in "wxyz":
        core.add(add_message(name, prompt=name * 5, max_tokens=20))
    tokens = run(core)
    assert tokens == {name: list(text.encode()) for name in "wxyz"}
    assert core.stats().num_preemptions > 0
    assert core.stats().num_free_pages == 12
    parts.kv.check()


def test_cached_tokens_are_those_of_the_first_admission() -> None:
    """A resumed request finds its own pages; that is no prefix hit of its prompt (MET-01)."""
    settings = Settings(num_pages=13, max_num_batched_tokens=16)
    executor = RecordingExecutor(scripted(default=script("0123456789abcdefghij")))
    core = make_core(executor, settings)
    for name in "wxyz":
        core.add(add_message(name, prompt=name * 5, max_tokens=20))
    cached: set[int] = set()
    while core.has_work:
        step = core.step()
        cached |= {delta.num_cached for delta in step.deltas} if step else set()
    assert core.stats().num_preemptions > 0
    assert cached == {0}
    assert core.stats().prefix_queries_tokens == 20
    assert core.stats().prefix_hits_tokens == 0


def test_the_queue_limit_refuses_with_a_capacity_error() -> None:
    core = make_core(RecordingExecutor(scripted()), Settings(max_num_queued_reqs=1))
    assert core.add(add_message("a")) is None
    refusal = core.add(add_message("b"))
    assert refusal is not None and refusal.error is not None
    assert refusal.error.kind is ErrorKind.CAPACITY
    assert refusal.finish_reason is FinishReason.ERROR


def test_an_abort_in_flight_gives_pages_back_when_the_step_is_collected() -> None:
    core = make_core(RecordingExecutor(scripted()), Settings())
    before = core.stats()
    core.add(add_message("a", max_tokens=50))
    assert core.step() is None  # submitted, not collected
    core.abort(AbortRequests(("a", "unknown")))
    assert core.has_work
    assert run(core) == {}
    after = core.stats()
    assert (after.num_free_pages, after.num_running, after.num_waiting) == (before.num_free_pages, 0, 0)


def collected(core: EngineCore) -> dict[str, list[TokenDelta]]:
    deltas: dict[str, list[TokenDelta]] = {}
    while core.has_work:
        step = core.step()
        for delta in step.deltas if step else ():
            deltas.setdefault(delta.request_id, []).append(delta)
    return deltas


def test_deltas_carry_log_probabilities_of_their_tokens_and_of_the_prompt_in_parts() -> None:
    core = make_core(RecordingExecutor(scripted()), Settings(max_num_batched_tokens=4))
    core.add(add_message("a", prompt="abcdefg", logprobs=2, prompt_logprobs=1))
    deltas = collected(core)["a"]
    assert [delta.token_ids for delta in deltas] == [(), tuple(b"H"), tuple(b"e"), tuple(b"l")]
    assert [delta.logprobs for delta in deltas] == [None, *(scripted_columns([i], 2) for i in b"Hel")]
    assert [delta.prompt_logprobs for delta in deltas] == [
        PromptLogprobs(1, scripted_columns(b"bcde", 1)),
        PromptLogprobs(5, scripted_columns(b"fg", 1)),
        None,
        None,
    ]


def test_log_probabilities_of_chosen_ids() -> None:
    core = make_core(RecordingExecutor(scripted()), Settings())
    core.add(add_message("a", logprob_token_ids=(101, 72), max_tokens=1))
    assert [delta.logprobs for delta in collected(core)["a"]] == [scripted_columns(b"H", chosen_ids=(101, 72))]


def test_a_prompt_that_is_only_scored_ends_with_its_last_scores_and_no_token() -> None:
    core = make_core(RecordingExecutor(scripted()), Settings(max_model_len=7, max_num_batched_tokens=4))
    core.add(add_message("a", prompt="abcdefg", prompt_logprobs=0, logprobs=1, max_tokens=0))
    deltas = collected(core)["a"]
    assert [(delta.token_ids, delta.logprobs, delta.finish_reason) for delta in deltas] == [
        ((), None, None),
        ((), None, FinishReason.LENGTH),
    ]
    assert [d.prompt_logprobs and d.prompt_logprobs.columns.token_ids for d in deltas] == [list(b"bcde"), list(b"fg")]


def test_siblings_share_a_prompt_and_are_no_prefix_hits() -> None:
    executor = RecordingExecutor(scripted(Script(choices=(tuple(b"one"), tuple(b"two"), tuple(b"six")))))
    core = make_core(executor, Settings())
    first = add_message("a#0", prompt="abcdefghij")
    core.add(first)
    for i in (1, 2):
        core.add(msgspec.structs.replace(first, request_id=f"a#0/{i}", fork_of="a#0"))
    num_tokens = 0
    tokens: dict[str, bytes] = {}
    while core.has_work:
        step = core.step()
        num_tokens += step.num_scheduled_tokens if step else 0
        for delta in step.deltas if step else ():
            assert delta.num_cached == 0
            tokens[delta.request_id] = tokens.get(delta.request_id, b"") + bytes(delta.token_ids)
    assert tokens == {"a#0": b"one", "a#0/1": b"two", "a#0/2": b"six"}
    assert num_tokens == 10 + 2 + 3 * 2  # the prompt once, its last token for each sibling, and decodes
    assert (core.stats().prefix_queries_tokens, core.stats().prefix_hits_tokens) == (10, 0)


def test_bad_words_and_forks_reach_the_executor() -> None:
    executor = scripted()
    parts = make_parts(executor)
    core = EngineCore(executor, parts.scheduler, parts.kv, ManualClock())
    core.add(msgspec.structs.replace(add_message("a"), bad_word_ids=((1, 2), (3,))))
    core.add(msgspec.structs.replace(add_message("b"), fork_of="a"))
    assert parts.scheduler.requests["b"].fork_of == "a"
    plan = parts.scheduler.schedule(0.0)
    assert plan is not None
    assert [(new.request_id, new.bad_word_ids) for new in plan.new] == [("a", ((1, 2), (3,)))]


def test_fail_names_every_request_and_then_says_that_nothing_follows() -> None:
    core = make_core(RecordingExecutor(scripted()), Settings())
    core.add(add_message("a"))
    core.add(add_message("b"))
    deltas, failed = core.fail("broken")
    assert isinstance(deltas, StepDeltas)
    assert {d.request_id for d in deltas.deltas} == {"a", "b"}
    assert all(d.finish_reason is FinishReason.ERROR and d.error and d.error.message == "broken" for d in deltas.deltas)
    assert failed == CoreFailed("broken")


def test_a_policy_that_admits_nobody_is_a_stall_not_a_spin() -> None:
    executor = RecordingExecutor(scripted())
    parts = make_parts(executor)

    class Nobody(FirstComeFirstServed):
        def admit(self, request: object, view: object) -> bool:
            return False

    parts.scheduler._policy._policy = Nobody()
    core = EngineCore(executor, parts.scheduler, parts.kv, ManualClock())
    core.add(add_message("a"))
    assert core.step() is None
    assert core.is_stalled
