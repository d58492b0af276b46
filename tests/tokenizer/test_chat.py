"""Chat templates: the trained prompt, untidy messages, and templates that mean harm."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxllm.errors import ConfigError, RequestError, UnsupportedModel
from jaxllm.tokenizer.chat import ChatTemplate
from jaxllm.tokenizer.load import load_chat_template

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/smollm2-golden.json").read_text())
USER = [{"role": "user", "content": "hi"}]
CALL = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": '{"city": "Zürich"}'}}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "sunny"}

# The kinds of templates in the wild: one adds the content, one asks whether it is null, one loops over calls.
ADDING = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '\n' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }} {{ c.function.arguments | tojson }}\n{% endfor %}"
    "{% endfor %}"
)
NULL_TESTING = (
    "{% for m in messages %}{% if m['content'] is none %}"
    "{% for c in m['tool_calls'] %}{{ c['function']['name'] + ' ' + c['function']['arguments'] + '\n' }}{% endfor %}"
    "{% else %}{{ '<' + m['role'] + '>' + m['content'] | trim + '\n' }}{% endif %}{% endfor %}"
)
SPLITTING = (
    "{% for m in messages %}{{ '<' ~ m.role ~ '>' ~ m.content.split('</think>')[-1] ~ '\n' }}"
    "{% if m.tool_calls %}{% for c in m.tool_calls %}{{ c.function.name ~ ' ' ~ c.function.arguments | tojson ~ '\n' }}"
    "{% endfor %}{% endif %}{% endfor %}"
)
KEEPING_CONTENT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% if 'tool_calls' in m %}"
    "{{ m.tool_calls[0].function.name }} {{ m.tool_calls[0].function.arguments | tojson }}\n{% endif %}{% endfor %}"
)
TEMPLATES = [ADDING, NULL_TESTING, SPLITTING, KEEPING_CONTENT]


@pytest.fixture(scope="module")
def template(gguf_path: Path) -> ChatTemplate:
    found = load_chat_template(gguf_path)
    assert found is not None
    return found


def test_rendered_prompts_are_the_golden_ones(template: ChatTemplate) -> None:
    for prompt in GOLDEN["prompts"]:
        assert template.render([{"role": "user", "content": prompt["user"]}]) == prompt["prompt_text"]


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": []}, {"content": ""}])
def test_tpl_01_a_call_without_content_is_kept_and_nothing_says_none(source: str, content: dict[str, Any]) -> None:
    messages = [*USER, {"role": "assistant", **content, "tool_calls": [CALL]}, RESULT]
    text = ChatTemplate(source).render(messages)
    assert "None" not in text
    assert "look_up" in text
    assert '{"city": "Zürich"}' in text
    assert "<tool>sunny" in text


@pytest.mark.parametrize("source", TEMPLATES)
def test_tpl_01_parts_render_as_the_plain_string_and_empty_calls_as_absent(source: str) -> None:
    template = ChatTemplate(source)
    plain = template.render([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}])
    parts = [{"type": "text", "text": "hi"}]
    calls: list[Any] = []
    untidy = [{"role": "user", "content": parts}, {"role": "assistant", "content": "yes", "tool_calls": calls}]
    assert template.render(untidy) == plain
    assert template.render([{"role": "user", "content": ["a", {"type": "text", "text": "b"}]}]) == "<user>a\nb\n"


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "hi",
        ["hi"],
        [{"content": "no role"}],
        [{"role": "user", "content": 7}],
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        [{"role": "user", "content": [{"type": "text"}]}],
        5,
        [{"role": "assistant", "tool_calls": 5}],
        [{"role": "assistant", "tool_calls": "f"}],
        [{"role": "assistant", "tool_calls": [{}]}],
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    ],
)
def test_messages_of_the_wrong_shape_are_refused(messages: Any) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(ADDING).render(messages)
    assert caught.value.param == "messages"


def test_tpl_02_the_templates_own_message_reaches_the_user() -> None:
    template = ChatTemplate("{{ raise_exception('System role not supported') if messages[0].role == 'system' }}")
    with pytest.raises(RequestError, match="System role not supported"):
        template.render([{"role": "system", "content": "x"}])
    assert template.render(USER) == ""


@pytest.mark.parametrize("name", ["messages", "chat_template", "tokenize"])
def test_tpl_02_template_variables_cannot_replace_the_request(name: str) -> None:
    with pytest.raises(RequestError, match=name):
        ChatTemplate(ADDING).render(USER, **{name: "x"})


def test_tpl_04_a_continued_message_ends_the_prompt_exactly(template: ChatTemplate) -> None:
    messages = [*USER, {"role": "assistant", "content": "The answer is "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe answer is ")
    trimming = ChatTemplate("{% for m in messages %}{{ m.content | trim }}<end>{% endfor %}")
    assert (
        trimming.render(messages, add_generation_prompt=False, continue_final_message=True) == "hi<end>The answer is "
    )
    with pytest.raises(RequestError, match="both"):
        template.render(messages, add_generation_prompt=True, continue_final_message=True)
    with pytest.raises(RequestError, match="assistant"):
        template.render(USER, add_generation_prompt=False, continue_final_message=True)


def test_names_that_hugging_face_templates_rely_on_work() -> None:
    source = (
        "{%- for m in messages %}\n    {% if loop.last and loop.length == 2 and loop.revindex == 1 %}\n"
        "{% generation %}{{ bos_token }}{{ {'a': [1, 'é<']} | tojson }}{% endgeneration %}\n"
        "    {% else %}\n{% continue %}\n    {% endif %}\n{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ tools is none }}{{ extra }}{% set ns = namespace(n=1) %}{{ ns.n + 1 }}"
    )
    text = ChatTemplate(source, {"bos_token": "<s>"}).render([*USER, *USER], extra="!")
    assert text == '<s>{"a": [1, "é<"]}4True!2'


HARMFUL = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% set x = i %}{% endfor %}{% endfor %}",
    "{% for i in range(10000000000) %}{% endfor %}",
    "{% for x in [1, 2] recursive %}{{ loop(range(100000)) if x < 100001 }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{{ 'a' * 10000000000 }}",
    "{{ [1] * 10000000000 }}",
    "{{ 'a' | center(10000000000) }}",
    "{{ 'a'.ljust(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ 7 ** 10000000000 }}",
    "{{ (1).to_bytes(10000000000, 'big') }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "{{ (['a' * 1000000] * 100000) | join }}",
    "{{ ''.join(['a' * 1000000] * 100000) }}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x }}",
    "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}{{ n.x | tojson }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.system('true') }}",
    "{{ messages.append(1) }}",
    "{{ undefined_function() }}",
]


@pytest.mark.parametrize("source", HARMFUL)
def test_sec_05_a_harmful_template_is_cut_off(source: str) -> None:
    start = time.monotonic()
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate(source, limit_s=0.3).render(USER)
    assert time.monotonic() - start < 3


def test_a_template_that_does_not_parse_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match="chat template"):
        ChatTemplate("{% for m in %}")


def test_template_places_of_a_folder(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path) is None
    config: Mapping[str, Any] = {
        "bos_token": {"content": "<s>"},
        "chat_template": [{"name": "rag", "template": "no"}, {"name": "default", "template": "{{ bos_token }}1"}],
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert _render(load_chat_template(tmp_path)) == "<s>1"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}2")
    assert _render(load_chat_template(tmp_path)) == "<s>2"
    (tmp_path / "mine.jinja").write_text("{{ bos_token }}3")
    assert _render(load_chat_template(tmp_path, str(tmp_path / "mine.jinja"))) == "<s>3"
    assert _render(load_chat_template(tmp_path, "{{ bos_token }}4")) == "<s>4"
    with pytest.raises(ConfigError, match="neither a file nor a template"):
        load_chat_template(tmp_path, "missing.jinja")


@pytest.mark.parametrize("templates", [[5], [{"name": "default"}], [{"name": "default", "template": 5}]])
def test_a_folder_with_templates_of_the_wrong_shape_is_refused(tmp_path: Path, templates: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    with pytest.raises(UnsupportedModel, match="chat_template holds"):
        load_chat_template(tmp_path)


def test_a_template_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "chat_template.jinja"
    file.write_bytes(b"\xff{{ 1 }}")
    for override in (None, str(file)):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_chat_template(tmp_path, override)


def _render(template: ChatTemplate | None) -> str:
    assert template is not None
    return template.render(USER)
