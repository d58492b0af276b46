from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxllm.runner.buckets import MAX_FORWARD_PROGRAMS, MAX_SAMPLE_SIZES, build_buckets

seqs = st.integers(1, 1100)
budgets = st.integers(1, 70_000)


@settings(max_examples=300, deadline=None)
@given(seqs=seqs, budget=budgets, min_rows=st.sampled_from([1, 2]), data=st.data())
def test_every_reachable_step_has_a_bucket(seqs: int, budget: int, min_rows: int, data: st.DataObject) -> None:
    buckets = build_buckets(seqs, budget, 4, min_rows=min_rows)
    rows = data.draw(st.integers(1, min(seqs, budget)))
    tokens = data.draw(st.one_of(st.just(rows), st.integers(rows, budget)))
    bucket = buckets.choose(tokens, rows)
    assert tokens <= bucket.num_tokens
    assert rows <= bucket.num_requests <= buckets.num_logit_rows(bucket)
    assert bucket.is_decode == (tokens == rows)


@settings(max_examples=300, deadline=None)
@given(seqs=seqs, budget=budgets, min_rows=st.sampled_from([1, 2]))
def test_tpu_01_no_bucket_exceeds_the_budget_and_programs_are_few(seqs: int, budget: int, min_rows: int) -> None:
    buckets = build_buckets(seqs, budget, 4, min_rows=min_rows)
    assert len(buckets.forward) <= MAX_FORWARD_PROGRAMS
    assert len(set(buckets.forward)) == len(buckets.forward)
    assert len(buckets.sample_sizes) <= MAX_SAMPLE_SIZES
    assert len({b.num_requests for b in buckets.mixed if b.num_tokens > 32}) <= 2
    for bucket in buckets.forward:
        assert bucket.num_tokens <= max(budget, min_rows)
        assert bucket.num_requests <= max(seqs, min_rows)
        assert bucket.num_requests >= (min_rows if bucket.is_decode else 1)
        assert bucket.num_tokens >= bucket.num_requests


@pytest.mark.parametrize("budget", [317, 16_640])
def test_tpu_01_a_budget_that_is_no_power_of_two_is_its_own_last_bucket(budget: int) -> None:
    assert build_buckets(64, budget, 4).forward[-1].num_tokens == budget


def test_the_default_configuration_compiles_few_programs() -> None:
    buckets = build_buckets(64, 512, 512)
    assert [b.num_requests for b in buckets.decode] == [1, 4, 8, 16, 32, 64]
    assert [(b.num_tokens, b.num_requests) for b in buckets.mixed] == [
        (32, 16),
        (64, 16),
        (128, 16),
        (128, 64),
        (256, 64),
        (512, 64),
    ]
    assert buckets.sample_sizes == (1, 16, 64)


def test_a_step_beyond_every_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match="513 tokens in 3 rows"):
        build_buckets(64, 512, 4).choose(513, 3)
