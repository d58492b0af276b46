"""Long random runs: whatever happens, no page and no request is lost, and every output is the solo one."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from jaxllm.errors import CapacityError
from jaxllm.scheduler.registry import BUILT_IN, create_policy
from jaxllm.types.request import FinishReason, Request
from jaxllm.types.sampling import RepetitionDetection, SamplingParams
from jaxllm.types.service import ServiceParams
from tests.scheduler.driver import EOS, Driver
from tests.scheduler.paged_device import VOCABULARY

PREFIXES = tuple(tuple((17 * k + 5 * i) % VOCABULARY for i in range(24)) for k in range(3))


def random_request(driver: Driver, rng: random.Random) -> list[Request]:
    """A request, or the siblings of one; now and then a prompt that is only scored."""
    prefix = rng.choice(PREFIXES)[: rng.choice((0, 0, 0, 4, 9, 17))]
    prompt = prefix + tuple(rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 4)))
    max_tokens = rng.choice((None, None, 35, rng.randrange(1, 30)))
    scores = rng.choice((None, None, None, None, 0))
    if scores is not None and rng.random() < 0.5:
        max_tokens = 0
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=rng.randrange(0, 1 + min(4, 4 if max_tokens is None else max_tokens)),
        ignore_eos=rng.random() < 0.95,
        stop_token_ids=tuple(rng.sample(range(VOCABULARY), rng.choice((0, 0, 0, 0, 1)))),
        skip_reading_prefix_cache=rng.random() < 0.1,
        logprobs=rng.choice((None, 0)),
        prompt_logprobs=scores,
        repetition_detection=rng.choice((None, None, None, RepetitionDetection(max_pattern_size=6))),
    )
    num = rng.choice((1, 1, 1, 2, 3, 5))
    service = ServiceParams(
        tenant=rng.choice((None, "b", "c")),
        retention_priority=rng.choice((0, 35, 35, 90)),
        retention_tokens=rng.choice((None, None, 6)),
        deadline_s=rng.choice((None, None, None, None, None, 60.0)),
    )
    keys = {"adapter_id": rng.choice((None, None, "a")), "cache_salt": rng.choice((None, None, "a"))}
    terms = {"arrival_s": float(driver.num_steps), "priority": rng.randrange(3), "service": service}
    return driver.add_family(num, prompt, params, **keys, **terms)


def random_event(driver: Driver, rng: random.Random, max_waiting: int) -> None:
    if driver.scheduler.num_waiting < max_waiting and rng.random() < 0.3:
        family = random_request(driver, rng)
        if rng.random() < 0.05:
            driver.abort(rng.choice(family).request_id)
    if driver.config.num_speculative_tokens:
        driver.propose(rng)
    if len(driver.submitted) < 2:
        driver.plan()
    if driver.submitted and (len(driver.submitted) == 2 or rng.random() < 0.5):
        driver.collect()
    driver.scheduler.expire(float(driver.num_steps))
    if rng.random() < 0.01 and driver.scheduler.requests:
        driver.abort(rng.choice(list(driver.scheduler.requests)))
    if rng.random() < 0.01 and driver.scheduler.num_running:
        driver.preempt(rng.choice(driver.scheduler._running.view()))
    if rng.random() < 0.002:
        driver.kv.reset_prefix_cache()


@pytest.mark.parametrize(
    ("seed", "num_steps", "options"),
    [
        (1, 8000, {"max_num_seqs": 8, "num_pages": 11, "max_num_batched_tokens": 24}),
        (2, 4000, {"num_groups": 2, "page_size": 3, "num_pages": 14, "max_num_batched_tokens": 9}),
        (3, 4000, {"caching": False, "max_num_batched_tokens": 7, "max_num_seqs": 6}),
        (4, 4000, {"chunked": False, "max_num_batched_tokens": 45, "max_model_len": 45, "max_num_seqs": 8}),
        (5, 4000, {"page_size": 1, "num_pages": 40, "max_num_seqs": 6}),
        (6, 4000, {"num_speculative_tokens": 4, "max_num_seqs": 6}),
    ],
)
def test_thousands_of_steps_over_a_tight_pool(seed: int, num_steps: int, options: dict[str, int]) -> None:
    """28,000 steps in all, thousands of preemptions, 0 to 2 steps in flight."""
    run_randomly(seed, num_steps, options)


@pytest.mark.parametrize("name", [name for name in BUILT_IN if name != "fcfs"])
def test_no_policy_and_no_limit_loses_anything(name: str) -> None:
    """1,500 steps each."""
    limits = {"long_prefill_token_threshold": 6, "max_num_partial_prefills": 2, "decode_budget_share": 0.5}
    run_randomly(6, 1500, {"max_num_seqs": 5, "num_pages": 11, "policy": create_policy(name), **limits})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_a_hundred_thousand_steps_over_tight_pools_of_many_shapes(seed: int) -> None:
    rng = random.Random(seed)
    page_size, num_groups = rng.randrange(1, 6), rng.randrange(1, 3)
    options = {
        "page_size": page_size,
        "num_groups": num_groups,
        "num_pages": 1 + rng.randrange(36, 48) // page_size,
        "max_num_seqs": rng.randrange(3, 9),
        "max_num_batched_tokens": rng.randrange(5, 30),
        "caching": seed % 2 == 0,
        "num_speculative_tokens": max(0, seed % 5 - 1),
    }
    run_randomly(seed, 10_000, options)


def run_randomly(seed: int, num_steps: int, options: dict[str, Any]) -> None:
    rng = random.Random(seed)
    driver = Driver(**options)
    reasons: set[FinishReason | None] = set()
    while driver.num_steps < num_steps:
        random_event(driver, rng, max_waiting=5)
        driver.check()
        reasons |= {request.finish_reason for request in driver.retire()}
    driver.drain()
    driver.retire()
    assert driver.all == []
    assert driver.scheduler.num_preemptions > num_steps // 15
    assert driver.num_forks > num_steps // 80 and (driver.num_copies > 0) == (options.get("page_size", 4) > 1)
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH, FinishReason.ABORT}
    is_cached = options.get("caching", True)
    assert (driver.scheduler.prefix_hits > 0) == is_cached
    if num_steps >= 4000:  # among fewer it may never come to that
        assert (driver.num_copied_tokens > 0) == (is_cached and options.get("page_size", 4) > 1)
    is_speculative = options.get("num_speculative_tokens", 0) > 0
    assert (driver.num_accepted > 0) == (driver.num_drafts > driver.num_accepted) == is_speculative


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses pool, budgets, policy and the order of events, and shrinks what fails."""

    num_rules = 0  # of all runs together
    num_copies = num_accepted = num_rejected = num_preemptions = 0

    @initialize(
        page_size=st.integers(1, 4),
        num_pages=st.integers(4, 14),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 16),
        chunked=st.booleans(),
        caching=st.booleans(),
        num_groups=st.integers(1, 2),
        policy=st.sampled_from(tuple(BUILT_IN)),
        num_speculative_tokens=st.sampled_from((0, 0, 1, 3)),
        in_batch_prefix_sharing=st.booleans(),
    )
    def start(
        self,
        page_size: int,
        num_pages: int,
        max_num_seqs: int,
        budget: int,
        chunked: bool,
        caching: bool,
        num_groups: int,
        policy: str,
        num_speculative_tokens: int,
        in_batch_prefix_sharing: bool,
    ) -> None:
        max_model_len = 24
        self.driver = Driver(
            page_size=page_size,
            num_pages=num_pages,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget if chunked else max(budget, max_model_len),
            max_model_len=max_model_len,
            chunked=chunked,
            caching=caching,
            num_groups=num_groups,
            policy=create_policy(policy),
            num_speculative_tokens=num_speculative_tokens,
            in_batch_prefix_sharing=in_batch_prefix_sharing,
        )

    @rule(
        prefix=st.sampled_from(PREFIXES),
        num_shared=st.integers(0, 12),
        tail=st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=4),
        max_tokens=st.none() | st.integers(0, 12),
        min_tokens=st.integers(0, 1),
        ignore_eos=st.booleans(),
        stop_ids=st.lists(st.sampled_from((EOS, 3, 11)), max_size=2),
        adapter_id=st.sampled_from((None, "a")),
        cache_salt=st.sampled_from((None, "a")),
        scores=st.sampled_from((None, None, 0)),
        num=st.sampled_from((1, 1, 2, 3, 4)),
        priority=st.integers(0, 2),
        tenant=st.sampled_from((None, "b")),
        retention=st.sampled_from(((35, None), (0, None), (90, None), (90, 5))),
        deadline_s=st.sampled_from((None, None, 20.0)),
    )
    def add(
        self,
        prefix: tuple[int, ...],
        num_shared: int,
        tail: list[int],
        max_tokens: int | None,
        min_tokens: int,
        ignore_eos: bool,
        stop_ids: list[int],
        adapter_id: str | None,
        cache_salt: str | None,
        scores: int | None,
        num: int,
        priority: int,
        tenant: str | None,
        retention: tuple[int, int | None],
        deadline_s: float | None,
    ) -> None:
        prompt = prefix[:num_shared] + tuple(tail)
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min_tokens if max_tokens != 0 else 0,
            ignore_eos=ignore_eos,
            stop_token_ids=tuple(stop_ids),
            logprobs=scores,
            prompt_logprobs=0 if max_tokens == 0 else scores,
        )
        if len(prompt) > self.driver.kv.capacity_tokens:
            with pytest.raises(CapacityError):
                self.driver.add(prompt, params)
        else:
            level, num_tokens = retention
            service = ServiceParams(
                tenant=tenant, retention_priority=level, retention_tokens=num_tokens, deadline_s=deadline_s
            )
            keys = {"adapter_id": adapter_id, "cache_salt": cache_salt, "priority": priority, "service": service}
            self.driver.add_family(num, prompt, params, arrival_s=float(self.driver.num_steps), **keys)

    @precondition(lambda self: len(self.driver.submitted) < 2)
    @rule(drafts=st.none() | st.integers(0, 99))
    def plan_and_submit(self, drafts: int | None) -> None:
        if drafts is not None:
            self.driver.propose(random.Random(drafts))
        self.driver.plan()

    @precondition(lambda self: self.driver.scheduler.num_running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.driver.preempt(data.draw(st.sampled_from(self.driver.scheduler._running.view())))

    @rule()
    def expire(self) -> None:
        self.driver.scheduler.expire(float(self.driver.num_steps))

    @precondition(lambda self: len(self.driver.submitted) > 0)
    @rule()
    def collect(self) -> None:
        self.driver.collect()

    @rule(num=st.integers(1, 8), drafts=st.integers(0, 99))
    def run_overlapped(self, num: int, drafts: int) -> None:
        for _ in range(num):
            self.driver.propose(random.Random(drafts))
            if (self.driver.plan() is None or len(self.driver.submitted) > 1) and self.driver.submitted:
                self.driver.collect()
        while len(self.driver.submitted) > 1:
            self.driver.collect()

    @precondition(lambda self: self.driver.scheduler.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.driver.abort(data.draw(st.sampled_from(sorted(self.driver.scheduler.requests))), "unknown")

    @rule()
    def reset_prefix_cache(self) -> None:
        holds = any(request.pages for request in self.driver.all)
        assert self.driver.kv.reset_prefix_cache() == (not holds)

    @invariant()
    def nothing_is_lost(self) -> None:
        SchedulerMachine.num_rules += 1
        if hasattr(self, "driver"):
            self.driver.check()

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            driver = self.driver
            driver.drain()
            driver.retire()
            assert driver.all == []
            SchedulerMachine.num_copies += driver.num_copied_tokens
            SchedulerMachine.num_accepted += driver.num_accepted
            SchedulerMachine.num_rejected += driver.num_drafts - driver.num_accepted
            SchedulerMachine.num_preemptions += driver.scheduler.num_preemptions


@pytest.mark.parametrize("num_rules", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_no_order_of_events_loses_a_page_a_token_or_a_request(num_rules: int) -> None:
    SchedulerMachine.num_rules = 0
    examples = settings(
        max_examples=num_rules // 40,
        stateful_step_count=50,
        derandomize=True,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(SchedulerMachine, settings=examples)
    machine = SchedulerMachine
    assert machine.num_rules >= num_rules
    assert min(machine.num_copies, machine.num_accepted, machine.num_rejected, machine.num_preemptions) > 0
