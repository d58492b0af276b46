"""Prompts are as long as asked for, by the tokenizer, and the same for the same seed."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from jaxllm.bench.datasets import BenchRequest, DatasetArgs, make_requests
from jaxllm.bench.texts import TextMaker
from jaxllm.build import resolve_tokenizer
from jaxllm.errors import ConfigError
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.tokenizer.load import load_tokenizer

BYTES = ByteLevelTokenizer()
BYTES_WITH_BOS = ByteLevelTokenizer(adds_bos=True)


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    """The default model's tokenizer: byte-level BPE of 49,152 entries."""
    return load_tokenizer(resolve_tokenizer("smollm2-135m"))


def requests(tokenizer: Tokenizer | None = BYTES, num_more: int = 0, **settings: Any) -> list[BenchRequest]:
    return make_requests(DatasetArgs(**{"num_prompts": 8, **settings}), tokenizer, num_more)


@pytest.mark.parametrize("tokenizer", [BYTES, BYTES_WITH_BOS])
@pytest.mark.parametrize("length", [1, 2, 17, 500])
def test_random_prompts_are_exactly_as_long_as_asked_for(tokenizer: Tokenizer, length: int) -> None:
    for each in requests(tokenizer, random_input_len=length + tokenizer.adds_bos, random_output_len=5):
        assert len(tokenizer.encode(each.prompt)) == each.num_prompt_tokens == length + tokenizer.adds_bos
        assert each.max_tokens == 5


def test_random_prompts_of_a_word_tokenizer_are_exact_too(words: Tokenizer) -> None:
    for each in requests(words, random_input_len=300, random_range_ratio=0.9):
        assert len(words.encode(each.prompt)) == each.num_prompt_tokens
    lengths = {each.num_prompt_tokens for each in requests(words, num_prompts=20, random_input_len=64)}
    assert lengths == {64}
    assert len(set(requests(words, num_prompts=20, random_input_len=16))) == 20


def test_a_length_that_no_text_has_is_said_as_it_is() -> None:
    """One token for the beginning is the least that this tokenizer gives."""
    made = TextMaker(BYTES_WITH_BOS, 0).draw(0)
    assert (made, len(BYTES_WITH_BOS.encode(made))) == ("", 1)


def test_lengths_stay_within_the_ratio_and_reach_its_ends() -> None:
    found = requests(num_prompts=2000, random_input_len=20, random_output_len=10, random_range_ratio=0.5)
    assert {each.num_prompt_tokens for each in found} == set(range(10, 31))
    assert {each.max_tokens for each in found} == set(range(5, 16))
    counts = Counter(each.num_prompt_tokens for each in found)
    assert max(counts.values()) < 2 * min(counts.values())


def test_input_len_and_output_len_hold_over_the_datasets_own() -> None:
    each = requests(input_len=7, output_len=3, random_input_len=9, random_output_len=9)[0]
    assert (each.num_prompt_tokens, each.max_tokens) == (7, 3)


def test_a_random_prefix_is_shared_and_comes_on_top() -> None:
    found = requests(random_input_len=10, random_prefix_len=20)
    assert {each.num_prompt_tokens for each in found} == {30}
    assert len({each.prompt[:20] for each in found}) == 1
    assert len({each.prompt for each in found}) == len(found)


@pytest.mark.parametrize("name", ["random", "prefix_repetition"])
def test_same_seed_same_bytes_and_more_change_nothing_before(name: str) -> None:
    def made(seed: int, num_more: int = 0) -> list[BenchRequest]:
        return requests(dataset_name=name, seed=seed, num_more=num_more, prefix_repetition_num_prefixes=3)

    assert made(1) == made(1)
    assert made(1) != made(2)
    assert made(1, 4)[:8] == made(1)
    assert len(made(1, 4)) == 12


def test_prefixes_are_shared_evenly_and_token_for_token(words: Tokenizer) -> None:
    found = requests(
        words,
        dataset_name="prefix_repetition",
        num_prompts=10,
        prefix_repetition_num_prefixes=3,
        prefix_repetition_prefix_len=40,
        prefix_repetition_suffix_len=8,
        prefix_repetition_output_len=6,
    )
    assert {(each.num_prompt_tokens, each.max_tokens) for each in found} == {(48, 6)}
    leads = Counter(tuple(words.encode(each.prompt)[:40]) for each in found)
    assert sorted(leads.values()) == [3, 3, 4]
    assert len({each.prompt for each in found}) == 10


def test_fewer_prompts_than_prefixes_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_prompts=8 is below prefix_repetition_num_prefixes=9"):
        requests(dataset_name="prefix_repetition", prefix_repetition_num_prefixes=9)


@pytest.fixture
def sharegpt(tmp_path: Path) -> Path:
    def turns(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    path = tmp_path / "sharegpt.json"
    long = "x" * 1025
    entries = [turns(f"question {i}", "answer" * (i + 1), "more") for i in range(5)]
    path.write_text(json.dumps([turns("alone"), turns("abc", "too short"), turns(long, "reply"), *entries]))
    return path


def test_sharegpt_takes_first_questions_with_the_lengths_of_their_replies(sharegpt: Path) -> None:
    found = requests(dataset_name="sharegpt", dataset_path=str(sharegpt), num_prompts=5, disable_shuffle=True)
    assert [(each.prompt, each.max_tokens) for each in found] == [(f"question {i}", 6 * (i + 1)) for i in range(5)]
    assert {each.num_prompt_tokens for each in found} == {10}


def test_sharegpt_starts_over_where_it_is_short_unless_told_not_to(sharegpt: Path) -> None:
    settings: dict[str, Any] = {"dataset_name": "sharegpt", "dataset_path": str(sharegpt), "num_prompts": 12}
    assert len(requests(**settings)) == 12
    assert len(requests(**settings, no_oversample=True)) == 5
    shuffled = [each.prompt for each in requests(**settings, seed=3)]
    assert shuffled == [each.prompt for each in requests(**settings, seed=3)]
    assert shuffled[:5] == shuffled[5:10]
    assert {each.max_tokens for each in requests(**settings, sharegpt_output_len=9)} == {9}


def test_custom_takes_lines_with_or_without_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(
        '{"prompt": "héllo", "output_tokens": 3}\n\n{"prompt": "b", "output_tokens": 4}\n', encoding="utf-8"
    )
    settings: dict[str, Any] = {"dataset_name": "custom", "dataset_path": str(path), "num_prompts": 2}
    in_order = requests(None, **settings, disable_shuffle=True, custom_output_len=-1)
    assert in_order == [BenchRequest("héllo", None, 3), BenchRequest("b", None, 4)]
    assert {each.max_tokens for each in requests(**settings)} == {256}
    assert requests(**settings, disable_shuffle=True)[0].num_prompt_tokens == 6


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ('{"prompt": "a", "output_tokens": 1}\nnope\n', ":2: not JSON"),
        ('{"prompt": ""}', ":1: "),
        ('\n\n{"text": "a"}', ":3: "),
        ("[1]", "accepted: a JSON object with a text, prompt"),
        ('{"prompt": "a", "output_tokens": 0}', "output_tokens=0; accepted with custom_output_len=-1: at least 1"),
        ("", "holds no prompt that fits"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        requests(dataset_name="custom", dataset_path=str(path), custom_output_len=-1)
    assert word in str(caught.value)


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{}", "a JSON list of conversations is needed"),
        ("[", "not JSON"),
        ("[5]", "entry 1 is 5"),
        ('[{"conversations": [{"value": 5}]}]', "entry 1: a turn is"),
        ("[]", "holds no prompt that fits"),
    ],
)
def test_a_wrong_conversation_is_named(tmp_path: Path, content: str, word: str) -> None:
    path = tmp_path / "sharegpt.json"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        requests(dataset_name="sharegpt", dataset_path=str(path))
    assert word in str(caught.value)


def test_a_missing_or_binary_file_is_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path in (tmp_path / "nothing", binary, tmp_path):
        with pytest.raises(ConfigError, match="cannot be read"):
            requests(dataset_name="custom", dataset_path=str(path))


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"dataset_name": "poems"}, "dataset_name='poems'"),
        ({"dataset_name": "custom"}, "dataset_name=custom needs dataset_path"),
        ({"dataset_path": "x"}, "means nothing to dataset_name=random"),
        ({"num_prompts": 0}, "num_prompts=0; accepted: at least 1"),
        ({"random_range_ratio": 1.0}, "random_range_ratio=1.0"),
        ({"custom_output_len": 0}, "custom_output_len=0"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        requests(**settings)
    assert word in str(caught.value)


def test_random_prompts_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        requests(None)
