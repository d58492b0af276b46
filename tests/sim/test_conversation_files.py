"""Lengths of conversations, from files written by hand."""

from __future__ import annotations

import json

import pytest

from jaxllm.errors import ConfigError
from jaxllm.sim.conversations import read_conversations
from jaxllm.sim.workload_spec import make_workload


def say(role, value):
    return {"from": role, "value": value}


SHAREGPT = [
    {"id": "a", "conversations": [say("human", "one two three"), say("gpt", "w " * 10), say("human", "unanswered")]},
    {"id": "b", "conversations": [say("gpt", "nobody asked")]},
    {"id": "c", "conversations": []},
    {"id": "d", "conversations": [say("system", "be kind"), say("user", "x"), say("chatgpt", "y " * 100)]},
]


def written(folder, text, name="chats.json"):
    path = folder / name
    path.write_text(text)
    return path


def test_words_are_counted_for_each_question_and_its_answer(tmp_path):
    path = written(tmp_path, json.dumps(SHAREGPT, indent=1))
    assert read_conversations(path) == (((4, 13),), ((1, 130),))  # 3, 10, 1 and 100 words, times 1.3


def test_json_lines_say_the_same_as_a_list(tmp_path):
    lines = written(tmp_path, "\n".join(map(json.dumps, SHAREGPT)), "chats.jsonl")
    assert read_conversations(lines) == read_conversations(written(tmp_path, json.dumps(SHAREGPT)))


def test_a_message_may_say_its_tokens(tmp_path):
    messages = [
        {"role": "user", "content": "ignored", "tokens": 5},
        {"role": "user", "tokens": 6},
        {"role": "assistant", "tokens": 7},
        {"role": "user", "tokens": 8},
        {"role": "assistant", "tokens": 9},
    ]
    path = written(tmp_path, json.dumps([{"messages": messages}]))
    assert read_conversations(path) == (((11, 7), (8, 9)),)
    assert read_conversations(path, max_prompt=10) == (((8, 9),),)
    assert read_conversations(path, max_output=7) == (((11, 7),),)


def test_single_requests_have_the_lengths_of_first_questions(tmp_path):
    path = written(tmp_path, json.dumps(SHAREGPT))
    spec = {"kind": "at_once", "num_requests": 50, "lengths": {"file": str(path)}}
    found = {(r.num_prompt, r.num_output) for r in make_workload(spec, 0, "test: workload").start()}
    assert found == {(4, 13), (1, 130)}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no question and answer"),
        ("[]", "no question and answer"),
        ("{}", "line 1: {}; accepted: an object with a list"),
        ("[\n{},\n]", "line 2: {}"),
        ('[\n{"conversations": [1]}]', "line 2: a message is 1"),
        ('[\n\n{"conversations": [{"from": "martian", "value": "x"}]}]', "line 3: from='martian'; accepted: assistant"),
        ('[{"conversations": [{"from": [], "value": "x"}]}]', "line 1: from=[]; accepted: assistant"),
        ('[{"conversations": [{"from": "human", "value": 3}]}]', "line 1: value=3"),
        ('[{"conversations": [{"from": "human", "tokens": -3}]}]', "line 1: tokens=-3"),
        ('[{"messages": []},\n{"messages": [}', "the file ends in the list"),
        ('[{"messages": []},\n{"messages": [}]', "line 2: not JSON"),
        ('[{"messages": []},', "the file ends in the list"),
        ("[" * 100_000 + "]", "not JSON"),
    ],
)
def test_a_wrong_file_is_refused_by_line_and_field(tmp_path, text, said):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_conversations(path)
    assert said in str(error.value)
    assert str(path) in str(error.value)


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_conversations(tmp_path / "none.json")
