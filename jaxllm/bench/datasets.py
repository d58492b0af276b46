"""Prompts to measure with. Pure functions of their settings: same seed, same bytes."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from jaxllm.bench.dataset_files import BenchRequest, FileWish, custom_requests, sharegpt_requests
from jaxllm.bench.texts import TextMaker
from jaxllm.config.fields import check_settings, setting
from jaxllm.errors import ConfigError
from jaxllm.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetArgs:
    """Which prompts, under the names of vLLM's flags. Lengths are in tokens.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    dataset_name: Literal["random", "sharegpt", "prefix_repetition", "custom"] = setting(
        "random", "where prompts come from"
    )
    dataset_path: str | None = setting(None, "file of sharegpt (JSON) or custom (JSON lines)")
    num_prompts: int = setting(1000, "requests", human=True)
    seed: int = setting(0, "of everything that is drawn")
    input_len: int | None = setting(None, "tokens of a prompt, over the dataset's own flag", human=True)
    output_len: int | None = setting(None, "tokens of an answer, over the dataset's own flag", human=True)
    random_input_len: int = setting(1024, "random: tokens of a prompt", human=True)
    random_output_len: int = setting(128, "random: tokens of an answer", human=True)
    random_range_ratio: float = setting(0.0, "random: lengths are drawn from [1 - RATIO, 1 + RATIO] times the length")
    random_prefix_len: int = setting(0, "random: tokens that all prompts begin with, in addition", human=True)
    prefix_repetition_prefix_len: int = setting(256, "prefix_repetition: tokens of a prefix", human=True)
    prefix_repetition_suffix_len: int = setting(256, "prefix_repetition: tokens after it", human=True)
    prefix_repetition_num_prefixes: int = setting(10, "prefix_repetition: prefixes that prompts share", human=True)
    prefix_repetition_output_len: int = setting(128, "prefix_repetition: tokens of an answer", human=True)
    sharegpt_output_len: int | None = setting(None, "sharegpt: tokens of an answer; default: the reply's", human=True)
    custom_output_len: int = setting(256, "custom: tokens of an answer; -1: output_tokens of the line")
    disable_shuffle: bool = setting(False, "take a file's prompts in their order")
    no_oversample: bool = setting(False, "take no prompt twice, even where a file has too few")

    def __post_init__(self) -> None:
        check_settings(self)
        for name in ("num_prompts", "random_output_len", "prefix_repetition_output_len", "random_input_len"):
            _at_least(self, name, 1)
        for name in ("prefix_repetition_prefix_len", "prefix_repetition_suffix_len", "prefix_repetition_num_prefixes"):
            _at_least(self, name, 1)
        for name in ("input_len", "output_len", "sharegpt_output_len"):
            _at_least(self, name, 1)
        for name in ("seed", "random_prefix_len"):
            _at_least(self, name, 0)
        if not 0 <= self.random_range_ratio < 1:
            raise ConfigError(f"random_range_ratio={self.random_range_ratio}; accepted: at least 0 and below 1")
        if self.custom_output_len != -1:
            _at_least(self, "custom_output_len", 1)
        self._check_path()

    def _check_path(self) -> None:
        needs_file = self.dataset_name in ("sharegpt", "custom")
        if needs_file and self.dataset_path is None:
            raise ConfigError(f"dataset_name={self.dataset_name} needs dataset_path, a file")
        if not needs_file and self.dataset_path is not None:
            raise ConfigError(
                f"dataset_path={self.dataset_path!r} means nothing to dataset_name={self.dataset_name}; "
                "accepted with a path: sharegpt, custom"
            )


def make_requests(args: DatasetArgs, tokenizer: Tokenizer | None, num_more: int = 0) -> list[BenchRequest]:
    """`num_prompts` requests, and `num_more` behind them that change nothing in those before.

    `custom` alone does without a tokenizer; its prompts then have no known length.

    Raises:
        ConfigError: there is no tokenizer, or a file is missing, wrong, or holds nothing that fits.
    """
    if args.dataset_name == "custom":
        return custom_requests(_file_wish(args, num_more), tokenizer)
    if tokenizer is None:
        raise ConfigError(f"dataset_name={args.dataset_name} needs a tokenizer; give --tokenizer FOLDER")
    if args.dataset_name == "sharegpt":
        return sharegpt_requests(_file_wish(args, num_more), tokenizer)
    make: Callable[..., list[BenchRequest]] = {"random": _random, "prefix_repetition": _prefix_repetition}[
        args.dataset_name
    ]
    return make(args, TextMaker(tokenizer, args.seed), args.num_prompts + num_more)


def _random(args: DatasetArgs, texts: TextMaker, count: int) -> list[BenchRequest]:
    lengths = random.Random(args.seed + 1)  # apart from the words: they do not depend on one another
    lead = texts.draw(args.random_prefix_len) if args.random_prefix_len else ""
    input_len, output_len = args.input_len or args.random_input_len, args.output_len or args.random_output_len
    requests: list[BenchRequest] = []
    for _ in range(count):
        num_input = _near(input_len, args.random_range_ratio, lengths)
        num_output = _near(output_len, args.random_range_ratio, lengths)
        prompt = texts.draw(args.random_prefix_len + num_input, lead)
        requests.append(BenchRequest(prompt, texts.num_tokens(prompt), num_output))
    return requests


def _near(length: int, ratio: float, draw: random.Random) -> int:
    """A whole number in [1 - ratio, 1 + ratio] times `length`, each as likely; at least 1."""
    low, high = max(1, math.floor(length * (1 - ratio))), math.ceil(length * (1 + ratio))
    return low + int(draw.random() * (high - low + 1))


def _prefix_repetition(args: DatasetArgs, texts: TextMaker, count: int) -> list[BenchRequest]:
    """Each prefix as often as every other one, give or take one, in random order."""
    num_prefixes, prefix_len = args.prefix_repetition_num_prefixes, args.prefix_repetition_prefix_len
    if args.num_prompts < num_prefixes:
        raise ConfigError(
            f"num_prompts={args.num_prompts} is below prefix_repetition_num_prefixes={num_prefixes}; "
            "accepted: at least one prompt a prefix"
        )
    prefixes = [texts.draw(prefix_len) for _ in range(num_prefixes)]
    order = [i % num_prefixes for i in range(args.num_prompts)]
    random.Random(args.seed + 1).shuffle(order)
    order += [i % num_prefixes for i in range(count - args.num_prompts)]
    output_len = args.output_len or args.prefix_repetition_output_len
    requests: list[BenchRequest] = []
    for index in order:
        prompt = texts.draw(prefix_len + args.prefix_repetition_suffix_len, prefixes[index])
        requests.append(BenchRequest(prompt, texts.num_tokens(prompt), output_len))
    return requests


def _file_wish(args: DatasetArgs, num_more: int) -> FileWish:
    output_len = args.output_len
    if output_len is None and args.dataset_name == "sharegpt":
        output_len = args.sharegpt_output_len
    elif output_len is None and args.custom_output_len != -1:
        output_len = args.custom_output_len
    return FileWish(
        path=args.dataset_path or "",
        num_prompts=args.num_prompts,
        num_more=num_more,
        seed=None if args.disable_shuffle else args.seed,
        output_len=output_len,
        may_repeat=not args.no_oversample,
    )


def _at_least(args: DatasetArgs, name: str, low: int) -> None:
    value = getattr(args, name)
    if value is not None and value < low:
        raise ConfigError(f"{name}={value}; accepted: at least {low}")
