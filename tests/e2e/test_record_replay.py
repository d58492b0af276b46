"""What a real model answered, replayed without it: the scheduler decides each step as it did."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.engine.replay import replay
from jaxllm.types.sampling import SamplingParams
from tests.helpers.tiny_engine import TinyEngine


@pytest.mark.parametrize(
    ("async_scheduling", "num_devices"), [(True, 1), pytest.param(False, 2, marks=pytest.mark.slow)]
)
def test_a_run_of_a_model_on_cpus_is_replayed_from_its_trace(
    async_scheduling: bool, num_devices: int, tmp_path: Path
) -> None:
    path = tmp_path / "trace.jsonl"
    num_pages = 24 if num_devices == 1 else 16
    prompts = [f"request {n % 4}: " + "abcdefghij" * (1 + n % 4) for n in range(24)]
    params = [
        SamplingParams(
            max_tokens=8 + 4 * (n % 8),
            seed=n,
            n=2 if n % 6 == 5 else 1,
            logprobs=2 if n % 5 == 0 else None,
            prompt_logprobs=1 if n % 7 == 0 else None,
            stop=("e", "a", " ") if n % 4 == 3 else (),  # found in the text: the front end aborts
        )
        for n in range(24)
    ]
    with TinyEngine(
        num_pages=num_pages,
        max_num_seqs=8,
        max_num_batched_tokens=20,
        async_scheduling=async_scheduling,
        num_devices=num_devices,
        record_trace=path,
    ) as tiny:
        tiny.engine.generate(prompts, params)
        tiny.wait_until_idle()
        counts = [(core.scheduler.num_preemptions, core.scheduler.prefix_hits) for core in tiny.cores]
    traces = [path, tmp_path / "trace.1.jsonl"][:num_devices]
    found = [replay(each) for each in traces]
    assert [each.difference for each in found] == [None] * num_devices
    assert [each.ended for each in found] == ["closed"] * num_devices
    assert [each.num_preemptions for each in found] == [preemptions for preemptions, _ in counts]
    assert sum(preemptions for preemptions, _ in counts) > 0 and sum(hits for _, hits in counts) > 0
    assert sum(each.num_requests for each in found) == 24 + 4
    assert any(b'"type":"aborted"' in each.read_bytes() for each in traces)
