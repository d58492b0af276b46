"""Prometheus exposition: vLLM's metric names (another prefix), types, labels and buckets.

Counters and gauges are read from `EngineStats` at the moment of the scrape, so each has one source
of truth and is exact; only histograms keep numbers of their own. What is counted per request is
counted once for a request with n > 1.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, cast

from jaxllm.metrics.histogram import PlainHistogram
from jaxllm.metrics.stats import EngineStats, FinishedRequest, StatsReader
from jaxllm.types.profile import PHASES

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

DEFAULT_PREFIX = "jaxllm:"

TTFT_BUCKETS_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_BUCKETS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_BUCKETS_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
SEQUENCES_BUCKETS = (1, 2, 5, 10, 20)
STEP_TOKENS_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

_GAUGES = {
    "num_requests_running": "Requests that hold a slot on the device.",
    "num_requests_waiting": "Requests that wait to be scheduled.",
    "kv_cache_usage_perc": "Share of KV pages in use, 0 to 1.",
    "num_free_pages": "KV pages that can be given out (cached but unreferenced ones count).",
}
_COUNTERS = {
    "num_preemptions": "Preemptions: requests that lost their pages and were recomputed.",
    "policy_faults": "Answers of the scheduling policy that could not be used; fcfs decided in its place.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Prompt tokens found in the prefix cache.",
    "compilations_after_ready": "Programs compiled after the engine was ready; more than 0 is a fault.",
    "generation_tokens": "Tokens generated and delivered.",
    "prompt_tokens": "Prompt tokens of requests that got a first token.",
    "prompt_tokens_cached": "Of those, tokens found in the prefix cache.",
}
_DURATIONS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", TTFT_BUCKETS_S),
    "inter_token_latency_seconds": ("Between a request's consecutive tokens.", TOKEN_GAP_BUCKETS_S),
    "request_time_per_output_token_seconds": ("Mean token gap of one request.", TOKEN_GAP_BUCKETS_S),
    "e2e_request_latency_seconds": ("From arrival to the end.", REQUEST_BUCKETS_S),
    "request_queue_time_seconds": ("From arrival to the first scheduled step.", REQUEST_BUCKETS_S),
    "request_prefill_time_seconds": ("From the first scheduled step to the first token.", REQUEST_BUCKETS_S),
    "request_decode_time_seconds": ("From the first token to the last.", REQUEST_BUCKETS_S),
    "request_inference_time_seconds": ("From the first scheduled step to the last token.", REQUEST_BUCKETS_S),
}
_SIZES = {
    "request_prompt_tokens": "Prompt tokens of ended requests.",
    "request_generation_tokens": "Generated tokens of ended requests, all sequences together.",
    "request_max_num_generation_tokens": "Generated tokens of the longest sequence of ended requests.",
    "request_prefill_kv_computed_tokens": "Prompt tokens of ended requests that the prefix cache did not hold.",
    "request_params_max_tokens": "max_tokens of ended requests, clamped to what fits.",
}


_LABELS = ("model_name", "engine")
_ENGINE = "0"  # all copies of the model are counted together
_OPENMETRICS = "application/openmetrics-text"
_PLAIN_TEXT = "text/plain; version=0.0.4; charset=utf-8"


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50 … up to the largest that does not exceed `max_tokens`."""
    steps = (mantissa * 10**power for power in range(12) for mantissa in (1, 2, 5))
    return tuple(b for b in steps if b <= max(max_tokens, 1))


class PrometheusMetrics:
    """One engine's metrics in a registry of their own. Implements `Observer`."""

    def __init__(
        self, read_stats: StatsReader, *, model_name: str, max_model_len: int, prefix: str = DEFAULT_PREFIX
    ) -> None:
        """`prefix` comes before every name, colon included ("jaxllm:")."""
        from prometheus_client import CollectorRegistry, ProcessCollector

        self.registry = CollectorRegistry(auto_describe=False)
        self._histograms: dict[str, PlainHistogram] = {}
        self._model_name = model_name
        self._prefix = prefix
        self.registry.register(_StatsCollector(read_stats, prefix, model_name))
        for name, (text, buckets) in _DURATIONS.items():
            self._add_histogram(name, text, buckets)
        for name, text in _SIZES.items():
            self._add_histogram(name, text, token_buckets(max_model_len))
        self._add_histogram("request_params_n", "n of ended requests.", SEQUENCES_BUCKETS)
        self._add_histogram("iteration_tokens_total", "Tokens computed in one step.", STEP_TOKENS_BUCKETS)
        ProcessCollector(registry=self.registry)  # memory, CPU time, open files, under their usual names

    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The exposition and its content type: OpenMetrics where the Accept header prefers it, else plain text."""
        if prefers_openmetrics(accept or ""):
            return _openmetrics(self.registry)
        from prometheus_client.exposition import generate_latest

        return generate_latest(self.registry), _PLAIN_TEXT

    def first_token(self, seconds: float) -> None:
        self._histograms["time_to_first_token_seconds"].observe(seconds)

    def inter_token(self, seconds: float) -> None:
        self._histograms["inter_token_latency_seconds"].observe(seconds)

    def step(self, num_tokens: int) -> None:
        self._histograms["iteration_tokens_total"].observe(num_tokens)

    def finished(self, request: FinishedRequest) -> None:
        for name, value in _finished_values(request):
            self._histograms[name].observe(value)

    def _add_histogram(self, name: str, text: str, buckets: Iterable[float]) -> None:
        labels = tuple(zip(_LABELS, (self._model_name, _ENGINE), strict=True))
        histogram = PlainHistogram(self._prefix + name, text, buckets=buckets, labels=labels)
        self.registry.register(histogram)
        self._histograms[name] = histogram


def prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header names OpenMetrics and gives it at least the weight of plain text."""
    wanted = _weight(accept, _OPENMETRICS)
    return wanted > 0 and wanted >= _weight(accept, "text/plain", "text/*")


def _openmetrics(registry: CollectorRegistry) -> tuple[bytes, str]:
    """The exposition and its content type.

    Releases of the client library that know ways of escaping names would, by default, put an
    underscore in place of the colon in samples' names, though names may hold one.
    """
    from prometheus_client.openmetrics import exposition

    write = cast("Callable[..., bytes]", exposition.generate_latest)  # pyright: ignore[reportUnknownMemberType]
    options = {"escaping": "allow-utf-8"} if "escaping" in inspect.signature(write).parameters else {}
    return write(registry, **options), exposition.CONTENT_TYPE_LATEST


def _weight(accept: str, *kinds: str) -> float:
    """The best q that an Accept header gives one of the media types; 0 where it names none."""
    best = 0.0
    for entry in accept.lower().split(","):
        kind, *params = (part.strip() for part in entry.split(";"))
        weight = next((param.removeprefix("q=") for param in params if param.startswith("q=")), "1")
        if kind in kinds:
            with contextlib.suppress(ValueError):  # a malformed weight asks for nothing
                best = max(best, float(weight))
    return best


def _finished_values(request: FinishedRequest) -> Iterator[tuple[str, float]]:
    yield "e2e_request_latency_seconds", request.finished_s - request.arrival_s
    yield "request_prompt_tokens", request.num_prompt_tokens
    yield "request_prefill_kv_computed_tokens", request.num_prompt_tokens - request.num_cached_tokens
    yield "request_generation_tokens", request.num_generation_tokens
    longest = request.longest_generation_tokens
    yield "request_max_num_generation_tokens", request.num_generation_tokens if longest is None else longest
    yield "request_params_n", request.num_sequences
    if request.max_tokens is not None:
        yield "request_params_max_tokens", request.max_tokens
    scheduled, first, last = request.scheduled_s, request.first_token_s, request.last_token_s
    if scheduled is not None:
        yield "request_queue_time_seconds", max(scheduled - request.arrival_s, 0.0)
    if scheduled is None or first is None or last is None:
        return
    yield "request_prefill_time_seconds", max(first - scheduled, 0.0)
    yield "request_decode_time_seconds", last - first
    yield "request_inference_time_seconds", max(last - scheduled, 0.0)
    if request.num_generation_tokens > 1:
        yield "request_time_per_output_token_seconds", (last - first) / (request.num_generation_tokens - 1)


class _StatsCollector:
    """Turns one `EngineStats` into metric families at each scrape."""

    def __init__(self, read_stats: StatsReader, prefix: str, model_name: str) -> None:
        self._read_stats = read_stats
        self._prefix = prefix
        self._labels = [model_name, _ENGINE]

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        stats = self._read_stats()
        gauges, counters = _gauge_values(stats), _counter_values(stats)
        for name, text in _GAUGES.items():
            gauge = GaugeMetricFamily(self._prefix + name, text, labels=_LABELS)
            gauge.add_metric(self._labels, gauges[name])
            yield gauge
        for name, text in _COUNTERS.items():
            counter = CounterMetricFamily(self._prefix + name, text, labels=_LABELS)
            counter.add_metric(self._labels, counters[name])
            yield counter
        success = CounterMetricFamily(
            self._prefix + "request_success", "Ended requests, by reason.", labels=[*_LABELS, "finished_reason"]
        )
        for reason, count in stats.totals.finished.items():
            success.add_metric([*self._labels, reason], count)
        yield success
        sources = CounterMetricFamily(
            self._prefix + "prompt_tokens_by_source",
            "Prompt tokens, by where their keys and values came from.",
            labels=[*_LABELS, "source"],
        )
        cached = stats.totals.cached_prompt_tokens
        sources.add_metric([*self._labels, "local_compute"], stats.totals.prompt_tokens - cached)
        sources.add_metric([*self._labels, "local_cache_hit"], cached)
        yield sources
        yield self._step_phases(stats)

    def _step_phases(self, stats: EngineStats) -> Metric:
        """Sums and counts without quantiles: an average over any time is the quotient of two differences."""
        from prometheus_client.core import SummaryMetricFamily

        phases = SummaryMetricFamily(
            self._prefix + "step_phase_seconds", "Seconds of a step, by phase.", labels=[*_LABELS, "phase"]
        )
        for phase, seconds in zip(PHASES, stats.core.phase_seconds, strict=True):
            phases.add_metric([*self._labels, phase], count_value=stats.core.num_steps, sum_value=seconds)
        return phases


def _gauge_values(stats: EngineStats) -> dict[str, float]:
    core = stats.core
    return {
        "num_requests_running": core.num_running,
        "num_requests_waiting": core.num_waiting,
        "kv_cache_usage_perc": core.kv_usage,
        "num_free_pages": core.num_free_pages,
    }


def _counter_values(stats: EngineStats) -> dict[str, float]:
    core, totals = stats.core, stats.totals
    return {
        "num_preemptions": core.num_preemptions,
        "policy_faults": core.num_policy_faults,
        "prefix_cache_queries": core.prefix_queries_tokens,
        "prefix_cache_hits": core.prefix_hits_tokens,
        "compilations_after_ready": stats.compilations_after_ready,
        "generation_tokens": totals.generation_tokens,
        "prompt_tokens": totals.prompt_tokens,
        "prompt_tokens_cached": totals.cached_prompt_tokens,
    }
