"""Encoding piece by piece gives the ids of the whole, and is used only where it must."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from jaxllm.tokenizer.fast import FastTokenizer
from jaxllm.tokenizer.segments import Segments, borders_are_hard

SPECIAL = ["<|end|>", "<|end|>!", "<s>", "|>"]


def byte_level(*, prefix_space: bool = False, **flags: bool) -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("Ġ", "he"), ("Ċ", "Ċ"), ("e", "<")]
    words = [*alphabet, *map("".join, merges)]
    backend = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False, **flags) for text in SPECIAL])
    return backend


BACKEND = byte_level()
TEXTS = st.lists(st.sampled_from([*SPECIAL, "he", "hello", " hell", "\n\n", "<", "<|end|", " ", "ü🙂"]), max_size=12)


@given(TEXTS.map("".join))
def test_pieces_give_the_ids_of_the_whole_met_for_the_first_time_and_again(text: str) -> None:
    whole = BACKEND.encode(text, add_special_tokens=False).ids
    tokenizer = FastTokenizer(BACKEND)
    assert tokenizer.encode(text, add_special_tokens=False) == whole
    assert tokenizer.encode(text, add_special_tokens=False) == whole


def test_text_met_before_is_not_encoded_again_unless_it_is_long() -> None:
    asked: list[str] = []

    def encode(text: str) -> list[int]:
        asked.append(text)
        return [7] * len(text)

    segments = Segments({"<s>": 1}, encode)
    assert segments.encode("<s>abc<s>d") == [1, 7, 7, 7, 1, 7]
    assert segments.encode("<s>abc<s>e") == [1, 7, 7, 7, 1, 7]
    assert asked == ["abc", "d", "e"]
    for _ in range(2):
        segments.encode("x" * 5000)
    assert len(asked) == 5


def test_the_ids_of_a_piece_are_not_the_caller_s_to_change() -> None:
    tokenizer = FastTokenizer(BACKEND)
    first = tokenizer.encode("hello<s>", add_special_tokens=False)
    expected = list(first)
    first.append(0)
    assert tokenizer.encode("hello<s>", add_special_tokens=False) == expected


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_tokens_that_look_beside_themselves_make_soft_borders(flag: str) -> None:
    assert borders_are_hard(byte_level())
    assert not borders_are_hard(byte_level(**{flag: True}))


def test_what_treats_the_beginning_of_a_text_in_its_own_way_makes_soft_borders() -> None:
    assert not borders_are_hard(byte_level(prefix_space=True))
    metaspace = byte_level()
    metaspace.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace()])
    assert not borders_are_hard(metaspace)
    normalized = byte_level()
    normalized.normalizer = normalizers.NFC()
    assert not borders_are_hard(normalized)
    plain = byte_level()
    plain.add_tokens([AddedToken("word", normalized=True)])
    assert not borders_are_hard(plain)
