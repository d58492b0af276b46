"""Which file here describes which architecture. A family is one line in each table it appears in."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Protocol, cast

from jaxllm.config.gguf_file import GGUFFile
from jaxllm.config.hf.keys import Keys
from jaxllm.config.model import ModelConfig
from jaxllm.errors import ConfigError, UnsupportedModel, WeightsError

# "architectures" of config.json -> module with `from_hf`.
HF_ARCHITECTURES: Mapping[str, str] = {"LlamaForCausalLM": "jaxllm.config.hf.llama"}
# "general.architecture" of GGUF -> module with `from_gguf`.
GGUF_ARCHITECTURES: Mapping[str, str] = {"llama": "jaxllm.config.hf.llama"}


class Family(Protocol):
    """What the module of a family offers."""

    def from_hf(self, config: Mapping[str, Any], source: str = ...) -> ModelConfig: ...

    def from_gguf(self, file: GGUFFile) -> ModelConfig: ...


def from_hf(config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """The model that a config.json describes.

    Raises:
        ConfigError: a key is missing or has the wrong type.
        UnsupportedModel: no family here runs it, or not with these settings.
    """
    names: Any = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError(f"{source}: key 'architectures' is {names!r}; accepted: a list with one name")
    for name in cast("list[Any]", names):
        if name in HF_ARCHITECTURES:
            return _family(HF_ARCHITECTURES[name]).from_hf(config, source)
    raise UnsupportedModel(f"{source}: architecture {names!r} is not served; served: {', '.join(HF_ARCHITECTURES)}")


def from_gguf(file: GGUFFile) -> ModelConfig:
    """The model that a GGUF file's metadata describes.

    Raises:
        WeightsError: a key is missing or has the wrong type.
        UnsupportedModel: no family here runs it, or not with these settings.
    """
    name = Keys(str(file.path), file.metadata, WeightsError).text("general.architecture")
    if name not in GGUF_ARCHITECTURES:
        served = ", ".join(GGUF_ARCHITECTURES)
        raise UnsupportedModel(f"{file.path}: GGUF architecture {name[:80]!r} is not served; served: {served}")
    return _family(GGUF_ARCHITECTURES[name]).from_gguf(file)


def _family(module: str) -> Family:
    return cast("Family", importlib.import_module(module))
