"""Metrics as a scraper reads them: names, types, buckets, exact counts."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.errors import EngineDead, RequestError
from jaxllm.metrics.prometheus import PrometheusMetrics, token_buckets
from jaxllm.metrics.stats import CoreStats, EngineStats, FinishedRequest, RequestTotals
from jaxllm.testing.faults import Fault, FaultKind
from jaxllm.types.outputs import RequestOutput
from jaxllm.types.profile import PHASES
from jaxllm.types.sampling import OutputKind, SamplingParams
from tests.helpers.scripted_engine import Settings, make_parts, script, scripted

ALWAYS_PRESENT = {
    "num_requests_running": "gauge",
    "num_requests_waiting": "gauge",
    "kv_cache_usage_perc": "gauge",
    "num_free_pages": "gauge",
    "num_preemptions": "counter",
    "prefix_cache_queries": "counter",
    "prefix_cache_hits": "counter",
    "compilations_after_ready": "counter",
    "generation_tokens": "counter",
    "prompt_tokens": "counter",
    "request_success": "counter",
    "time_to_first_token_seconds": "histogram",
    "inter_token_latency_seconds": "histogram",
    "e2e_request_latency_seconds": "histogram",
}


class Scrape:
    """The exposition, read by the client library's own parser."""

    def __init__(self, metrics: PrometheusMetrics) -> None:
        body, self.content_type = metrics.render()
        self.text = body.decode()
        self.families = {f.name: f for f in text_string_to_metric_families(self.text)}

    def value(self, name: str, **labels: str) -> float:
        found = [s.value for s in self._samples() if s.name == f"jaxllm:{name}" and labels.items() <= s.labels.items()]
        assert len(found) == 1, (name, labels, found)
        return found[0]

    def buckets(self, name: str) -> list[float]:
        samples = (s for s in self._samples() if s.name == f"jaxllm:{name}_bucket")
        return [float(s.labels["le"]) for s in samples]

    def _samples(self) -> Iterator:
        return (sample for family in self.families.values() for sample in family.samples)


def plain(stats: EngineStats | None = None, **more: str) -> PrometheusMetrics:
    stats = stats or EngineStats(CoreStats(), RequestTotals())
    return PrometheusMetrics(lambda: stats, model_name="m", max_model_len=1000, **more)


def test_every_promised_name_is_there_from_the_start() -> None:
    scrape = Scrape(plain())
    assert scrape.content_type.startswith("text/plain")
    for name, kind in ALWAYS_PRESENT.items():
        assert scrape.families[f"jaxllm:{name}"].type == kind, name
    for reason in ("stop", "length", "abort", "error"):
        assert scrape.value("request_success_total", finished_reason=reason, model_name="m") == 0
    assert "jaxllm:num_preemptions_total{" in scrape.text


def test_another_prefix_renames_everything() -> None:
    names = set(Scrape(plain(prefix="vllm:")).families)
    assert all(name.startswith(("vllm:", "process_")) for name in names)
    assert {f"vllm:{name}" for name in ALWAYS_PRESENT} <= names


def test_two_engines_share_nothing() -> None:
    first, second = plain(), plain()
    first.first_token(0.1)
    assert Scrape(first).value("time_to_first_token_seconds_count") == 1
    assert Scrape(second).value("time_to_first_token_seconds_count") == 0
    assert not any(f.name.startswith("jaxllm") for f in REGISTRY.collect())


def test_buckets_are_those_of_existing_dashboards() -> None:
    scrape = Scrape(plain())
    inf = float("inf")
    assert scrape.buckets("time_to_first_token_seconds")[:4] == [0.001, 0.005, 0.01, 0.02]
    assert scrape.buckets("time_to_first_token_seconds")[-4:] == [160.0, 640.0, 2560.0, inf]
    assert scrape.buckets("inter_token_latency_seconds")[:3] == [0.01, 0.025, 0.05]
    assert scrape.buckets("e2e_request_latency_seconds")[-3:] == [1920.0, 7680.0, inf]
    assert scrape.buckets("request_prompt_tokens") == [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, inf]
    assert token_buckets(1) == (1,)


def test_gauges_and_counters_are_read_at_the_scrape() -> None:
    core = CoreStats(3, 4, 50, 100, 0.5, 7, 80, 16, 9)
    totals = RequestTotals(11, 12, 13, {"stop": 1, "length": 2, "abort": 3, "error": 4})
    scrape = Scrape(plain(EngineStats(core, totals, 5, 6)))
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 4,
        "num_free_pages": 50,
        "kv_cache_usage_perc": 0.5,
        "num_preemptions_total": 7,
        "prefix_cache_queries_total": 80,
        "prefix_cache_hits_total": 16,
        "compilations_after_ready_total": 6,
        "prompt_tokens_total": 11,
        "prompt_tokens_cached_total": 12,
        "generation_tokens_total": 13,
    }
    assert {name: scrape.value(name) for name in expected} == expected
    assert scrape.value("request_success_total", finished_reason="abort") == 3


def test_an_ended_request_fills_the_histograms_it_has_moments_for() -> None:
    metrics = plain()
    metrics.finished(FinishedRequest("stop", 10, 5, 16, 0.0, 1.0, 3.0, 7.0, 8.0, 3, 4, 8))
    metrics.finished(FinishedRequest("abort", 10, 0, None, 0.0, None, None, None, 2.0))
    scrape = Scrape(metrics)
    sums = {
        "e2e_request_latency_seconds": 10.0,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 6.0,
        "request_time_per_output_token_seconds": 1.0,
        "request_generation_tokens": 5.0,
        "request_max_num_generation_tokens": 4.0,
        "request_params_n": 4.0,
        "request_prefill_kv_computed_tokens": 12.0,
        "request_params_max_tokens": 16.0,
    }
    assert {name: scrape.value(f"{name}_sum") for name in sums} == sums
    assert scrape.value("e2e_request_latency_seconds_count") == 2
    assert scrape.value("request_queue_time_seconds_count") == 1


async def _run(engine: AsyncEngine, request_id: str, prompt: str, **params: object) -> RequestOutput:
    sampling = SamplingParams(**{"max_tokens": 20, "output_kind": OutputKind.DELTA, **params})  # type: ignore[arg-type]
    outputs = [o async for o in engine.stream(prompt, sampling, request_id=request_id)]
    return outputs[-1]


def test_met_01_counts_are_exact() -> None:
    """10 run to their end under preemption, 3 leave, 2 are refused."""

    async def main() -> None:
        settings = Settings(num_pages=16, max_num_batched_tokens=16)
        executor = scripted(default=script("0123456789" * 3), step_s=0.0005)
        engine = AsyncEngine(make_parts(executor, settings))
        usages = [o.usage for o in await asyncio.gather(*(_run(engine, f"ok{i}", chr(97 + i) * 6) for i in range(10)))]
        for number in range(3):
            stream = engine.stream("leaver", SamplingParams(max_tokens=None), request_id=f"leave{number}")
            usages.append((await anext(stream)).usage)
            await stream.aclose()
        for prompt in ("", "x" * 500):
            with pytest.raises(RequestError):
                await _run(engine, "bad", prompt)
        await asyncio.sleep(0.1)

        scrape = Scrape(engine.metrics)
        success = {
            reason: scrape.value("request_success_total", finished_reason=reason)
            for reason in ("stop", "length", "abort", "error")
        }
        assert success == {"stop": 0, "length": 10, "abort": 3, "error": 0}
        assert scrape.value("time_to_first_token_seconds_count") == 13
        assert scrape.value("time_to_first_token_seconds_sum") > 0
        assert scrape.value("e2e_request_latency_seconds_count") == 13
        generated = sum(usage.completion_tokens for usage in usages[:10])
        assert generated == 200
        leavers = scrape.value("generation_tokens_total") - generated
        assert leavers >= 3  # each left at its first output; more may have come by then
        assert scrape.value("inter_token_latency_seconds_count") == generated + leavers - 13
        assert scrape.value("prompt_tokens_total") == sum(usage.prompt_tokens for usage in usages) == 78
        assert scrape.value("num_preemptions_total") >= 1
        assert scrape.value("prefix_cache_queries_total") == 78
        hits = scrape.value("prefix_cache_hits_total")
        assert hits == scrape.value("prompt_tokens_cached_total") == sum(u.cached_tokens for u in usages)
        assert (
            hits <= 2 * 5
        )  # only the later leavers can find the first one's page of 4 tokens, and copy one of the next
        assert scrape.value("num_requests_running") == 0
        assert scrape.value("num_free_pages") == 15
        await engine.close()

    asyncio.run(main())


def test_met_01_requests_of_a_dead_engine_count_as_errors() -> None:
    async def main() -> None:
        engine = AsyncEngine(
            make_parts(scripted(faults=[Fault(2, FaultKind.RAISE)]), compilations_after_ready=lambda: 2)
        )
        runs = (_run(engine, f"r{i}", "abc") for i in range(3))
        results = await asyncio.gather(*runs, return_exceptions=True)
        assert all(isinstance(r, EngineDead) for r in results)
        scrape = Scrape(engine.metrics)
        assert scrape.value("request_success_total", finished_reason="error") == 3
        assert scrape.value("compilations_after_ready_total") == 2
        with contextlib.suppress(EngineDead):
            await engine.close()

    asyncio.run(main())


def test_phases_of_steps_are_sums_and_counts_that_match_the_profiles() -> None:
    async def run() -> None:
        engine = AsyncEngine(make_parts(scripted(script("hello"), step_s=0.001)))
        try:
            async for _ in engine.stream("abc", SamplingParams(max_tokens=9), request_id="a"):
                pass
            while engine.stats().core.num_running:
                await asyncio.sleep(0.001)
            profiles, scrape = engine.step_profiles(), Scrape(engine.metrics)
        finally:
            await engine.close()
        for number, phase in enumerate(PHASES):
            assert scrape.value("step_phase_seconds_count", phase=phase) == len(profiles)
            total = sum(profile.seconds[number] for profile in profiles)
            assert scrape.value("step_phase_seconds_sum", phase=phase) == pytest.approx(total)
        assert scrape.value("step_phase_seconds_sum", phase="device") == pytest.approx(0.001 * len(profiles))

    asyncio.run(run())
