"""The oracle: plain jnp in float32, one token at a time over its whole context. Slow, and obviously right."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention import layout
from pallas_kernels.ragged_paged_attention.layout import cache_struct, num_kv_heads, pack, unpack
from pallas_kernels.ragged_paged_attention.problem import Operands, Problem

__all__ = ["cache_struct", "num_kv_heads", "pack", "run", "unpack", "why_not"]


def why_not(problem: Problem) -> str | None:
    return layout.why_not(problem)


def run(operands: Operands, problem: Problem) -> tuple[jax.Array, jax.Array]:
    kv = layout.write(operands)

    def attend(token: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q, position, row = token
        keys, values = _context(operands, kv, row)
        return _attend_token(q.astype(jnp.float32), position, row, keys, values, operands, problem)

    out = lax.map(attend, (operands.q, operands.positions, operands.token_rows))
    return out.astype(operands.q.dtype), kv


def _context(operands: Operands, kv: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and values [C, K, H] of every place in the page table of `row`, as float32."""
    num_rows = operands.page_tables.shape[0]
    pages = kv[operands.layer, operands.page_tables[jnp.minimum(row, num_rows - 1)]]  # [P, 2, K, S, H]
    tokens = layout.as_float32(pages).transpose(1, 0, 3, 2, 4)  # [2, P, S, K, H]
    keys, values = tokens.reshape(2, -1, kv.shape[3], kv.shape[5])
    if operands.k_scale is not None and operands.v_scale is not None:
        keys, values = keys * operands.k_scale[:, None], values * operands.v_scale[:, None]
    return keys, values


def _attend_token(
    q: jax.Array,
    position: jax.Array,
    row: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    operands: Operands,
    problem: Problem,
) -> jax.Array:
    """q [N, H] against keys, values [C, K, H] -> [N, H]; zeros if nothing is visible."""
    num_rows = operands.kv_lens.shape[0]
    places = jnp.arange(keys.shape[0])
    visible = (places <= position) & (places < operands.kv_lens[jnp.minimum(row, num_rows - 1)]) & (row < num_rows)
    if problem.window is not None:
        visible &= places > position - problem.window
    # Unseen memory may hold NaN, and 0 * NaN is NaN.
    keys, values = (jnp.where(visible[:, None, None], x, 0.0) for x in (keys, values))
    group = q.shape[0] // keys.shape[1]
    keys, values = (jnp.repeat(x, group, axis=1) for x in (keys, values))
    logits = jnp.einsum("nh,cnh->nc", q, keys, precision=lax.Precision.HIGHEST) * problem.scale
    if problem.soft_cap is not None:
        logits = problem.soft_cap * jnp.tanh(logits / problem.soft_cap)
    logits = jnp.where(visible, logits, -jnp.inf)
    if operands.sinks is not None:
        logits = jnp.concatenate([logits, operands.sinks[:, None]], axis=1)
    weights = jnp.where(visible.any(), jax.nn.softmax(logits, axis=1), 0.0)[:, : visible.shape[0]]
    return jnp.einsum("nc,cnh->nh", weights, values, precision=lax.Precision.HIGHEST)
