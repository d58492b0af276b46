"""What answers look like: OpenAI's objects, full rather than minimal, plus vLLM's `stop_reason`.

`service_tier` and `system_fingerprint` are never null (validators of OpenAI's schema refuse that);
`refusal` and `annotations` are always present (the same validators want them).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from jaxllm.types.outputs import RequestOutput
from jaxllm.types.outputs import Usage as TokenCounts

FinishReason = str | None


class PromptDetails(msgspec.Struct):
    cached_tokens: int
    audio_tokens: int = 0


class CompletionDetails(msgspec.Struct):
    reasoning_tokens: int = 0
    audio_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Message(msgspec.Struct):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: str | None = None
    annotations: tuple[str, ...] = ()


class TopEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]  # of the token, also where it is only a part of a character


class TokenEntry(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: tuple[TopEntry, ...]


class ChatLogprobs(msgspec.Struct):
    content: tuple[TokenEntry, ...]
    refusal: None = None


class TextLogprobs(msgspec.Struct):
    """Columns, an entry a token; null where the model gives a token no probability: the first of a prompt."""

    text_offset: list[int]  # characters before the token in the choice's text
    token_logprobs: list[float | None] = msgspec.field(default_factory=list[float | None])
    tokens: list[str] = msgspec.field(default_factory=list[str])
    top_logprobs: list[dict[str, float] | None] = msgspec.field(default_factory=list[dict[str, float] | None])


class PromptEntry(msgspec.Struct):
    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = tuple[dict[int, PromptEntry] | None, ...]


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: Message
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason
    stop_reason: int | str | None = None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class Delta(msgspec.Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET


class TextChoice(msgspec.Struct, kw_only=True):
    """A choice of a completion, whole or a chunk of it."""

    index: int
    text: str
    logprobs: TextLogprobs | None = None
    finish_reason: FinishReason = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class _Reply(msgspec.Struct, kw_only=True):
    id: str
    created: int
    model: str
    system_fingerprint: str
    service_tier: str = "default"


class ChatCompletion(_Reply, kw_only=True):
    object: Literal["chat.completion"] = "chat.completion"
    choices: tuple[ChatChoice, ...]
    usage: Usage
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class ChatChunk(_Reply, kw_only=True):
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: tuple[ChunkChoice, ...]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_text: str | UnsetType = UNSET


class TextCompletion(_Reply, kw_only=True):
    """A completion, whole or a chunk of it: OpenAI gives both the same object name."""

    object: Literal["text_completion"] = "text_completion"
    choices: tuple[TextChoice, ...]
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "jaxllm"
    root: str
    parent: str | None = None
    max_model_len: int
    permission: tuple[str, ...] = ()


class ModelList(msgspec.Struct, kw_only=True):
    object: Literal["list"] = "list"
    data: tuple[ModelCard, ...]


def usage_of(outputs: Iterable[RequestOutput]) -> Usage:
    """Tokens of all prompts of one HTTP request, from each prompt's latest output."""
    counts: list[TokenCounts] = [output.usage for output in outputs]
    num_prompt = sum(count.prompt_tokens for count in counts)
    num_completion = sum(count.completion_tokens for count in counts)
    details = PromptDetails(sum(count.cached_tokens for count in counts))
    return Usage(num_prompt, num_completion, num_prompt + num_completion, details, CompletionDetails())
