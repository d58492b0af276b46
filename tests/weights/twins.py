"""One small Llama written twice, as a folder of safetensors and as a GGUF file, and how it is loaded.

The writer of the GGUF file permutes q and k as llama.cpp's converter does: the tests that compare
the two loads do not use any code of the loader for that.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import jax
import numpy as np
from safetensors.numpy import save_file

from jaxllm.weights.spec import TensorSpec

V, D, F, L, N, K, H = 320, 64, 128, 2, 4, 2, 16
Q, KV = N * H, K * H

Tensors = dict[str, np.ndarray[Any, Any]]

GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SHAPES = {
    "input_layernorm": (D,),
    "self_attn.q_proj": (Q, D),
    "self_attn.k_proj": (KV, D),
    "self_attn.v_proj": (KV, D),
    "self_attn.o_proj": (D, Q),
    "post_attention_layernorm": (D,),
    "mlp.gate_proj": (F, D),
    "mlp.up_proj": (F, D),
    "mlp.down_proj": (D, F),
}


def random_tensors(*, tied: bool = True, dtype: Any = np.float32) -> Tensors:
    """A state dict with Hugging Face's names; no two entries alike."""
    rng = np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (V, D), "model.norm.weight": (D,)}
    shapes |= {f"model.layers.{i}.{name}.weight": shape for i in range(L) for name, shape in SHAPES.items()}
    if not tied:
        shapes["lm_head.weight"] = (V, D)
    return {name: rng.standard_normal(shape, np.float32).astype(dtype) for name, shape in shapes.items()}


def specs(*, tied: bool = True) -> list[TensorSpec]:
    found = [
        TensorSpec("model.embed_tokens.weight", (V, D), "embed.weight"),
        TensorSpec("model.norm.weight", (D,), "norm.weight"),
    ]
    if not tied:
        found.append(TensorSpec("lm_head.weight", (V, D), "lm_head.weight"))
    places = {
        "input_layernorm": ("attention_norm", 0), "self_attn.q_proj": ("attention.qkv", 0),
        "self_attn.k_proj": ("attention.qkv", Q), "self_attn.v_proj": ("attention.qkv", Q + KV),
        "self_attn.o_proj": ("attention.out", 0), "post_attention_layernorm": ("mlp_norm", 0),
        "mlp.gate_proj": ("mlp.gate_up", 0), "mlp.up_proj": ("mlp.gate_up", F), "mlp.down_proj": ("mlp.down", 0),
    }  # fmt: skip
    for layer in range(L):
        for name, (path, offset) in places.items():
            shape = SHAPES[name]
            target = f"runs.0.{path}.weight"
            source = f"model.layers.{layer}.{name}.weight"
            found.append(TensorSpec(source, shape, target, layer, offset, transpose=len(shape) == 2))
    return found


def params(dtype: Any = np.float32, *, tied: bool = True) -> dict[str, jax.ShapeDtypeStruct]:
    shapes: dict[str, tuple[int, ...]] = {
        "embed.weight": (V, D), "norm.weight": (D,), "runs.0.attention_norm.weight": (L, D),
        "runs.0.attention.qkv.weight": (L, D, Q + 2 * KV), "runs.0.attention.out.weight": (L, Q, D),
        "runs.0.mlp_norm.weight": (L, D), "runs.0.mlp.gate_up.weight": (L, D, 2 * F),
        "runs.0.mlp.down.weight": (L, F, D),
    }  # fmt: skip
    if not tied:
        shapes["lm_head.weight"] = (V, D)
    return {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}


def expected(tensors: Tensors) -> Tensors:
    """The parameters that `tensors` make, put together in the plainest way."""

    def layers(name: str) -> list[np.ndarray[Any, Any]]:
        return [tensors[f"model.layers.{i}.{name}.weight"] for i in range(L)]

    def matrices(*names: str) -> np.ndarray[Any, Any]:
        return np.stack([np.concatenate([w.T for w in ws], axis=1) for ws in zip(*map(layers, names), strict=True)])

    found = {
        "embed.weight": tensors["model.embed_tokens.weight"],
        "norm.weight": tensors["model.norm.weight"],
        "runs.0.attention_norm.weight": np.stack(layers("input_layernorm")),
        "runs.0.attention.qkv.weight": matrices("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "runs.0.attention.out.weight": matrices("self_attn.o_proj"),
        "runs.0.mlp_norm.weight": np.stack(layers("post_attention_layernorm")),
        "runs.0.mlp.gate_up.weight": matrices("mlp.gate_proj", "mlp.up_proj"),
        "runs.0.mlp.down.weight": matrices("mlp.down_proj"),
    }
    if "lm_head.weight" in tensors:
        found["lm_head.weight"] = tensors["lm_head.weight"]
    return found


def check_loaded(loaded: dict[str, jax.Array], wanted: Tensors) -> None:
    assert set(loaded) == set(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(np.asarray(loaded[name]), array, err_msg=name)


def write_folder(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path, tensors: Tensors, num_shards: int = 3) -> Path:
    folder.mkdir(exist_ok=True)
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        held = names[shard::num_shards]
        save_file({name: tensors[name] for name in held}, folder / file)
        weight_map |= dict.fromkeys(held, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def permute(weights: np.ndarray[Any, Any], num_heads: int) -> np.ndarray[Any, Any]:
    """From Hugging Face's order of rows to GGUF's, as llama.cpp's converter does it."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return halves.swapaxes(1, 2).reshape(weights.shape)


def to_gguf_names(tensors: Tensors) -> Tensors:
    top = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "lm_head.weight": "output.weight"}  # fmt: skip
    found: Tensors = {}
    for name, array in tensors.items():
        if name in top:
            found[top[name]] = array
            continue
        _, _, layer, rest = name.split(".", 3)
        kind = rest.removesuffix(".weight")
        heads = {"self_attn.q_proj": N, "self_attn.k_proj": K}.get(kind)
        found[f"blk.{layer}.{GGUF_NAMES[kind]}.weight"] = permute(array, heads) if heads else array
    return found


def write_gguf(path: Path, tensors: Tensors, kind: str | None = None, extra: Tensors | None = None) -> Path:
    """The twin as GGUF; matrices as block type `kind` (None: as they are)."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.attention.head_count", N)
    writer.add_uint32("llama.attention.head_count_kv", K)
    for name, array in {**to_gguf_names(tensors), **(extra or {})}.items():
        if kind is None or array.ndim == 1:
            writer.add_tensor(name, np.ascontiguousarray(array))
        else:
            block_type = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(array), block_type), raw_dtype=block_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
