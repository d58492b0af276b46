"""The page layout that `reference` and `xla` share: ``[L, pages, 2, K, S, H]``, keys at 0 and values at 1.

Head-major inside a page, so that the pages of a row, gathered as they lie, are batched operands of the two
matmuls of attention and nothing is transposed. NOTES.md has the other layouts that were measured.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.ragged_paged_attention.problem import Operands, Problem

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")


def cache_shape(problem: Problem, num_layers: int, num_pages: int) -> tuple[int, ...]:
    assert problem.page_size is not None
    return (num_layers, num_pages, 2, problem.num_kv_heads, problem.page_size, problem.head_dim)


def why_not(problem: Problem) -> str | None:
    """The reason a cache of this kind cannot be served with this layout, or None."""
    if problem.kv_dtype not in DTYPES:
        return f"KV dtype {problem.kv_dtype} is not one of {', '.join(DTYPES)}"
    shape = problem.cache_shape
    if shape is None:
        return None
    want = (2, problem.num_kv_heads, shape[-2] if len(shape) > 1 else 1, problem.head_dim)
    if len(shape) != 6 or shape[2:] != want:
        return (
            f"kv_pages has shape {shape}; its layout is [L, pages, 2, K, S, H] "
            f"with K = {problem.num_kv_heads}, H = {problem.head_dim}"
        )
    return None


def num_kv_heads(shape: tuple[int, ...]) -> int | None:
    """K as this layout would read it off a cache; None if the shape is not of this layout."""
    return shape[3] if len(shape) == 6 else None


def pack(k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Keys and values ``[L, pages, S, K, H]`` -> a cache. For tests and tools, on the host."""
    return np.stack([k, v], axis=2).swapaxes(3, 4)


def unpack(kv_pages: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """A cache -> keys and values ``[L, pages, S, K, H]``."""
    token_major = np.asarray(kv_pages).swapaxes(3, 4)
    return token_major[:, :, 0], token_major[:, :, 1]


def stored(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """``x [T, K, H]`` as the cache keeps it: divided by its scale, rounded and saturated to the cache's range.

    Saturated because a float8 has no infinity to overflow to, and an int8 would wrap.
    """
    if scale is not None:
        x = x.astype(jnp.float32) / scale[:, None]
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(x.astype(jnp.float32)), -127, 127).astype(dtype)
    if jnp.dtype(dtype).itemsize == 1:
        limit = float(jnp.finfo(dtype).max)
        return jnp.clip(x.astype(jnp.float32), -limit, limit).astype(dtype)
    return x.astype(dtype)


def write(operands: Operands) -> jax.Array:
    """Scatter this step's keys and values into the stacked cache, in place where it is donated.

    A token with no page of its own (padding, or a position past its page table) goes to the null page, slot 0:
    an index of -1 would wrap to the last page, and one out of range would be dropped in silence.
    """
    kv, layer = operands.kv_pages, operands.layer
    if operands.k is None or operands.v is None:
        return kv
    num_rows, pages_per_row = operands.page_tables.shape
    page_size = kv.shape[4]
    column = operands.positions // page_size
    real = (operands.token_rows < num_rows) & (column < pages_per_row)
    page = operands.page_tables[jnp.minimum(operands.token_rows, num_rows - 1), jnp.minimum(column, pages_per_row - 1)]
    page = jnp.where(real, page, 0)
    slot = jnp.where(real, operands.positions % page_size, 0)
    # Two scatters of plain windows: one of both at once, and anything that views the cache in another shape,
    # were slower or made XLA copy the whole cache.
    k = stored(operands.k, operands.k_scale, kv.dtype)
    v = stored(operands.v, operands.v_scale, kv.dtype)
    kv = kv.at[layer, page, 0, :, slot].set(k, mode="promise_in_bounds")
    return kv.at[layer, page, 1, :, slot].set(v, mode="promise_in_bounds")
