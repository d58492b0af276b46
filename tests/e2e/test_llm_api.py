"""The Python face, on a scripted device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM, RequestOutput, SamplingParams
from jaxllm.errors import ConfigError, RequestError
from jaxllm.types.sampling import OutputKind


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm") / "script.json"
    responses = [{"prompt_contains": "France", "text": " Paris."}]
    path.write_text(json.dumps({"responses": responses, "default": {"text": "Hello 🫠!"}, "max_model_len": 128}))
    return path


@pytest.fixture(scope="module")
def llm(script: Path) -> Iterator[LLM]:
    with LLM(executor=f"scripted:{script}") as llm:
        yield llm


def texts(outputs: list[RequestOutput]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_every_form_of_prompt_is_taken(llm: LLM) -> None:
    ids = llm.tokenizer.encode("capital of France")
    prompts: list[Any] = ["capital of France", ids, {"prompt_token_ids": ids}, {"prompt": "capital of France"}]
    outputs = llm.generate(prompts)
    assert texts(outputs) == [" Paris."] * 4
    assert {output.prompt_token_ids for output in outputs} == {tuple(ids)}
    assert texts(llm.generate("capital of France")) == [" Paris."]
    assert texts(llm.generate(ids)) == [" Paris."]
    assert llm.generate([]) == []


def test_params_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    short, long = SamplingParams(max_tokens=1), SamplingParams(max_tokens=50)
    assert texts(llm.generate(["a", "b"], short)) == ["Hello", "Hello"]
    assert texts(llm.generate(["a", "b"], [short, long])) == ["Hello", "Hello 🫠!"]
    with pytest.raises(RequestError, match="2 prompts with 1 params"):
        llm.generate(["a", "b"], [short])


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    one = [{"role": "user", "content": "capital of France?"}]
    two = [{"role": "user", "content": "hi"}]
    assert texts(llm.chat(one)) == [" Paris."]
    outputs = llm.chat([one, two])
    assert texts(outputs) == [" Paris.", "Hello 🫠!"]
    assert outputs[0].prompt_token_ids[0] == 1
    assert outputs[0].prompt_token_ids.count(1) == 3  # system, user, assistant: no second BOS


def test_updates_stream_on_the_way(llm: LLM) -> None:
    pieces: list[str] = []
    params = SamplingParams(output_kind=OutputKind.DELTA, max_tokens=20)
    outputs = llm.generate("a", params, on_update=lambda output: pieces.append(output.outputs[0].text))
    assert "".join(pieces) == outputs[0].outputs[0].text == "Hello 🫠!"
    assert len(pieces) > 2


@pytest.mark.parametrize(
    ("prompts", "word"),
    [
        (["fine", ""], r"prompts\[1\]: prompt is empty"),
        ([[1, 2], [49152]], r"prompts\[1\].*49152"),
        ("word " * 200, "maximum context length"),
        ([{"text": "a"}], "prompt_token_ids"),
        (5, "prompts=5; accepted: text, token ids"),
        (None, "prompts=None"),
        (b"abc", "prompts=b'abc'"),
        (["fine", None], r"prompts\[1\]: prompt=None; accepted: text, token ids"),
        ([[1], 2], r"prompts\[1\]: prompt=2"),
    ],
)
def test_sch_05_a_wrong_prompt_is_named_and_the_engine_lives_on(llm: LLM, prompts: Any, word: str) -> None:
    with pytest.raises(RequestError, match=word):
        llm.generate(prompts)
    assert texts(llm.generate("a")) == ["Hello 🫠!"]


@pytest.mark.parametrize("params", [5, "x", {"temperature": 0}, [5, 5], [SamplingParams(), None]])
def test_params_that_are_none_are_refused(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match=r"sampling_params=.* accepted: SamplingParams"):
        llm.generate(["a", "b"], params)


@pytest.mark.parametrize(
    ("messages", "options", "param"),
    [
        (5, {}, "messages"),
        ([5], {}, "messages"),
        (None, {"tools": 5}, "tools"),
        (None, {"chat_template_kwargs": 5}, "chat_template_kwargs"),
        (None, {"chat_template_kwargs": {1: 2}}, "chat_template_kwargs"),
        (None, {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_a_chat_of_the_wrong_shape_is_refused(llm: LLM, messages: Any, options: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        llm.chat(messages or [{"role": "user", "content": "hi"}], **options)
    assert caught.value.param == param


def test_flags_are_checked_and_the_closest_one_is_named(script: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean max_model_len"):
        LLM(max_model_length=8, executor=f"scripted:{script}")
    with pytest.raises(ConfigError, match="set the same thing"):
        LLM(page_size=16, block_size=16)
    with pytest.raises(ConfigError, match="max_num_seqs=0"):
        LLM(max_num_seqs=0)
    with pytest.raises(ConfigError, match="no-such-model"):
        LLM("no-such-model")


def test_other_spellings_of_flags_and_closing_twice(script: Path) -> None:
    llm = LLM(executor=f"scripted:{script}", block_size=4, max_model_len="32", num_gpu_blocks_override=20)
    assert llm.max_model_len == 32
    assert texts(llm.generate("a")) == ["Hello 🫠!"]
    llm.close()
    llm.close()


def test_start_up_is_reported(llm: LLM) -> None:
    assert [phase.name for phase in llm.report.phases] == ["tokenizer"]
    assert all(phase.wall_s >= 0 and phase.cpu_s >= 0 for phase in llm.report.phases)


def test_without_the_default_model_a_script_speaks_bytes(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str | None) -> Path:
        raise ConfigError("not installed")

    monkeypatch.setattr("jaxllm.build.resolve_model", missing)
    with LLM(executor=f"scripted:{script}") as llm:
        assert llm.tokenizer.vocab_size == 260
        assert texts(llm.generate("France", SamplingParams(max_tokens=20))) == [" Paris."]
        assert texts(llm.chat([{"role": "user", "content": "France"}], SamplingParams(max_tokens=20))) == [" Paris."]
    with pytest.raises(ConfigError, match="not installed"):
        LLM("mine", executor=f"scripted:{script}")
