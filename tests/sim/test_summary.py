"""Figures of a run beside hand-made requests and what a cost model saw."""

from __future__ import annotations

import json
import math
import statistics

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxllm.errors import ConfigError
from jaxllm.sim.metrics import Slo, Spread, Summary, jain, make_slo, summarise
from jaxllm.sim.replica import Counts, KVSlots, Sample
from jaxllm.sim.simulator import Run
from tests.helpers.sim_runs import CountingCost, run_of, served, small_fleet, small_run, without_token

CONTRACT = {
    *("policy", "seed", "num_requests", "duration_s", "output_tokens_per_s", "ttft_s", "tpot_s", "e2e_s"),
    *("goodput_req_per_s", "jain", "preemptions", "recomputed_tokens", "kv_waste", "prefix_hit_rate", "plan_hash"),
}


def summary_of(run: Run, slo: Slo | None = None) -> Summary:
    return summarise(run, slo, "fcfs", 0)


def test_latencies_of_one_request_are_differences_of_its_times() -> None:
    found = summary_of(run_of(served(2.0, [5.0, 6.0, 10.0], scheduled_s=3.5)))
    figures = (found.ttft_s, found.tpot_s, found.e2e_s, found.queue_s, found.longest_gap_s)
    assert [spread.mean for spread in figures] == [3.0, 2.5, 8.0, 1.5, 4.0]
    assert [spread.p99 for spread in figures] == [3.0, 2.5, 8.0, 1.5, 4.0]
    assert found.output_tokens_per_s == pytest.approx(3 / 10)
    assert found.requests_per_s == pytest.approx(1 / 10)


@given(st.lists(st.floats(0, 1e3), min_size=2, max_size=40))
def test_percentiles_are_those_of_the_statistics_module(values: list[float]) -> None:
    found = Spread.of(np.array([*values, math.nan]))
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert (found.p50, found.p90, found.p99) == pytest.approx((cuts[49], cuts[89], cuts[98]), abs=1e-9)
    assert found.mean == pytest.approx(statistics.fmean(values), abs=1e-9)


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    found = summary_of(run_of(served(0.0, [1.0])))
    assert math.isnan(found.tpot_s.p50)
    assert found.as_dict()["tpot_s"] == dict.fromkeys(("mean", "p50", "p90", "p99"))
    assert summary_of(run_of(served(0.0, [1.0]), served(0.0, [1.0, 3.0]))).tpot_s.mean == 2.0


def test_who_did_not_finish_is_counted_and_has_no_latency() -> None:
    late = served(0.0, [50.0])
    late.reason, late.end_s = None, 60.0
    run = run_of(served(0.0, [1.0]), without_token(0.0, 0.0, "queue full"), without_token(0.0, 3.0), late)
    found = summary_of(run)
    assert (found.num_requests, found.num_finished, found.num_refused) == (4, 1, 1)
    assert (found.ttft_s.p99, found.e2e_s.p99) == (1.0, 1.0)
    assert found.slo_share == 0.25
    assert found.goodput_req_per_s == found.requests_per_s == pytest.approx(1 / 60)
    assert found.output_tokens_per_s == pytest.approx(2 / 60)  # the token that came late was served


def test_goodput_counts_requests_within_every_target() -> None:
    run = run_of(
        served(0.0, [1.0, 2.0, 3.0]),
        served(0.0, [2.0, 3.0]),  # first token too late
        served(0.0, [1.0, 4.0]),  # too slow after it
        served(4.0, [5.0]),  # one token: nothing to be slow about
        served(0.0, [1.0, *np.arange(2.0, 10.5, 0.5).tolist()]),  # ends too late
    )
    slo = Slo(ttft_s=1.0, tpot_s=1.5, e2e_s=9.0)
    assert summary_of(run, slo).goodput_req_per_s == pytest.approx(2 / 10)
    assert summary_of(run, Slo(e2e_s=9.0)).slo_share == pytest.approx(4 / 5)
    assert summary_of(run).slo_share == 1.0


def test_a_requests_own_targets_go_before_those_of_the_run() -> None:
    patient = served(0.0, [5.0, 6.0], ttft_target_s=6.0)
    hurried = served(0.0, [1.0, 2.0], tpot_target_s=0.5)
    plain = served(0.0, [5.0])
    assert summary_of(run_of(patient, hurried, plain), Slo(ttft_s=2.0)).slo_share == pytest.approx(1 / 3)
    assert summary_of(run_of(patient, hurried, plain)).slo_share == pytest.approx(2 / 3)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=20), st.floats(1e-3, 1e3))
def test_jains_index_lies_between_all_to_one_and_equal(amounts: list[float], factor: float) -> None:
    found = jain(amounts)
    assert 1 / len(amounts) - 1e-9 <= found <= 1 + 1e-9
    assert jain([factor * amount for amount in amounts]) == pytest.approx(found)


def test_jains_index_in_closed_form() -> None:
    assert jain([7.0] * 5) == pytest.approx(1.0)
    assert jain([3.0, 0.0, 0.0, 0.0]) == pytest.approx(1 / 4)
    assert jain([1.0, 1.0, 0.0]) == pytest.approx(2 / 3)
    assert jain([0.0, 0.0]) == jain([]) == 1.0


def test_fairness_is_judged_while_there_is_something_to_share() -> None:
    """Both tenants get 20 tokens in the end: here one after the other, there side by side."""
    first, second = [1.0, *range(2, 11)], [11.0, *range(12, 21)]
    after = summary_of(run_of(served(0.0, first, tenant="ann"), served(0.0, second, tenant="bob")))
    beside = summary_of(run_of(served(0.0, first, tenant="ann"), served(0.0, first, tenant="bob")))
    assert [tenant.served_tokens for tenant in after.tenants] == [20, 20]
    assert [tenant.shared_tokens for tenant in after.tenants] == [20.0, 0.0]
    assert after.jain == pytest.approx(0.5)
    assert beside.jain == pytest.approx(1.0)


def test_output_counts_evenly_between_first_and_last_token() -> None:
    slow = served(0.0, [1.0, *np.arange(2.0, 12.0).tolist()], tenant="slow")  # 1 + 10 tokens by second 11
    quick = served(0.0, [6.0], tenant="quick")
    tenants = {tenant.tenant: tenant for tenant in summary_of(run_of(slow, quick)).tenants}
    assert tenants["slow"].shared_tokens == pytest.approx(10 + 1 + 5)
    assert tenants["quick"].shared_tokens == pytest.approx(10 + 1)


def test_a_tenant_that_got_nothing_does_not_end_the_sharing() -> None:
    run = run_of(served(0.0, [1.0], tenant="ann"), without_token(0.0, 0.0, "full", tenant="bob"), served(0.0, [4.0]))
    found = summary_of(run)
    assert [tenant.tenant for tenant in found.tenants] == [None, "ann", "bob"]
    assert found.jain == pytest.approx(1 / 3)  # by second 1, ann alone
    assert (found.tenants[2].num_refused, found.tenants[2].slo_share) == (1, 0.0)


def test_recomputed_tokens_are_positions_computed_again() -> None:
    cost = CountingCost()
    run = small_run(num_pages=30, cost=cost)
    found = summary_of(run)
    assert found.preemptions > 0
    assert found.recomputed_tokens == cost.num_tokens - len(cost.positions) > 0


def test_with_memory_enough_nothing_is_recomputed() -> None:
    found = summary_of(small_run(num_pages=4000))
    assert (found.preemptions, found.recomputed_tokens) == (0, 0)


def test_cached_prompt_tokens_are_not_needed() -> None:
    request = served(0.0, [1.0, 2.0], num_prompt=10, num_hits=8)
    assert summary_of(run_of(request, num_computed_tokens=3)).recomputed_tokens == 0
    assert summary_of(run_of(request, num_computed_tokens=5)).recomputed_tokens == 2


def test_memory_and_devices_are_taken_together_over_replicas() -> None:
    one = Counts(3, 5, KVSlots(held=160, used=120, all=800), [Sample(1.0, 1, 0, 0.2), Sample(2.0, 1, 0, 0.6)])
    two = Counts(4, 6, KVSlots(held=40, used=40, all=800), [Sample(1.0, 1, 0, 0.1)])
    run = run_of(
        served(0.0, [10.0]), counts=(one, two), busy_s=15.0, replica_s=20.0, prefix_queries=200, prefix_hits=50
    )
    found = summary_of(run)
    assert found.kv_waste == pytest.approx(40 / 200)
    assert (found.kv_usage, found.kv_peak) == pytest.approx((0.3, 0.6))
    assert found.device_busy == pytest.approx(0.75)
    assert found.prefix_hit_rate == pytest.approx(0.25)
    assert (found.num_steps, found.num_row_steps) == (7, 11)


def test_a_fleet_that_lost_a_replica_has_figures() -> None:
    cost = CountingCost()
    found = summary_of(small_fleet(cost, fails_at_s=1.0))
    assert (found.num_requests, found.num_finished) == (50, 50)
    assert found.num_retries > 0
    assert found.recomputed_tokens == cost.num_tokens - len(cost.positions) > 0
    assert found.duration_s < found.replica_s < 2 * found.duration_s
    assert 0.5 < found.device_busy <= 1.0


def test_a_run_without_requests_has_figures_all_the_same() -> None:
    found = summary_of(run_of())
    assert (found.num_requests, found.output_tokens_per_s, found.slo_share, found.jain) == (0, 0.0, 0.0, 1.0)
    assert found.as_dict()["ttft_s"]["p50"] is None


def test_the_json_has_the_keys_that_were_agreed() -> None:
    found = summarise(small_run(num_requests=5), Slo(), "fair", 3, plan_hash="abc").as_dict()
    assert found.keys() >= CONTRACT
    assert (found["policy"], found["seed"], found["plan_hash"]) == ("fair", 3, "abc")
    assert json.loads(json.dumps(found, allow_nan=False)) == {**found, "tenants": list(found["tenants"])}


def test_targets_are_read_from_a_section() -> None:
    assert make_slo({"ttft_s": 1, "e2e_s": None}, "a.yaml: slo") == Slo(ttft_s=1)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"ttft": 1}, r"a\.yaml: slo.ttft: unknown key; did you mean 'ttft_s'"),
        ({"ttft_s": 0}, r"a\.yaml: slo.ttft_s=0; accepted: a number above 0"),
        ({"tpot_s": "fast"}, r"slo.tpot_s='fast'; accepted"),
        ({"e2e_s": math.inf}, r"slo.e2e_s=inf; accepted"),
        ({"e2e_s": True}, r"slo.e2e_s=True; accepted"),
    ],
)
def test_bad_targets_are_refused(spec: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_slo(spec, "a.yaml: slo")
