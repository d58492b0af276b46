"""The Llama family's configuration, in each spelling that real checkpoints have."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxllm.config.checkpoint import load_model_config
from jaxllm.config.hf.registry import from_hf
from jaxllm.config.model import ModelConfig, RopeSpec
from jaxllm.errors import ConfigError, JaxLLMError, UnsupportedModel, WeightsError

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def rope_of(config: ModelConfig) -> RopeSpec:
    rope = config.layers[0].attention.rope
    assert rope is not None
    return rope


def test_every_field_of_the_model_comes_from_its_key() -> None:
    config = from_hf({**BASE, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "head_dim": 32})
    assert (config.vocab_size, config.hidden_size, config.num_layers) == (320, 64, 3)
    assert (config.max_positions, config.norm_eps, config.tied_embeddings) == (256, 1e-5, True)
    assert config.dtype == "bfloat16"
    attention, mlp = config.layers[0].attention, config.layers[0].mlp
    assert (attention.num_heads, attention.num_kv_heads, attention.head_dim) == (4, 2, 32)
    assert attention.scale == pytest.approx(1 / math.sqrt(32))
    assert (mlp.intermediate_size, mlp.activation, mlp.gated, mlp.bias) == (128, "silu", True, False)
    assert config.runs() == ((config.layers[0], 3),)


def test_optional_keys_have_transformers_defaults() -> None:
    config = from_hf({**BASE, "num_key_value_heads": None, "head_dim": None})
    attention = config.layers[0].attention
    assert (attention.num_kv_heads, attention.head_dim) == (4, 16)
    assert (config.tied_embeddings, config.dtype) == (False, "float32")
    assert rope_of(config) == RopeSpec(theta=10000.0)


def test_biases_are_data() -> None:
    layer = from_hf({**BASE, "attention_bias": True, "mlp_bias": True}).layers[0]
    assert layer.attention.qkv_bias and layer.attention.out_bias and layer.mlp.bias


@pytest.mark.parametrize(
    ("keys", "rope"),
    [
        ({"rope_theta": 5e5}, RopeSpec(5e5)),
        ({"rope_theta": 5e5, "rope_scaling": None}, RopeSpec(5e5)),
        ({"rope_parameters": {"rope_theta": 1e5, "rope_type": "default"}}, RopeSpec(1e5)),
        ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, RopeSpec(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeSpec(1e4, "linear", None, 2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4}}, RopeSpec(1e4, "linear", None, 4.0)),
        (
            {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            RopeSpec(5e5, "llama3", None, 8.0, 1.0, 4.0, 8192),
        ),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", **LLAMA3}},
            RopeSpec(5e5, "llama3", None, 8.0, 1.0, 4.0, 8192),
        ),
    ],
)
def test_rope_in_the_old_spelling_and_the_new(keys: dict[str, Any], rope: RopeSpec) -> None:
    assert rope_of(from_hf({**BASE, **keys})) == rope


@pytest.mark.parametrize(
    ("keys", "kind", "message"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, UnsupportedModel, "rope_type 'yarn' is not served"),
        ({"rope_scaling": {"type": "dynamic"}}, UnsupportedModel, "'dynamic' is not served; accepted: default"),
        ({"partial_rotary_factor": 0.5}, UnsupportedModel, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, UnsupportedModel, "hidden_act='gelu' is not served; accepted: 'silu'"),
        ({"torch_dtype": "float8_e4m3fn"}, UnsupportedModel, "dtype 'float8_e4m3fn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, ConfigError, "rope_scaling: key 'low_freq_factor' is missing"),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}},
            ConfigError,
            "high_freq_factor=1.0 is not above",
        ),
        ({"rope_scaling": "linear"}, ConfigError, "key 'rope_scaling' is 'linear'; accepted: an object"),
        ({"vocab_size": None}, ConfigError, "key 'vocab_size' is missing"),
        ({"vocab_size": "320"}, ConfigError, "key 'vocab_size' is '320'; accepted: an integer from 1"),
        ({"hidden_size": 0}, ConfigError, "key 'hidden_size' is 0"),
        ({"num_hidden_layers": 10**9}, ConfigError, "key 'num_hidden_layers' is 1000000000; .* to 10000"),
        ({"rms_norm_eps": float("nan")}, ConfigError, "key 'rms_norm_eps' is nan; accepted: a number above 0"),
        ({"tie_word_embeddings": 1}, ConfigError, "key 'tie_word_embeddings' is 1; accepted: true or false"),
        ({"num_key_value_heads": 3}, ConfigError, "num_attention_heads=4 is no multiple of num_key_value_heads=3"),
        ({"hidden_size": 66}, ConfigError, "key 'head_dim' is missing"),
        ({"head_dim": 15}, ConfigError, "accepted: an even number"),
        ({"architectures": "LlamaForCausalLM"}, ConfigError, "key 'architectures'"),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(keys: dict[str, Any], kind: type[JaxLLMError], message: str) -> None:
    with pytest.raises(kind, match=message):
        from_hf({**BASE, **keys})


def write_gguf(path: Path, **changes: Any) -> Path:
    """The twin of BASE as GGUF. `changes` are keys below "llama." (None: left out), or extra tensors."""
    keys = {"block_count": 3, "context_length": 256, "embedding_length": 64, "feed_forward_length": 128,
            "attention.head_count": 4, "attention.head_count_kv": 2, "rope.freq_base": 5e5,
            "attention.layer_norm_rms_epsilon": 1e-5, **changes, "tensors": None}  # fmt: skip
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in keys.items():
        if isinstance(value, str):
            writer.add_string(f"llama.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"llama.{name}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"llama.{name}", value)
    writer.add_tensor("token_embd.weight", np.zeros((320, 64), np.float16))
    for name, value in changes.get("tensors", {}).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_a_gguf_file_gives_the_same_model_as_its_config_json(tmp_path: Path) -> None:
    twin = {**BASE, "rope_theta": 5e5, "torch_dtype": "float16", "tie_word_embeddings": True}
    assert load_model_config(write_gguf(tmp_path / "m.gguf")) == from_hf(twin)


def test_a_gguf_file_with_an_output_matrix_is_not_tied(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors={"output.weight": np.zeros((320, 64), np.float16)})
    assert not load_model_config(path).tied_embeddings


def divisors_of_the_converter(dim: int, theta: float, factor: float, original: int) -> np.ndarray:
    """Llama 3's rule in the loop form in which converters to GGUF apply it."""
    found = []
    for i in range(0, dim, 2):
        wavelength = 2 * math.pi * theta ** (i / dim)
        if wavelength < original / 4.0:
            found.append(1.0)
        elif wavelength > original / 1.0:
            found.append(factor)
        else:
            smooth = (original / wavelength - 1.0) / (4.0 - 1.0)
            found.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(found, np.float32)


@pytest.mark.parametrize(("factor", "original"), [(8.0, 8192), (32.0, 8192), (8.0, 4096)])
def test_llama_3_scaling_is_recognised_from_the_divisors_in_a_gguf_file(
    tmp_path: Path, factor: float, original: int
) -> None:
    divisors = divisors_of_the_converter(64, 5e5, factor, original)
    changes = {"attention.key_length": 64, "rope.dimension_count": 64, "tensors": {"rope_freqs.weight": divisors}}
    rope = rope_of(load_model_config(write_gguf(tmp_path / "m.gguf", **changes)))
    assert rope == RopeSpec(5e5, "llama3", None, factor, 1.0, 4.0, original)


def test_divisors_of_one_are_no_scaling(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tensors={"rope_freqs.weight": np.ones(8, np.float32)})
    assert rope_of(load_model_config(path)) == RopeSpec(5e5)


def test_linear_scaling_of_a_gguf_file(tmp_path: Path) -> None:
    changes = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}
    path = write_gguf(tmp_path / "m.gguf", **changes)
    assert rope_of(load_model_config(path)) == RopeSpec(5e5, "linear", None, 4.0)


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"block_count": None}, WeightsError, "key 'llama.block_count' is missing"),
        ({"embedding_length": "64"}, WeightsError, "key 'llama.embedding_length' is '64'"),
        ({"expert_count": 8}, UnsupportedModel, "llama.expert_count=8"),
        ({"rope.scaling.type": "yarn"}, UnsupportedModel, "llama.rope.scaling.type='yarn'"),
        ({"rope.dimension_count": 8}, UnsupportedModel, "llama.rope.dimension_count=8"),
        ({"tensors": {"rope_freqs.weight": np.arange(1, 9, dtype=np.float32)}}, UnsupportedModel, "not those of"),
        ({"tensors": {"rope_freqs.weight": np.ones(5, np.float32)}}, WeightsError, "tensor 'rope_freqs.weight' is F32"),
    ],
)  # fmt: skip
def test_a_gguf_file_that_cannot_be_run_is_refused_by_name(
    tmp_path: Path, changes: dict[str, Any], kind: type[JaxLLMError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        load_model_config(write_gguf(tmp_path / "m.gguf", **changes))
