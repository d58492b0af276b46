"""The default model against transformers, its weights read by the `gguf` package's own reader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxllm.config.checkpoint import resolve_model
from tests.helpers.oracle import load_model, run_pieces

# The oracle leg: torch has no wheel for every Python this runs on, and there this test says so.
torch = pytest.importorskip("torch")

GOLDEN = Path(__file__).parents[1] / "golden" / "smollm2-golden.json"
LAYERS, HEADS, KV_HEADS, HEAD_DIM = 30, 9, 3, 64
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
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


def half_split(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of one head from interleaved rotary pairs (0, d/2, 1, d/2 + 1, ...) to halves."""
    heads = weight.reshape(num_heads, HEAD_DIM, -1)
    return np.concatenate([heads[:, 0::2], heads[:, 1::2]], axis=1).reshape(weight.shape)


def state_dict(path: Path) -> dict[str, Any]:
    state = {}
    for tensor in gguf.GGUFReader(path).tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type)
        *block, kind, _ = tensor.name.split(".")
        if kind in ("attn_q", "attn_k"):
            weight = half_split(weight, HEADS if kind == "attn_q" else KV_HEADS)
        name = f"model.layers.{block[1]}.{NAMES[kind]}" if block else NAMES[kind]
        state[f"{name}.weight"] = torch.from_numpy(np.array(weight, np.float32))
    return state | {"lm_head.weight": state["model.embed_tokens.weight"]}


def test_logits_of_a_whole_prompt_equal_transformers() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=HEADS * HEAD_DIM,
        intermediate_size=1536,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    oracle = LlamaForCausalLM(config).float().eval()
    path = resolve_model(None)
    oracle.load_state_dict(state_dict(path))
    token_ids = json.loads(GOLDEN.read_text())["prompts"][0]["prompt_token_ids"]
    with torch.no_grad():
        expected = oracle(torch.tensor([token_ids])).logits[0].numpy()
    logits = run_pieces(load_model(path), token_ids, [len(token_ids)], page_size=16)
    assert logits.shape == expected.shape
    np.testing.assert_allclose(logits, expected, atol=1e-3, rtol=0)
    assert np.abs(expected).max() > 5  # not flat
