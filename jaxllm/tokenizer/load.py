"""Which tokenizer and which chat template belong to a model path."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from jaxllm.errors import ConfigError, UnsupportedModel, shown
from jaxllm.tokenizer.base import Tokenizer
from jaxllm.tokenizer.chat import ChatTemplate
from jaxllm.tokenizer.fast import FastTokenizer, special_token

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
_GGUF_NAMES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}


def load_tokenizer(model_path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a .gguf file.

    Raises:
        UnsupportedModel: there is none that is known here.
        WeightsError: a GGUF file's header is broken.
    """
    if _is_gguf(model_path):
        return FastTokenizer.from_gguf(_gguf_metadata(model_path))
    fast = model_path / "tokenizer.json"
    if fast.is_file():
        return FastTokenizer.from_file(fast, _tokenizer_config(model_path))
    from jaxllm.tokenizer.hf import HFTokenizer

    return HFTokenizer.from_folder(model_path)


def load_chat_template(model_path: Path, override: str | None = None) -> ChatTemplate | None:
    """The chat template of a model, or `override`: a file's path, or the template itself.

    None where the model has none: chat requests are then refused, and completions still work.

    Raises:
        ConfigError: the override is neither a file nor a template, or the template does not parse.
    """
    if _is_gguf(model_path):
        metadata = _gguf_metadata(model_path)
        source, tokens = metadata.get("tokenizer.chat_template"), _gguf_special_tokens(metadata)
    else:
        config = _tokenizer_config(model_path)
        source = _folder_template(model_path, config)
        tokens = {name: text for name in _SPECIAL_NAMES if (text := special_token(config, name)) is not None}
    if override is not None:
        source = _override_source(override)
    return ChatTemplate(source, tokens) if isinstance(source, str) and source else None


def _is_gguf(path: Path) -> bool:
    return path.suffix.lower() == ".gguf"


def _gguf_metadata(path: Path) -> Mapping[str, Any]:
    from jaxllm.config.gguf_file import GGUFFile

    return GGUFFile.open(path).metadata


def _gguf_special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    tokens = metadata.get("tokenizer.ggml.tokens") or []
    found: dict[str, str] = {}
    for name, key in _GGUF_NAMES.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if isinstance(token_id, int) and 0 <= token_id < len(tokens):
            found[name] = tokens[token_id]
    return found


def _tokenizer_config(folder: Path) -> dict[str, Any]:
    return _json_object(folder / "tokenizer_config.json")


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty where there is no file."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedModel(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path}: a JSON object is needed, not {type(value).__name__}")
    return cast("dict[str, Any]", value)


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template file, else the older places: chat_template.json, tokenizer_config.json."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return _read_text(file)
    for place in (_json_object(folder / "chat_template.json"), config):
        template = place.get("chat_template")
        if isinstance(template, str):
            return template
        if isinstance(template, list):  # several, with names
            return _default_of(cast("list[Any]", template), folder)
    return None


def _default_of(templates: Sequence[Any], folder: Path) -> str | None:
    for entry in templates:
        if not isinstance(entry, dict) or not isinstance(entry.get("template"), str):
            raise UnsupportedModel(f"{folder}: chat_template holds {shown(entry)}; accepted: objects with a template")
    return next((entry["template"] for entry in templates if entry.get("name") == "default"), None)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat template {path} cannot be read: {error}") from None


def _override_source(override: str) -> str:
    if "{" in override or "\n" in override:
        return override
    path = Path(override).expanduser()
    if not path.is_file():
        raise ConfigError(f"chat_template={override!r} is neither a file nor a template (which would hold a '{{')")
    return _read_text(path)
