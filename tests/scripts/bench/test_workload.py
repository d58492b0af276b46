"""The requests of a comparison: exact lengths, the same for every seed; text that no other seed has."""

from __future__ import annotations

import pytest

from scripts.bench import workload
from scripts.bench.words import Texts, whole_words


class WordTokenizer:
    """An id for each of 400 words of three letters, and one for any other letter."""

    vocab_size = 400

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [self._id(word) for word in text.split(" ")[1:]] if text else []

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return "".join(" x" if i < 8 else f" {chr(97 + i // 20)}{chr(97 + i % 20)}z" for i in ids)

    def _id(self, word: str) -> int:
        return 0 if word == "x" else (ord(word[0]) - 97) * 20 + ord(word[1]) - 97


TOKENIZER = WordTokenizer()
WORDS = whole_words(TOKENIZER)


def texts(seed: object) -> Texts:
    return Texts(TOKENIZER, WORDS, seed)


@pytest.mark.parametrize("name", workload.WORKLOADS)
def test_the_same_seed_gives_the_same_requests_and_another_only_other_text(name: str) -> None:
    make = workload.WORKLOADS[name]
    first, again, other = make(texts(1)), make(texts(1)), make(texts(2))
    assert first == again
    prompts = {request.prompt for request in first.requests}
    assert len(prompts) == len(first.requests)
    assert prompts.isdisjoint({request.prompt for request in other.requests})
    shape = [(r.id, r.num_prompt_tokens, r.max_tokens, r.arrival_s) for r in first.requests]
    assert shape == [(r.id, r.num_prompt_tokens, r.max_tokens, r.arrival_s) for r in other.requests]
    for request in first.requests:
        assert len(request.prompt.split()) == request.num_prompt_tokens


def test_lengths_and_arrivals_are_those_of_earlier_comparisons() -> None:
    offline = workload.offline(texts(0)).requests
    amounts = (len(offline), sum(r.num_prompt_tokens for r in offline), sum(r.max_tokens for r in offline))
    assert amounts == (64, 16004, 9199)
    online = workload.online(texts(0))
    assert (len(online.requests), online.concurrency) == (31, None)
    assert [r.arrival_s for r in online.requests] == sorted(r.arrival_s for r in online.requests)
    assert online.requests[-1].arrival_s < workload.ONLINE_S
    short = workload.online(texts(0), seconds=30.0)
    assert short.requests == online.requests[: len(short.requests)]


def test_prompts_of_the_shared_prefix_differ_after_512_tokens() -> None:
    requests = workload.shared_prefix(texts(0)).requests
    split = [request.prompt.split() for request in requests]
    assert len({tuple(words[:512]) for words in split}) == 1
    assert len({tuple(words[512:]) for words in split}) == len(requests) == 32


def test_a_tokenizer_without_words_is_refused() -> None:
    class Letters(WordTokenizer):
        vocab_size = 8

    with pytest.raises(ValueError, match="0 words that are one token"):
        whole_words(Letters())


def test_a_text_whose_length_never_comes_out_is_refused() -> None:
    class Longer(WordTokenizer):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return [0, *super().encode(text, add_special_tokens=add_special_tokens)]

    with pytest.raises(ValueError, match="no text of 16 tokens"):
        Texts(Longer(), WORDS, 0).draw(16)


def test_only_the_first_requests_are_taken_where_a_server_is_asked_less() -> None:
    asked = workload.single_stream(texts(0))
    assert asked.first(None) == asked
    assert asked.first(2).requests == asked.requests[:2]
