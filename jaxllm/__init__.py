"""jaxllm: an LLM serving engine in JAX. Importing it imports nothing else (and never jax)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxllm.engine.async_engine import AsyncEngine
    from jaxllm.llm import LLM
    from jaxllm.types.outputs import CompletionOutput, RequestOutput
    from jaxllm.types.processors import LogitsProcessor
    from jaxllm.types.sampling import BeamSearchParams, SamplingParams
    from jaxllm.types.service import ServiceParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "LogitsProcessor",
    "RequestOutput",
    "SamplingParams",
    "ServiceParams",
    "__version__",
]

_HOMES = {
    "LLM": "jaxllm.llm",
    "AsyncEngine": "jaxllm.engine.async_engine",
    "BeamSearchParams": "jaxllm.types.sampling",
    "CompletionOutput": "jaxllm.types.outputs",
    "LogitsProcessor": "jaxllm.types.processors",
    "RequestOutput": "jaxllm.types.outputs",
    "SamplingParams": "jaxllm.types.sampling",
    "ServiceParams": "jaxllm.types.service",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'jaxllm' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)
