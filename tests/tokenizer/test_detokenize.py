"""Streamed text equals the text of all ids at once, for every tokenizer kind and every cutting."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from jaxllm.tokenizer.detokenize import IncrementalDetokenizer
from jaxllm.tokenizer.fast import FastTokenizer
from tests.tokenizer.spm_vocabulary import spm_metadata


@cache
def small_byte_level() -> FastTokenizer:
    """One token a byte, a few longer ones, special tokens with and without spaces and non-ASCII."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "Ġa", "ab", "Ã©"])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "a"), ("a", "b"), ("Ã", "©")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<s>", "</s>", "<｜tool｜>", "<a b>"])
    backend.add_tokens(["<think>", "你é"])
    return FastTokenizer(backend, bos_id=backend.token_to_id("<s>"), eos_id=backend.token_to_id("</s>"))


@cache
def small_wordpiece() -> FastTokenizer:
    words = ["[UNK]", "[CLS]", "un", "##able", "##s", "hello", ",", ".", "do", "n", "'", "t", "é", "\ufffd", "##\ufffd"]
    backend = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(cleanup=True)
    backend.add_special_tokens(["[CLS]"])
    return FastTokenizer(backend)


@cache
def small_metaspace() -> FastTokenizer:
    words = ["<unk>", "▁", "▁▁", "▁a", "a", "b", "▁b▁", "é", "</s>"]
    backend = Tokenizer(models.Unigram([(word, -1.0) for word in words], unk_id=0))
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["</s>"])
    return FastTokenizer(backend)


@cache
def spm(space_prefix: bool) -> FastTokenizer:
    return FastTokenizer.from_gguf(spm_metadata(space_prefix))


KINDS = {
    "byte_level": small_byte_level,
    "wordpiece": small_wordpiece,
    "metaspace": small_metaspace,
    "sentencepiece": lambda: spm(True),
    "sentencepiece without space prefix": lambda: spm(False),
}


def stream(tokenizer: FastTokenizer, pieces: Sequence[Sequence[int]], skip_special: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special)
    return [*(detokenizer.push(piece) for piece in pieces), detokenizer.finish()]


@st.composite
def cut_ids(draw: st.DrawFn, size: int) -> list[list[int]]:
    # One id past the vocabulary: models have more rows than tokens, and must not break the text.
    return draw(st.lists(st.lists(st.integers(0, size), max_size=4), max_size=24))


@pytest.mark.parametrize("kind", KINDS)
def test_str_01_any_cutting_of_any_ids_gives_the_whole_text(kind: str) -> None:
    tokenizer = KINDS[kind]()

    @settings(max_examples=200, deadline=None)
    @given(pieces=cut_ids(tokenizer.vocab_size), skip_special=st.booleans())
    def check(pieces: list[list[int]], skip_special: bool) -> None:
        whole = tokenizer.decode([i for piece in pieces for i in piece], skip_special_tokens=skip_special)
        deltas = stream(tokenizer, pieces, skip_special)
        assert "".join(deltas) == whole
        assert sum(delta.count("\ufffd") for delta in deltas) == whole.count("\ufffd")

    check()


@settings(max_examples=200, deadline=None)
@given(text=st.text(alphabet=st.sampled_from("a é你🫠ďab\ufffd\n"), max_size=30), size=st.integers(1, 5))
def test_str_01_real_text_streams_without_replacement_characters(text: str, size: int) -> None:
    for tokenizer in (small_byte_level(), spm(True), spm(False)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        pieces = [ids[i : i + size] for i in range(0, len(ids), size)]
        deltas = stream(tokenizer, pieces, True)
        assert "".join(deltas) == tokenizer.decode(ids)
        assert "".join(deltas).count("\ufffd") == text.count("\ufffd")


def test_str_01_a_character_of_four_tokens_comes_out_whole(smollm: FastTokenizer) -> None:
    ids = smollm.encode("hi 🫠!")
    deltas = stream(smollm, [[i] for i in ids], True)
    assert "".join(deltas) == "hi 🫠!"
    assert not any("\ufffd" in delta for delta in deltas)
    assert len(ids) > 4


@pytest.mark.parametrize("spaces", [True, False])
def test_str_06_no_space_between_or_after_special_tokens(smollm: FastTokenizer, spaces: bool) -> None:
    ids = [1, 2, *smollm.encode("word"), 0, 1]
    detokenizer = IncrementalDetokenizer(smollm, False, spaces)
    text = "".join(detokenizer.push([i]) for i in ids) + detokenizer.finish()
    assert text == smollm.decode(ids, False, spaces) == "<|im_start|><|im_end|>word<|endoftext|><|im_start|>"


@pytest.mark.parametrize("kind", KINDS)
def test_cost_is_linear_even_for_ids_that_never_make_a_character(kind: str) -> None:
    tokenizer = KINDS[kind]()
    broken = {"byte_level": "ÿ", "wordpiece": "##\ufffd", "metaspace": "▁"}.get(kind, "<0xFF>")
    token_id = tokenizer.token_id(broken)
    assert token_id is not None

    def seconds(count: int) -> float:
        start = time.process_time()
        stream(tokenizer, [[token_id]] * count, True)
        return time.process_time() - start

    seconds(100)
    small, large = min(seconds(1000) for _ in range(3)), seconds(8000)
    assert large < 8 * small * 4 + 0.05  # the square would be 64 times
