"""POST /tokenize and POST /detokenize: what the model sees of a text or a chat, and back."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from jaxllm.errors import RequestError
from jaxllm.server.openai.body import json_response, read_request
from jaxllm.server.openai.messages import render_chat
from jaxllm.server.schema import ChatRequest, GenerationRequest
from jaxllm.server.state import ServerState, state_of

if TYPE_CHECKING:
    from jaxllm.tokenizer.base import Tokenizer


class TokenizeRequest(ChatRequest, kw_only=True):
    """A prompt, or a chat with everything that shapes its prompt in /v1/chat/completions."""

    prompt: str | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(GenerationRequest, kw_only=True):
    tokens: list[int] | None = None


class TokenizeReply(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None  # the vocabulary's own spelling of each


class DetokenizeReply(msgspec.Struct):
    prompt: str


async def tokenize(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(state, request, TokenizeRequest)
    state.resolve_model(body.model)
    text, adds_special = await _text_of(state, body)
    tokenizer = state.engine.tokenizer
    ids = await asyncio.to_thread(tokenizer.encode, text, adds_special)
    strings = [tokenizer.token(token_id) or "" for token_id in ids] if body.return_token_strs else None
    return json_response(TokenizeReply(len(ids), state.engine.max_model_len, ids, strings))


async def detokenize(request: Request) -> Response:
    state = state_of(request)
    body = await read_request(state, request, DetokenizeRequest)
    state.resolve_model(body.model)
    if body.tokens is None:
        raise RequestError("tokens is missing; accepted: a list of token ids", param="tokens")
    return json_response(DetokenizeReply(await asyncio.to_thread(_decoded, state.engine.tokenizer, body.tokens)))


async def _text_of(state: ServerState, body: TokenizeRequest) -> tuple[str, bool]:
    """The text, and whether the tokenizer adds its special tokens: a chat template writes them itself."""
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("send either prompt or messages", param="prompt")
    if body.prompt is not None:
        return body.prompt, body.add_special_tokens is not False
    if body.tools:
        raise RequestError("tools are not served yet; accepted: [] or null", param="tools")
    return await render_chat(state, body), bool(body.add_special_tokens)


def _decoded(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    for position, token_id in enumerate(ids):
        if not 0 <= token_id < tokenizer.vocab_size:
            path = f"tokens[{position}]"
            raise RequestError(f"{path}={token_id}; accepted: 0 to {tokenizer.vocab_size - 1}", param=path)
    return tokenizer.decode(ids, skip_special_tokens=False)
