"""Log probabilities as OpenAI's two routes show them, and prompts' as vLLM does.

JSON has no infinity: what is impossible (-inf) is shown as -9999.0, as in vLLM.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from jaxllm.server.openai.replies import ChatLogprobs, PromptEntry, TextLogprobs, TokenEntry, TopEntry
from jaxllm.tokenizer.base import ByteFallbackTokenizer, ByteTokenizer, Tokenizer
from jaxllm.tokenizer.detokenize import IncrementalDetokenizer
from jaxllm.types.outputs import TokenLogprob

FLOOR = -9999.0

Position = Sequence[TokenLogprob]  # the token itself, then the others that were asked for, without itself


class LogprobView:
    """What of the engine's log probabilities a request wants to see, and how tokens are spelled. Immutable.

    `num_top` are the most likely tokens of a position (-1: all there are); `token_ids` these tokens
    instead, in this order; `as_ids` writes "token_id:7" in place of a token's text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        num_top: int = 0,
        token_ids: tuple[int, ...] | None = None,
        as_ids: bool = False,
    ) -> None:
        self.tokenizer = tokenizer
        self.num_top = num_top
        self.token_ids = token_ids
        self.as_ids = as_ids
        self.bytes_of = byte_reader(tokenizer)

    def others(self, position: Position) -> list[TokenLogprob]:
        """The entries beside the chosen token: most likely first, the chosen one among them where it belongs."""
        if self.token_ids is not None:
            by_id = {entry.token_id: entry for entry in position}
            return [by_id[token_id] for token_id in self.token_ids if token_id in by_id]
        return most_likely(position, self.num_top)

    def spelled(self, entry: TokenLogprob) -> str:
        return f"token_id:{entry.token_id}" if self.as_ids else text_of(self.tokenizer, entry)


def most_likely(position: Position, count: int) -> list[TokenLogprob]:
    """The `count` most likely entries (-1: all), equal ones by id, as the device orders them."""
    ranked = sorted(position, key=lambda entry: (-entry.logprob, entry.token_id))
    return ranked if count < 0 else ranked[:count]


def finite(value: float) -> float:
    return value if FLOOR < value < math.inf else FLOOR


def text_of(tokenizer: Tokenizer, entry: TokenLogprob) -> str:
    if entry.decoded_token is not None:
        return entry.decoded_token
    return tokenizer.decode([entry.token_id], skip_special_tokens=False)


def byte_reader(tokenizer: Tokenizer) -> Callable[[TokenLogprob], bytes]:
    """What a token adds to the text, exact also for a part of a character where the tokenizer knows it."""
    if isinstance(tokenizer, ByteTokenizer) and tokenizer.is_byte_level:
        bytes_of_id = tokenizer.token_bytes
        return lambda entry: bytes_of_id(entry.token_id)
    is_byte = tokenizer.is_byte_token if isinstance(tokenizer, ByteFallbackTokenizer) else _never

    def read(entry: TokenLogprob) -> bytes:
        if is_byte(entry.token_id):
            return bytes.fromhex((tokenizer.token(entry.token_id) or "<0x>")[3:-1])  # spelled <0xE2>
        return text_of(tokenizer, entry).encode(errors="replace")

    return read


def _never(token_id: int) -> bool:
    del token_id
    return False


def chat_logprobs(view: LogprobView, positions: Iterable[Position]) -> ChatLogprobs:
    """One entry a token; the joined entries of a stream are those of the whole answer."""
    return ChatLogprobs(tuple(_token_entry(view, position) for position in positions))


def _token_entry(view: LogprobView, position: Position) -> TokenEntry:
    top = tuple(TopEntry(*_shown(view, entry)) for entry in view.others(position))
    return TokenEntry(*_shown(view, position[0]), top)


def _shown(view: LogprobView, entry: TokenLogprob) -> tuple[str, float, list[int]]:
    return view.spelled(entry), finite(entry.logprob), list(view.bytes_of(entry))


class TextOffsets:
    """Where each token of a text begins in it, in characters, however the tokens are cut into pieces.

    A token within a character begins where the character does; a hidden one (a special token that is
    left out of the text) where the next one does. Mutable; owned by one choice of an answer.
    """

    def __init__(self, detokenizer: IncrementalDetokenizer, start: int = 0) -> None:
        self._detokenizer = detokenizer
        self._next = start

    def take(self, ids: Iterable[int]) -> list[int]:
        found: list[int] = []
        for token_id in ids:
            found.append(self._next)
            self._next += len(self._detokenizer.push((token_id,)))
        return found


def text_logprobs(
    view: LogprobView, ids: Sequence[int], positions: Sequence[Position | None], offsets: TextOffsets
) -> TextLogprobs:
    """The four columns of /v1/completions. A position without values (the first of a prompt) is null in them."""
    shown = TextLogprobs(text_offset=offsets.take(ids))
    for token_id, position in zip(ids, positions, strict=True):
        if position is None:
            shown.tokens.append(view.spelled(TokenLogprob(token_id, 0.0, None)))
            shown.token_logprobs.append(None)
            shown.top_logprobs.append(None)
        else:
            shown.tokens.append(view.spelled(position[0]))
            shown.token_logprobs.append(finite(position[0].logprob))
            shown.top_logprobs.append(_by_text(view, position))
    return shown


def _by_text(view: LogprobView, position: Position) -> dict[str, float]:
    """Most likely first, then the chosen token where it is not among them. Of equal texts the likeliest stays."""
    by_text: dict[str, float] = {}
    for entry in (*view.others(position), position[0]):
        by_text.setdefault(view.spelled(entry), finite(entry.logprob))
    return by_text


def prompt_logprobs(
    tokenizer: Tokenizer, positions: Sequence[Position | None], num_top: int
) -> tuple[dict[int, PromptEntry] | None, ...]:
    """vLLM's `prompt_logprobs`: by position, by token id; the prompt's own token first."""
    return tuple(None if position is None else _by_id(tokenizer, position, num_top) for position in positions)


def _by_id(tokenizer: Tokenizer, position: Position, num_top: int) -> dict[int, PromptEntry]:
    entries = (position[0], *most_likely(position, num_top))
    return {e.token_id: PromptEntry(finite(e.logprob), e.rank, text_of(tokenizer, e)) for e in entries}
