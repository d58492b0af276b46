"""What the executor answered for one piece of a step, held against what was asked."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jaxllm.errors import EngineDead
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import Logprobs, PromptLogprobs, StepOutput

if TYPE_CHECKING:
    from jaxllm.scheduler.step_plan import Piece


@dataclass(frozen=True, slots=True)
class Answer:
    """What a step yields for a piece: one token if it samples, and log probabilities as asked."""

    new_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None


def read_answer(piece: Piece, output: StepOutput) -> Answer:
    """The part of `output` that belongs to `piece`.

    Raises:
        EngineDead: something is missing, or is not of the size that was asked for.
    """
    request = piece.request
    request_id, params = request.request_id, request.params
    new_ids: tuple[int, ...] = ()
    logprobs = None
    if piece.samples:
        new_ids = output.tokens.get(request_id, ())
        if len(new_ids) != 1:
            raise _wrong(output, f"{new_ids!r}", request, "one token")
        if asks_logprobs(params):
            logprobs = output.logprobs.get(request_id)
            if logprobs is None or len(logprobs.token_ids) != 1:
                raise _wrong(output, f"logprobs={logprobs!r}", request, "log probabilities at one position")
    scored = None
    num_scored = num_prompt_scored(piece)
    if num_scored > 0:
        scored = output.prompt_logprobs.get(request_id)
        if scored is None or (scored.start, len(scored.columns.token_ids)) != (piece.start + 1, num_scored):
            accepted = f"log probabilities of the {num_scored} prompt tokens from position {piece.start + 1} on"
            raise _wrong(output, f"prompt_logprobs={scored!r}", request, accepted)
    return Answer(new_ids, logprobs, scored)


def asks_logprobs(params: SamplingParams) -> bool:
    return params.logprobs is not None or params.logprob_token_ids is not None


def num_prompt_scored(piece: Piece) -> int:
    """Prompt tokens that the rows of a piece score: each row the token after its own."""
    if piece.request.params.prompt_logprobs is None:
        return 0
    return max(0, min(piece.start + piece.num_tokens, piece.request.num_prompt_tokens - 1) - piece.start)


class PromptScores:
    """Passes each position of a prompt on once, though a preempted one is computed again. Mutable."""

    def __init__(self) -> None:
        self._next: dict[Request, int] = {}

    def __len__(self) -> int:
        return len(self._next)

    def unseen(self, request: Request, scored: PromptLogprobs | None) -> PromptLogprobs | None:
        """The part of `scored` that was not passed on before; None if there is none.

        Raises:
            EngineDead: positions were left out, so that no reader could put the parts together.
        """
        if scored is None:
            return None
        start = self._next.get(request, 1)
        end = scored.start + len(scored.columns.token_ids)
        if scored.start > start:
            raise EngineDead(f"request {request.request_id} is scored from {scored.start} on, not from {start}")
        if end <= start:
            return None
        self._next[request] = end
        if scored.start == start:
            return scored
        return PromptLogprobs(start, _from(scored.columns, start - scored.start))

    def forget(self, request: Request) -> None:
        self._next.pop(request, None)


def _from(columns: Logprobs, first: int) -> Logprobs:
    return replace(
        columns,
        token_ids=columns.token_ids[first:],
        values=columns.values[first:],
        ranks=columns.ranks[first:],
        top_ids=columns.top_ids[first:],
        top_values=columns.top_values[first:],
    )


def _wrong(output: StepOutput, answer: str, request: Request, accepted: str) -> EngineDead:
    return EngineDead(f"step {output.step_id} answered {answer} for request {request.request_id}; accepted: {accepted}")
