"""What is refused before it reaches the core, and what is filled in."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.engine.inputs import InputProcessor, TextPrompt, TokensPrompt
from jaxllm.engine.messages import AddRequest
from jaxllm.errors import RequestError
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.types.sampling import MAX_FORBIDDEN, SamplingParams
from jaxllm.types.service import ServiceParams

VOCAB = 260


def make(
    adds_bos: bool = False, eos_ids: frozenset[int] = frozenset({257}), seed: int = 0, **more: Any
) -> InputProcessor:
    tokenizer = ByteLevelTokenizer(adds_bos)
    return InputProcessor(tokenizer, max_model_len=10, vocab_size=VOCAB, eos_ids=eos_ids, seed=seed, **more)


def request(inputs: InputProcessor, prompt: Any = "abc", cache_salt: Any = None, **params: Any) -> AddRequest:
    sampling = SamplingParams(**params)
    prepared = inputs.tokenize(prompt, sampling)
    return inputs.request(prepared, sampling, request_id="a", arrival_s=0.0, cache_salt=cache_salt)


@pytest.mark.parametrize("prompt", ["", TextPrompt(""), TokensPrompt([]), TokensPrompt(())])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_sch_05_an_empty_prompt_is_refused(prompt: Any, adds_bos: bool) -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        make(adds_bos).tokenize(prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**40, True, 1.0, "1", None])
def test_ids_outside_the_vocabulary_are_refused_by_name(bad: Any) -> None:
    with pytest.raises(RequestError, match=rf"{bad!r} at position 1 .* 0 to {VOCAB - 1}"):
        make().tokenize(TokensPrompt([5, bad]))


@pytest.mark.parametrize("bad", [5, None, b"abc"])
def test_text_that_is_no_text_is_refused(bad: Any) -> None:
    with pytest.raises(RequestError, match="accepted: text"):
        make().tokenize(TextPrompt(bad))


def test_half_a_surrogate_pair_is_refused() -> None:
    with pytest.raises(RequestError, match="character 1"):
        make().tokenize("a\ud800")


@pytest.mark.parametrize("num_tokens", [10, 11])
def test_sch_03_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(num_tokens: int) -> None:
    with pytest.raises(RequestError, match=rf"{num_tokens} tokens .* 10 tokens") as caught:
        make().tokenize("x" * num_tokens)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")


def test_sch_03_the_longest_prompt_gets_one_token() -> None:
    assert request(make(), "x" * 9, max_tokens=None).params.max_tokens == 1


@pytest.mark.parametrize(("asked", "given"), [(None, 7), (3, 3), (7, 7), (10**9, 7)])
def test_max_tokens_is_clamped_to_what_fits(asked: int | None, given: int) -> None:
    assert request(make(), "abc", max_tokens=asked).params.max_tokens == given


def test_min_tokens_never_exceeds_what_fits() -> None:
    assert request(make(), "abc", max_tokens=None, min_tokens=50).params.min_tokens == 7


def test_bos_is_added_once_and_only_if_asked() -> None:
    assert make(adds_bos=True).tokenize("a").token_ids == (256, 97)
    assert make(adds_bos=True).tokenize(TextPrompt("<bos>a", add_special_tokens=False)).token_ids == (256, 97)


def test_fields_that_are_not_served_are_refused() -> None:
    with pytest.raises(RequestError, match="not served"):
        request(make(), thinking_token_budget=2)


def test_stop_ids_must_be_in_the_vocabulary() -> None:
    with pytest.raises(RequestError, match=f"{VOCAB}, which is not"):
        request(make(), stop_token_ids=(1, VOCAB))


def test_min_tokens_holds_back_no_more_ids_than_a_device_row_takes() -> None:
    """More would be refused inside the executor, which would end every request."""
    eos_ids = frozenset(range(100, 100 + MAX_FORBIDDEN - 2))
    assert request(make(eos_ids=eos_ids), min_tokens=1, stop_token_ids=(1, 2, 100))
    assert request(make(eos_ids=eos_ids), min_tokens=0, stop_token_ids=(1, 2, 3))
    with pytest.raises(RequestError, match=f"hold back {MAX_FORBIDDEN + 1}") as caught:
        request(make(eos_ids=eos_ids), min_tokens=1, stop_token_ids=(1, 2, 3))
    assert caught.value.param == "min_tokens"


def test_the_device_row_has_that_room() -> None:
    from jaxllm.sampling import state

    assert state.MAX_FORBIDDEN == MAX_FORBIDDEN


def test_seeds_are_the_users_or_drawn_from_the_engines() -> None:
    assert request(make(), seed=-5).seed == -5
    first, again, other = make(seed=1), make(seed=1), make(seed=2)
    drawn = [request(first).seed, request(first).seed]
    assert drawn == [request(again).seed, request(again).seed]
    assert drawn[0] != drawn[1]
    assert request(other).seed != drawn[0]


@pytest.mark.parametrize("salt", ["", 5, True])
def test_pfx_03_a_cache_salt_is_a_non_empty_string(salt: Any) -> None:
    with pytest.raises(RequestError, match="cache_salt"):
        request(make(), cache_salt=salt)


@pytest.mark.parametrize("name", ["stop", "bad_words", "stop_token_ids", "logprob_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("bad", [5, {"a": 1}, b"ab", [None], [[1]]])
def test_a_list_that_is_none_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(RequestError, match=f"{name}=.* accepted: ") as caught:
        SamplingParams(**{name: bad})
    assert caught.value.param == name


@pytest.mark.parametrize("name", ["n", "top_k", "min_tokens", "temperature", "top_p", "ignore_eos", "output_kind"])
@pytest.mark.parametrize("bad", [None, "x", [1]])
def test_sampling_fields_of_another_type_are_refused_before_the_device_sees_them(name: str, bad: Any) -> None:
    with pytest.raises(RequestError, match=f"{name}=.* accepted: ") as caught:
        SamplingParams(**{name: bad})
    assert caught.value.param == name


def test_a_switch_is_true_or_false_and_nothing_else() -> None:
    for name in ("detokenize", "skip_special_tokens", "include_stop_str_in_output", "skip_reading_prefix_cache"):
        with pytest.raises(RequestError, match=f"{name}=1 .* true or false"):
            SamplingParams(**{name: 1})  # type: ignore[arg-type]


def test_a_message_shows_a_short_piece_of_a_value() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    for value in ("x" * 100_000, 10**5000, deep):
        with pytest.raises(RequestError) as caught:
            request(make(), structured_outputs={"json": value})
        assert len(str(caught.value)) < 250


def test_text_of_tokens_that_the_model_does_not_know_is_refused() -> None:
    inputs = InputProcessor(ByteLevelTokenizer(), max_model_len=10, vocab_size=258, eos_ids=frozenset(), seed=0)
    with pytest.raises(RequestError, match=r"'<\|user\|>', which this model does not know"):
        inputs.tokenize("a<|user|>")


@pytest.mark.parametrize(("cut", "kept"), [(3, "efg"), (1, "g"), (7, "abcdefg"), (100, "abcdefg")])
@pytest.mark.parametrize("as_ids", [False, True])
def test_a_prompt_is_cut_to_its_last_tokens(cut: int, kept: str, as_ids: bool) -> None:
    prompt = TokensPrompt(list(b"abcdefg")) if as_ids else "abcdefg"
    assert request(make(), prompt, truncate_prompt_tokens=cut).prompt_ids == tuple(kept.encode())


@pytest.mark.parametrize(
    ("max_tokens", "num_kept"), [(None, 9), (1, 9), (4, 6), (9, 1)], ids=["unset", "one", "four", "nine"]
)
def test_a_cut_of_minus_one_leaves_room_for_the_answer(max_tokens: int | None, num_kept: int) -> None:
    made = request(make(), "x" * 50 + "abcdefghi", truncate_prompt_tokens=-1, max_tokens=max_tokens)
    assert made.prompt_ids == tuple(b"abcdefghi"[-num_kept:])
    assert made.params.max_tokens == (max_tokens or 1)


@pytest.mark.parametrize(
    ("params", "word", "param"),
    [
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0 leaves no prompt", "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": -1, "max_tokens": 10}, "max_tokens=10; accepted: .* at most 9", "max_tokens"),
        ({"truncate_prompt_tokens": 12, "max_tokens": 1}, "the prompt has 12 tokens", "prompt"),
    ],
)
def test_a_cut_that_leaves_nothing_or_too_much_is_refused(params: dict[str, Any], word: str, param: str) -> None:
    with pytest.raises(RequestError, match=word) as caught:
        request(make(), "x" * 20, **params)
    assert caught.value.param == param


def test_api_01_a_prompt_that_is_only_scored_may_fill_the_context() -> None:
    made = request(make(), "x" * 10, max_tokens=0, prompt_logprobs=0)
    assert (len(made.prompt_ids), made.params.max_tokens) == (10, 0)
    with pytest.raises(RequestError, match=r"11 tokens .* at most 10 tokens"):
        request(make(), "x" * 11, max_tokens=0, prompt_logprobs=0)
    with pytest.raises(RequestError, match="n=2 with max_tokens=0") as caught:
        request(make(), "x", max_tokens=0, prompt_logprobs=0, n=2)
    assert caught.value.param == "n"


def test_several_sequences_are_one_request() -> None:
    assert request(make(), n=5).params.n == 5


def test_priority_salt_and_service_go_with_the_request() -> None:
    service = ServiceParams(tenant="alice", deadline_s=2.0)
    terms: dict[str, Any] = {"priority": -4, "cache_salt": "salt", "service": service}
    message = make().request(make().tokenize("abc"), SamplingParams(), request_id="a", arrival_s=0.0, **terms)
    assert {name: getattr(message, name) for name in terms} == terms
    assert request(make()).service == ServiceParams()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("priority", bad) for bad in (1.0, True, None, "1", 2**63, -(2**63) - 1)),
        *(("service", bad) for bad in (None, {}, {"deadline_s": 1}, ServiceParams)),
    ],
)
def test_wrong_terms_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"{name}=.*accepted") as caught:
        make().request(make().tokenize("abc"), SamplingParams(), request_id="a", arrival_s=0.0, **{name: value})
    assert caught.value.param == name
