"""A sentencepiece vocabulary as GGUF metadata."""

from __future__ import annotations

from typing import Any


def spm_metadata(space_prefix: bool) -> dict[str, Any]:
    """A small sentencepiece vocabulary whose tokens overlap, so that the order of merges matters."""
    words = ["▁the", "the", "▁t", "he", "th", "▁th", "in", "ing", "▁in", "er", "▁a", "an", "and", "▁and", "nd", "▁▁"]
    words += ["ab", "bc", "abc", "cd", "bcd", "abcd", "你", "你好", "é", "▁你"]
    letters = [*"abcdefghijklmnopqrstuvwxyz", "▁", "好", "."]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words, *letters]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(words) + len(letters))]
    scores = [0.0] * 259 + [-float((index * 7) % len(words)) for index in range(len(words))] + [-1000.0] * len(letters)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }
