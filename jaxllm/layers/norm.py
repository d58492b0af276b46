"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax


class RMSNorm(nnx.Module):
    """weight [D]; computed in float32."""

    def __init__(self, size: int, eps: float, dtype: jnp.dtype) -> None:
        self.weight = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., D] -> the same shape and dtype."""
        exact = x.astype(jnp.float32)
        inverse = lax.rsqrt(jnp.mean(exact * exact, axis=-1, keepdims=True) + self.eps)
        return (exact * inverse * self.weight[...].astype(jnp.float32)).astype(x.dtype)
