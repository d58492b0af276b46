"""A GGUF file as a folder for transformers: config.json, float32 weights, tokenizer.json.

    python -m scripts.eval.hf_folder FILE.gguf FOLDER

For comparisons with transformers on the very same weights. They are read and dequantised by the
`gguf` package, not by our own reader, so that a fault in ours cannot hide on both sides.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]

_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_OTHER_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def write_folder(gguf_file: Path, folder: Path) -> None:
    """Raises: ValueError: the file holds another architecture than llama's, or a tensor without a name here."""
    import gguf
    from safetensors.numpy import save_file

    reader = gguf.GGUFReader(gguf_file)
    metadata = {name: field.contents() for name, field in reader.fields.items()}
    if metadata["general.architecture"] != "llama":
        raise ValueError(f"architecture {metadata['general.architecture']!r}; this writes folders of 'llama' alone")
    folder.mkdir(parents=True, exist_ok=True)
    weights = dict(_weights(reader, metadata))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = _config(
        metadata, vocab_size=len(weights["model.embed_tokens.weight"]), tied="lm_head.weight" not in weights
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(metadata, folder)


def _weights(reader: Any, metadata: dict[str, Any]) -> Iterator[tuple[str, Array]]:
    import gguf

    heads = metadata["llama.attention.head_count"]
    num_heads = {"attn_q": heads, "attn_k": metadata.get("llama.attention.head_count_kv", heads)}
    for tensor in reader.tensors:
        weight = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), np.float32)
        *layer, kind, _ = tensor.name.split(".")
        if kind in num_heads and layer:
            weight = _in_halves(weight, num_heads[kind])
        name = f"model.layers.{layer[1]}.{_LAYER_NAMES[kind]}" if layer else _OTHER_NAMES.get(kind)
        if name is None:
            raise ValueError(f"tensor {tensor.name!r} has no place in a llama model")
        yield f"{name}.weight", weight


def _in_halves(weight: Array, num_heads: int) -> Array:
    """Rows of each head from rotary pairs side by side, as GGUF keeps them, to first halves then second halves."""
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.transpose(0, 2, 1, 3)).reshape(weight.shape)


def _config(metadata: dict[str, Any], *, vocab_size: int, tied: bool) -> dict[str, Any]:
    heads, width = metadata["llama.attention.head_count"], metadata["llama.embedding_length"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": width,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", heads),
        "head_dim": metadata.get("llama.attention.key_length", width // heads),
        "max_position_embeddings": metadata["llama.context_length"],
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "torch_dtype": "float32",
    }


def write_tokenizer(metadata: dict[str, Any], folder: Path) -> None:
    from jaxllm.tokenizer.gguf import build_backend

    build_backend(metadata).backend.save(str(folder / "tokenizer.json"))
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in (("bos", "bos"), ("eos", "eos"))}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        **{f"{name}_token": tokens[token_id] for name, token_id in ids.items() if token_id is not None},
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1, ensure_ascii=False))


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]), Path(sys.argv[2]))
