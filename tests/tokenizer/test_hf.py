"""Folders that only transformers reads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import UnsupportedModel
from jaxllm.tokenizer.detokenize import IncrementalDetokenizer
from jaxllm.tokenizer.fast import FastTokenizer
from jaxllm.tokenizer.hf import HFTokenizer
from jaxllm.tokenizer.load import load_tokenizer
from tests.tokenizer.unicode_lines import LINES


def test_vocab_and_merges_files_are_read_by_transformers(tmp_path: Path, metadata: Mapping[str, Any]) -> None:
    tokens = metadata["tokenizer.ggml.tokens"]
    (tmp_path / "vocab.json").write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(metadata["tokenizer.ggml.merges"]))
    names = {"unk_token": tokens[0], "bos_token": tokens[1], "eos_token": tokens[2]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer", **names}))
    ours = load_tokenizer(tmp_path)
    assert isinstance(ours, HFTokenizer)
    assert (ours.bos_id, ours.eos_id, ours.vocab_size, ours.adds_bos) == (1, 2, 49152, False)
    assert (ours.token(0), ours.token(10**6), ours.token_id("<|im_end|>"), ours.token_id("no such token")) == (
        *("<|endoftext|>", None, 2, None),
    )
    oracle = FastTokenizer.from_gguf({**metadata, "tokenizer.ggml.pre": "gpt-2"})
    for line in LINES[:60]:
        ids = ours.encode(line)
        assert ids == oracle.encode(line)
        stream = IncrementalDetokenizer(ours)
        assert "".join(stream.push([i]) for i in ids) + stream.finish() == ours.decode(ids) == oracle.decode(ids)


def test_a_folder_that_transformers_cannot_read_either_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match="no tokenizer"):
        load_tokenizer(tmp_path)
