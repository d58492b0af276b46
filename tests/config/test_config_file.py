"""Configuration files: YAML and TOML, names as on the command line, bad keys named."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxllm.config.engine import EngineArgs, ServerConfig
from jaxllm.config.load import load_config_file
from jaxllm.errors import ConfigError


def write(tmp_path: Path, text: str, name: str = "serve.yaml") -> Path:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return path


def test_yaml_takes_dashes_underscores_and_aliases(tmp_path: Path) -> None:
    path = write(tmp_path, "max-model-len: 4K\nmax_num_seqs: 3\nblock-size: 32\nserved-model-name: [a, b]\n")
    settings = load_config_file(path)
    assert settings == {"max_model_len": 4096, "max_num_seqs": 3, "page_size": 32, "served_model_name": ("a", "b")}
    assert EngineArgs(**settings).page_size == 32


def test_toml_holds_the_same_names(tmp_path: Path) -> None:
    path = write(tmp_path, 'model = "smollm2-135m"\nenable-prefix-caching = false\n', "serve.toml")
    assert load_config_file(path) == {"model": "smollm2-135m", "enable_prefix_caching": False}


def test_server_settings_may_stand_in_the_same_file(tmp_path: Path) -> None:
    path = write(tmp_path, "port: 9000\napi-key: secret\nshutdown-timeout: 5\nseed: 3\n")
    settings = load_config_file(path, EngineArgs, ServerConfig)
    assert settings == {"port": 9000, "api_keys": ("secret",), "shutdown_timeout_s": 5.0, "seed": 3}


def test_the_servers_own_spelling_of_the_model_names_is_not_lost(tmp_path: Path) -> None:
    path = write(tmp_path, "served_model_names: [a, b]\n")
    assert load_config_file(path, EngineArgs, ServerConfig) == {"served_model_name": ("a", "b")}


def test_an_empty_file_sets_nothing(tmp_path: Path) -> None:
    assert load_config_file(write(tmp_path, "# nothing\n")) == {}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-model-length: 5", "unknown key 'max-model-length'; did you mean 'max-model-len'"),
        ("zzzzz: 5", "unknown key 'zzzzz'; accepted: .*max_model_len"),
        ("5: 5", "unknown key 5"),
        ("max-num-seqs: many", "key 'max-num-seqs': max_num_seqs: 'many' is not a count; accepted: an integer"),
        ("enable-prefix-caching: 1", "enable_prefix_caching=1 has the wrong type; accepted: true or false"),
        ("max-model-len: {a: 1}", "max_model_len=.* has the wrong type"),
        ("tensor-parallel-size: 4", "tensor_parallel_size=4 is not served yet"),
        ("page-size: 16\nblock-size: 32", "'block-size' and 'page-size' set the same thing"),
        ("- a\n- b", "holds list; accepted: lines of KEY: VALUE"),
        ("a: [1", "is not YAML"),
        ("a: !!python/object/apply:os.system [exit]", "is not YAML"),
    ],
)
def test_a_bad_key_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_config_file(path)
    assert str(path) in str(caught.value)


def test_broken_toml_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not TOML"):
        load_config_file(write(tmp_path, "a = ", "serve.toml"))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config_file(tmp_path / "none.yaml")


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot read the configuration file"):
        load_config_file(path)
