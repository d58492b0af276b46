"""Prompts of /v1/completions: text, texts, token ids or lists of token ids; and cutting them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxllm.engine.inputs import Prompt, TextPrompt, TokensPrompt
from jaxllm.errors import RequestError, shown
from jaxllm.server import limits
from jaxllm.server.openai.params import Asked
from jaxllm.server.state import ServingEngine
from jaxllm.types.sampling import SamplingParams

_ACCEPTED = "a string, a list of strings, a list of token ids or a list of such lists"


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


def cut_from_the_right(
    engine: ServingEngine, prompts: Sequence[Prompt], asked: Asked
) -> tuple[Sequence[Prompt], Asked]:
    """Prompts cut to their first `truncate_prompt_tokens`, which then asks for nothing more; may take long.

    The engine itself keeps the last ones. -1 keeps as many as leave room for the answer.

    Raises:
        RequestError: nothing would be left of a prompt.
    """
    params = asked.params
    if not isinstance(params, SamplingParams) or params.truncate_prompt_tokens is None:
        return prompts, asked
    count = params.truncate_prompt_tokens
    if count == -1:
        count = engine.max_model_len - max(1, params.max_tokens or 1)
    if count < 1:
        asked_for = f"truncate_prompt_tokens={params.truncate_prompt_tokens}"
        message = f"{asked_for} leaves no prompt; accepted: at least 1, or -1 with a max_tokens that leaves room"
        raise RequestError(message, param="truncate_prompt_tokens")
    cut = [_first_tokens(engine, prompt, count) for prompt in prompts]
    return cut, replace(asked, params=replace(params, truncate_prompt_tokens=None))


def _first_tokens(engine: ServingEngine, prompt: Prompt, count: int) -> Prompt:
    """A prompt without text or tokens stays as it is, for the engine to refuse as what it is."""
    if isinstance(prompt, TextPrompt) and not prompt.text:
        return prompt
    ids = _ids(engine, prompt)
    return TokensPrompt(ids[:count]) if ids else prompt


def _ids(engine: ServingEngine, prompt: Prompt) -> Sequence[int]:
    if isinstance(prompt, TokensPrompt):
        return prompt.token_ids
    text, adds_special = (prompt, True) if isinstance(prompt, str) else (prompt.text, prompt.add_special_tokens)
    return engine.tokenizer.encode(text, adds_special)
