"""The default model's tokenizer, read once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config.checkpoint import resolve_model
from jaxllm.config.gguf_file import GGUFFile
from jaxllm.tokenizer.fast import FastTokenizer


@pytest.fixture(scope="session")
def gguf_path() -> Path:
    return resolve_model(None)


@pytest.fixture(scope="session")
def metadata(gguf_path: Path) -> Mapping[str, Any]:
    return GGUFFile.open(gguf_path).metadata


@pytest.fixture(scope="session")
def smollm(metadata: Mapping[str, Any]) -> FastTokenizer:
    return FastTokenizer.from_gguf(metadata)
