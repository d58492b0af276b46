"""/tokenize and /detokenize: the same prompt as the chat route, behind the same key."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import processors

from jaxllm.config.checkpoint import resolve_model
from jaxllm.config.gguf_file import GGUFFile
from jaxllm.testing.scripted import Script, ScriptedExecutor
from jaxllm.tokenizer.gguf import build_backend
from jaxllm.tokenizer.load import load_tokenizer
from tests.helpers.scripted_engine import scripted
from tests.server.harness import SETTINGS, Running, running

HI = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Zürich"}'}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "sunny"}
BOS = "<|im_start|>"


def _text(server: Running, messages: list[Any], **fields: Any) -> str:
    reply = server.post("/tokenize", {"messages": messages, **fields})
    assert reply.status_code == 200, reply.text
    return server.post("/detokenize", {"tokens": reply.json()["tokens"]}).json()["prompt"]


def test_a_text_comes_back_as_it_was(server: Running) -> None:
    reply = server.post("/tokenize", {"prompt": "Größe 🫠", "return_token_strs": True}).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"]) == 12
    assert reply["max_model_len"] == SETTINGS.max_model_len
    assert server.post("/detokenize", {"tokens": reply["tokens"]}).json() == {"prompt": "Größe 🫠"}
    assert server.post("/tokenize", {"prompt": "", "model": "tiny"}).json() == {
        "count": 0,
        "max_model_len": SETTINGS.max_model_len,
        "tokens": [],
        "token_strs": None,
    }


def test_a_chat_has_the_tokens_that_the_chat_route_runs(server: Running) -> None:
    for fields in ({}, {"chat_template_kwargs": {"x": 1}}):
        ran = server.chat("hi", return_token_ids=True, max_tokens=1, **fields).json()
        assert server.post("/tokenize", {"messages": HI, **fields}).json()["tokens"] == ran["prompt_token_ids"]
    assert _text(server, HI) == "<|user|>hi<|assistant|>"
    assert _text(server, HI, add_generation_prompt=False) == "<|user|>hi"


def test_tpl_01_untidy_histories_render_without_none() -> None:
    template = (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "[{{ c.function.name }} {{ c.function.arguments | tojson }}]{% endfor %}{% endfor %}"
    )
    with running(scripted(), template=template) as served:
        for content in ({"content": None}, {}, {"content": []}, {"content": ""}):
            text = _text(served, [*HI, {"role": "assistant", **content, "tool_calls": [CALL]}, RESULT])
            assert text == '<user>hi<assistant>[look_up {"city": "Zürich"}]<tool>sunny'
        parts = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
        assert _text(served, parts) == _text(served, HI) == "<user>hi"
        answer = {"role": "assistant", "content": "yes"}
        assert _text(served, [*HI, {**answer, "tool_calls": []}]) == _text(served, [*HI, answer])


def test_tpl_04_a_continued_message_ends_the_prompt_exactly(server: Running) -> None:
    begun = [*HI, {"role": "assistant", "content": "The answer is "}]
    assert _text(server, begun, continue_final_message=True) == "<|user|>hi<|assistant|>The answer is "
    for wrong in (
        {"messages": begun, "continue_final_message": True, "add_generation_prompt": True},
        {"messages": HI, "continue_final_message": True},
    ):
        reply = server.post("/tokenize", wrong)
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": HI}, "prompt"),
        ("/tokenize", {"prompt": ["a"]}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ("/tokenize", {"messages": HI, "tools": [{"type": "function"}]}, "tools"),
        ("/tokenize", {"messages": HI, "chat_template": "{{ 1 }}"}, "chat_template"),
        ("/tokenize", {"prompt": "a", "model": "gpt-none"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {"tokens": [1, -1]}, "tokens[1]"),
        ("/detokenize", {"tokens": [10**6]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens[0]"),
    ],
    ids=str,
)
def test_wrong_fields_are_named(server: Running, path: str, body: dict[str, Any], param: str) -> None:
    reply = server.post(path, body)
    assert reply.status_code == (404 if param == "model" else 400)
    assert reply.json()["error"]["param"] == param
    assert len(reply.json()["error"]["message"]) < 400


def test_special_tokens_keep_their_text(server: Running) -> None:
    eos = server.state.engine.tokenizer.eos_id
    assert server.post("/detokenize", {"tokens": [104, eos]}).json()["prompt"].startswith("h<")


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """A tokenizer that puts BOS first, and a template that writes it."""
    place: Path = tmp_path_factory.mktemp("bos")
    metadata: Mapping[str, Any] = GGUFFile.open(resolve_model(None)).metadata
    backend: tokenizers.Tokenizer = build_backend(metadata).backend
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    backend.save(str(place / "tokenizer.json"))
    (place / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS}))
    tokenizer = load_tokenizer(place)
    executor = ScriptedExecutor(eos_id=2, default=Script((2000,), repeat=True))
    parts = {"tokenizer": tokenizer, "vocab_size": tokenizer.vocab_size, "eos_ids": frozenset({2})}
    template = BOS + "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
    with running(executor, template=template, parts=parts) as served:
        yield served


def test_tpl_03_chat_and_completions_start_with_exactly_one_bos(with_bos: Running) -> None:
    tokenizer = with_bos.state.engine.tokenizer
    chat = with_bos.chat("hi", return_token_ids=True, max_tokens=1).json()["prompt_token_ids"]
    text = with_bos.complete("hi", return_token_ids=True, max_tokens=1).json()["choices"][0]["prompt_token_ids"]
    bare = with_bos.complete("hi", return_token_ids=True, max_tokens=1, add_special_tokens=False).json()
    assert [ids.count(tokenizer.bos_id) for ids in (chat, text)] == [1, 1]
    assert chat[0] == text[0] == tokenizer.bos_id
    assert bare["choices"][0]["prompt_token_ids"] == text[1:]
    assert with_bos.post("/tokenize", {"messages": HI}).json()["tokens"] == chat
    assert with_bos.post("/tokenize", {"prompt": "hi"}).json()["tokens"] == text
    assert with_bos.post("/tokenize", {"prompt": "hi", "add_special_tokens": False}).json()["tokens"] == text[1:]
