"""Llama (Touvron et al., 2023; Llama 3: Grattafiori et al., 2024) and checkpoints of its architecture."""

from __future__ import annotations

from collections.abc import Iterator

from jaxllm.config.model import LayerSpec, ModelConfig
from jaxllm.errors import UnsupportedModel
from jaxllm.models.decoder import Decoder, Runs
from jaxllm.weights.spec import TensorSpec


class LlamaForCausalLM(Decoder):
    """Pre-norm decoder with grouped-query attention, rotary positions and a gated MLP."""

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        if any(not spec.mlp.gated for spec in config.layers):
            raise UnsupportedModel(f"{config.architecture}: gated=False in an MLP; this family has gated MLPs only")

    @classmethod
    def head_names(cls, config: ModelConfig) -> tuple[str, ...]:
        return ("embed.weight",) if config.tied_embeddings else ("lm_head.weight",)

    @classmethod
    def tensors(cls, config: ModelConfig, runs: Runs) -> tuple[TensorSpec, ...]:
        table = (config.vocab_size, config.hidden_size)
        specs = [
            TensorSpec("model.embed_tokens.weight", table, "embed.weight"),
            TensorSpec("model.norm.weight", (config.hidden_size,), "norm.weight"),
        ]
        if not config.tied_embeddings:
            specs.append(TensorSpec("lm_head.weight", table, "lm_head.weight"))
        first = 0
        for run, (spec, num_layers) in enumerate(runs):
            for layer in range(num_layers):
                specs += _layer_tensors(spec, config.hidden_size, f"model.layers.{first + layer}", f"runs.{run}", layer)
            first += num_layers
        return tuple(specs)


def _layer_tensors(spec: LayerSpec, hidden_size: int, source: str, target: str, layer: int) -> Iterator[TensorSpec]:
    """The tensors below `source` in the checkpoint, and their places below `target` at index `layer`."""
    for norm, path in (("input_layernorm", "attention_norm"), ("post_attention_layernorm", "mlp_norm")):
        yield TensorSpec(f"{source}.{norm}.weight", (hidden_size,), f"{target}.{path}.weight", layer=layer)
    for name, path, num_in, num_out, offset, bias in _matrices(spec, hidden_size):
        yield TensorSpec(
            f"{source}.{name}.weight", (num_out, num_in), f"{target}.{path}.weight", layer, offset, transpose=True
        )
        if bias:
            yield TensorSpec(f"{source}.{name}.bias", (num_out,), f"{target}.{path}.bias", layer, offset)


def _matrices(spec: LayerSpec, hidden_size: int) -> Iterator[tuple[str, str, int, int, int, bool]]:
    """(checkpoint name, parameter path, in, out, first column in the parameter, has a bias)."""
    attention, mlp = spec.attention, spec.mlp
    q_size, kv_size = attention.num_heads * attention.head_dim, attention.num_kv_heads * attention.head_dim
    offset = 0
    for name, size in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
        yield f"self_attn.{name}", "attention.qkv", hidden_size, size, offset, attention.qkv_bias
        offset += size
    yield "self_attn.o_proj", "attention.out", q_size, hidden_size, 0, attention.out_bias
    size = mlp.intermediate_size
    yield "mlp.gate_proj", "mlp.gate_up", hidden_size, size, 0, mlp.bias
    yield "mlp.up_proj", "mlp.gate_up", hidden_size, size, size, mlp.bias
    yield "mlp.down_proj", "mlp.down", size, hidden_size, 0, mlp.bias
