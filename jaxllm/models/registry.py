"""Which class runs which architecture. Classes are imported when asked for."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from jaxllm.errors import UnsupportedModel

if TYPE_CHECKING:
    from jaxllm.models.base import Model

# The architecture as config.json spells it: "module:Class".
MODELS: dict[str, str] = {
    "LlamaForCausalLM": "jaxllm.models.llama:LlamaForCausalLM",
}


def model_class(architecture: str) -> type[Model]:
    """The class that runs `architecture`.

    Raises:
        UnsupportedModel: no family here does; the message lists those that are served.
    """
    home = MODELS.get(architecture)
    if home is None:
        supported = ", ".join(sorted(MODELS))
        raise UnsupportedModel(f"architecture={architecture!r} is not supported; supported: {supported}")
    module, _, name = home.partition(":")
    return getattr(importlib.import_module(module), name)
