"""The JSON objects that `jaxllm run --json` writes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from jaxllm.types.outputs import CompletionOutput, RequestOutput, TokenLogprob
from jaxllm.types.sampling import SamplingParams

_FLOOR = -9999.0  # JSON has no infinity; vLLM's stand-in for what is impossible


def json_line(output: RequestOutput, params: SamplingParams) -> dict[str, Any]:
    """One prompt's result. The first sequence stands in the object itself; with n > 1 all are in `outputs` too."""
    usage = output.usage
    line: dict[str, Any] = {
        "prompt_token_ids": list(output.prompt_token_ids),
        **_sequence(output.outputs[0], params),
        "usage": {
            "prompt_tokens": usage.prompt_tokens,
            "completion_tokens": usage.completion_tokens,
            "cached_tokens": usage.cached_tokens,
        },
    }
    if output.prompt_logprobs is not None:
        line["prompt_logprobs"] = [
            None if entries is None else _position(entries, params.prompt_logprobs, None)
            for entries in output.prompt_logprobs
        ]
    if params.n > 1:
        line["outputs"] = [{"index": each.index, **_sequence(each, params)} for each in output.outputs]
    return line


def _sequence(completion: CompletionOutput, params: SamplingParams) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "token_ids": list(completion.token_ids),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
    }
    if completion.logprobs is not None:
        ids = params.logprob_token_ids
        shown["logprobs"] = [_position(entries, params.logprobs, ids) for entries in completion.logprobs]
    return shown


def _position(entries: Sequence[TokenLogprob], num_top: int | None, ids: Sequence[int] | None) -> dict[str, Any]:
    """The token itself, and in `top` the most likely ones, or those of `ids` in their order."""
    own = entries[0]
    if ids is not None:
        by_id = {entry.token_id: entry for entry in entries}
        top = [by_id[token_id] for token_id in ids if token_id in by_id]
    else:
        ranked = sorted(entries, key=lambda entry: (-entry.logprob, entry.token_id))
        top = ranked if num_top == -1 else ranked[: num_top or 0]
    return {
        "token_id": own.token_id,
        "logprob": _finite(own.logprob),
        "rank": own.rank,
        "top": [[entry.token_id, _finite(entry.logprob)] for entry in top],
    }


def _finite(value: float) -> float:
    return value if _FLOOR < value < math.inf else _FLOOR
