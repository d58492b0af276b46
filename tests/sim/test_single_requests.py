"""Requests that stand alone, in an open and in a closed loop."""

from __future__ import annotations

import pickle
from collections import Counter

import pytest

from jaxllm.sim.workload_spec import make_workload
from tests.sim.workload_runs import Steps, arrivals, run

OPEN = {
    "kind": "poisson",
    "rate": 5,
    "num_requests": 300,
    "prompt": {"kind": "lognormal", "mean": 60, "sigma": 0.6, "max": 500},
    "output": {"kind": "uniform", "low": 1, "high": 12},
}
CLOSED = {"kind": "closed", "concurrency": 4, "num_requests": 60, "prompt": [20, 90], "output": [1, 5, 9]}


def requests(spec, seed=0):
    return list(make_workload(spec, seed, "test: workload").start())


def test_equal_seeds_give_equal_requests_and_others_do_not():
    assert requests(OPEN, 1) == requests(OPEN, 1)
    assert [r.num_prompt for r in requests(OPEN, 1)] != [r.num_prompt for r in requests(OPEN, 2)]


def test_requests_come_in_order_under_ids_of_their_own():
    found = requests(OPEN)
    assert [r.at_s for r in found] == sorted(r.at_s for r in found)
    assert len({r.request_id for r in found}) == len(found) == 300


def test_a_duration_ends_the_arrivals():
    found = requests({**OPEN, "num_requests": 10_000, "duration_s": 30})
    assert 100 < len(found) < 200
    assert found[-1].at_s < 30


def test_another_rate_leaves_lengths_classes_and_prefixes_as_they_are():
    spec = {**OPEN, "classes": [{"tenant": "a"}, {"tenant": "b"}], "prefixes": {"count": 4, "tokens": 32}}
    slow, fast = requests(spec), requests({**spec, "rate": 50})
    assert [(r.prompt_ids, r.num_output, r.service) for r in slow] == [
        (r.prompt_ids, r.num_output, r.service) for r in fast
    ]
    assert slow[-1].at_s == pytest.approx(10 * fast[-1].at_s)


def test_classes_have_their_weights_wishes_and_lengths():
    classes = [
        {"tenant": "a", "weight": 3, "priority": -1, "ttft_target_s": 0.5},
        {"tenant": "b", "weight": 1, "prompt": 7, "output": 2, "cache_salt": "s", "deadline_s": 9},
    ]
    found = requests({**OPEN, "num_requests": 2000, "classes": classes})
    counts = Counter(r.service.tenant for r in found)
    assert counts["a"] / 2000 == pytest.approx(0.75, abs=0.04)
    a, b = ([r for r in found if r.service.tenant == name] for name in "ab")
    assert {(r.priority, r.service.ttft_target_s, r.cache_salt) for r in a} == {(-1, 0.5, None)}
    assert {(r.num_prompt, r.num_output, r.cache_salt, r.service.deadline_s) for r in b} == {(7, 2, "s", 9)}


def test_prefixes_come_before_what_is_a_requests_own_and_skew_favours_the_first():
    spec = {**OPEN, "num_requests": 3000, "prompt": 8, "prefixes": {"count": 3, "tokens": 16, "skew": 1.0}}
    counts = Counter(r.prompt_ids[:16] for r in requests(spec))
    most = [n for _, n in counts.most_common()]
    assert [n / 3000 for n in most] == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.04)
    assert len({r.prompt_ids[16:] for r in requests(spec)}) == 3000


def test_predictions_are_right_without_error_and_near_with_one():
    exact = requests({**OPEN, "output": 100, "prediction_sigma": 0})
    assert {r.service.predicted_tokens for r in exact} == {100}
    said = sorted(r.service.predicted_tokens or 0 for r in requests({**OPEN, "output": 100, "prediction_sigma": 0.5}))
    assert 85 < said[150] < 115
    assert said[0] < 60 and said[-1] > 160


def test_a_closed_loop_keeps_so_many_requests_open():
    result = run({**CLOSED, "concurrency": 3})
    events = sorted(
        [(s.arrival.at_s, 1) for s in result.served] + [(s.end_s, -1) for s in result.served], key=lambda e: e
    )
    open_now, most = 0, 0
    for _, change in events:
        open_now += change
        most = max(most, open_now)
    assert most == 3
    assert len(result.served) == 60


def test_a_closed_loop_thinks_before_its_next_request():
    spec = {**CLOSED, "concurrency": 1, "think_s": 0.5}
    ends = 0.0
    for served in run(spec).served:
        assert served.arrival.at_s == pytest.approx(ends + 0.5 if ends else 0.0)
        ends = served.end_s


def test_the_same_requests_come_whatever_the_engine_does():
    slow = arrivals(run(CLOSED, cost=Steps(0.5, 0.01), policy="shortest_first"))
    fast = arrivals(run(CLOSED, cost=Steps(0.001, 0.0)))
    assert slow.keys() == fast.keys()
    for request_id, arrival in slow.items():
        assert (arrival.prompt_ids, arrival.num_output) == (fast[request_id].prompt_ids, fast[request_id].num_output)


def test_a_closed_loop_whose_requests_are_all_refused_ends_all_the_same():
    spec = {"kind": "closed", "concurrency": 2, "duration_s": 1, "prompt": 5000, "output": 1}
    result = run(spec)
    assert 150 < len(result.served) < 250  # every 10 ms and client
    assert all(served.error for served in result.served)


@pytest.mark.parametrize("spec", [OPEN, {**OPEN, "prefixes": {"count": 4, "tokens": 32}, "prediction_sigma": 0.3}])
def test_a_pickled_workload_goes_on_where_it_was(spec):
    coming = iter(make_workload(spec, 3, "test: workload").start())
    for _ in range(100):
        next(coming)
    again = pickle.loads(pickle.dumps(coming))
    assert list(again) == list(coming)


@pytest.mark.parametrize("spec", [OPEN, {**OPEN, "prefixes": {"count": 4, "tokens": 32}}, CLOSED])
def test_each_start_gives_the_same_requests(spec):
    workload = make_workload(spec, 3, "test: workload")
    first = list(workload.start())
    for arrival in first[:3]:
        workload.ended(arrival, 5.0, [1])
    assert list(workload.start()) == first
    again = pickle.loads(pickle.dumps(workload))
    assert list(again.start()) == first
    assert again.ended(first[3], 6.0, [1]) == workload.ended(first[3], 6.0, [1])
