"""The page layout that `reference` and `xla` share: ``[L, pages, 2, K, S, H]``, keys at 0 and values at 1.

Head-major inside a page, so that the pages of a row, gathered as they lie, are batched operands of the two
matmuls of attention and nothing is transposed. NOTES.md has the other layouts that were measured.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels._core.platform import default_platform
from pallas_kernels.ragged_paged_attention.problem import HOLDS, Operands, Problem, logical_dtype

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "int8")


# On CPU, XLA computes a gather, scatter or slice update of these on a float32 copy of its whole operand; of their
# bits, as integers, in place.
_BITS_ON_CPU = {held: bits for bits, held in HOLDS.items()}


def cache_struct(problem: Problem, num_layers: int, num_pages: int) -> jax.ShapeDtypeStruct:
    assert problem.page_size is not None
    shape = (num_layers, num_pages, 2, problem.num_kv_heads, problem.page_size, problem.head_dim)
    return jax.ShapeDtypeStruct(shape, storage_dtype(problem.kv_dtype))


def storage_dtype(kv_dtype: str) -> jnp.dtype:
    """The dtype of the array that holds `kv_dtype` on this platform."""
    return jnp.dtype(_BITS_ON_CPU.get(kv_dtype, kv_dtype) if default_platform() == "cpu" else kv_dtype)


def as_float32(stored: jax.Array) -> jax.Array:
    """Values read from a cache, whether it holds floats, integers or the bits of floats."""
    held = logical_dtype(stored.dtype)
    if held != stored.dtype.name:
        stored = lax.bitcast_convert_type(stored, jnp.dtype(held))
    return stored.astype(jnp.float32)


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


def why_not_in_place(problem: Problem) -> str | None:
    """The reason this kind of cache would be copied at every step on this platform, or None."""
    if default_platform() == "cpu" and problem.kv_dtype == "float8_e5m2":
        return "XLA copies a whole float8_e5m2 cache at every step on CPU; float8_e4m3fn has a way round"
    return None


def num_kv_heads(shape: tuple[int, ...]) -> int | None:
    """K as this layout would read it off a cache; None if the shape is not of this layout."""
    return shape[3] if len(shape) == 6 else None


def pack(k: np.ndarray, v: np.ndarray, kv_dtype: str) -> jax.Array:
    """Keys and values ``[L, pages, S, K, H]`` -> a cache that holds them as `kv_dtype`. For tests and tools."""
    held = np.stack([k, v], axis=2).swapaxes(3, 4).astype(np.float32).astype(jnp.dtype(kv_dtype))
    return jnp.asarray(held.view(storage_dtype(kv_dtype)))


def unpack(kv_pages: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """A cache -> the keys and values ``[L, pages, S, K, H]`` that it holds, float32, scales not applied."""
    held = np.asarray(kv_pages).view(jnp.dtype(logical_dtype(kv_pages.dtype))).astype(np.float32)
    token_major = held.swapaxes(3, 4)
    return token_major[:, :, 0], token_major[:, :, 1]


def stored(x: jax.Array, scale: jax.Array | None, dtype: jnp.dtype) -> jax.Array:
    """``x [T, K, H]`` as a cache array of `dtype` keeps it: divided by its scale, rounded and saturated.

    Saturated because a float8 has no infinity to overflow to, and an int8 would wrap.
    """
    held = jnp.dtype(logical_dtype(dtype))
    if scale is not None:
        x = x.astype(jnp.float32) / scale[:, None]
    if held == jnp.int8:
        x = jnp.clip(jnp.round(x.astype(jnp.float32)), -127, 127)
    elif held.itemsize == 1:
        limit = float(jnp.finfo(held).max)
        x = jnp.clip(x.astype(jnp.float32), -limit, limit)
    x = x.astype(held)
    return x if held == dtype else lax.bitcast_convert_type(x, dtype)


def write(operands: Operands) -> jax.Array:
    """This step's keys and values into the stacked cache, in place where it is donated.

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
    k = stored(operands.k, operands.k_scale, kv.dtype)
    v = stored(operands.v, operands.v_scale, kv.dtype)
    if default_platform() == "cpu":
        return _write_one_by_one(kv, layer, k, v, page, slot, operands.query_starts[-1])
    kv = kv.at[layer, page, 0, :, slot].set(k, mode="promise_in_bounds")
    return kv.at[layer, page, 1, :, slot].set(v, mode="promise_in_bounds")


def _write_one_by_one(
    kv: jax.Array, layer: jax.Array, k: jax.Array, v: jax.Array, page: jax.Array, slot: jax.Array, num_tokens: jax.Array
) -> jax.Array:
    """The scatter as a loop over the real tokens.

    A loop of slices ends with the real tokens, and stays in place whatever T is. XLA's CPU compiler expands a scatter
    to such a loop over all T tokens.
    """
    new = jnp.stack([k, v], axis=1)[:, None, None, :, :, None]  # [T, 1, 1, 2, K, 1, H]
    zero = jnp.int32(0)

    def put(token: jax.Array, kv: jax.Array) -> jax.Array:
        return lax.dynamic_update_slice(kv, new[token], (layer, page[token], zero, zero, slot[token], zero))

    return lax.fori_loop(0, num_tokens, put, kv)
