"""Sampling parameters: vLLM's fields, defaults and ranges, validated on construction."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard, cast

from jaxllm.errors import RequestError, shown

GREEDY_BELOW = 0.01  # temperatures below this are greedy: dividing logits by less overflows
MAX_FORBIDDEN = 32  # stop and EOS ids that min_tokens can hold back: the room in a device row


class OutputKind(enum.Enum):
    CUMULATIVE = "cumulative"  # each RequestOutput holds everything so far
    DELTA = "delta"  # only what is new
    FINAL_ONLY = "final_only"  # one RequestOutput, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request.

    Raises:
        RequestError: a value is outside its range; `param` names the field.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    output_kind: OutputKind = OutputKind.CUMULATIVE
    stream_interval: int | None = None
    structured_outputs: Mapping[str, Any] | None = None
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    thinking_token_budget: int | None = None
    repetition_detection: Mapping[str, int] | None = None
    truncate_prompt_tokens: int | None = None
    skip_reading_prefix_cache: bool = False
    extra_args: Mapping[str, Any] | None = field(default=None)

    def __post_init__(self) -> None:
        for name in ("stop", "bad_words"):
            _freeze(self, name, _strings(name, getattr(self, name)))
        for name in ("stop_token_ids", "logprob_token_ids", "allowed_token_ids"):
            value = getattr(self, name)
            if value is not None:
                _freeze(self, name, _token_ids(name, value))
        _check_kinds(self)
        _check_numbers(self)
        _check_lengths(self)
        if self.seed == -1:
            _freeze(self, "seed", None)
        if self.top_k == -1:
            _freeze(self, "top_k", 0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


# Fields whose meaning is not served yet, with the one value that asks for nothing.
_UNSERVED: dict[str, Any] = {
    "n": 1,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_p": 0.0,
    "logprobs": None,
    "prompt_logprobs": None,
    "logprob_token_ids": None,
    "structured_outputs": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": (),
    "thinking_token_budget": None,
    "repetition_detection": None,
    "truncate_prompt_tokens": None,
    "extra_args": None,
}


def check_served(params: SamplingParams) -> None:
    """Refuse a field that this version does not honour yet, rather than ignore it.

    Raises:
        RequestError: naming the field, its value and the value that is accepted.
    """
    for name, neutral in _UNSERVED.items():
        value = getattr(params, name)
        if value != neutral and value not in ({}, ()):
            raise RequestError(f"{name}={shown(value)} is not served yet; accepted: {neutral!r}", param=name)


def sampling_fields() -> tuple[str, ...]:
    return tuple(f.name for f in fields(SamplingParams))


def _freeze(params: SamplingParams, name: str, value: Any) -> None:
    object.__setattr__(params, name, value)


def _fail(name: str, value: Any, accepted: str) -> RequestError:
    return RequestError(f"{name}={shown(value)} is out of range; accepted: {accepted}", param=name)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    items = () if value is None else (value,) if isinstance(value, str) else _listed(value)
    if items is None or any(not isinstance(s, str) or not s for s in items):
        raise _fail(name, value, "non-empty strings")
    return items


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    items = _listed(value)
    if items is None or any(not _is_int(i) or i < 0 for i in items):
        raise _fail(name, value, "token ids, integers of at least 0")
    return tuple(dict.fromkeys(items))


def _listed(value: Any) -> tuple[Any, ...] | None:
    """The items of a list or the like; None for what has no items, or has them as text or under names."""
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    return tuple(cast("Iterable[Any]", value)) if is_list else None


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


# name: (lowest, highest, text); the lowest is accepted, and so is the highest.
_INT_RANGES: dict[str, tuple[float, float, str]] = {
    "n": (1, 16384, "1 to 16384"),
    "top_k": (-1, math.inf, "at least 1, or 0 or -1 for off"),
    "min_tokens": (0, math.inf, "at least 0"),
    "max_tokens": (1, math.inf, "at least 1"),
    "seed": (-(2**63), 2**63 - 1, "a 64-bit integer"),
    "logprobs": (-1, math.inf, "at least 0, or -1 for all"),
    "prompt_logprobs": (-1, math.inf, "at least 0, or -1 for all"),
    "stream_interval": (1, math.inf, "at least 1"),
    "thinking_token_budget": (-1, math.inf, "at least 0, or -1 for none"),
    "truncate_prompt_tokens": (-1, math.inf, "at least -1"),
}
_FLOAT_RANGES: dict[str, tuple[float, float, str]] = {
    "presence_penalty": (-2, 2, "-2 to 2"),
    "frequency_penalty": (-2, 2, "-2 to 2"),
    "repetition_penalty": (1e-9, math.inf, "at least 1e-9"),
    "temperature": (0, 2, "0 to 2"),
    "top_p": (1e-9, 1, "1e-9 to 1"),
    "min_p": (0, 1, "0 to 1"),
}


_OPTIONAL = frozenset(
    {"max_tokens", "seed", "logprobs", "prompt_logprobs", "stream_interval"}
    | {"thinking_token_budget", "truncate_prompt_tokens"}
)
_SWITCHES = (
    "ignore_eos",
    "detokenize",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "include_stop_str_in_output",
    "skip_reading_prefix_cache",
)


def _check_kinds(params: SamplingParams) -> None:
    for name in _SWITCHES:
        if not isinstance(getattr(params, name), bool):
            raise _fail(name, getattr(params, name), "true or false")
    kind: Any = params.output_kind
    if not isinstance(kind, OutputKind):
        raise _fail("output_kind", kind, ", ".join(map(str, OutputKind)))


def _check_numbers(params: SamplingParams) -> None:
    for name, (low, high, text) in _INT_RANGES.items():
        value = getattr(params, name)
        is_off = value is None and name in _OPTIONAL
        if not is_off and (not _is_int(value) or not low <= value <= high):
            raise _fail(name, value, text)
    for name, (low, high, text) in _FLOAT_RANGES.items():
        value = getattr(params, name)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not low <= value <= high:
            raise _fail(name, value, text)


def _check_lengths(params: SamplingParams) -> None:
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _fail("min_tokens", params.min_tokens, f"at most max_tokens={params.max_tokens}")
    if params.stop and not params.detokenize:
        raise RequestError("stop needs detokenize=True: stop strings are found in the text", param="stop")
