from __future__ import annotations

import numpy as np

from jaxllm.memory.manager import KVManager
from jaxllm.scheduler.decode_rows import DecodeRows
from jaxllm.scheduler.step_plan import StepPlan
from jaxllm.scheduler.stop import StopRules
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from tests.scheduler.driver import make_kv


def ask(request_id: str, num_tokens: int, slot: int) -> Request:
    return Request(request_id, tuple(range(num_tokens)), SamplingParams(), 0.0, slot=slot)


def step_plan(kv: KVManager, budget: int) -> StepPlan:
    return StepPlan(kv, DecodeRows(kv, StopRules(frozenset(), 100)), budget)


def test_withdrawing_gives_back_tokens_pages_and_budget_together() -> None:
    kv = make_kv(num_pages=6, page_size=4)
    plan = step_plan(kv, budget=20)
    stays, goes = ask("stays", 9, 0), ask("goes", 6, 1)
    assert plan.add(stays, 9, is_new=True)
    assert plan.add(goes, 6, is_new=True)
    assert (plan.budget, kv.num_free_pages) == (5, 0)
    assert (goes.num_in_flight, goes.num_pending) == (6, 1)
    plan.withdraw(goes)
    assert (plan.budget, kv.num_free_pages) == (11, 2)
    assert (goes.num_in_flight, goes.num_pending, goes.pages) == (0, 0, [])
    sealed = plan.seal(7, preempted=["goes"], finished=["old"]).output
    assert (sealed.step_id, sealed.rows.request_ids) == (7, ("stays",))
    assert (sealed.preempted, sealed.finished) == (("goes",), ("old",))
    assert [new.request_id for new in sealed.new] == ["stays"]
    assert sealed.page_diffs[0].slots.tolist() == [0, 0, 0]


def test_a_piece_that_finds_no_pages_changes_nothing() -> None:
    kv = make_kv(num_pages=3, page_size=4)
    plan = step_plan(kv, budget=20)
    request = ask("r", 9, 0)
    assert not plan.add(request, 9)
    assert (plan.budget, kv.num_free_pages, request.num_in_flight, request.num_pending) == (20, 2, 0, 0)
    assert not plan.pieces


def test_a_step_is_plain_columns_with_decode_rows_first() -> None:
    kv = make_kv(num_pages=20, page_size=4)
    plan = step_plan(kv, budget=50)
    chunk, last, decode = ask("chunk", 9, 2), ask("last", 5, 0), ask("decode", 4, 1)
    last.num_computed = 4
    decode.num_computed, decode.num_pending = 4, 1  # its next token is still on the device
    for request, num_tokens in ((chunk, 8), (last, 1), (decode, 1)):
        assert plan.add(request, num_tokens)
    rows = plan.seal(0, preempted=(), finished=()).output.rows
    assert rows.request_ids == ("decode", "chunk", "last")
    assert rows.num_decode == 1
    columns = {name: getattr(rows, name) for name in ("slots", "starts", "num_tokens", "samples")}
    assert {name: column.tolist() for name, column in columns.items()} == {
        "slots": [1, 2, 0],
        "starts": [4, 0, 4],
        "num_tokens": [1, 8, 1],
        "samples": [True, False, True],
    }
    assert [column.dtype for column in columns.values()] == [np.int32, np.int32, np.int32, np.bool_]
    assert rows.total_tokens == 10
