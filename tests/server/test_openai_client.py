"""OpenAI's own Python client: several choices, log probabilities, streams, and its exception classes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam

from tests.helpers.scripted_engine import script, scripted
from tests.server.harness import SETTINGS, Running, running

HI: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def served() -> Iterator[Running]:
    with running(scripted(default=script("Ä one STOP two")), SETTINGS) as server:
        yield server


@pytest.fixture
def client(served: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=served.url + "/v1", api_key="x", max_retries=0) as made:
        yield made


@pytest.fixture
def model(served: Running) -> str:
    return served.state.model_names[0]


def test_three_choices_with_log_probabilities_whole_and_streamed(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=HI, n=3, logprobs=True, top_logprobs=2, seed=1)
    assert [choice.index for choice in whole.choices] == [0, 1, 2]
    assert {choice.message.content for choice in whole.choices} == {"Ä one STOP two"}
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 3 * (len("Ä one STOP two".encode()) + 1)  # and EOS
    text, entries, reasons = defaultdict[int, str](str), defaultdict[int, list[Any]](list), dict[int, str]()
    usage = None
    with client.chat.completions.create(
        model=model,
        messages=HI,
        n=3,
        logprobs=True,
        top_logprobs=2,
        seed=1,
        stream=True,
        stream_options={"include_usage": True},
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text[choice.index] += choice.delta.content or ""
                entries[choice.index] += (choice.logprobs.content or []) if choice.logprobs else []
                if choice.finish_reason:
                    reasons[choice.index] = choice.finish_reason
    assert usage is not None and usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.content is not None
        assert text[choice.index] == choice.message.content
        assert entries[choice.index] == choice.logprobs.content
        assert reasons[choice.index] == choice.finish_reason
        raw = bytes(byte for entry in choice.logprobs.content[:-1] for byte in entry.bytes or [])
        assert raw.decode() == choice.message.content
        for entry in choice.logprobs.content:
            assert len(entry.top_logprobs) == 2
            assert math.isfinite(entry.logprob)
            values = [top.logprob for top in entry.top_logprobs]
            assert values == sorted(values, reverse=True)


def test_completions_with_echo_log_probabilities_and_several_prompts(client: openai.OpenAI, model: str) -> None:
    asked: dict[str, Any] = {"model": model, "prompt": ["hi", "you"], "echo": True, "logprobs": 2, "n": 2}
    whole = client.completions.create(**asked, max_tokens=4, stop="STOP")
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in whole.choices] == ["hiÄ o", "hiÄ o", "youÄ o", "youÄ o"]
    columns: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for chunk in client.completions.create(**asked, max_tokens=4, stop="STOP", stream=True):
        for choice in chunk.choices:
            for name, values in (choice.logprobs.model_dump() if choice.logprobs else {}).items():
                columns[choice.index][name] += values
    for choice in whole.choices:
        assert choice.logprobs is not None
        assert choice.logprobs.model_dump() == columns[choice.index]
        assert choice.logprobs.token_logprobs is not None
        assert choice.logprobs.token_logprobs[0] is None
        prompt = "hi" if choice.index < 2 else "you"
        assert len(choice.logprobs.token_logprobs) == len(prompt) + 4
        assert choice.logprobs.text_offset == [*range(len(prompt) + 1), len(prompt), len(prompt) + 1, len(prompt) + 2]


def test_its_stream_helper_gives_the_whole_answer(client: openai.OpenAI, model: str) -> None:
    whole = client.chat.completions.create(model=model, messages=HI, n=2, stop=" STOP")
    with client.chat.completions.stream(model=model, messages=HI, n=2, stop=" STOP") as stream:
        stream.until_done()
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == ["Ä one"] * 2
    assert [choice.message.content for choice in whole.choices] == ["Ä one"] * 2
    assert [choice.finish_reason for choice in final.choices] == ["stop"] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 10**6}, "n"),
        ({"logprobs": True, "top_logprobs": 1000}, "top_logprobs"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logit_bias": {"999999": 1}}, "logit_bias"),
        ({"temperature": 3.0}, "temperature"),
        ({"presence_penalty": 5.0}, "presence_penalty"),
        ({"messages": []}, "messages"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True])
def test_wrong_values_are_bad_requests_that_name_the_field(
    client: openai.OpenAI, model: str, fields: dict[str, Any], param: str, stream: bool
) -> None:
    asked: dict[str, Any] = {"model": model, "messages": HI, "stream": stream, **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**asked)
    assert caught.value.param == param


def test_an_unknown_model_is_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-none", messages=HI, n=3)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-none", prompt="hi", logprobs=1)
