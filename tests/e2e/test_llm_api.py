"""The Python face, on a scripted device."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxllm import LLM, RequestOutput, SamplingParams, ServiceParams
from jaxllm.errors import ConfigError, RequestError
from jaxllm.testing.logprobs import scripted_logprob, scripted_top
from jaxllm.types.processors import LogitsProcessor
from jaxllm.types.sampling import BeamSearchParams, OutputKind


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm") / "script.json"
    responses: list[dict[str, object]] = [
        {"prompt_contains": "France", "text": " Paris."},
        {"prompt_contains": "colour", "choices": [" red", " green", " blue"]},
    ]
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


def test_several_sequences_and_their_log_probabilities(llm: LLM) -> None:
    (output,) = llm.generate("a colour", SamplingParams(n=3, logprobs=2, prompt_logprobs=1, max_tokens=9))
    assert [(c.index, c.text) for c in output.outputs] == [(0, " red"), (1, " green"), (2, " blue")]
    for completion in output.outputs:
        assert completion.logprobs is not None
        assert [position[0].token_id for position in completion.logprobs] == list(completion.token_ids)
        assert completion.cumulative_logprob == sum(position[0].logprob for position in completion.logprobs)
        assert [position[0].decoded_token for position in completion.logprobs] == [
            llm.tokenizer.decode([i], skip_special_tokens=False) for i in completion.token_ids
        ]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None


EVERY_FIELD: dict[str, Any] = {
    "n": 2,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 1.2,
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 5,
    "min_p": 0.1,
    "seed": 3,
    "stop": ["zzz"],
    "stop_token_ids": [5],
    "ignore_eos": True,
    "max_tokens": 4,
    "min_tokens": 2,
    "logprobs": 2,
    "prompt_logprobs": 2,
    "logprob_token_ids": [1, 2],
    "detokenize": False,
    "skip_special_tokens": False,
    "spaces_between_special_tokens": False,
    "include_stop_str_in_output": True,
    "output_kind": OutputKind.DELTA,
    "stream_interval": 2,
    "logit_bias": {5: 1.0},
    "allowed_token_ids": [5, 6],
    "bad_words": ["never"],
    "repetition_detection": {"max_pattern_size": 3, "min_count": 9},
    "truncate_prompt_tokens": 2,
    "skip_reading_prefix_cache": True,
    "extra_args": {},
}
NOT_SERVED = {"structured_outputs", "thinking_token_budget"}


def test_every_field_of_sampling_params_is_known_here() -> None:
    from jaxllm.types.sampling import sampling_fields

    assert set(EVERY_FIELD) | NOT_SERVED == set(sampling_fields())


@pytest.mark.parametrize("name", EVERY_FIELD)
def test_every_field_is_taken(llm: LLM, name: str) -> None:
    (output,) = llm.generate("a b c", SamplingParams(**{"max_tokens": 6, name: EVERY_FIELD[name]}))
    assert output.finished
    assert len(output.outputs) == (2 if name == "n" else 1)
    assert len(output.prompt_token_ids) == (2 if name == "truncate_prompt_tokens" else 3)


def test_sam_01_a_wrong_token_is_named_and_the_engine_lives_on(llm: LLM) -> None:
    vocab_size = llm.tokenizer.vocab_size
    with pytest.raises(RequestError, match=f"logit_bias holds {vocab_size + 5}"):
        llm.generate("a", SamplingParams(logit_bias={vocab_size + 5: 1.0}))
    assert texts(llm.generate("a")) == ["Hello 🫠!"]


def test_sch_03_prompts_around_the_longest(llm: LLM) -> None:
    room = llm.max_model_len
    for length in (room - 2, room - 1):
        (output,) = llm.generate([100] * length, SamplingParams(max_tokens=None, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == room - length
        assert output.outputs[0].finish_reason == "length"
    for length in (room, room + 1):
        with pytest.raises(RequestError, match=rf"{length} tokens .* {room} tokens"):
            llm.generate([100] * length, SamplingParams(max_tokens=None))
    scored = llm.generate([100] * room, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert scored[0].outputs[0].token_ids == ()


def test_beam_search_gives_the_best_first(llm: LLM) -> None:
    prompts = ["capital of France", {"prompt_token_ids": [7, 8]}]
    outputs = llm.beam_search(prompts, BeamSearchParams(beam_width=3, max_tokens=4, ignore_eos=True))
    assert outputs[0].prompt == "capital of France"
    assert outputs[1].prompt_token_ids == (7, 8)
    for output in outputs:
        totals = [c.cumulative_logprob or 0.0 for c in output.outputs]
        assert totals == sorted(totals, reverse=True)
        assert [len(c.token_ids) for c in output.outputs] == [4, 4, 4]
        # The script's most likely tokens do not depend on what came before.
        first = llm.generate([list(output.prompt_token_ids)], SamplingParams(max_tokens=1))[0].outputs[0].token_ids[0]
        best = scripted_top(first, 1, llm.tokenizer.vocab_size)[0]
        assert totals[0] == 4 * scripted_logprob(first, best, llm.tokenizer.vocab_size)
        assert output.outputs[0].token_ids == (best,) * 4


@pytest.mark.parametrize("params", [5, None, SamplingParams(), {"beam_width": 2}])
def test_beam_search_takes_its_own_params_alone(llm: LLM, params: Any) -> None:
    with pytest.raises(RequestError, match="accepted: BeamSearchParams") as caught:
        llm.beam_search("a", params)
    assert caught.value.param == "params"
    with pytest.raises(RequestError, match=r"prompts\[1\]: prompt is empty"):
        llm.beam_search(["a", ""], BeamSearchParams(beam_width=2, max_tokens=2))
    with pytest.raises(RequestError, match="max_logprobs=20; accepted: at most 10"):
        llm.beam_search("a", BeamSearchParams(beam_width=11, max_tokens=2))


@pytest.mark.parametrize("bad", [5, "x", [len]])
def test_hooks_that_are_no_functions_are_refused_by_name(llm: LLM, script: Path, bad: Any) -> None:
    with pytest.raises(RequestError, match=r"on_update=.* accepted: a function") as caught:
        llm.generate("a", on_update=bad)
    assert caught.value.param == "on_update"
    with pytest.raises(ConfigError, match=r"report=.* accepted: a StartupReport"):
        LLM(executor=f"scripted:{script}", report=bad)
    with pytest.raises(ConfigError, match=r"progress=.* accepted: a function"):
        LLM(executor=f"scripted:{script}", progress=bad)
    with pytest.raises(ConfigError, match=r"logits_processors.* accepted: a list"):
        LLM(executor=f"scripted:{script}", logits_processors=bad)


def test_arguments_of_declared_logits_processors_are_taken(script: Path) -> None:
    shift = LogitsProcessor("shift", lambda logits, by: logits + by[:, None])
    with LLM(executor=f"scripted:{script}", logits_processors=[shift]) as llm:
        assert texts(llm.generate("a", SamplingParams(extra_args={"shift": 0.5}))) == ["Hello 🫠!"]
        with pytest.raises(RequestError, match="names 'other'; accepted: shift"):
            llm.generate("a", SamplingParams(extra_args={"other": 0.5}))
    with pytest.raises(ConfigError, match="names of their own"):
        LLM(executor=f"scripted:{script}", logits_processors=[shift, shift])


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


def test_priority_and_service_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    patient, hurried = ServiceParams(tenant="alice"), ServiceParams(deadline_s=60)
    assert texts(llm.generate(["a", "b"], priority=[2, -1], service=[patient, hurried])) == ["Hello 🫠!"] * 2
    assert texts(llm.generate(["a", "b"], priority=None, service=None)) == ["Hello 🫠!"] * 2
    one = [{"role": "user", "content": "capital of France?"}]
    assert texts(llm.chat(one, priority=3, service=patient)) == [" Paris."]
    for name, value in {"priority": [1], "service": [patient] * 3}.items():
        with pytest.raises(RequestError, match=f"{name} has {len(value)} entries for 2 prompts") as caught:
            llm.generate(["a", "b"], **{name: value})
        assert caught.value.param == name
    wrong: dict[str, Any] = {"priority": [1, 1.5], "service": {"deadline_s": 3}}
    for name, value in wrong.items():
        with pytest.raises(RequestError, match=f"{name}=.*accepted"):
            llm.generate(["a", "b"], **{name: value})


def test_a_reset_forgets_what_was_cached(llm: LLM) -> None:
    prompt = list(range(100))
    llm.generate([prompt])
    assert llm.generate([prompt])[0].num_cached_tokens > 0
    assert llm.reset_prefix_cache() is True
    assert llm.generate([prompt])[0].num_cached_tokens == 0
