"""Figures of a load on a server, under vLLM's names: throughput, TTFT, TPOT, ITL, E2EL, goodput."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.bench.answers import Answer
from jaxllm.bench.distribution import Distribution, percent_name
from jaxllm.bench.load import LoadRun
from jaxllm.bench.serve_args import METRICS
from jaxllm.bench.tables import Row

_LONG_NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token, the first left out",
    "itl": "inter-token latency (between chunks)",
    "e2el": "end-to-end latency",
}
_LATE_SHARE = 0.1  # a client later than this share of the median gap spoils the figures
_LEAST_LATE_S = 0.005
_SEVERAL = 1.05  # tokens a chunk


@dataclass(frozen=True, slots=True)
class ServeResult:
    """Only requests that succeeded count, in every figure but `num_failed` and `errors`."""

    num_completed: int
    num_failed: int
    errors: tuple[tuple[str, int], ...]  # (what, how often), most often first
    duration_s: float
    num_input_tokens: int
    num_cached_tokens: int  # of them, found in the server's prefix cache, where it says so
    num_output_tokens: int
    num_chunks: int
    num_without_usage: int  # answers of which only chunks could be counted
    num_most_running: int
    num_good: int | None  # None: no goodput was asked for
    offered_rate: float  # requests a second that were due
    client_cpu_s: float
    client_lag: Distribution  # seconds
    send_lag: Distribution  # seconds
    latencies: Mapping[str, Distribution]  # seconds, by name in METRICS
    answers: tuple[Answer, ...]

    @staticmethod
    def of(
        run: LoadRun, *, percentiles: Sequence[float] = (99,), slos: Mapping[str, float] | None = None
    ) -> ServeResult:
        """`slos`: seconds by metric, of which a good request exceeds none."""
        done = [answer for answer in run.answers if answer.error is None]
        errors = Counter(answer.error for answer in run.answers if answer.error is not None)
        values: dict[str, list[float]] = {name: [] for name in METRICS}
        for answer in done:
            values["ttft"].append(answer.ttft_s)
            values["tpot"] += [] if answer.tpot_s is None else [answer.tpot_s]
            values["itl"] += answer.itl_s
            values["e2el"].append(answer.e2el_s)
        return ServeResult(
            num_completed=len(done),
            num_failed=len(run.answers) - len(done),
            errors=tuple(errors.most_common()),
            duration_s=run.duration_s,
            num_input_tokens=sum(answer.prompt_tokens for answer in done),
            num_cached_tokens=sum(answer.num_cached_tokens for answer in done),
            num_output_tokens=sum(answer.output_tokens for answer in done),
            num_chunks=sum(len(answer.chunk_times) for answer in done),
            num_without_usage=sum(not answer.has_usage for answer in done),
            num_most_running=run.num_most_running,
            num_good=sum(_is_good(answer, slos) for answer in done) if slos else None,
            offered_rate=_offered_rate(run),
            client_cpu_s=run.client_cpu_s,
            client_lag=Distribution.of(run.lags_s, (99,)),
            send_lag=Distribution.of(run.send_lags_s, (99,)),
            latencies={name: Distribution.of(values[name], percentiles) for name in METRICS},
            answers=run.answers,
        )

    @property
    def tokens_per_chunk(self) -> float:
        return self.num_output_tokens / self.num_chunks if self.num_chunks else 0.0

    @property
    def client_us_per_token(self) -> float:
        return self.client_cpu_s * 1e6 / self.num_output_tokens if self.num_output_tokens else 0.0

    def warnings(self) -> list[str]:
        """What a reader of the figures must know."""
        found: list[str] = []
        lag_s, send_lag_s = self.client_lag.percentiles[0][1], self.send_lag.percentiles[0][1]
        allowed_s = max(_LEAST_LATE_S, _LATE_SHARE * self.latencies["itl"].median)
        if lag_s > allowed_s:
            found.append(
                f"the client itself was late: by {lag_s * 1e3:.1f} ms in 1 % of looks, "
                f"{self.client_lag.largest * 1e3:.1f} ms at most; latencies may be wrong by as much"
            )
        if send_lag_s > allowed_s:
            found.append(
                f"requests left late: 1 % by {send_lag_s * 1e3:.1f} ms or more; arrivals were not quite those asked for"
            )
        if self.tokens_per_chunk > _SEVERAL:
            found.append(
                f"the server sends {self.tokens_per_chunk:.2f} tokens a chunk: ITL is between chunks, TPOT by token"
            )
        if self.num_without_usage:
            found.append(f"{self.num_without_usage} answers came without usage: their tokens are counted as chunks")
        return found

    def rows(self, metrics: Sequence[str]) -> list[Row]:
        rows: list[Row] = [
            ("successful requests", f"{self.num_completed}"),
            ("failed requests", f"{self.num_failed}"),
            *((f"  {count} x", error) for error, count in self.errors),
            ("most requests in flight", f"{self.num_most_running}"),
            ("duration", f"{self.duration_s:.2f} s"),
            ("input tokens", f"{self.num_input_tokens}"),
            ("  of them cached", f"{self.num_cached_tokens}"),
            ("output tokens", f"{self.num_output_tokens}"),
            ("request throughput", f"{self._rate(self.num_completed):.3f} requests/s"),
            *([] if self.num_good is None else [("request goodput", f"{self._rate(self.num_good):.3f} requests/s")]),
            ("output throughput", f"{self._rate(self.num_output_tokens):.2f} tokens/s"),
            ("total throughput", f"{self._rate(self.num_input_tokens + self.num_output_tokens):.2f} tokens/s"),
            ("tokens a chunk", f"{self.tokens_per_chunk:.2f}"),
            ("client CPU", f"{self.client_cpu_s:.3f} s, {self.client_us_per_token:.1f} us a token"),
            (
                "client lag p99, max",
                f"{self.client_lag.percentiles[0][1] * 1e3:.2f}, {self.client_lag.largest * 1e3:.2f} ms",
            ),
            ("send lag p99, max", f"{self.send_lag.percentiles[0][1] * 1e3:.2f}, {self.send_lag.largest * 1e3:.2f} ms"),
        ]
        for name in metrics:
            rows += _latency_rows(name, self.latencies[name].scaled(1e3))
        return rows

    def as_dict(self, *, detailed: bool = False) -> dict[str, Any]:
        """vLLM's keys, and ours beside them."""
        figures: dict[str, Any] = {
            "duration": self.duration_s,
            "completed": self.num_completed,
            "failed": self.num_failed,
            "total_input_tokens": self.num_input_tokens,
            "total_cached_tokens": self.num_cached_tokens,
            "total_output_tokens": self.num_output_tokens,
            "request_throughput": self._rate(self.num_completed),
            "request_goodput": None if self.num_good is None else self._rate(self.num_good),
            "output_throughput": self._rate(self.num_output_tokens),
            "total_token_throughput": self._rate(self.num_input_tokens + self.num_output_tokens),
            "max_concurrent_requests": self.num_most_running,
            "offered_request_rate": self.offered_rate,
            "tokens_per_chunk": self.tokens_per_chunk,
            "answers_without_usage": self.num_without_usage,
            "client_cpu_s": self.client_cpu_s,
            "client_us_per_token": self.client_us_per_token,
            "client_lag_p99_ms": self.client_lag.percentiles[0][1] * 1e3,
            "client_lag_max_ms": self.client_lag.largest * 1e3,
            "send_lag_p99_ms": self.send_lag.percentiles[0][1] * 1e3,
            "send_lag_max_ms": self.send_lag.largest * 1e3,
            "error_counts": dict(self.errors),
            "warnings": self.warnings(),
        }
        for name, distribution in self.latencies.items():
            figures |= _latency_figures(name, distribution.scaled(1e3))
        return {**figures, **(_details(self.answers) if detailed else {})}

    def _rate(self, count: int) -> float:
        return count / self.duration_s if self.duration_s else 0.0


def _is_good(answer: Answer, slos: Mapping[str, float]) -> bool:
    seen = {"ttft": answer.ttft_s, "tpot": answer.tpot_s or 0.0, "e2el": answer.e2el_s}
    return all(seen[name] <= limit for name, limit in slos.items())


def _offered_rate(run: LoadRun) -> float:
    """Of the requests after the first, over the time in which they were due; 0 if all were due at once."""
    span_s = max((answer.due_s for answer in run.answers), default=run.start_s) - run.start_s
    return (len(run.answers) - 1) / span_s if span_s > 0 else 0.0


def _lag_text(lag: Distribution) -> str:
    return f"{lag.percentiles[0][1] * 1e3:.2f}, {lag.largest * 1e3:.2f} ms"


def _latency_rows(name: str, ms: Distribution) -> list[Row]:
    if not ms.count:
        return [(f"{name.upper()}: {_LONG_NAMES[name]}", "no value")]
    return [
        (f"{name.upper()}: {_LONG_NAMES[name]}", ""),
        ("  mean, median", f"{ms.mean:.2f}, {ms.median:.2f} ms"),
        *((f"  p{percent_name(percent)}", f"{value:.2f} ms") for percent, value in ms.percentiles),
    ]


def _latency_figures(name: str, ms: Distribution) -> dict[str, float]:
    return {
        f"mean_{name}_ms": ms.mean,
        f"median_{name}_ms": ms.median,
        f"std_{name}_ms": ms.std,
        **{f"p{percent_name(percent)}_{name}_ms": value for percent, value in ms.percentiles},
    }


def _details(answers: Sequence[Answer]) -> dict[str, Any]:
    """Lists over all requests, in their order; a failed one has zeros and its error."""
    return {
        "input_lens": [answer.prompt_tokens for answer in answers],
        "output_lens": [answer.output_tokens for answer in answers],
        "ttfts": [answer.ttft_s if answer.chunk_times else 0.0 for answer in answers],
        "itls": [answer.itl_s for answer in answers],
        "e2els": [answer.e2el_s for answer in answers],
        "start_times": [answer.sent_s for answer in answers],
        "generated_texts": [answer.text for answer in answers],
        "errors": [answer.error or "" for answer in answers],
    }
