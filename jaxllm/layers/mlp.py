"""The feed-forward part of a layer."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.config.model import MLPSpec
from jaxllm.layers.linear import Linear

ACTIVATIONS = {
    "silu": jax.nn.silu,
    "gelu": partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class GatedMLP(nnx.Module):
    """down(activation(gate(x)) * up(x)); gate_up.weight [D, 2F] holds the gate's columns, then up's."""

    def __init__(self, spec: MLPSpec, hidden_size: int, dtype: jnp.dtype) -> None:
        self.gate_up = Linear(hidden_size, 2 * spec.intermediate_size, dtype, bias=spec.bias)
        self.down = Linear(spec.intermediate_size, hidden_size, dtype, bias=spec.bias)
        self.activation = spec.activation

    def __call__(self, x: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """x [T, D] -> [T, D] float32; `num_rows`: the rows that count."""
        gate, up = jnp.split(self.gate_up(x, num_rows), 2, axis=-1)
        return self.down((ACTIVATIONS[self.activation](gate) * up).astype(x.dtype), num_rows)
