"""Which token sequences a banned word stands for: vLLM's rule, held against a tokenizer that marks spaces."""

from __future__ import annotations

import pytest

from jaxllm.engine.bad_words import bad_word_ids
from jaxllm.engine.inputs import InputProcessor
from jaxllm.errors import RequestError
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.types.sampling import MAX_BAD_SEQUENCE_TOKENS, MAX_BAD_SEQUENCES, SamplingParams

# Longest piece first, as a byte-pair vocabulary would: a word after a space has a token of its own.
PIECES = {
    " the": 1,
    "the": 2,
    " cat": 3,
    "cat": 4,
    " ": 5,
    "c": 6,
    "a": 7,
    "t": 8,
    "h": 9,
    "e": 10,
    " cats": 11,
    "s": 12,
}


def encode(text: str) -> list[int]:
    ids: list[int] = []
    while text:
        piece = max((p for p in PIECES if text.startswith(p)), key=len)
        ids.append(PIECES[piece])
        text = text[len(piece) :]
    return ids


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["the"], [(2,), (1,)]),  # at the start of a text, and after a space
        ([" the"], [(2,), (1,)]),  # a space of the user's own changes nothing
        (["cat the"], [(4, 1), (3, 1)]),
        (["cats"], [(4, 12)]),  # after a space it has one token instead of two: that reading does not count
        (["hat"], [(9, 7, 8)]),  # a space before it is a token of its own: the same first token, one more
        ([" "], [(5,)]),  # spaces alone are taken as they are
        (["the", " the", "the"], [(2,), (1,)]),
    ],
)
def test_readings(words: list[str], expected: list[tuple[int, ...]]) -> None:
    assert list(bad_word_ids(words, encode)) == expected


def test_words_without_tokens_or_with_too_many_are_named() -> None:
    with pytest.raises(RequestError, match=r"'cat' of 0 tokens") as caught:
        bad_word_ids(["cat"], lambda text: [])
    assert caught.value.param == "bad_words"
    with pytest.raises(RequestError, match=f"of {MAX_BAD_SEQUENCE_TOKENS + 1} tokens; accepted: words of 1 to"):
        bad_word_ids(["h" * (MAX_BAD_SEQUENCE_TOKENS + 1)], encode)
    assert bad_word_ids(["h" * MAX_BAD_SEQUENCE_TOKENS], encode)


def test_sec_02_words_of_one_token_are_free_and_longer_ones_are_few() -> None:
    def in_two(text: str) -> list[int]:
        return [int(text) // 100, int(text) % 100]

    words = [f"{number}" for number in range(100, 100 + MAX_BAD_SEQUENCES + 1)]
    assert len(bad_word_ids(words[:-1], in_two)) == MAX_BAD_SEQUENCES
    with pytest.raises(RequestError, match=f"makes {MAX_BAD_SEQUENCES + 1} such sequences") as caught:
        bad_word_ids(words, in_two)
    assert caught.value.param == "bad_words"
    assert len(bad_word_ids(words, lambda text: [int(text)])) == len(words)


def test_a_request_carries_them() -> None:
    inputs = InputProcessor(ByteLevelTokenizer(), max_model_len=10, vocab_size=258, eos_ids=frozenset(), seed=0)
    params = SamplingParams(bad_words=("a", "bc", "<|user|>"))
    message = inputs.request(inputs.tokenize("x", params), params, request_id="a", arrival_s=0.0)
    assert message.bad_word_ids == ((97,), (98, 99))  # a token that the model does not have needs no ban
    with pytest.raises(RequestError, match="valid Unicode"):
        inputs.tokenize("x", SamplingParams(bad_words=("a\ud800",)))
