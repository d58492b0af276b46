"""The token table: ids to rows, and rows back to logits where it is tied."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

from jaxllm.layers.linear import matmul_transposed


class Embed(nnx.Module):
    """weight [V, D]."""

    def __init__(self, vocab_size: int, hidden_size: int, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.zeros((vocab_size, hidden_size), dtype))

    def __call__(self, token_ids: jax.Array) -> jax.Array:
        """token_ids [T] int32 -> [T, D]."""
        return self.weight[...].at[token_ids].get(mode="clip")

    def logits(self, hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """hidden [N, D] -> [N, V] float32; `num_rows`: the rows that count."""
        return matmul_transposed(hidden, self.weight[...], num_rows)
