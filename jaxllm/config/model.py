"""What a model is, as data: one `LayerSpec` a layer, so that a hybrid is a mixed tuple, not a flag."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding. `kind` is the checkpoint's rope type; unknown kinds are refused at load."""

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    rotary_dim: int | None = None  # None: the whole head
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    scale: float  # multiplies q·k; usually head_dim ** -0.5
    rope: RopeSpec | None = RopeSpec()
    window: int | None = None  # tokens a query sees, itself included; None: all
    soft_cap: float | None = None
    qkv_bias: bool = False
    out_bias: bool = False


@dataclass(frozen=True, slots=True)
class MLPSpec:
    intermediate_size: int  # F
    activation: Literal["silu", "gelu", "gelu_tanh", "relu"] = "silu"
    gated: bool = True
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    attention: AttentionSpec
    mlp: MLPSpec


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Everything a model class needs to build itself, whatever file it came from."""

    architecture: str  # "LlamaForCausalLM": the key of the model registry
    vocab_size: int  # V
    hidden_size: int  # D
    layers: tuple[LayerSpec, ...]
    norm_eps: float
    tied_embeddings: bool
    max_positions: int
    dtype: str = "float32"  # of the checkpoint: "float32" | "bfloat16" | "float16"

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def runs(self) -> tuple[tuple[LayerSpec, int], ...]:
        """Consecutive equal layers as (spec, count): each run is stacked and scanned."""
        runs: list[tuple[LayerSpec, int]] = []
        for spec in self.layers:
            if runs and runs[-1][0] == spec:
                runs[-1] = (spec, runs[-1][1] + 1)
            else:
                runs.append((spec, 1))
        return tuple(runs)
