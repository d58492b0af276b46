"""Outputs that were not read one by one become one output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from jaxllm.types.outputs import CompletionOutput, RequestOutput
from jaxllm.types.sampling import OutputKind


def merge_outputs(earlier: RequestOutput, later: RequestOutput, kind: OutputKind) -> RequestOutput:
    """One output in place of two that the caller has not read yet."""
    return later if kind is not OutputKind.DELTA else join_deltas((earlier, later))


def join_deltas(outputs: Sequence[RequestOutput]) -> RequestOutput:
    """What a caller knows who has read all of these, oldest first, of a request with output_kind DELTA."""
    if len(outputs) == 1:
        return outputs[0]
    pieces: dict[int, list[CompletionOutput]] = {}
    for output in outputs:
        for completion in output.outputs:
            pieces.setdefault(completion.index, []).append(completion)
    prompt_logprobs = next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None)
    completions = tuple(_joined(pieces[index]) for index in sorted(pieces))
    return replace(outputs[-1], outputs=completions, prompt_logprobs=prompt_logprobs)


def _joined(pieces: Sequence[CompletionOutput]) -> CompletionOutput:
    """The last one, with the texts, ids and log probabilities of all."""
    last = pieces[-1]
    if len(pieces) == 1:
        return last
    return replace(
        last,
        text="".join([piece.text for piece in pieces]),
        token_ids=tuple([token_id for piece in pieces for token_id in piece.token_ids]),
        logprobs=None if last.logprobs is None else tuple([p for piece in pieces for p in piece.logprobs or ()]),
    )
