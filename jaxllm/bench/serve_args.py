"""The settings of `jaxllm bench serve`, under the names of vLLM's flags."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from jaxllm.bench.arrivals import Arrivals, RampUp
from jaxllm.bench.distribution import parse_percentiles
from jaxllm.config.fields import check_settings, setting
from jaxllm.errors import ConfigError, shown

METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")
ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeArgs:
    """Where requests go, how fast, and what is reported of them.

    Raises:
        ConfigError: a value has the wrong type, is out of range, or contradicts another.
    """

    backend: Literal["openai", "openai-chat"] = setting("openai", "completions or chat")
    base_url: str | None = setting(None, "the server, http://HOST:PORT; over host and port")
    host: str = setting("127.0.0.1", "the server's host")
    port: int = setting(8000, "the server's port")
    endpoint: str | None = setting(None, "path; default /v1/completions or /v1/chat/completions")
    model: str | None = setting(None, "name sent to the server; default: the first that it lists")
    served_model_name: str | None = setting(None, "name sent to the server, where model names a tokenizer's folder")
    tokenizer: str | None = setting(None, "folder or .gguf file of the tokenizer; default: the model's")
    api_key: str | None = setting(None, "key sent to the server")
    header: tuple[str, ...] = setting((), "further headers, NAME=VALUE")
    insecure: bool = setting(False, "do not check the certificate of an https server")
    request_rate: float = setting(math.inf, "requests a second; inf: all at once")
    burstiness: float = setting(1.0, "shape of the gaps between requests: 1 Poisson, below in bursts, above even")
    max_concurrency: int | None = setting(None, "requests in flight at most", human=True)
    ramp_up_strategy: Literal["linear", "exponential"] | None = setting(None, "let the rate rise over the requests")
    ramp_up_start_rps: float | None = setting(None, "requests a second at the start of the ramp")
    ramp_up_end_rps: float | None = setting(None, "requests a second at its end")
    num_warmups: int = setting(0, "requests before those that count; their prompts come from behind them")
    ready_check_timeout_sec: float = setting(0.0, "wait so long for the server to answer")
    request_timeout_sec: float = setting(6 * 3600.0, "give a request up after so long")
    ignore_eos: bool = setting(False, "let answers run to their full length")
    temperature: float | None = setting(None, "of each request")
    top_p: float | None = setting(None, "of each request")
    top_k: int | None = setting(None, "of each request")
    min_p: float | None = setting(None, "of each request")
    frequency_penalty: float | None = setting(None, "of each request")
    presence_penalty: float | None = setting(None, "of each request")
    repetition_penalty: float | None = setting(None, "of each request")
    logprobs: int | None = setting(None, "log probabilities asked for with each token")
    extra_body: str | None = setting(None, "JSON object merged into each request")
    percentile_metrics: str = setting("ttft,tpot,itl", "metrics to show percentiles of: ttft, tpot, itl, e2el")
    metric_percentiles: str = setting("99", "percentiles to show, between commas")
    goodput: tuple[str, ...] = setting((), "NAME:MILLISECONDS for ttft, tpot, e2el: requests within all count")
    label: str | None = setting(None, "first part of the result file's name; default: the backend")
    metadata: tuple[str, ...] = setting((), "NAME=VALUE, kept in the result file")
    save_result: bool = setting(False, "write a result file")
    save_detailed: bool = setting(False, "with every request's figures and text in it")
    result_dir: str = setting(".", "folder of the result file")
    result_filename: str | None = setting(None, "its name; default from label, rate, model and date")

    def __post_init__(self) -> None:
        check_settings(self)
        self._check_rates()
        for name, low in (("port", 1), ("max_concurrency", 1), ("num_warmups", 0), ("ready_check_timeout_sec", 0)):
            value = getattr(self, name)
            if value is not None and not value >= low:
                raise ConfigError(f"{name}={value}; accepted: at least {low}")
        if not self.request_timeout_sec > 0:
            raise ConfigError(f"request_timeout_sec={self.request_timeout_sec}; accepted: above 0")
        if self.port > 65535:
            raise ConfigError(f"port={self.port}; accepted: 1 to 65535")
        if self.endpoint is not None and not (self.endpoint.startswith("/") and _is_plain(self.endpoint)):
            raise ConfigError(f"endpoint={self.endpoint!r}; accepted: a path such as /v1/completions")
        _ = self.shown_metrics, self.percentiles, self.slos, self.headers, self.extra, self.notes

    def _check_rates(self) -> None:
        for name in ("request_rate", "burstiness"):
            value = getattr(self, name)
            if not value > 0 or (name == "burstiness" and math.isinf(value)):
                raise ConfigError(f"{name}={value}; accepted: above 0{', inf included' if name[0] == 'r' else ''}")
        ends = (self.ramp_up_start_rps, self.ramp_up_end_rps)
        if self.ramp_up_strategy is None:
            if ends != (None, None):
                raise ConfigError(f"ramp_up_start_rps and ramp_up_end_rps={ends} need ramp_up_strategy")
            return
        start, end = ends
        if start is None or end is None:
            raise ConfigError(f"ramp_up_strategy={self.ramp_up_strategy} needs ramp_up_start_rps and ramp_up_end_rps")
        if not math.isinf(self.request_rate):
            raise ConfigError(f"request_rate={self.request_rate} and ramp_up_strategy exclude each other; give one")
        if not (0 <= start <= end < math.inf and end > 0):
            raise ConfigError(f"ramp_up_start_rps={start}, ramp_up_end_rps={end}; accepted: 0 <= start <= end, finite")
        if self.ramp_up_strategy == "exponential" and start == 0:
            raise ConfigError("ramp_up_start_rps=0 cannot rise exponentially; accepted: above 0")

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return self.base_url if self.base_url is not None else f"http://{host}:{self.port}"

    @property
    def path(self) -> str:
        return self.endpoint or ENDPOINTS[self.backend]

    @property
    def arrivals(self) -> Arrivals:
        if self.ramp_up_strategy is None:
            return Arrivals(self.request_rate, self.burstiness)
        strategy: RampUp = self.ramp_up_strategy
        return Arrivals(self.ramp_up_end_rps or 0.0, self.burstiness, strategy, self.ramp_up_start_rps or 0.0)

    @property
    def shown_metrics(self) -> tuple[str, ...]:
        names = tuple(name.strip() for name in self.percentile_metrics.split(","))
        for name in names:
            if name not in METRICS:
                raise ConfigError(f"percentile_metrics holds {name!r}; accepted: {', '.join(METRICS)}")
        return names

    @property
    def percentiles(self) -> tuple[float, ...]:
        return parse_percentiles(self.metric_percentiles)

    @property
    def slos(self) -> dict[str, float]:
        """What a good request stays within: seconds by metric."""
        found: dict[str, float] = {}
        for pair in self.goodput:
            name, colon, text = pair.partition(":")
            if name not in GOODPUT_METRICS or not colon:
                raise ConfigError(f"goodput={pair!r}; accepted: {', '.join(f'{n}:MS' for n in GOODPUT_METRICS)}")
            found[name] = _milliseconds(pair, text) / 1e3
        return found

    @property
    def headers(self) -> dict[str, str]:
        """Besides those that every request has."""
        pairs = _pairs("header", self.header)
        if self.api_key is not None:
            pairs = {"Authorization": f"Bearer {self.api_key}", **pairs}
        for name, value in pairs.items():
            if not (_is_plain(name) and value.isascii() and value.isprintable()):
                what = "api_key" if name == "Authorization" and self.api_key else "header"
                raise ConfigError(f"{what} holds a character that no header may; accepted: printable ASCII")
        return pairs

    @property
    def extra(self) -> dict[str, Any]:
        """What each request's body holds besides prompt and length."""
        names = ("temperature", "top_p", "top_k", "min_p", "logprobs")
        names += ("frequency_penalty", "presence_penalty", "repetition_penalty")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.backend == "openai-chat" and "logprobs" in given:
            given |= {"logprobs": True, "top_logprobs": self.logprobs}
        if self.ignore_eos:
            given["ignore_eos"] = True
        return {**given, **_json_object("extra_body", self.extra_body)}

    @property
    def notes(self) -> dict[str, str]:
        return _pairs("metadata", self.metadata)


def _is_plain(text: str) -> bool:
    return bool(text) and text.isascii() and text.isprintable() and " " not in text


def _milliseconds(pair: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise ConfigError(f"goodput={pair!r}; accepted: milliseconds of at least 0 after the colon")
    return value


def _pairs(name: str, words: tuple[str, ...]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise ConfigError(f"{name}={shown(word)}; accepted: NAME=VALUE")
        pairs[key] = value
    return pairs


def _json_object(name: str, text: str | None) -> Mapping[str, Any]:
    if text is None:
        return {}
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name}={shown(text)} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{name}={shown(text)}; accepted: a JSON object")
    return cast("dict[str, Any]", value)
