"""The plain histogram shows what the client library's own would."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram

from jaxllm.metrics.histogram import PlainHistogram

BUCKETS = (0.01, 0.025, 1, 2.5, 80)


def samples(collector: Any) -> list[Any]:
    families = list(collector.collect())
    assert [family.type for family in families] == ["histogram"]
    return [(s.name, s.labels, s.value) for s in families[0].samples if not s.name.endswith("_created")]


@given(st.lists(st.floats(0, 100) | st.sampled_from(BUCKETS)))
def test_each_value_counts_where_the_library_counts_it(values: list[float]) -> None:
    plain = PlainHistogram("a:b", "text", buckets=BUCKETS, labels=[("model", "m"), ("engine", "0")])
    family = Histogram("a:b", "text", labelnames=("model", "engine"), buckets=BUCKETS, registry=CollectorRegistry())
    library = family.labels("m", "0")
    for value in values:
        plain.observe(value)
        library.observe(value)
    ours, theirs = samples(plain), samples(family)
    assert [sample[:2] for sample in ours] == [sample[:2] for sample in theirs]
    assert [sample[2] for sample in ours] == pytest.approx([sample[2] for sample in theirs])
