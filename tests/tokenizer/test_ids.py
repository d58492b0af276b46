"""Ids against transformers, the golden file, and a plain writing-down of sentencepiece's rule."""

from __future__ import annotations

import inspect
import json
import logging
import unicodedata
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import UnsupportedModel, WeightsError
from jaxllm.tokenizer.fast import FastTokenizer
from jaxllm.tokenizer.load import load_tokenizer
from tests.tokenizer.spm_vocabulary import spm_metadata
from tests.tokenizer.unicode_lines import LINES

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/smollm2-golden.json").read_text())


def transformers_tokenizer(name: str, metadata: Mapping[str, Any]) -> Any:
    import transformers

    tokens = metadata["tokenizer.ggml.tokens"]
    return getattr(transformers, name)(
        vocab={token: index for index, token in enumerate(tokens)},
        merges=[tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]],
        unk_token=tokens[0],
        bos_token=tokens[1],
        eos_token=tokens[2],
        pad_token=tokens[2],
        additional_special_tokens=tokens[:17],
    )


def fragments_around_digits(text: str) -> list[str]:
    fragments = [""]
    for char in text:
        if unicodedata.category(char).startswith("N"):
            fragments += [char, ""]
        else:
            fragments[-1] += char
    return [fragment for fragment in fragments if fragment]


def test_chat_prompts_have_the_golden_ids(smollm: FastTokenizer) -> None:
    assert len(GOLDEN["prompts"]) == 5
    for prompt in GOLDEN["prompts"]:
        assert smollm.encode(prompt["prompt_text"], add_special_tokens=False) == prompt["prompt_token_ids"]


def test_golden_outputs_have_the_golden_text(smollm: FastTokenizer) -> None:
    for prompt in GOLDEN["prompts"]:
        ids = prompt["output_token_ids"][: prompt["eos_at"]]
        assert smollm.decode(ids) == prompt["output_text"]


def test_load_04_smollm_ids_and_text_equal_transformers(smollm: FastTokenizer, metadata: Mapping[str, Any]) -> None:
    oracle = transformers_tokenizer("GPT2Tokenizer", metadata)
    assert len(LINES) >= 199
    for line in LINES:
        expected = [i for part in fragments_around_digits(line) for i in oracle(part)["input_ids"]]
        ids = smollm.encode(line)
        assert ids == expected, line
        assert smollm.decode(ids) == oracle.decode(ids, skip_special_tokens=True)
        assert smollm.decode(ids, skip_special_tokens=False) == line


@pytest.mark.parametrize(("pre", "name"), [("qwen2", "Qwen2Tokenizer"), ("gpt-2", "GPT2Tokenizer")])
def test_load_04_known_splits_give_the_ids_of_transformers(pre: str, name: str, metadata: Mapping[str, Any]) -> None:
    oracle = transformers_tokenizer(name, metadata)
    ours = FastTokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": pre})
    for line in LINES:
        assert ours.encode(line) == oracle(line)["input_ids"], line


def test_load_04_llama_bpe_splits_as_transformers_says(metadata: Mapping[str, Any]) -> None:
    import regex
    from transformers.convert_slow_tokenizer import TikTokenConverter

    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    ours = FastTokenizer.from_gguf(
        {**metadata, "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}
    )
    specials = {ours.token(i) for i in ours.special_ids}
    for line in LINES:
        if not any(special in line for special in specials if special):
            pieces = [i for piece in regex.findall(pattern, line) for i in ours.encode(piece)]
            assert ours.encode(line) == pieces, line


def test_llama_bpe_adds_bos_unless_told_not_to(metadata: Mapping[str, Any]) -> None:
    without_flag = {key: value for key, value in metadata.items() if not key.endswith("add_bos_token")}
    ours = FastTokenizer.from_gguf({**without_flag, "tokenizer.ggml.pre": "llama-bpe"})
    assert ours.adds_bos
    assert ours.encode("x")[0] == ours.bos_id
    assert ours.encode("x", add_special_tokens=False)[0] != ours.bos_id


@pytest.mark.filterwarnings("ignore")
def test_load_04_missing_split_warns_loudly(metadata: Mapping[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    without = {key: value for key, value in metadata.items() if key != "tokenizer.ggml.pre"}
    with caplog.at_level(logging.WARNING):
        ours = FastTokenizer.from_gguf(without)
    assert "tokenizer.ggml.pre is missing" in caplog.text
    assert ours.encode("hello") == FastTokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": "gpt-2"}).encode("hello")


@pytest.mark.parametrize(
    ("key", "value", "error"),
    [
        ("pre", "klingon-bpe", UnsupportedModel),
        ("pre", 7, UnsupportedModel),
        ("model", "t5", UnsupportedModel),
        ("model", None, UnsupportedModel),
        ("tokens", "abc", WeightsError),
        ("tokens", [1, 2], WeightsError),
        ("token_type", [1], WeightsError),
        ("merges", ["ab"], WeightsError),
        ("merges", ["qqqqq zzzzz"], WeightsError),
        ("eos_token_id", 10**9, WeightsError),
        ("eos_token_id", -1, WeightsError),
    ],
)
def test_load_04_bad_metadata_refuses_to_start(
    key: str, value: object, error: type[Exception], metadata: Mapping[str, Any]
) -> None:
    with pytest.raises(error, match=r"tokenizer\.ggml"):
        FastTokenizer.from_gguf({**metadata, f"tokenizer.ggml.{key}": value})


def sentencepiece_ids(text: str, metadata: Mapping[str, Any]) -> list[int]:
    """Sentencepiece's BPE, written down: join the best-scoring adjacent pair, leftmost first."""
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    scores = metadata["tokenizer.ggml.scores"]
    prefix = "▁" if metadata["tokenizer.ggml.add_space_prefix"] else ""
    parts = list(prefix + text.replace(" ", "▁"))
    while True:
        pairs = [(-scores[ids[a + b]], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in ids]
        if not pairs:
            break
        _, at = min(pairs)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [i for part in parts for i in ([ids[part]] if part in ids else [3 + byte for byte in part.encode()])]


@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_merges_follow_the_scores(space_prefix: bool) -> None:
    metadata = spm_metadata(space_prefix)
    ours = FastTokenizer.from_gguf(metadata)
    for text in ["the and in", "abcd bcd abcabcd", "你好 你 é🫠 ď", "thethe  inging", "zzz. anderthing"]:
        ids = ours.encode(text, add_special_tokens=False)
        assert ids == sentencepiece_ids(text, metadata), text
        assert ours.decode(ids) == text
        assert ours.encode(text) == [1, *ids]


def test_tokenizer_json_gives_the_same_as_the_gguf(smollm: FastTokenizer, tmp_path: Path) -> None:
    smollm._backend.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<|im_start|>", "add_bos_token": True}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = load_tokenizer(tmp_path)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (1, 2, 49152)
    assert ours.special_ids == smollm.special_ids
    for line in LINES[:50]:
        assert ours.encode(line) == [1, *smollm.encode(line)]


def test_folder_without_any_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
