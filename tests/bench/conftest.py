"""A scripted engine that never stops talking, and the command line around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli import main

Result = tuple[int, str, str]


@pytest.fixture(scope="session")
def script_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "script.json"
    path.write_text(json.dumps({"default": {"text": " one two", "repeat": True}, "max_model_len": 256}))
    return path


@pytest.fixture
def bench(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Run `jaxllm bench` in this process: exit code, stdout, stderr."""

    def run(*args: Any) -> Result:
        code = main(["bench", *map(str, args)])
        out = capsys.readouterr()
        return code, out.out, out.err

    return run
