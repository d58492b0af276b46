"""What a request asks of the engine: choices, echo, prompts cut, beam search; and how it shows in the answer."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.engine.inputs import TextPrompt, TokensPrompt
from jaxllm.types.sampling import BeamSearchParams, RepetitionDetection, SamplingParams
from tests.helpers.scripted_engine import scripted
from tests.server.canned import Canned, CannedEngine, ask, logprob_of
from tests.server.harness import events_of, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
EXTRA = {"prompt": "hi", "messages": HI}  # each route takes its own and ignores the other
ONE = Canned([b"A"])


def params_of(path: str, answer: Canned = ONE, **fields: Any) -> SamplingParams:
    engine = CannedEngine([answer])
    reply = ask(engine, path, {**EXTRA, **fields})
    assert reply.status_code == 200, reply.text
    [(_, params)] = engine.asked
    assert isinstance(params, SamplingParams)
    return params


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_sampling_field_reaches_the_engine(path: str) -> None:
    same: dict[str, Any] = {
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.5,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "seed": 7,
        "min_tokens": 2,
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": False,
        "truncate_prompt_tokens": 9,
        "stream_interval": 3,
        "max_tokens": 11,
    }
    lists = {"stop": ["a"], "stop_token_ids": [1], "allowed_token_ids": [5, 6], "bad_words": ["b"]}
    params = params_of(
        path,
        **same,
        **lists,
        logit_bias={"5": 1, "7": -200},
        repetition_detection={"max_pattern_size": 4, "min_count": 3},
        vllm_xargs={"strength": 2},
    )
    assert {name: getattr(params, name) for name in same} == same
    assert {name: list(getattr(params, name)) for name in lists} == lists
    assert params.logit_bias == {5: 1.0, 7: -100.0}
    assert params.repetition_detection == RepetitionDetection(max_pattern_size=4, min_count=3)
    assert params.extra_args == {"strength": 2}


def test_logprobs_of_each_route_reach_the_engine() -> None:
    assert params_of(CHAT).logprobs is None
    assert params_of(CHAT, logprobs=False, top_logprobs=0).logprobs is None
    assert params_of(CHAT, logprobs=True).logprobs == 0
    assert params_of(CHAT, logprobs=True, top_logprobs=5).logprobs == 5
    assert params_of(TEXT, logprobs=0).logprobs == 0
    assert params_of(TEXT, logprobs=3, prompt_logprobs=1).prompt_logprobs == 1
    by_id = params_of(CHAT, logprobs=True, logprob_token_ids=[7, 5])
    assert (by_id.logprobs, by_id.logprob_token_ids) == (None, (7, 5))


@pytest.mark.parametrize(
    ("fields", "prompt_logprobs"),
    [
        ({"echo": True}, None),
        ({"echo": True, "logprobs": 0}, 0),
        ({"echo": True, "logprobs": 2}, 2),
        ({"echo": True, "logprobs": 2, "prompt_logprobs": 4}, 4),
        ({"echo": True, "logprobs": 4, "prompt_logprobs": 2}, 4),
        ({"echo": True, "max_tokens": 0}, 0),
        ({"echo": True, "max_tokens": 0, "logprobs": 1}, 1),
        ({"logprobs": 2}, None),
    ],
    ids=str,
)
def test_echo_with_logprobs_scores_the_prompt(fields: dict[str, Any], prompt_logprobs: int | None) -> None:
    assert params_of(TEXT, **fields).prompt_logprobs == prompt_logprobs


@pytest.mark.parametrize("prompts", [["hi", "you"], [list(b"hi"), list(b"you")]], ids=["text", "ids"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_harness_reads_echo_with_logprobs_and_one_token(prompts: list[Any], stream: bool) -> None:
    """lm-eval asks so, with token ids; it sums token_logprobs from the context's length to the last but one."""
    engine = CannedEngine([ONE, Canned([b"B"])])
    body = {"prompt": prompts, "echo": True, "logprobs": 1, "max_tokens": 1, "stream": stream}
    reply = ask(engine, TEXT, body)
    assert reply.status_code == 200, reply.text
    choices = _joined(events_of(reply.text)[:-1]) if stream else reply.json()["choices"]
    for choice, text in zip(choices, ("hiA", "youB"), strict=True):
        columns = choice["logprobs"]
        assert choice["text"] == text
        assert columns["tokens"] == list(text)
        assert columns["text_offset"] == list(range(len(text)))
        expected = [None, *(logprob_of(i, 1)[0].logprob for i in text.encode()[1:])]
        assert columns["token_logprobs"] == expected
        assert columns["top_logprobs"][0] is None
        assert columns["top_logprobs"][1] == {chr(ord(text[1]) + 1): -0.25, text[1]: expected[1]}


def _joined(chunks: list[Any]) -> list[Any]:
    choices: dict[int, Any] = {}
    for chunk in chunks:
        [part] = chunk["choices"]
        choice = choices.setdefault(part["index"], {"text": "", "logprobs": {}})
        choice["text"] += part["text"]
        for name, values in (part["logprobs"] or {}).items():
            choice["logprobs"][name] = choice["logprobs"].get(name, []) + values
    return [choices[index] for index in sorted(choices)]


@pytest.mark.parametrize("stream", [False, True])
def test_api_01_a_prompt_that_is_only_scored_is_run_once_and_shown_n_times(stream: bool) -> None:
    engine = CannedEngine([Canned([b""])])
    body = {"prompt": "hi", "echo": True, "logprobs": 0, "max_tokens": 0, "n": 3, "stream": stream}
    reply = ask(engine, TEXT, body)
    [(_, params)] = engine.asked
    assert isinstance(params, SamplingParams)
    assert (params.n, params.max_tokens, params.prompt_logprobs) == (1, 0, 0)
    choices = _joined(events_of(reply.text)[:-1]) if stream else reply.json()["choices"]
    assert [choice["text"] for choice in choices] == ["hi"] * 3
    assert [choice["logprobs"]["tokens"] for choice in choices] == [["h", "i"]] * 3


def test_sam_10_prompt_logprobs_have_an_entry_for_every_token_and_null_first() -> None:
    text = ask(CannedEngine([ONE]), TEXT, {"prompt": "hi!", "prompt_logprobs": 1}).json()
    [table] = [choice["prompt_logprobs"] for choice in text["choices"]]
    chat = ask(CannedEngine([ONE]), CHAT, {"messages": [{"role": "user", "content": "hi!"}], "prompt_logprobs": 1})
    assert chat.json()["prompt_logprobs"] == table
    assert table[0] is None
    assert [list(entries) for entries in table[1:]] == [[str(i), str(i + 1)] for i in b"i!"]
    assert table[1][str(ord("i"))] == {
        "logprob": logprob_of(ord("i"), 1)[0].logprob,
        "rank": 100,
        "decoded_token": "i",
    }
    assert "prompt_logprobs" not in ask(CannedEngine([ONE]), CHAT, {"messages": HI}).json()


def test_the_prompts_choices_follow_each_other() -> None:
    engine = CannedEngine([Canned([b"a", b"b"]), Canned([b"c", b"d"])])
    choices = ask(engine, TEXT, {"prompt": ["x", "y"], "n": 2}).json()["choices"]
    assert [(choice["index"], choice["text"]) for choice in choices] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]


@pytest.mark.parametrize(("fields", "is_fine"), [({}, True), ({"n": 2}, True), ({"n": 3}, False)], ids=str)
def test_best_of_may_be_one_or_n(fields: dict[str, Any], is_fine: bool) -> None:
    best = 1 if not fields else 2
    choices = Canned([b"A"] * fields.get("n", 1))
    reply = ask(CannedEngine([choices]), TEXT, {"prompt": "hi", "best_of": best, **fields})
    assert reply.status_code == (200 if is_fine else 400)
    if not is_fine:
        assert reply.json()["error"]["param"] == "best_of"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_a_chat_is_the_message_that_the_assistant_has_begun(stream: bool) -> None:
    messages = [*HI, {"role": "assistant", "content": [{"type": "text", "text": "I s"}]}]
    body = {"messages": messages, "continue_final_message": True, "stream": stream}
    for echo, user_last, text in ((True, False, "I sA"), (False, False, "A"), (True, True, "A")):
        sent = {**body, "echo": echo}
        if user_last:
            sent |= {"messages": HI, "continue_final_message": False}
        reply = ask(CannedEngine([ONE]), CHAT, sent)
        if stream:
            deltas = [chunk["choices"][0]["delta"] for chunk in events_of(reply.text)[:-1]]
            assert "".join(delta.get("content", "") for delta in deltas) == text
        else:
            assert reply.json()["choices"][0]["message"]["content"] == text


def test_prompts_are_cut_at_the_side_asked_for() -> None:
    def asked(**fields: Any) -> tuple[Any, SamplingParams]:
        engine = CannedEngine([ONE], max_model_len=6)
        assert ask(engine, TEXT, {"prompt": "hello world", "max_tokens": 2, **fields}).status_code == 200
        [(prompt, params)] = engine.asked
        assert isinstance(params, SamplingParams)
        return prompt, params

    prompt, params = asked(truncate_prompt_tokens=3)
    assert (prompt, params.truncate_prompt_tokens) == (TextPrompt("hello world"), 3)
    for given, kept in ((3, "hel"), (-1, "hell"), (50, "hello world")):
        prompt, params = asked(truncate_prompt_tokens=given, truncation_side="right")
        assert isinstance(prompt, TokensPrompt)
        assert (list(prompt.token_ids), params.truncate_prompt_tokens) == (list(kept.encode()), None)
    prompt, _ = asked(truncation_side="right")
    assert prompt == TextPrompt("hello world")
    refused = ask(CannedEngine([ONE]), TEXT, {"prompt": "hi", "truncation_side": "top"})
    assert refused.json()["error"]["param"] == "truncation_side"
    for wrong in ({"truncate_prompt_tokens": 0}, {"truncate_prompt_tokens": -1, "max_tokens": 10**9}):
        refused = ask(CannedEngine([ONE]), TEXT, {"prompt": "hi", "truncation_side": "right", **wrong})
        assert refused.json()["error"]["param"] == "truncate_prompt_tokens"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(("prompt", "named"), [("", "prompt is empty"), (["hi", ""], "prompt[1]: prompt is empty")])
def test_an_empty_prompt_is_called_that_whichever_side_is_cut(prompt: Any, named: str, side: str) -> None:
    with running(scripted()) as served:
        reply = served.complete(prompt, truncate_prompt_tokens=3, truncation_side=side)
    assert reply.status_code == 400
    assert reply.json()["error"]["message"].startswith(f"{named}; accepted: text")
    assert reply.json()["error"]["param"] == named.partition(":")[0].partition(" ")[0]


def test_the_prompts_text_can_be_given_back_also_of_ids_and_where_it_was_cut() -> None:
    for prompt, cut, text in (("hi<eos>", None, "hi<eos>"), ([104, 257], None, "h<eos>"), ("hi", 2, "hi")):
        body = {"prompt": prompt, "return_prompt_text": True, "truncate_prompt_tokens": cut}
        assert ask(CannedEngine([ONE]), TEXT, body).json()["choices"][0]["prompt_text"] == text
    body = {"messages": HI, "return_prompt_text": True}
    assert ask(CannedEngine([ONE]), CHAT, body, template="<{{ messages[0].content }}>").json()["prompt_text"] == "<hi>"


def test_beam_search_is_asked_with_n_as_its_width() -> None:
    engine = CannedEngine([Canned([b"A", b"B"])])
    body = {"prompt": "hi", "use_beam_search": True, "n": 2, "length_penalty": 0.5, "max_tokens": 4, "ignore_eos": True}
    choices = ask(engine, TEXT, {**body, "top_p": 0.9, "seed": 3, "frequency_penalty": 0}).json()["choices"]
    assert [choice["text"] for choice in choices] == ["A", "B"]
    [(prompt, params)] = engine.asked
    assert prompt == TextPrompt("hi")
    assert params == BeamSearchParams(beam_width=2, max_tokens=4, length_penalty=0.5, ignore_eos=True)


def test_beam_search_of_a_chat_may_be_as_long_as_fits() -> None:
    engine = CannedEngine([ONE])
    assert ask(engine, CHAT, {"messages": HI, "use_beam_search": True}).status_code == 200
    [(_, params)] = engine.asked
    assert params == BeamSearchParams(beam_width=1, max_tokens=engine.max_model_len)


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": True},
        {"logprobs": 0},
        {"prompt_logprobs": 1},
        {"stop": "a"},
        {"presence_penalty": 1},
        {"bad_words": ["a"]},
        {"n": 100},
        {"temperature": 7.0},
    ],
    ids=str,
)
def test_what_beam_search_cannot_do_is_400_and_named(fields: dict[str, Any]) -> None:
    reply = ask(CannedEngine([ONE]), TEXT, {"prompt": "hi", "use_beam_search": True, **fields})
    assert reply.status_code == 400
    assert reply.json()["error"]["param"] == next(iter(fields))


@pytest.mark.parametrize("stream", [False, True])
def test_a_long_scored_prompt_shows_every_position(stream: bool) -> None:
    """Long enough to be written down off the event loop."""
    text = "abcdefgh" * 60
    engine = CannedEngine([Canned([b"A"] * 2), Canned([b"B"] * 2)])
    body = {"prompt": [text, text], "echo": True, "logprobs": 1, "n": 2, "stream": stream}
    reply = ask(engine, TEXT, body)
    choices = _joined(events_of(reply.text)[:-1]) if stream else reply.json()["choices"]
    assert [choice["text"] for choice in choices] == [text + "A", text + "A", text + "B", text + "B"]
    for choice in choices:
        assert choice["logprobs"]["tokens"] == list(choice["text"])
        assert choice["logprobs"]["text_offset"] == list(range(len(text) + 1))
