"""The scripted executor does what its file says, and says what is wrong with a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jaxllm.engine.clock import ManualClock
from jaxllm.engine.core import EngineCore
from jaxllm.engine.engine import Engine
from jaxllm.engine.messages import AddRequest
from jaxllm.errors import ConfigError
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from jaxllm.testing.faults import Fault, FaultKind, FaultPlace, FaultyExecutor
from jaxllm.testing.scripted import Script, ScriptedExecutor
from jaxllm.types.sampling import SamplingParams
from tests.helpers.scripted_engine import EOS, Settings, make_parts, script, scripted

TOKENIZER = ByteLevelTokenizer()
PARAMS = SamplingParams(max_tokens=12)


def load(path: Path, **content: Any) -> ScriptedExecutor:
    path.write_text(json.dumps(content))
    return ScriptedExecutor.from_file(path, encode=TOKENIZER.encode, eos_id=EOS, decode=TOKENIZER.decode)


def answers(executor: ScriptedExecutor, *prompts: str) -> list[str]:
    with Engine(make_parts(executor)) as engine:
        return [o.outputs[0].text for o in engine.generate(prompts, [PARAMS] * len(prompts))]


def test_a_file_chooses_answers_by_prompt_then_by_order_then_by_default(tmp_path: Path) -> None:
    executor = load(
        tmp_path / "script.json",
        responses=[
            {"prompt_contains": "France", "text": "Paris"},
            {"prompt_starts_with_ids": list(b"ab"), "token_ids": list(b"starts")},
            {"prompt_contains_ids": list(b"yz"), "text": "ha", "repeat": True},
            {"text": "first"},
            {"text": "second"},
        ],
        default={"text": "default"},
        max_model_len=512,
    )
    assert executor.max_model_len == 512
    prompts = ("q", "capital of France?", "abc", "xyz", "q", "q", "q")
    expected = ["first", "Paris", "starts", "hahahahahaha", "second", "default", "default"]
    assert answers(executor, *prompts) == expected


def test_an_empty_file_ends_every_request_at_once(tmp_path: Path) -> None:
    assert answers(load(tmp_path / "script.json"), "a") == [""]


def test_repeat_for_the_whole_file(tmp_path: Path) -> None:
    executor = load(
        tmp_path / "s.json", repeat=True, responses=[{"text": "no", "repeat": False}], default={"text": "ab"}
    )
    assert answers(executor, "1", "2") == ["no", "abababababab"]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"respones": []}, "respones"),
        ({"responses": [{"txt": "a"}]}, r"txt.*responses"),
        ({"responses": [{"text": 5}]}, "responses.*text"),
        ({"responses": [{"text": "a", "token_ids": [1]}]}, r"responses\[0\] has both"),
        ({"faults": [{"step": 1, "kind": "explode"}]}, "explode"),
        ({"faults": [{"kind": "raise"}]}, "step"),
        ({"step_s": "fast"}, "step_s"),
        ({"step_s": -0.5}, r"step_s=-0\.5; accepted: a finite number of seconds, at least 0"),
        ({"max_model_len": 1}, "max_model_len=1; accepted: at least 2"),
        ({"faults": [{"step": 0, "kind": "raise"}]}, r"faults\[0\]\.step=0; accepted: at least 1"),
        ({"responses": [{"text": "a"}, {"token_ids": [3, -1]}]}, r"responses\[1\]\.token_ids holds -1; accepted"),
        ({"responses": [{"prompt_starts_with_ids": [-2], "text": ""}]}, "prompt_starts_with_ids holds -2"),
        ({"responses": [{"prompt_contains_ids": [-2], "text": ""}]}, "prompt_contains_ids holds -2"),
        ({"responses": [{"choices": ["a", [1, -7]]}]}, r"responses\[0\]\.choices\[1\] holds -7"),
        ({"responses": [{"choices": []}]}, r"responses\[0\]\.choices=\[\]; accepted: at least one"),
        ({"responses": [{"choices": ["a"], "text": "b"}]}, r"responses\[0\] has both text and choices"),
        ({"default": {"token_ids": [2147483648]}}, "default.token_ids holds 2147483648"),
    ],
)
def test_a_wrong_file_is_a_config_error_that_names_the_key(tmp_path: Path, content: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        load(tmp_path / "script.json", **content)


def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ScriptedExecutor.from_file(tmp_path / "none.json", encode=TOKENIZER.encode, eos_id=EOS)
    (tmp_path / "bad.json").write_bytes(b"{\xff")
    with pytest.raises(ConfigError, match=r"bad\.json"):
        ScriptedExecutor.from_file(tmp_path / "bad.json", encode=TOKENIZER.encode, eos_id=EOS)


def test_text_conditions_need_a_tokenizer_that_decodes(tmp_path: Path) -> None:
    path = tmp_path / "script.json"
    path.write_text('{"responses": [{"prompt_contains": "a", "text": "b"}]}')
    with pytest.raises(ConfigError, match="prompt_contains"):
        ScriptedExecutor.from_file(path, encode=TOKENIZER.encode, eos_id=EOS)


def test_faults_in_a_file(tmp_path: Path) -> None:
    executor = load(tmp_path / "script.json", faults=[{"step": 2, "kind": "raise", "where": "submit"}])
    executor._injector.reach(2, FaultPlace.COLLECT)
    with pytest.raises(RuntimeError, match="submit of step 2"):
        executor._injector.reach(2, FaultPlace.SUBMIT)


def test_a_faulty_executor_passes_everything_else_through() -> None:
    executor = FaultyExecutor(scripted(default=script("same")), [Fault(1000, FaultKind.DIE)])
    with Engine(make_parts(executor)) as engine:
        assert engine.generate(["a"], [PARAMS])[0].outputs[0].text == "same"


def test_scripts_go_by_position() -> None:
    once, again = Script((1, 2)), Script((1, 2), repeat=True)
    assert [once.token(i, 9) for i in range(4)] == [1, 2, 9, 9]
    assert [again.token(i, 9) for i in range(4)] == [1, 2, 1, 2]
    assert Script(repeat=True).token(0, 9) == 9


def test_choices_go_to_siblings_in_turn() -> None:
    several = Script(choices=((1, 2), (3,), ()), repeat=True)
    assert [[several.token(i, 9, sibling) for i in range(3)] for sibling in range(4)] == [
        [1, 2, 1],
        [3, 3, 3],
        [9, 9, 9],
        [1, 2, 1],
    ]


def tokens_of(executor: ScriptedExecutor, *messages: AddRequest) -> dict[str, str]:
    """What each sequence gets through scheduler and core, as text."""
    parts = make_parts(executor, Settings(num_pages=40))
    core = EngineCore(executor, parts.scheduler, parts.kv, ManualClock())
    for message in messages:
        assert core.add(message) is None
    texts: dict[str, str] = {}
    while core.has_work:
        step = core.step()
        for delta in step.deltas if step else ():
            texts[delta.request_id] = texts.get(delta.request_id, "") + TOKENIZER.decode(delta.token_ids)
    parts.kv.check()
    return texts


def ask(request_id: str, prompt: str, fork_of: str | None = None) -> AddRequest:
    return AddRequest(request_id, tuple(prompt.encode()), PARAMS, arrival_s=0.0, seed=0, fork_of=fork_of)


def family(first: str, prompt: str, num: int) -> list[AddRequest]:
    return [ask(first, prompt)] + [ask(f"{first}/{i}", prompt, first) for i in range(1, num)]


def test_siblings_get_their_choice_and_count_as_one_request(tmp_path: Path) -> None:
    executor = load(
        tmp_path / "script.json",
        responses=[
            {"prompt_contains": "colour", "choices": ["red", list(b"green"), "blue"]},
            {"text": "first"},
            {"choices": ["second", "another"]},
        ],
        default={"choices": ["default"]},
    )
    texts = tokens_of(
        executor,
        *family("a#0", "any", 2),
        *family("a/1#1", "a colour", 4),
        *family("b#2", "any", 2),
        *family("c#3", "any", 2),
        ask("plain", "any"),
    )
    assert texts == {
        **{"a#0": "first", "a#0/1": "first"},
        **{"a/1#1": "red", "a/1#1/1": "green", "a/1#1/2": "blue", "a/1#1/3": "red"},
        **{"b#2": "second", "b#2/1": "another"},
        **{"c#3": "default", "c#3/1": "default", "plain": "default"},
    }


def test_an_id_without_siblings_may_come_again_for_another_answer() -> None:
    executor = scripted(script("one"), script("two"))
    parts = make_parts(executor)
    core = EngineCore(executor, parts.scheduler, parts.kv, ManualClock())
    got: list[int] = []
    for _ in range(2):
        core.add(ask("x", "a"))
        while core.has_work:
            step = core.step()
            got += [i for delta in (step.deltas if step else ()) for i in delta.token_ids]
    assert TOKENIZER.decode(got) == "onetwo"


def test_the_byte_tokenizer_reads_what_it_wrote() -> None:
    text = "a<|user|>\u010f<eos>"
    ids = TOKENIZER.encode(text)
    assert ids == [97, 258, 0xC4, 0x8F, 257]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text
    assert TOKENIZER.decode(ids) == "a\u010f"
    assert [TOKENIZER.token_id(TOKENIZER.token(i) or "") for i in ids] == ids
    assert (TOKENIZER.token(260), TOKENIZER.token_id("zz"), TOKENIZER.token_bytes(300)) == (None, None, b"")
