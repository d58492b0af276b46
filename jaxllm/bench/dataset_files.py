"""Prompts from files: conversations as ShareGPT's, and JSON lines."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from jaxllm.errors import ConfigError, shown
from jaxllm.tokenizer.base import Tokenizer

# What vLLM takes of ShareGPT: pairs that are neither trivial nor too long for a small context.
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """One prompt, and how many tokens are asked for after it."""

    prompt: str
    num_prompt_tokens: int | None  # by the model's tokenizer, special tokens included; None: not known here
    max_tokens: int


@dataclass(frozen=True, slots=True)
class FileWish:
    """What to take from a file."""

    path: str
    num_prompts: int
    num_more: int  # behind them
    seed: int | None  # of the shuffle; None: the file's order
    output_len: int | None  # tokens of each answer; None: what the file says
    may_repeat: bool  # start over where the file has too few


def sharegpt_requests(wish: FileWish, tokenizer: Tokenizer) -> list[BenchRequest]:
    """The first question of each conversation, with the length of its reply.

    Pairs under 4 tokens, and over 1,024 of prompt or 2,048 in all, are left out, as vLLM does.

    Raises:
        ConfigError: the file is missing or of another form, or nothing in it fits.
    """
    path = Path(wish.path).expanduser()
    try:
        entries: Any = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{path}: a JSON list of conversations is needed, not {type(entries).__name__}")
    pairs = [_pair(entry, f"{path}: entry {number}") for number, entry in enumerate(cast("list[Any]", entries), 1)]
    kept = _ordered([pair for pair in pairs if pair is not None], wish.seed)

    def request(pair: tuple[str, str]) -> BenchRequest | None:
        num_prompt = len(tokenizer.encode(pair[0]))
        num_reply = wish.output_len or len(tokenizer.encode(pair[1], add_special_tokens=False))
        fits = min(num_prompt, num_reply) >= (_MIN_TOKENS if wish.output_len is None else 1)
        fits = fits and num_prompt <= _MAX_PROMPT_TOKENS and num_prompt + num_reply <= _MAX_TOTAL_TOKENS
        return BenchRequest(pair[0], num_prompt, num_reply) if fits else None

    return _taken(path, wish, kept, request)


def _pair(entry: Any, where: str) -> tuple[str, str] | None:
    """The first two turns; None where there are fewer."""
    turns: Any = cast("dict[str, Any]", entry).get("conversations") if isinstance(entry, dict) else None
    if not isinstance(turns, list):
        raise ConfigError(f"{where} is {shown(entry)}; accepted: an object with a list of conversations")
    texts: list[str] = []
    for turn in cast("list[Any]", turns)[:2]:
        text: Any = cast("dict[str, Any]", turn).get("value") if isinstance(turn, dict) else None
        if not isinstance(text, str) or not _is_unicode(text):
            raise ConfigError(f"{where}: a turn is {shown(turn)}; accepted: an object with a text, value")
        texts.append(text)
    return (texts[0], texts[1]) if len(texts) == 2 else None


def _is_unicode(text: str) -> bool:
    """JSON can spell halves of characters, which no tokenizer takes."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def custom_requests(wish: FileWish, tokenizer: Tokenizer | None) -> list[BenchRequest]:
    """Prompts of JSON lines: `{"prompt": text}`, and `output_tokens` beside it where no length is given.

    Raises:
        ConfigError: the file is missing, or a line is wrong; the message says which one.
    """
    path = Path(wish.path).expanduser()
    lines = [_line(line, f"{path}:{number}", wish) for number, line in _numbered(_read(path))]

    def request(line: tuple[str, int]) -> BenchRequest:
        num_prompt = None if tokenizer is None else len(tokenizer.encode(line[0]))
        return BenchRequest(line[0], num_prompt, line[1])

    return _taken(path, wish, _ordered(lines, wish.seed), request)


def _numbered(text: str) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())


def _line(line: str, where: str, wish: FileWish) -> tuple[str, int]:
    try:
        entry: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: not JSON: {error}") from None
    prompt: Any = cast("dict[str, Any]", entry).get("prompt") if isinstance(entry, dict) else None
    if not isinstance(prompt, str) or not prompt or not _is_unicode(prompt):
        raise ConfigError(f"{where}: {shown(entry)}; accepted: a JSON object with a text, prompt")
    if wish.output_len is not None:
        return prompt, wish.output_len
    length: Any = entry.get("output_tokens")
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise ConfigError(f"{where}: output_tokens={shown(length)}; accepted with custom_output_len=-1: at least 1")
    return prompt, length


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"dataset_path={str(path)!r} cannot be read: {reason}; accepted: a UTF-8 file") from None


def _ordered(items: list[Any], seed: int | None) -> list[Any]:
    if seed is not None:
        random.Random(seed).shuffle(items)
    return items


def _taken(
    path: Path, wish: FileWish, items: Sequence[Any], request: Callable[[Any], BenchRequest | None]
) -> list[BenchRequest]:
    """As many as wished, from the front; only those looked at are tokenised."""
    wanted = wish.num_prompts + wish.num_more
    found: list[BenchRequest] = []
    for item in items:
        if len(found) == wanted:
            return found
        made = request(item)
        if made is not None:
            found.append(made)
    if not found:
        raise ConfigError(f"{path} holds no prompt that fits; accepted: at least one")
    if not wish.may_repeat:
        return found
    return [found[i % len(found)] for i in range(wanted)]
