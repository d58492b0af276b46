"""The environment: one reader, with defaults."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.config.env import read_environment
from jaxllm.errors import ConfigError


def test_nothing_set_gives_the_defaults() -> None:
    found = read_environment({})
    assert found.cache_dir == Path("~/.cache/jaxllm").expanduser()
    assert found.api_keys == () and found.hub_offline is False


def test_variables_are_read(tmp_path: Path) -> None:
    found = read_environment(
        {"JAXLLM_CACHE_DIR": str(tmp_path / "cache"), "JAXLLM_API_KEY": " secret ", "HF_HUB_OFFLINE": "1"}
    )
    assert (found.cache_dir, found.api_keys, found.hub_offline) == (tmp_path / "cache", ("secret",), True)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JAXLLM_CACHE_DIR", str(tmp_path))
    assert read_environment().cache_dir == tmp_path


def test_a_switch_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE='maybe' is not a switch; accepted: 1 or 0"):
        read_environment({"HF_HUB_OFFLINE": "maybe"})


def test_a_cache_folder_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r"JAXLLM_CACHE_DIR=.* is not a folder"):
        read_environment({"JAXLLM_CACHE_DIR": str(file)})
