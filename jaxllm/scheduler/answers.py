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
    """What a step yields for a piece: if it samples, drafts that were accepted and one token more; log
    probabilities as asked."""

    new_ids: tuple[int, ...] = ()
    logprobs: Logprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None

    def first_logprobs(self, num: int) -> Logprobs | None:
        """Those of the first `num` new tokens; None if none were asked for, or of none."""
        if self.logprobs is None or num == len(self.new_ids):
            return self.logprobs
        return _part(self.logprobs, 0, num) if num else None


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
        _check_sampled(new_ids, piece, output)
        if asks_logprobs(params):
            logprobs = output.logprobs.get(request_id)
            if logprobs is None or len(logprobs.token_ids) != len(new_ids):
                accepted = f"log probabilities at positions: {len(new_ids)}"
                raise _wrong(output, f"logprobs={logprobs!r}", request, accepted)
    scored = None
    num_scored = num_prompt_scored(piece)
    if num_scored > 0:
        scored = output.prompt_logprobs.get(request_id)
        if scored is None or (scored.start, len(scored.columns.token_ids)) != (piece.start + 1, num_scored):
            accepted = f"log probabilities of the {num_scored} prompt tokens from position {piece.start + 1} on"
            raise _wrong(output, f"prompt_logprobs={scored!r}", request, accepted)
    return Answer(new_ids, logprobs, scored)


def _check_sampled(new_ids: tuple[int, ...], piece: Piece, output: StepOutput) -> None:
    num_drafts = len(piece.draft_ids)
    if not num_drafts:
        if len(new_ids) != 1:
            raise _wrong(output, f"{new_ids!r}", piece.request, "one token")
        return
    num_accepted = len(new_ids) - 1
    if not 0 <= num_accepted <= num_drafts or new_ids[:num_accepted] != piece.draft_ids[:num_accepted]:
        accepted = f"a beginning of the drafts {piece.draft_ids!r} and one token"
        raise _wrong(output, f"{new_ids!r}", piece.request, accepted)
    said = output.num_accepted.get(piece.request.request_id, num_accepted)
    if said != num_accepted:
        raise _wrong(output, f"num_accepted={said}", piece.request, f"{num_accepted}, as many drafts as it gave")


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
        return PromptLogprobs(start, _part(scored.columns, start - scored.start, None))

    def forget(self, request: Request) -> None:
        self._next.pop(request, None)


def _part(columns: Logprobs, first: int, end: int | None) -> Logprobs:
    return replace(
        columns,
        token_ids=columns.token_ids[first:end],
        values=columns.values[first:end],
        ranks=columns.ranks[first:end],
        top_ids=columns.top_ids[first:end],
        top_values=columns.top_values[first:end],
    )


def _wrong(output: StepOutput, answer: str, request: Request, accepted: str) -> EngineDead:
    return EngineDead(f"step {output.step_id} answered {answer} for request {request.request_id}; accepted: {accepted}")
