"""Sampling parameters: vLLM's fields, defaults and ranges, validated on construction."""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeGuard, cast

from jaxllm.errors import RequestError, shown

GREEDY_BELOW = 0.01  # temperatures below this are greedy: dividing logits by less overflows
# Room on the device, a row each.
MAX_FORBIDDEN = 32  # stop and EOS ids that min_tokens can hold back
MAX_LOGIT_BIAS = 1024  # entries of logit_bias
MAX_LOGPROB_TOKEN_IDS = 128
MAX_BAD_SEQUENCES = 512  # of more than one token, after tokenising bad_words; those of one token are free
MAX_BAD_SEQUENCE_TOKENS = 16
MAX_PATTERN = 4096  # tokens, and copies, of repetition_detection
BIAS_LIMIT = 100.0  # values of logit_bias are clamped to it, as OpenAI documents


class OutputKind(enum.Enum):
    CUMULATIVE = "cumulative"  # each RequestOutput holds everything so far
    DELTA = "delta"  # only what is new
    FINAL_ONLY = "final_only"  # one RequestOutput, at the end


@dataclass(frozen=True, slots=True, kw_only=True)
class RepetitionDetection:
    """End a request whose output ends in `min_count` copies of a pattern of so many tokens.

    Raises:
        RequestError: a number is outside its range.
    """

    max_pattern_size: int
    min_pattern_size: int = 1
    min_count: int = 2

    def __post_init__(self) -> None:
        for name, low in (("max_pattern_size", 1), ("min_pattern_size", 1), ("min_count", 2)):
            value = getattr(self, name)
            if not _is_int(value) or not low <= value <= MAX_PATTERN:
                raise _fail("repetition_detection", {name: value}, f"{low} to {MAX_PATTERN}")
        if self.min_pattern_size > self.max_pattern_size:
            accepted = f"at most max_pattern_size={self.max_pattern_size}"
            raise _fail("repetition_detection", {"min_pattern_size": self.min_pattern_size}, accepted)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose the tokens of one request.

    `max_tokens=0` is accepted with `prompt_logprobs` alone: the prompt is scored and nothing generated.

    Raises:
        RequestError: a value is outside its range, or asks for what is not served yet; `param` names the field.
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
    repetition_detection: RepetitionDetection | None = None  # a mapping of its fields is accepted
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
        _freeze(self, "logit_bias", _bias(self.logit_bias))
        _freeze(self, "repetition_detection", _repetition(self.repetition_detection))
        _check_kinds(self)
        _check_numbers(self)
        _check_lengths(self)
        _check_served(self)
        if self.seed == -1:
            _freeze(self, "seed", None)
        if self.top_k == -1:
            _freeze(self, "top_k", 0)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW


MAX_BEAM_WIDTH = 64
MAX_LENGTH_PENALTY = 10  # a million tokens to this power is still a float


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamSearchParams:
    """Keep the `beam_width` most likely sequences at each token; vLLM's fields.

    A finished sequence is ranked by the sum of its log probabilities / its output tokens ** length_penalty.

    Raises:
        RequestError: a value is outside its range; `param` names the field.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0  # 0: of the model's own probabilities, as 1
    length_penalty: float = 1.0
    include_stop_str_in_output: bool = False

    def __post_init__(self) -> None:
        if not _is_int(self.beam_width) or not 1 <= self.beam_width <= MAX_BEAM_WIDTH:
            raise _fail("beam_width", self.beam_width, f"1 to {MAX_BEAM_WIDTH}")
        if not _is_int(self.max_tokens) or self.max_tokens < 1:
            raise _fail("max_tokens", self.max_tokens, "at least 1")
        for name, low, high in (("temperature", 0, 2), ("length_penalty", -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)):
            value: Any = getattr(self, name)
            if not _is_finite(value) or not low <= value <= high:
                raise _fail(name, value, f"{low} to {high}")
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise _fail(name, getattr(self, name), "true or false")


_UNSERVED = ("structured_outputs", "thinking_token_budget")


def _check_served(params: SamplingParams) -> None:
    """Refuse a field that this version does not honour yet, rather than ignore it."""
    for name in _UNSERVED:
        value: Any = getattr(params, name)
        if value is not None and not _is_empty(value):
            raise RequestError(f"{name}={shown(value)} is not served yet; accepted: None", param=name)


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


def _bias(value: Any) -> Mapping[int, float] | None:
    if value is None:
        return None
    accepted = f"at most {MAX_LOGIT_BIAS} token ids, each with a finite number"
    if not isinstance(value, Mapping) or len(cast("Mapping[Any, Any]", value)) > MAX_LOGIT_BIAS:
        raise _fail("logit_bias", value, accepted)
    entries = cast("Mapping[Any, Any]", value)
    for key, number in entries.items():
        if not _is_int(key) or key < 0 or not _is_finite(number):
            raise _fail("logit_bias", {key: number}, accepted)
    return {key: max(-BIAS_LIMIT, min(BIAS_LIMIT, float(number))) for key, number in entries.items()} or None


def _repetition(value: Any) -> RepetitionDetection | None:
    if value is None or isinstance(value, RepetitionDetection):
        return value
    names = {f.name for f in fields(RepetitionDetection)}
    if not isinstance(value, Mapping) or not names >= set(cast("Mapping[Any, Any]", value)) >= {"max_pattern_size"}:
        raise _fail("repetition_detection", value, f"an object of {', '.join(sorted(names))}")
    size = cast("Mapping[str, Any]", value)["max_pattern_size"]
    is_off = _is_int(size) and size == 0  # as in vLLM; the other numbers are checked all the same
    given = {**cast("dict[str, Any]", value), "max_pattern_size": MAX_PATTERN if is_off else size}
    checked = RepetitionDetection(**given)
    return None if is_off else checked


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    items = _listed(value)
    if items is None or any(not _is_int(i) or i < 0 for i in items):
        raise _fail(name, value, "token ids, integers of at least 0")
    return tuple(dict.fromkeys(items))


def _listed(value: Any) -> tuple[Any, ...] | None:
    """The items of a list or the like; None for what has no items, or has them as text or under names."""
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes, Mapping))
    return tuple(cast("Iterable[Any]", value)) if is_list else None


def _is_empty(value: Any) -> bool:
    return isinstance(value, Mapping) and not value


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: Any) -> TypeGuard[float]:
    """A number that a float can hold; 10**400 is an int that it cannot."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(float(value))
    except OverflowError:
        return False


# name: (lowest, highest, text); the lowest is accepted, and so is the highest.
_INT_RANGES: dict[str, tuple[float, float, str]] = {
    "n": (1, 16384, "1 to 16384"),
    "top_k": (-1, math.inf, "at least 1, or 0 or -1 for off"),
    "min_tokens": (0, math.inf, "at least 0"),
    "max_tokens": (0, math.inf, "at least 1, or 0 with prompt_logprobs"),
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
        if not _is_finite(value) or not low <= value <= high:
            raise _fail(name, value, text)


def _check_lengths(params: SamplingParams) -> None:
    if params.max_tokens == 0 and params.prompt_logprobs is None:
        raise _fail("max_tokens", 0, "at least 1, or 0 with prompt_logprobs")
    if params.allowed_token_ids == ():
        raise _fail("allowed_token_ids", [], "at least one token id")
    ids = params.logprob_token_ids
    if ids is not None:
        if not 1 <= len(ids) <= MAX_LOGPROB_TOKEN_IDS:
            raise _fail("logprob_token_ids", list(ids), f"1 to {MAX_LOGPROB_TOKEN_IDS} token ids")
        if params.logprobs not in (None, len(ids)):
            raise _fail("logprobs", params.logprobs, f"none or {len(ids)} beside that many logprob_token_ids")
    if params.max_tokens is not None and params.min_tokens > params.max_tokens:
        raise _fail("min_tokens", params.min_tokens, f"at most max_tokens={params.max_tokens}")
    if params.stop and not params.detokenize:
        raise RequestError("stop needs detokenize=True: stop strings are found in the text", param="stop")
