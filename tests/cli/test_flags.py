"""Flags that hold lists: every time they are given counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxllm.cli.flags import parse, schema_flags
from jaxllm.config.engine import ServerConfig


def parsed(*argv: str) -> dict[str, Any]:
    return parse("serve", "", schema_flags(ServerConfig), argv, schemas=(ServerConfig,))


@pytest.mark.parametrize(
    ("argv", "keys"),
    [
        ((), ()),
        (("--api-key", "a"), ("a",)),
        (("--api-key", "a", "b"), ("a", "b")),
        (("--api-key", "a", "--api-key", "b", "c"), ("a", "b", "c")),
        (("--api-key", "a", "--api-keys", "b"), ("a", "b")),
    ],
)
def test_a_list_flag_given_again_adds_to_the_list(argv: tuple[str, ...], keys: tuple[str, ...]) -> None:
    assert parsed(*argv)["api_keys"] == keys


def test_a_list_flag_replaces_its_default_and_the_files_list(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("api-key: [x, y]\n")
    assert parsed()["allowed_methods"] == ("*",)
    assert parsed("--allowed-methods", "GET", "--allowed-methods", "POST")["allowed_methods"] == ("GET", "POST")
    assert parsed("--config", str(file))["api_keys"] == ("x", "y")
    assert parsed("--config", str(file), "--api-key", "z")["api_keys"] == ("z",)
