"""Self-attention over paged KV."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

import pallas_kernels
from jaxllm.config.model import AttentionSpec
from jaxllm.layers.batch import BatchMetadata
from jaxllm.layers.linear import Linear
from jaxllm.layers.rope import RopeTable, apply_rope


class Attention(nnx.Module):
    """qkv.weight [D, (N + 2K) * H]: query heads, then key heads, then value heads; out.weight [N * H, D].

    `implementation` names the kernel; None leaves it to the platform.
    """

    def __init__(self, spec: AttentionSpec, hidden_size: int, dtype: jnp.dtype, implementation: str | None) -> None:
        num_out = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
        self.qkv = Linear(hidden_size, num_out, dtype, bias=spec.qkv_bias)
        self.out = Linear(spec.num_heads * spec.head_dim, hidden_size, dtype, bias=spec.out_bias)
        self.spec = spec
        self.implementation = implementation

    def __call__(
        self, x: jax.Array, kv: jax.Array, layer: jax.Array, batch: BatchMetadata, rope: RopeTable | None
    ) -> tuple[jax.Array, jax.Array]:
        """x [T, D] -> ([T, D] float32, kv with this step's keys and values).

        `kv` holds the pages of all layers of the run; `layer` (int32 scalar) is this one's index in it.
        """
        q, k, v = self._heads(x, batch, rope)
        attended, kv = pallas_kernels.ragged_paged_attention(
            q,
            k,
            v,
            kv,
            layer,
            kv_lens=batch.seq_lens,
            page_tables=batch.page_tables,
            query_starts=batch.query_starts,
            distribution=batch.distribution,
            positions=batch.positions,
            token_rows=batch.token_rows,
            scale=self.spec.scale,
            window=self.spec.window,
            soft_cap=self.spec.soft_cap,
            implementation=self.implementation,
            decode_only=batch.bucket.is_decode,
        )
        return self.out(attended.astype(x.dtype).reshape(x.shape[0], -1), batch.num_tokens), kv

    def _heads(
        self, x: jax.Array, batch: BatchMetadata, rope: RopeTable | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        spec = self.spec
        heads = self.qkv(x, batch.num_tokens).reshape(x.shape[0], -1, spec.head_dim)
        q, k, v = jnp.split(heads, [spec.num_heads, spec.num_heads + spec.num_kv_heads], axis=1)
        if rope is not None:
            q, k = apply_rope(q, rope), apply_rope(k, rope)
        return q.astype(x.dtype), k.astype(x.dtype), v.astype(x.dtype)
