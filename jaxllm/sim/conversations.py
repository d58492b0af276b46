"""Lengths of conversations from a file such as ShareGPT's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from jaxllm.errors import ConfigError, shown
from jaxllm.sim.lengths import MAX_TOKENS

TOKENS_PER_WORD = 1.3  # a guess for English text; a message may say its `tokens` itself

_ASKING = frozenset({"human", "user"})
_ANSWERING = frozenset({"gpt", "assistant", "chatgpt", "bing", "bard"})
_OTHER = frozenset({"system", "tool"})

Conversation = tuple[tuple[int, int], ...]  # tokens of each question and of its answer


def read_conversations(
    path: str | Path, *, max_prompt: int = MAX_TOKENS, max_output: int = MAX_TOKENS
) -> tuple[Conversation, ...]:
    """Conversations with at least one question that was answered, in the file's order.

    The file is a JSON list, or has an object a line; each holds `conversations` of messages with `from`
    and `value`, or `messages` with `role` and `content`. A message counts its `tokens`, or 1.3 for each
    word. A question without answer, an empty one, and a pair that is longer than asked for are left out.

    Raises:
        ConfigError: the file cannot be read or has another form, or nothing in it fits.
    """
    path = Path(path).expanduser()
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"conversations {str(path)!r} cannot be read: {error}") from None
    found: list[Conversation] = []
    for start, entry in _entries(text, path):
        try:
            pairs = tuple(
                pair for pair in _pairs(_messages(entry)) if 0 < pair[0] <= max_prompt and 0 < pair[1] <= max_output
            )
        except _Wrong as wrong:
            raise ConfigError(f"{_at(text, start, path)}: {wrong}") from None
        if pairs:
            found.append(pairs)
    if not found:
        raise ConfigError(f"conversations {str(path)!r}: no question and answer of the wished lengths")
    return tuple(found)


class _Wrong(Exception):
    """What an entry holds that it may not."""


def _at(text: str, place: int, path: Path) -> str:
    line = text.count("\n", 0, place) + 1
    return f"conversations {str(path)!r}, line {line}"


def _entries(text: str, path: Path) -> Iterator[tuple[int, Any]]:
    """Each entry with its place in the text, of a list or one after the other."""
    decoder, between = json.JSONDecoder(), " \t\r\n"
    place = _skip(text, 0, between)
    if text[place : place + 1] == "[":
        if not text.rstrip().endswith("]"):
            raise ConfigError(f"{_at(text, len(text), path)}: the file ends in the list; accepted: a whole one")
        place, between = place + 1, between + ",]"
    while (place := _skip(text, place, between)) < len(text):
        start = place
        try:
            entry, place = decoder.raw_decode(text, start)
        except (ValueError, RecursionError) as error:
            at = error.pos if isinstance(error, json.JSONDecodeError) else start
            raise ConfigError(f"{_at(text, at, path)}: not JSON: {error}") from None
        yield start, entry


def _skip(text: str, place: int, characters: str) -> int:
    while place < len(text) and text[place] in characters:
        place += 1
    return place


def _messages(entry: Any) -> list[Any]:
    if isinstance(entry, dict):
        for name in ("conversations", "messages"):
            messages: Any = cast("dict[str, Any]", entry).get(name)
            if isinstance(messages, list):
                return cast("list[Any]", messages)
    raise _Wrong(f"{shown(entry)}; accepted: an object with a list of conversations or messages")


def _pairs(messages: list[Any]) -> Iterator[tuple[int, int]]:
    asked = 0  # tokens of the questions since the last answer
    for message in messages:
        if not isinstance(message, dict):
            raise _Wrong(f"a message is {shown(message)}; accepted: an object")
        fields = cast("dict[str, Any]", message)
        role = fields.get("from", fields.get("role"))
        if not isinstance(role, str):
            raise _Wrong(f"from={shown(role)}; accepted: {', '.join(sorted(_ASKING | _ANSWERING | _OTHER))}")
        if role in _ASKING:
            asked += _num_tokens(fields)
        elif role in _ANSWERING:
            yield asked, _num_tokens(fields)
            asked = 0
        elif role not in _OTHER:
            raise _Wrong(f"from={shown(role)}; accepted: {', '.join(sorted(_ASKING | _ANSWERING | _OTHER))}")


def _num_tokens(message: dict[str, Any]) -> int:
    tokens = message.get("tokens")
    if tokens is not None:
        if isinstance(tokens, bool) or not isinstance(tokens, int) or not 0 <= tokens <= MAX_TOKENS:
            raise _Wrong(f"tokens={shown(tokens)}; accepted: a whole number, 0 to {MAX_TOKENS}")
        return tokens
    text = message.get("value", message.get("content"))
    if not isinstance(text, str):
        raise _Wrong(f"value={shown(text)}; accepted: text, or a number of tokens")
    return min(round(len(text.split()) * TOKENS_PER_WORD), MAX_TOKENS)
