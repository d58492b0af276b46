"""Prompts of /v1/completions: text, texts, token ids or lists of token ids; and giving them back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.engine.inputs import Prompt, TextPrompt, TokensPrompt
from jaxllm.errors import RequestError, shown
from jaxllm.server import limits
from jaxllm.server.generation import Outputs
from jaxllm.server.state import ServingEngine
from jaxllm.types.outputs import CompletionOutput, RequestOutput
from jaxllm.types.sampling import SamplingParams

_ACCEPTED = "a string, a list of strings, a list of token ids or a list of such lists"


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    text: str
    token_ids: tuple[int, ...]  # empty where the engine will tokenise


def parse_prompts(prompt: str | list[Any] | None, add_special_tokens: bool) -> list[Prompt]:
    """One engine prompt per choice.

    Raises:
        RequestError: nothing to complete, mixed kinds, or too many prompts.
    """
    if prompt is None or prompt == []:
        fault = "missing" if prompt is None else "empty"
        raise RequestError(f"prompt is {fault}; accepted: {_ACCEPTED}", param="prompt")
    if isinstance(prompt, str):
        return [TextPrompt(prompt, add_special_tokens=add_special_tokens)]
    if _are_ids(prompt):
        return [TokensPrompt(tuple(prompt))]
    limits.check_count("prompt", prompt, limits.MAX_PROMPTS)
    return [_one(item, f"prompt[{index}]", add_special_tokens) for index, item in enumerate(prompt)]


def _one(item: Any, path: str, add_special_tokens: bool) -> Prompt:
    if isinstance(item, str):
        return TextPrompt(item, add_special_tokens=add_special_tokens)
    if isinstance(item, list) and _are_ids(item):
        if not item:
            raise RequestError(f"{path} is empty; accepted: at least one token id", param=path)
        return TokensPrompt(tuple(item))
    raise RequestError(f"{path}={shown(item)}; prompt accepts {_ACCEPTED}", param=path)


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def echoed_prompts(
    engine: ServingEngine, prompts: Sequence[Prompt], params: SamplingParams, *, generates: bool
) -> list[EchoedPrompt]:
    """What echo=true gives back. Without generation the prompts are also checked here, as no engine will.

    Raises:
        RequestError: a prompt is empty, too long, or holds an id outside the vocabulary.
    """
    return [_echoed(engine, prompt, params, generates) for prompt in prompts]


def _echoed(engine: ServingEngine, prompt: Prompt, params: SamplingParams, generates: bool) -> EchoedPrompt:
    tokenizer = engine.tokenizer
    if isinstance(prompt, TokensPrompt):
        ids = tuple(prompt.token_ids)
        _check_vocabulary(ids, tokenizer.vocab_size)
        return _measured(engine, tokenizer.decode(list(ids), params.skip_special_tokens), ids)
    text, adds_special = (prompt, True) if isinstance(prompt, str) else (prompt.text, prompt.add_special_tokens)
    if generates:
        return EchoedPrompt(text, ())
    return _measured(engine, text, tuple(tokenizer.encode(text, adds_special)))


def _measured(engine: ServingEngine, text: str, ids: tuple[int, ...]) -> EchoedPrompt:
    if not 1 <= len(ids) <= engine.max_model_len:
        message = f"prompt has {len(ids)} tokens; accepted: 1 to {engine.max_model_len} (max_model_len)"
        code = "context_length_exceeded" if ids else None
        raise RequestError(message, param="prompt", code=code)
    return EchoedPrompt(text, ids)


def _check_vocabulary(ids: tuple[int, ...], vocab_size: int) -> None:
    for token_id in ids:
        if not 0 <= token_id < vocab_size:
            raise RequestError(f"prompt holds the token id {token_id}; accepted: 0 to {vocab_size - 1}", param="prompt")


async def scored_only(prompts: Sequence[EchoedPrompt]) -> Outputs:
    """Outputs for max_tokens=0: the prompt, and nothing generated."""
    for index, prompt in enumerate(prompts):
        nothing = CompletionOutput(0, "", (), finish_reason="length")
        yield index, RequestOutput(f"echo-{index}", prompt.text, prompt.token_ids, (nothing,), finished=True)
