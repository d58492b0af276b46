"""Llama and models of its shape, SmolLM2 among them.

Keys of config.json: https://huggingface.co/docs/transformers/model_doc/llama#transformers.LlamaConfig,
with rotary settings in the old spelling (`rope_theta`, `rope_scaling`) or the new (`rope_parameters`).
Keys of GGUF: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, section on LLMs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxllm.config.gguf_file import GGUFFile
from jaxllm.config.hf.keys import Keys
from jaxllm.config.model import AttentionSpec, LayerSpec, MLPSpec, ModelConfig, RopeSpec
from jaxllm.errors import UnsupportedModel, WeightsError

ARCHITECTURE = "LlamaForCausalLM"
_DTYPES = ("float32", "bfloat16", "float16")
_MAX_LAYERS = 10_000


def from_hf(config: Mapping[str, Any], source: str = "config.json") -> ModelConfig:
    """The model of a config.json.

    Raises:
        ConfigError: a key is missing or has the wrong type.
        UnsupportedModel: another activation, or rotary scaling of another kind.
    """
    keys = Keys(source, config)
    activation = keys.text("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"{source}: hidden_act={activation!r} is not served; accepted: 'silu'")
    max_positions = keys.integer("max_position_embeddings")
    hidden_size = keys.integer("hidden_size")
    num_heads, num_kv_heads = _heads(keys, "num_attention_heads", "num_key_value_heads")
    return _model(
        vocab_size=keys.integer("vocab_size"),
        hidden_size=hidden_size,
        num_layers=keys.integer("num_hidden_layers", maximum=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_head_dim(keys, "head_dim", hidden_size, num_heads),
        mlp=MLPSpec(keys.integer("intermediate_size"), bias=keys.flag("mlp_bias", False)),
        qkv_bias=keys.flag("attention_bias", False),
        out_bias=keys.flag("attention_bias", False),
        rope=_hf_rope(keys, max_positions),
        norm_eps=keys.positive("rms_norm_eps"),
        tied_embeddings=keys.flag("tie_word_embeddings", False),
        max_positions=max_positions,
        dtype=_hf_dtype(keys),
    )


def _model(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    mlp: MLPSpec,
    qkv_bias: bool,
    out_bias: bool,
    rope: RopeSpec,
    norm_eps: float,
    tied_embeddings: bool,
    max_positions: int,
    dtype: str,
) -> ModelConfig:
    attention = AttentionSpec(
        num_heads,
        num_kv_heads,
        head_dim,
        scale=head_dim**-0.5,
        rope=rope,
        qkv_bias=qkv_bias,
        out_bias=out_bias,
    )
    return ModelConfig(
        architecture=ARCHITECTURE,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        layers=(LayerSpec(attention, mlp),) * num_layers,
        norm_eps=norm_eps,
        tied_embeddings=tied_embeddings,
        max_positions=max_positions,
        dtype=dtype,
    )


def _heads(keys: Keys, heads_key: str, kv_heads_key: str) -> tuple[int, int]:
    num_heads = keys.integer(heads_key)
    num_kv_heads = keys.integer(kv_heads_key, num_heads)
    if num_heads % num_kv_heads:
        raise keys.error(f"{keys.source}: {heads_key}={num_heads} is no multiple of {kv_heads_key}={num_kv_heads}")
    return num_heads, num_kv_heads


def _head_dim(keys: Keys, key: str, hidden_size: int, num_heads: int) -> int:
    if not keys.has(key) and hidden_size % num_heads:
        raise keys.error(f"{keys.source}: key {key!r} is missing, and {hidden_size} splits into no {num_heads} heads")
    head_dim = keys.integer(key, hidden_size // num_heads or 1)
    if head_dim % 2:
        raise keys.error(f"{keys.source}: a head of {head_dim} cannot be rotated; accepted: an even number")
    return head_dim


def _hf_dtype(keys: Keys) -> str:
    dtype = keys.text("dtype", keys.text("torch_dtype", "float32"))
    if dtype not in _DTYPES:
        raise UnsupportedModel(f"{keys.source}: dtype {dtype!r} is not served; accepted: {', '.join(_DTYPES)}")
    return dtype


def _hf_rope(keys: Keys, max_positions: int) -> RopeSpec:
    """Rotary settings in either spelling; where a file has both, the new one holds."""
    if keys.has("partial_rotary_factor") and keys.positive("partial_rotary_factor") != 1:
        raise UnsupportedModel(f"{keys.source}: partial_rotary_factor is not served; accepted: 1")
    theta = keys.positive("rope_theta", 10000.0)
    scaling = keys.section("rope_parameters") or keys.section("rope_scaling")
    if scaling is None:
        return RopeSpec(theta=theta)
    theta = scaling.positive("rope_theta", theta)
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "default":
        return RopeSpec(theta=theta)
    if kind == "linear":
        return RopeSpec(theta=theta, kind="linear", factor=scaling.positive("factor"))
    if kind == "llama3":
        return _llama3_rope(scaling, theta, max_positions)
    raise UnsupportedModel(f"{scaling.source}: rope_type {kind!r} is not served; accepted: default, linear, llama3")


def _llama3_rope(scaling: Keys, theta: float, max_positions: int) -> RopeSpec:
    low, high = scaling.positive("low_freq_factor"), scaling.positive("high_freq_factor")
    if high <= low:
        raise scaling.error(f"{scaling.source}: high_freq_factor={high} is not above low_freq_factor={low}")
    return RopeSpec(
        theta=theta,
        kind="llama3",
        factor=scaling.positive("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=scaling.integer("original_max_position_embeddings", max_positions),
    )


def from_gguf(file: GGUFFile) -> ModelConfig:
    """The model of a GGUF file of architecture "llama".

    Embeddings are tied where the file has no `output.weight`; biases are those the first layer has.
    The shape of `token_embd.weight`
    gives the vocabulary, which the metadata need not state.

    Raises:
        WeightsError: a key or the embedding is missing, or a key has the wrong type.
        UnsupportedModel: experts, a sliding window, or rotary scaling of another kind.
    """
    keys = Keys(str(file.path), file.metadata, WeightsError)
    for name in ("llama.expert_count", "llama.attention.sliding_window"):
        if keys.has(name) and keys.integer(name, minimum=0):
            raise UnsupportedModel(f"{file.path}: {name}={file.metadata[name]} is not served; accepted: none")
    hidden_size = keys.integer("llama.embedding_length")
    num_heads, num_kv_heads = _heads(keys, "llama.attention.head_count", "llama.attention.head_count_kv")
    head_dim = _head_dim(keys, "llama.attention.key_length", hidden_size, num_heads)
    return _model(
        vocab_size=_gguf_vocab_size(file),
        hidden_size=hidden_size,
        num_layers=keys.integer("llama.block_count", maximum=_MAX_LAYERS),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        mlp=MLPSpec(keys.integer("llama.feed_forward_length"), bias="blk.0.ffn_down.bias" in file.tensors),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        rope=_gguf_rope(file, keys, head_dim),
        norm_eps=_shortest(keys.positive("llama.attention.layer_norm_rms_epsilon")),
        tied_embeddings="output.weight" not in file.tensors,
        max_positions=keys.integer("llama.context_length"),
        dtype=_gguf_dtype(file),
    )


def _shortest(value: float) -> float:
    """1e-05 for the float32 next to it, so that a model reads the same from GGUF and from config.json."""
    return float(str(np.float32(value)))


def _gguf_vocab_size(file: GGUFFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise WeightsError(f"{file.path}: tensor 'token_embd.weight' is missing, or is no matrix")
    return embedding.shape[0]


def _gguf_dtype(file: GGUFFile) -> str:
    """The type most of the weights are stored in; float32 for block types, which dequantise to it."""
    num_bytes: dict[str, int] = {}
    for tensor in file.tensors.values():
        num_bytes[tensor.type] = num_bytes.get(tensor.type, 0) + tensor.num_bytes
    largest = max(num_bytes, key=lambda name: num_bytes[name])
    return {"F16": "float16", "BF16": "bfloat16"}.get(largest, "float32")


def _gguf_rope(file: GGUFFile, keys: Keys, head_dim: int) -> RopeSpec:
    rotary_dim = keys.integer("llama.rope.dimension_count", head_dim)
    if rotary_dim != head_dim:
        raise UnsupportedModel(
            f"{file.path}: llama.rope.dimension_count={rotary_dim} is not served; accepted: the head, {head_dim}"
        )
    theta = keys.positive("llama.rope.freq_base", 10000.0)
    kind = keys.text("llama.rope.scaling.type", "none")
    # Files from before scaling.type hold scale_linear alone.
    old_factor = keys.positive("llama.rope.scale_linear", 1.0)
    factor = keys.positive("llama.rope.scaling.factor", old_factor)
    if "rope_freqs.weight" in file.tensors:
        return _rope_of_divisors(file, theta, head_dim)
    if kind == "none" and old_factor == 1.0:
        return RopeSpec(theta=theta)
    if kind in ("none", "linear"):
        return RopeSpec(theta=theta, kind="linear", factor=factor)
    raise UnsupportedModel(f"{file.path}: llama.rope.scaling.type={kind!r} is not served; accepted: none, linear")


def _rope_of_divisors(file: GGUFFile, theta: float, head_dim: int) -> RopeSpec:
    """Recognise Llama 3's scaling from its effect: GGUF stores a divisor for each frequency, not the rule."""
    tensor = file.tensors["rope_freqs.weight"]
    if tensor.type != "F32" or tensor.shape != (head_dim // 2,):
        raise WeightsError(
            f"{file.path}: tensor 'rope_freqs.weight' is {tensor.type} {tensor.shape}; accepted: F32 {(head_dim // 2,)}"
        )
    stored = file.data("rope_freqs.weight").view("<f4")
    factor = _shortest(float(stored.max()))
    for original_max_positions in (8192, 4096, 2048, 16384, 32768, 65536, 131072):
        spec = RopeSpec(theta, "llama3", None, factor, 1.0, 4.0, original_max_positions)
        if np.allclose(stored, llama3_divisors(spec, head_dim), rtol=1e-4):
            return RopeSpec(theta=theta) if factor == 1.0 else spec
    raise UnsupportedModel(f"{file.path}: the divisors in 'rope_freqs.weight' are not those of Llama 3's scaling")


def llama3_divisors(rope: RopeSpec, rotary_dim: int) -> npt.NDArray[np.float64]:
    """What Llama 3's scaling divides each rotary frequency by, float64 [rotary_dim // 2].

    High frequencies stay, low ones are divided by `factor`, those between are blended
    (Llama 3.1 release, https://github.com/meta-llama/llama-models, `apply_scaling`).
    """
    wavelengths = 2 * np.pi * rope.theta ** (np.arange(0, rotary_dim, 2) / rotary_dim)
    turns = rope.original_max_positions / wavelengths
    blend = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return 1 / ((1 - blend) / rope.factor + blend)
