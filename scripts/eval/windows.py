"""How surprised a model is by a text, in windows that each start anew."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jaxllm import RequestOutput, SamplingParams

    Generate = Callable[[list[list[int]], SamplingParams], Sequence[RequestOutput]]


@dataclass(frozen=True, slots=True)
class Score:
    nll: float  # nats a scored token, the mean
    num_tokens: int  # scored; the first of each window is not, for want of a context

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


def cut(token_ids: Sequence[int], size: int, most: int | None = None) -> list[Sequence[int]]:
    """Whole windows of `size` tokens, at most `most`; a shorter rest is left out, unless it is all there is.

    Raises:
        ValueError: fewer than two tokens, so that there is nothing to score.
    """
    if len(token_ids) < 2 or size < 2:
        raise ValueError(f"{len(token_ids)} tokens in windows of {size}: scoring takes at least two tokens")
    if len(token_ids) < size:
        return [token_ids]
    count = len(token_ids) // size if most is None else min(most, len(token_ids) // size)
    return [token_ids[i * size : (i + 1) * size] for i in range(count)]


def score(generate: Generate, windows: Sequence[Sequence[int]]) -> list[Score]:
    """Score each window by itself, through the engine: its prompt's log probabilities, and nothing generated.

    Args:
        generate: `LLM.generate`, or what takes token ids and parameters as it does.
    """
    from jaxllm import SamplingParams

    params = SamplingParams(max_tokens=0, prompt_logprobs=0, temperature=0, detokenize=False)
    outputs = generate([list(window) for window in windows], params)
    return [_of_window(output, window) for output, window in zip(outputs, windows, strict=True)]


def _of_window(output: RequestOutput, window: Sequence[int]) -> Score:
    positions = output.prompt_logprobs or ()
    entries = [position[0] for position in positions[1:] if position is not None]
    if [entry.token_id for entry in entries] != list(window[1:]):
        raise ValueError(f"the engine scored {len(entries)} tokens that are not the window's {len(window) - 1}")
    return Score(-math.fsum(entry.logprob for entry in entries) / len(entries), len(entries))


def together(scores: Iterable[Score]) -> Score:
    listed = list(scores)
    count = sum(each.num_tokens for each in listed)
    return Score(math.fsum(each.nll * each.num_tokens for each in listed) / count, count)


def joined_rows(path: Path) -> str:
    """The text of a JSONL file of questions and answers, as the golden figures were made from."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return "\n\n".join(f"Question: {row['question']}\nAnswer: {row['answer']}" for row in rows)
