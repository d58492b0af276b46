"""Log probabilities on their way back: which rows of a step whose they are, and the plain lists of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxllm.sampling.logprobs import DeviceLogprobs
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import Int32Array, Logprobs, PromptLogprobs


@dataclass(frozen=True, slots=True)
class SampledRow:
    """A sampled row whose request asks for log probabilities."""

    request_id: str
    row: int  # of the step's sample rows
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class ScoredPiece:
    """Scored rows of one request: `count` of the step's scored rows from `first` on."""

    request_id: str
    start: int  # position, in the prompt, of the first token that is scored
    first: int
    count: int
    num_top: int  # -1: all there are


def sampled_logprobs(wanted: Sequence[SampledRow], tokens: Int32Array, found: DeviceLogprobs) -> dict[str, Logprobs]:
    """By request, each with what its own params ask for, from `found` on the host."""
    columns: dict[str, Logprobs] = {}
    for sampled in wanted:
        rows, chosen = slice(sampled.row, sampled.row + 1), sampled.params.logprob_token_ids
        if chosen is None:
            columns[sampled.request_id] = _ranked(found, tokens, rows, sampled.params.logprobs or 0)
        else:
            columns[sampled.request_id] = _chosen(found, tokens, rows, chosen)
    return columns


def prompt_logprobs(
    pieces: Sequence[ScoredPiece], tokens: Int32Array, slices: Sequence[DeviceLogprobs]
) -> dict[str, PromptLogprobs]:
    """By request, from the results of all slices of a step, on the host, and the `tokens` they are about."""
    if not pieces:
        return {}
    found = _joined(slices)
    return {
        piece.request_id: PromptLogprobs(
            piece.start, _ranked(found, tokens, slice(piece.first, piece.first + piece.count), piece.num_top)
        )
        for piece in pieces
    }


def _joined(slices: Sequence[DeviceLogprobs]) -> DeviceLogprobs:
    if len(slices) == 1:
        return slices[0]
    names = ("values", "ranks", "top_ids", "top_values", "chosen_values")
    joined: dict[str, Any] = {name: np.concatenate([getattr(s, name) for s in slices]) for name in names}
    return DeviceLogprobs(**joined)


def _ranked(found: DeviceLogprobs, tokens: Int32Array, rows: slice, num_top: int) -> Logprobs:
    top = slice(None) if num_top < 0 else slice(num_top)
    return Logprobs(
        token_ids=tokens[rows].tolist(),
        values=found.values[rows].tolist(),
        ranks=found.ranks[rows].tolist(),
        top_ids=found.top_ids[rows, top].tolist(),
        top_values=found.top_values[rows, top].tolist(),
    )


def _chosen(found: DeviceLogprobs, tokens: Int32Array, rows: slice, chosen: tuple[int, ...]) -> Logprobs:
    return Logprobs(
        token_ids=tokens[rows].tolist(),
        values=found.values[rows].tolist(),
        ranks=found.ranks[rows].tolist(),
        top_ids=[list(chosen)] * len(tokens[rows]),
        top_values=found.chosen_values[rows, : len(chosen)].tolist(),
        is_ranked=False,
    )
