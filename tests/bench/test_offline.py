"""latency and throughput on a whole engine with a scripted device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxllm.bench.datasets import DatasetArgs, make_requests
from jaxllm.bench.latency import LatencyArgs, LatencyResult, random_ids, run_latency
from jaxllm.bench.throughput import ThroughputArgs, run_throughput
from jaxllm.errors import ConfigError, RequestError
from jaxllm.llm import LLM


@pytest.fixture(scope="module")
def llm(script_file: Path) -> Iterator[LLM]:
    with LLM(executor=f"scripted:{script_file}", max_num_seqs=8) as llm:
        yield llm


def test_latency_times_the_batches_after_the_warm_up(llm: LLM) -> None:
    seen: list[tuple[str, int, int]] = []
    args = LatencyArgs(input_len=5, output_len=4, batch_size=3, n=2, num_iters_warmup=1, num_iters=2, profile=True)
    result = run_latency(llm, args, progress=lambda *each: seen.append(each))
    assert len(result.latencies_s) == len(result.cpu_s) == 2
    assert all(seconds > 0 for seconds in result.latencies_s)
    assert result.num_output_tokens == 3 * 2 * 4
    assert seen == [("batches", i, 3) for i in (1, 2, 3)]
    assert result.profile is not None
    # Two batches: at least a step for the prompts and one for each further token.
    assert result.profile.count >= 2 * 4
    assert result.profile.num_tokens >= 2 * (3 * 5 + 6 * 3)


def test_latency_figures_are_those_of_its_batches() -> None:
    result = LatencyResult((1.0, 2.0, 6.0), (0.5, 0.5, 0.5), 12, 4, None)
    figures = result.as_dict()
    assert figures["avg_latency"] == 3.0
    assert figures["median_latency"] == figures["percentiles"]["50"] == 2.0
    rows = dict(result.rows())
    assert rows["median (lowest to highest)"] == "2.0000 s (1.0000 to 6.0000)"
    assert rows["latency of a token, median"] == "500.000 ms"
    assert rows["output throughput, median"] == "6.00 tokens/s"
    assert "profile" not in figures


def test_random_ids_are_ordinary_tokens_and_follow_the_seed(llm: LLM) -> None:
    prompts = random_ids(llm, 4, 50, 0)
    ids = [i for prompt in prompts for i in prompt["prompt_token_ids"]]
    assert not set(ids) & llm.tokenizer.special_ids
    assert len(ids) == 200
    assert prompts == random_ids(llm, 4, 50, 0) != random_ids(llm, 4, 50, 1)


def test_throughput_counts_every_request_but_the_warm_ups(llm: LLM) -> None:
    dataset = DatasetArgs(num_prompts=10, random_input_len=12, random_output_len=7)
    requests = make_requests(dataset, llm.tokenizer, 2)
    result = run_throughput(llm, ThroughputArgs(num_warmups=2, profile=True), requests)
    assert (result.num_requests, result.num_failed) == (10, 0)
    assert (result.num_input_tokens, result.num_output_tokens) == (120, 70)
    assert [num for _, num in result.finished] == [7] * 10
    assert list(result.finished) == sorted(result.finished)
    assert result.profile is not None
    assert result.profile.num_tokens >= 120 + 10 * 6
    figures = result.as_dict()
    assert figures["total_num_tokens"] == 190
    assert figures["tokens_per_second"] == pytest.approx(190 / result.elapsed_s)


def test_throughput_finds_shared_prefixes(llm: LLM) -> None:
    dataset = DatasetArgs(
        dataset_name="prefix_repetition",
        num_prompts=12,
        prefix_repetition_num_prefixes=1,
        prefix_repetition_prefix_len=64,
        prefix_repetition_suffix_len=8,
        prefix_repetition_output_len=2,
    )
    result = run_throughput(llm, ThroughputArgs(), make_requests(dataset, llm.tokenizer))
    assert result.num_input_tokens == 12 * 72
    assert result.num_cached_tokens >= 4 * 64  # all that started after the first ones had ended


def test_what_does_not_fit_is_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError, match="maximum context length"):
        run_latency(llm, LatencyArgs(input_len=300, num_iters=1))


@pytest.mark.parametrize("field", ["input_len", "output_len", "batch_size", "n", "num_iters"])
def test_nothing_may_be_below_one(field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field}=0; accepted: at least 1"):
        LatencyArgs(**{field: 0})
