"""Beam search without input or output: what to ask of the model, and what to make of its answers.

At each token every beam is continued by its 2 x width most likely next tokens. A continuation that
ends (end of sequence) is set aside as finished; of the others the `width` most likely go on. At the
end, beams that still run count as finished. The best `width` by score win, where the score is the
sum of log probabilities / number of output tokens ** length_penalty, the end-of-sequence token
counted. This is vLLM's search, except that vLLM counts the prompt's tokens too and leaves the last one out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxllm.types.sampling import BeamSearchParams

Candidate = tuple[int, float]  # a next token and its log probability


@dataclass(frozen=True, slots=True)
class Beam:
    """One sequence of output tokens."""

    token_ids: tuple[int, ...] = ()
    cumulative_logprob: float = 0.0
    ended_by: int | None = None  # the end-of-sequence id that it ends in

    def score(self, length_penalty: float) -> float:
        return self.cumulative_logprob / max(1, len(self.token_ids)) ** length_penalty


class BeamSearch:
    """The beams after one prompt. Mutable; owned by whoever asks the model.

    while beams := search.wanted():
        search.advance([most_likely_next(beam) for beam in beams])
    search.best()
    """

    def __init__(self, params: BeamSearchParams, *, max_tokens: int, eos_ids: frozenset[int] = frozenset()) -> None:
        """`max_tokens` is that of `params`, cut to what fits."""
        self._width = params.beam_width
        self._length_penalty = params.length_penalty
        self._eos_ids = frozenset[int]() if params.ignore_eos else eos_ids
        self._max_tokens = max_tokens
        self._live = [Beam()]
        self._finished: list[Beam] = []
        self._num_tokens = 0

    def wanted(self) -> tuple[Beam, ...]:
        """The beams whose next tokens `advance` needs; none once the search is over."""
        return () if self._num_tokens == self._max_tokens else tuple(self._live)

    def advance(self, candidates: Sequence[Sequence[Candidate]]) -> None:
        """Continue each wanted beam: 2 x width candidates each (fewer in a smaller vocabulary), most likely first."""
        going: list[Beam] = []
        for beam, options in zip(self._live, candidates, strict=True):
            for token_id, logprob in options:
                has_ended = token_id in self._eos_ids
                ids, total = (*beam.token_ids, token_id), beam.cumulative_logprob + logprob
                (self._finished if has_ended else going).append(Beam(ids, total, token_id if has_ended else None))
        going.sort(key=lambda beam: -beam.cumulative_logprob)  # stable: of equals the one found first
        self._live = going[: self._width]
        self._finished = self._ranked(self._finished)
        self._num_tokens += 1
        if self._num_tokens < self._max_tokens and self._is_decided():
            self._live = []

    def best(self) -> list[Beam]:
        """The `width` best sequences, best first; at any time."""
        return self._ranked([*self._finished, *self._live])

    def _ranked(self, beams: Sequence[Beam]) -> list[Beam]:
        return sorted(beams, key=lambda beam: -beam.score(self._length_penalty))[: self._width]

    def _is_decided(self) -> bool:
        """Whether no running beam can still come among the best: log probabilities only ever fall."""
        if not self._live or len(self._finished) < self._width:
            return False
        longest = self._max_tokens if self._length_penalty >= 0 else self._num_tokens + 1
        bound = self._live[0].cumulative_logprob / longest**self._length_penalty
        return self._finished[-1].score(self._length_penalty) >= bound
