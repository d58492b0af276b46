"""Figures of a load, worked out by hand beside them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxllm.bench.answers import Answer
from jaxllm.bench.dataset_files import BenchRequest
from jaxllm.bench.load import LoadRun
from jaxllm.bench.serve_args import ServeArgs
from jaxllm.bench.serve_result import ServeResult
from jaxllm.errors import ConfigError

START_S = 100.0


def answer(sent_s: float, times: list[float], *, error: str | None = None, usage: bool = True) -> Answer:
    """Sent `sent_s` after the start; tokens come `times` after that, the end 1 s after the last."""
    at = START_S + sent_s
    last_s = at + times[-1] if times else at
    return Answer(
        request=BenchRequest("p", 10, 4),
        due_s=at,
        sent_s=at,
        ended_s=last_s + 1,
        chunk_times=[at + time for time in times],
        last_s=last_s,
        num_prompt_tokens=10 if usage else None,
        num_output_tokens=len(times) if usage else None,
        is_finished=True,
        error=error,
    )


def run(*answers: Answer, duration_s: float = 10.0, lags: tuple[float, ...] = (0.0,)) -> LoadRun:
    return LoadRun(answers, START_S, duration_s, 0.5, lags, (0.0,), 2)


RUN = run(answer(0, [1, 2, 4]), answer(2, [3]), answer(5, [1, 1.5], error="boom"))


def test_failed_requests_are_in_no_figure_but_their_own() -> None:
    figures = ServeResult.of(RUN).as_dict()
    assert (figures["completed"], figures["failed"], figures["error_counts"]) == (2, 1, {"boom": 1})
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (20, 4)
    assert figures["request_throughput"] == pytest.approx(0.2)
    assert figures["output_throughput"] == pytest.approx(0.4)
    assert figures["total_token_throughput"] == pytest.approx(2.4)
    assert figures["client_us_per_token"] == pytest.approx(0.5e6 / 4)
    assert figures["offered_request_rate"] == pytest.approx(2 / 5)


def test_latencies_are_in_milliseconds_under_vllms_names() -> None:
    figures = ServeResult.of(RUN, percentiles=(50, 99.9)).as_dict()
    for name, seconds in (("ttft", [1, 3]), ("tpot", [1.5]), ("itl", [1, 2]), ("e2el", [5, 4])):
        ms = np.asarray(seconds) * 1e3
        assert figures[f"mean_{name}_ms"] == pytest.approx(ms.mean())
        assert figures[f"median_{name}_ms"] == pytest.approx(np.median(ms))
        assert figures[f"std_{name}_ms"] == pytest.approx(ms.std())
        assert figures[f"p99.9_{name}_ms"] == pytest.approx(np.percentile(ms, 99.9))


@pytest.mark.parametrize(
    ("slos", "num_good"),
    [
        ({"ttft": 1.0}, 1),
        ({"ttft": 3.0}, 2),
        ({"ttft": 3.0, "tpot": 1.4}, 1),  # one token alone has no time per token
        ({"e2el": 4.5}, 1),
        ({"ttft": 0.5}, 0),
    ],
)
def test_good_requests_stay_within_every_limit(slos: dict[str, float], num_good: int) -> None:
    result = ServeResult.of(RUN, slos=slos)
    assert result.num_good == num_good
    assert result.as_dict()["request_goodput"] == pytest.approx(num_good / 10)


def test_without_limits_there_is_no_goodput() -> None:
    assert ServeResult.of(RUN).as_dict()["request_goodput"] is None


def test_details_are_lists_over_all_requests() -> None:
    details = ServeResult.of(RUN).as_dict(detailed=True)
    assert details["ttfts"] == [1.0, 3.0, 1.0]
    assert details["itls"] == [[1.0, 2.0], [], [0.5]]
    assert details["errors"] == ["", "", "boom"]


def test_no_answer_at_all_is_shown_without_figures() -> None:
    result = ServeResult.of(run(answer(0, [], error="refused")))
    rows = dict(result.rows(("ttft",)))
    assert rows["failed requests"] == "1"
    assert rows["  1 x"] == "refused"
    assert rows["TTFT: time to first token"] == "no value"
    assert result.as_dict()["output_throughput"] == 0


def test_readers_are_warned_of_a_late_client_and_of_missing_usage() -> None:
    calm = ServeResult.of(RUN)
    assert calm.warnings() == []
    late = ServeResult.of(run(answer(0, [1, 2]), lags=(0.3,) * 10))
    assert any("the client itself was late: by 300.0 ms" in warning for warning in late.warnings())
    unknown = ServeResult.of(run(answer(0, [1, 2], usage=False)))
    assert unknown.num_output_tokens == 2
    assert any("1 answers came without usage" in warning for warning in unknown.warnings())


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"goodput": ("ttf:1",)}, "goodput='ttf:1'; accepted: ttft:MS, tpot:MS, e2el:MS"),
        ({"goodput": ("ttft",)}, "goodput='ttft'"),
        ({"goodput": ("ttft:x",)}, "accepted: milliseconds"),
        ({"goodput": ("ttft:inf",)}, "accepted: milliseconds"),
        ({"percentile_metrics": "ttft,foo"}, "percentile_metrics holds 'foo'"),
        ({"metric_percentiles": "120"}, "metric_percentiles holds '120'"),
        ({"request_rate": 0.0}, "request_rate=0.0; accepted: above 0"),
        ({"request_rate": math.nan}, "request_rate=nan"),
        ({"burstiness": -1.0}, "burstiness=-1.0"),
        ({"max_concurrency": 0}, "max_concurrency=0"),
        ({"port": 70000}, "port=70000"),
        ({"endpoint": "v1"}, "endpoint='v1'"),
        ({"endpoint": "/a b"}, "endpoint='/a b'"),
        ({"extra_body": "["}, "extra_body='[' is not JSON"),
        ({"extra_body": "[]"}, "accepted: a JSON object"),
        ({"header": ("a",)}, "header='a'; accepted: NAME=VALUE"),
        ({"header": ("a=\n",)}, "header holds a character"),
        ({"api_key": "日"}, "api_key holds a character"),
        ({"ramp_up_start_rps": 1.0}, "need ramp_up_strategy"),
        ({"ramp_up_strategy": "linear"}, "needs ramp_up_start_rps and ramp_up_end_rps"),
        ({"request_timeout_sec": 0.0}, "request_timeout_sec=0.0"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeArgs(**settings)  # pyright: ignore[reportArgumentType]
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("more", "word"),
    [
        ({"ramp_up_start_rps": 5.0, "ramp_up_end_rps": 1.0}, "accepted: 0 <= start <= end"),
        ({"ramp_up_start_rps": 1.0, "ramp_up_end_rps": 5.0, "request_rate": 2.0}, "exclude each other"),
        ({"ramp_up_start_rps": 0.0, "ramp_up_end_rps": 5.0}, "cannot rise exponentially"),
    ],
)
def test_ramps_that_make_no_sense_are_refused(more: dict[str, float], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeArgs(ramp_up_strategy="exponential", **more)
    assert word in str(caught.value)
