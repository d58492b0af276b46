"""TPL-03: prompts of wild templates, text and ids, equal those of transformers, with one BOS."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import processors

from jaxllm.errors import RequestError
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.tokenizer.chat import ChatTemplate
from jaxllm.tokenizer.gguf import build_backend
from jaxllm.tokenizer.load import load_chat_template, load_tokenizer
from tests.tokenizer.wild_templates import WILD, WRITES_BOS

BOS, EOS = "<|im_start|>", "<|im_end|>"  # of the vocabulary at hand
TALK = [
    {"role": "user", "content": "  What is 2+2?\n"},
    {"role": "assistant", "content": "<think>easy</think> It's 4. "},
    {"role": "user", "content": "Größe 🫠, 你好?"},
]
WITH_SYSTEM = [{"role": "system", "content": "Be <b>brief</b> & 'kind'."}, *TALK]
CALL = {"id": "1", "type": "function", "function": {"name": "look_up", "arguments": {"city": "Zürich", "n": [1]}}}
WITH_CALL = [*TALK, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "sunny"}]
TOOLS = [{"type": "function", "function": {"name": "look_up", "description": "d", "parameters": {"type": "object"}}}]


CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "talk": (TALK, {}),
    "kwargs": (TALK[:1], {"enable_thinking": True, "date_string": "1 Jan 2030"}),
    "system": (WITH_SYSTEM, {}),
    "call": (WITH_CALL, {}),
    "tools": (TALK, {"tools": TOOLS}),
    "documents": (TALK, {"documents": [{"title": "T", "text": " x "}, {"title": "<U>", "text": "y"}]}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, metadata: Mapping[str, Any]) -> Path:
    """The default model's vocabulary as a Hugging Face folder whose tokenizer puts BOS first."""
    place = tmp_path_factory.mktemp("bos")
    backend: tokenizers.Tokenizer = build_backend(metadata).backend
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    backend.save(str(place / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS, "eos_token": EOS}
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    return place


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return load_tokenizer(folder)


@pytest.fixture(scope="module")
def reference(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def _ours(folder: Path, name: str) -> ChatTemplate:
    template = load_chat_template(folder, WILD[name])
    assert template is not None
    return template


# Where a call has no words, transformers gives "thinking" an empty reply that no model was trained on.
CASES = [(name, case) for name in WILD for case in CHATS if (name, case) != ("thinking", "call")]


@pytest.mark.parametrize("generates", [True, False])
@pytest.mark.parametrize(("name", "case"), CASES)
def test_tpl_03_prompts_are_those_of_transformers(
    folder: Path, tokenizer: Tokenizer, reference: Any, name: str, case: str, generates: bool
) -> None:
    messages, kwargs = CHATS[case]
    asked = {"add_generation_prompt": generates, **kwargs}
    try:
        expected = reference.apply_chat_template(messages, chat_template=WILD[name], tokenize=False, **asked)
    except Exception as error:
        with pytest.raises(RequestError) as refused:
            _ours(folder, name).render(messages, **asked)
        assert str(error) in str(refused.value)
        return
    text = _ours(folder, name).render(messages, **asked)
    assert text == expected
    ids = tokenizer.encode(text, add_special_tokens=False)
    whole = reference.apply_chat_template(messages, chat_template=WILD[name], return_dict=False, **asked)
    assert ids == list(whole)


@pytest.mark.parametrize("name", sorted(WRITES_BOS))
def test_tpl_03_a_template_that_writes_bos_gives_one(folder: Path, tokenizer: Tokenizer, name: str) -> None:
    bos_id = tokenizer.token_id(BOS)
    assert tokenizer.adds_bos
    ids = tokenizer.encode(_ours(folder, name).render(TALK), add_special_tokens=False)
    assert ids[0] == bos_id
    assert ids.count(bos_id) == 1
    assert tokenizer.encode("plain text")[:2].count(bos_id) == 1


@pytest.mark.parametrize("name", list(WILD))
def test_tpl_04_a_continued_message_is_that_of_transformers(folder: Path, reference: Any, name: str) -> None:
    messages = [*TALK, {"role": "assistant", "content": "The answer is"}]
    asked: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    text = _ours(folder, name).render(messages, **asked)
    assert text == reference.apply_chat_template(messages, chat_template=WILD[name], tokenize=False, **asked)
    assert text.endswith("The answer is")


def test_tpl_01_a_call_without_words_is_no_empty_reply(folder: Path) -> None:
    text = _ours(folder, "thinking").render(WITH_CALL)
    assert text.endswith("你好?<|tool_output|>sunny")
