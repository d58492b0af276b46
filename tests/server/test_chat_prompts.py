"""TPL-01 to TPL-04 over HTTP: what a conversation becomes, and how a template refuses one."""

from __future__ import annotations

from typing import Any

import pytest

from jaxllm.engine.inputs import TextPrompt
from jaxllm.testing.byte_tokenizer import ByteLevelTokenizer
from tests.helpers.scripted_engine import scripted
from tests.server.canned import Canned, CannedEngine, ask
from tests.server.harness import running

CHAT = "/v1/chat/completions"
TOOLS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content if m.content is not none else '' }}"
    "{% for call in m.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments.city }}]{% endfor %}"
    "</{{ m.role }}>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
PICKY = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% if not loop.first and m.role == loop.previtem.role %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.content }}{% endfor %}{{ flavour.upper() if flavour }}"
)
CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def rendered(template: str, messages: list[Any], *, server: dict[str, Any] | None = None, **fields: Any) -> str:
    """The prompt that the engine gets."""
    engine = CannedEngine([Canned([b"A"])])
    reply = ask(engine, CHAT, {"messages": messages, **fields}, template=template, **(server or {}))
    assert reply.status_code == 200, reply.text
    [(prompt, _)] = engine.asked
    assert isinstance(prompt, TextPrompt)
    assert not prompt.add_special_tokens
    return prompt.text


def refusal(template: str, messages: list[Any], *, server: dict[str, Any] | None = None, **fields: Any) -> Any:
    """The error of a request that never reaches the engine; the same whole and streamed."""
    errors: list[Any] = []
    for stream in (False, True):
        engine = CannedEngine([])
        body = {"messages": messages, "stream": stream, **fields}
        reply = ask(engine, CHAT, body, template=template, **(server or {}))
        assert reply.status_code == 400
        assert reply.headers["content-type"] == "application/json"
        assert engine.asked == []
        errors.append(reply.json()["error"])
    assert errors[0] == errors[1]
    return errors[0]


@pytest.mark.parametrize(
    "content",
    [{"content": None}, {}, {"content": []}, {"content": ""}, {"content": [{"type": "text", "text": ""}]}],
    ids=str,
)
def test_tpl_01_a_call_without_words_keeps_the_call_and_its_result(content: dict[str, Any]) -> None:
    messages = [
        user("weather?"),
        {"role": "assistant", "tool_calls": [CALL], **content},
        {"role": "tool", "tool_call_id": "c1", "content": "sunny"},
    ]
    expected = "<user>weather?</user><assistant>[weather Paris]</assistant><tool>sunny</tool><assistant>"
    assert rendered(TOOLS, messages) == expected


def test_tpl_01_text_parts_are_the_plain_string_and_no_calls_are_none() -> None:
    plain = rendered(TOOLS, [user("hi"), {"role": "assistant", "content": "yes"}, user("a\nb")])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls: dict[str, Any] = {"role": "assistant", "content": "yes", "tool_calls": []}
    assert rendered(TOOLS, [user([{"type": "text", "text": "hi"}]), calls, user(parts)]) == plain


def test_tpl_02_a_template_that_refuses_says_why() -> None:
    assert "no system role" in refusal(PICKY, [{"role": "system", "content": "x"}, user("hi")])["message"]
    assert "roles must alternate" in refusal(PICKY, [user("hi"), user("hi")])["message"]
    assert refusal(PICKY, [user("hi")], chat_template_kwargs={"flavour": 5})["message"]
    assert rendered(PICKY, [user("hi")], chat_template_kwargs={"flavour": "mint"}) == "hiMINT"


def test_tpl_02_kwargs_that_the_server_sets_itself_are_400_and_named() -> None:
    for name in ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template", "tokenize"):
        error = refusal(TOOLS, [user("hi")], chat_template_kwargs={name: True})
        assert error["param"] == f"chat_template_kwargs.{name}"
    assert rendered(TOOLS, [user("hi")], chat_template_kwargs={"self": 1, "template": 2, "kwargs": 3})


@pytest.mark.parametrize("stream", [False, True])
def test_tpl_02_a_model_without_a_template_still_completes(stream: bool) -> None:
    with running(scripted(), template=None) as served:
        refused = served.chat("hi", stream=stream)
        assert refused.status_code == 400
        assert "chat template" in refused.json()["error"]["message"]
        assert served.complete("hi", stream=stream).status_code == 200


def test_tpl_03_a_template_that_writes_bos_gives_one_and_a_completion_has_one_too() -> None:
    template = "<bos>{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer = ByteLevelTokenizer(adds_bos=True)
    with running(scripted(), template=template, parts={"tokenizer": tokenizer}) as served:
        chat = served.chat("hi", return_token_ids=True).json()
        text = served.complete("hi", return_token_ids=True).json()["choices"][0]
        assert chat["prompt_token_ids"] == text["prompt_token_ids"] == [256, *b"hi"]
        bare = served.complete("hi", return_token_ids=True, add_special_tokens=False).json()["choices"][0]
        assert bare["prompt_token_ids"] == list(b"hi")


def test_tpl_04_a_continued_message_ends_the_prompt_and_is_not_repeated() -> None:
    begun = [user("q"), {"role": "assistant", "content": "The answer is "}]
    for flags in ({}, {"add_generation_prompt": False}, {"add_generation_prompt": None}):
        prompt = rendered(TOOLS, begun, continue_final_message=True, **flags)
        assert prompt == "<user>q</user><assistant>The answer is "
    reply = ask(CannedEngine([Canned([b"4"])]), CHAT, {"messages": begun, "continue_final_message": True})
    assert reply.json()["choices"][0]["message"]["content"] == "4"
    both = refusal(TOOLS, begun, continue_final_message=True, add_generation_prompt=True)
    assert both["param"] == "continue_final_message"
    assert refusal(TOOLS, [user("q")], continue_final_message=True)["param"] == "continue_final_message"


def test_documents_and_effort_reach_the_template() -> None:
    template = (
        "{% for d in documents or [] %}{{ d.title }};{% endfor %}{{ reasoning_effort }} {{ enable_thinking }} "
        "{{ messages[0].content }}"
    )
    documents = [{"title": "one", "text": "x"}, {"title": "two"}]
    assert rendered(template, [user("hi")], documents=documents, reasoning_effort="none") == "one;two;none False hi"
    kwargs = {"enable_thinking": "perhaps"}
    assert rendered(template, [user("hi")], reasoning_effort="high", chat_template_kwargs=kwargs) == "high perhaps hi"


def test_sec_05_a_requests_own_template_is_used_only_where_the_server_trusts_it() -> None:
    own = "{{ messages[0].content }}!"
    assert refusal(TOOLS, [user("hi")], chat_template=own)["param"] == "chat_template"
    trusting = {"trust_request_chat_template": True}
    assert rendered(TOOLS, [user("hi")], server=trusting, chat_template=own) == "hi!"
    assert refusal(TOOLS, [user("hi")], server=trusting, chat_template="{% for %}")["param"] == "chat_template"
    inside = {"chat_template": own}
    error = refusal(TOOLS, [user("hi")], server=trusting, chat_template_kwargs=inside)
    assert error["param"] == "chat_template_kwargs.chat_template"


def test_the_servers_own_template_variables_yield_to_the_requests() -> None:
    template = "{{ a }}{{ b }}{{ messages[0].content }}"
    server = {"default_chat_template_kwargs": '{"a": 1, "b": 2}'}
    assert rendered(template, [user("x")], server=server) == "12x"
    assert rendered(template, [user("x")], server=server, chat_template_kwargs={"b": 3}) == "13x"
