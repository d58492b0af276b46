"""A scripted engine behind the command line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli import main


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.json"
    responses = [
        {"prompt_contains": "capital of France", "text": " Paris."},
        {"prompt_contains": "two colours", "choices": [" red", " green"]},
        {"prompt_contains": "count", "text": " one two three four five six seven eight"},
    ]
    path.write_text(json.dumps({"responses": responses, "default": {"text": "Hello 🫠!"}, "max_model_len": 64}))
    return path


Result = tuple[int, str, str]


@pytest.fixture
def cli(script: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run a command in this process: exit code, stdout, stderr."""

    def run(command: str, *args: Any, scripted: bool = True) -> Result:
        engine = ["--executor", f"scripted:{script}"] if scripted else []
        code = main([command, *map(str, args), *engine])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run
