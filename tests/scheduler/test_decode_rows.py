"""The decodes of the next step: who is in it, from where, and what page each needs."""

from __future__ import annotations

import random

from jaxllm.memory.manager import KVManager
from jaxllm.scheduler.decode_rows import DecodeRows
from jaxllm.scheduler.policies.fcfs import FirstComeFirstServed
from jaxllm.scheduler.policy import SchedulerView
from jaxllm.scheduler.stop import StopRules
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from tests.scheduler.driver import Driver, make_kv

PAGE = 4


def make_rows(kv: KVManager) -> DecodeRows:
    return DecodeRows(kv, StopRules(frozenset({7}), 40))


def running(kv: KVManager, name: str, num_prompt: int, slot: int, **params: int) -> Request:
    """A request whose prompt is on its way, with the token after it."""
    request = Request(name, tuple(range(num_prompt)), SamplingParams(**params), 0.0, slot=slot)
    assert kv.grow(request, num_prompt) is not None
    request.num_in_flight, request.num_pending = num_prompt, 1
    return request


def test_each_step_starts_one_further_and_takes_a_page_at_the_end_of_one() -> None:
    kv = make_kv(num_pages=20, page_size=PAGE)
    rows = make_rows(kv)
    request = running(kv, "r", 6, slot=3, max_tokens=30)
    rows.join([request])
    starts: list[int] = []
    new_pages: list[int] = []
    for _ in range(8):
        for number in rows.begin(100):
            assert rows.grow(number)
        step = rows.take(len(rows))
        starts += step.starts.tolist()
        assert (step.request_ids, step.slots.tolist()) == (("r",), [3])
        new_pages.append(sum(len(group) for groups in step.new_pages.values() for group in groups))
    assert starts == list(range(6, 14))
    assert new_pages == [0, 0, 1, 0, 0, 0, 1, 0]  # positions 8 and 12
    assert (request.num_in_flight, request.num_pending) == (6 + 8, 1 + 8)


def test_who_has_its_full_length_leaves_and_who_has_it_already_never_joins() -> None:
    kv = make_kv(num_pages=20, page_size=PAGE)
    rows = make_rows(kv)
    short, long = running(kv, "short", 3, 0, max_tokens=3), running(kv, "long", 3, 1, max_tokens=9)
    rows.join([short, long, running(kv, "one", 3, 2, max_tokens=1)])
    members: list[tuple[str, ...]] = []
    for _ in range(4):
        for number in rows.begin(100):
            rows.grow(number)
        members.append(rows.take(len(rows)).request_ids)
    assert members == [("short", "long"), ("short", "long"), ("long",), ("long",)]


def test_a_plan_that_was_handed_out_does_not_change() -> None:
    kv = make_kv(num_pages=30, page_size=PAGE)
    rows = make_rows(kv)
    first, second = running(kv, "first", 5, 0), running(kv, "second", 5, 1)
    rows.join([first])
    rows.begin(9)
    step = rows.take(1)
    before = (step.starts.tolist(), step.slots.tolist(), list(step.rows), step.request_ids)
    rows.join([second])
    rows.leave(first)
    rows.begin(9)
    rows.take(1)
    assert (step.starts.tolist(), step.slots.tolist(), list(step.rows), step.request_ids) == before


def test_a_page_taken_for_a_step_that_was_never_made_is_told_with_the_next() -> None:
    kv = make_kv(num_pages=30, page_size=PAGE)
    rows = make_rows(kv)
    stays, goes = running(kv, "stays", 4, 0), running(kv, "goes", 4, 1)
    rows.join([stays, goes])
    assert [rows.grow(number) for number in rows.begin(9)] == [True, True]
    rows.leave(goes)
    assert rows.begin(9) == []
    assert list(rows.take(1).new_pages) == [stays]


def test_any_coming_and_going_agrees_with_a_plain_list() -> None:
    rng = random.Random(0)
    kv = make_kv(num_pages=500, page_size=PAGE)
    rows, model = make_rows(kv), list[list]()  # request, next position
    for number in range(300):
        if rng.random() < 0.5:
            request = running(kv, str(number), rng.randrange(1, 9), slot=number, max_tokens=rng.randrange(2, 20))
            rows.join([request])
            model.append([request, request.num_prompt_tokens])
        if model and rng.random() < 0.3:
            request, _ = model.pop(rng.randrange(len(model)))
            rows.leave(request)
            kv.release(request)
        budget = rng.randrange(0, 12)
        short = rows.begin(budget)
        model = [[r, at] for r, at in model if at < r.num_prompt_tokens + r.params.max_tokens - 1]
        assert [rows.request(i) for i in short] == [r for r, at in model[:budget] if at >= len(r.pages[0]) * PAGE]
        assert all(rows.grow(i) for i in short)
        step = rows.take(rows.num_left_of(budget))
        assert list(zip(step.request_ids, step.starts.tolist(), strict=True)) == [
            (r.request_id, at) for r, at in model[:budget]
        ]
        for entry in model[:budget]:
            entry[1] += 1
        assert len(rows) == len(model)


def test_who_is_beyond_the_budget_gets_no_token_in_the_place_of_one_that_yields() -> None:
    """Its page for it was never looked for."""

    class Shrinking(FirstComeFirstServed):
        budget = 99

        def token_budget(self, view: SchedulerView) -> int:
            return self.budget

        def victim(self, view: SchedulerView, needing: Request) -> Request:
            return max(view.running, key=lambda request: request.priority)

    policy, params = Shrinking(), SamplingParams(max_tokens=20, ignore_eos=True)
    limits = {"max_num_batched_tokens": 16, "long_prefill_token_threshold": 2}
    driver = Driver(page_size=2, num_pages=6, max_num_seqs=5, policy=policy, caching=False, **limits)
    driver.add(tuple(range(9)), params, priority=0)
    for prompt, priority in (((1, 2), 1), ((2,), 9), ((3,), 5), ((4, 4), 1)):
        driver.add(prompt, params, priority=priority)
    driver.step()
    policy.budget = 3
    driver.plan()  # the device looks at every page
    policy.budget = 99
    driver.drain()
    driver.retire()
