"""What an implementation is asked: the static facts of a call, and its arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

# A cache may hold the bits of a narrow float as unsigned integers. This says which float.
HOLDS = {"uint16": "bfloat16", "uint8": "float8_e4m3fn"}


def logical_dtype(dtype: jnp.dtype) -> str:
    """Name of the dtype that a cache of `dtype` holds."""
    name = jnp.dtype(dtype).name
    return HOLDS.get(name, name)


@dataclass(frozen=True, slots=True)
class Problem:
    """The static facts of a call, as far as they are known (a question about a cache has no queries).

    Axis letters: T tokens, R rows, P pages a row, S page size, N query heads, K kv heads, H head dim, L layers.
    """

    num_kv_heads: int  # K
    head_dim: int  # H
    kv_dtype: str  # what the cache holds, whatever the type of the array
    num_heads: int | None = None  # N
    q_dtype: str | None = None
    page_size: int | None = None  # S; None: read off the cache
    cache_shape: tuple[int, ...] | None = None  # of the array that was given
    scale: float = 1.0
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_scales: bool = False
    writes: bool = True  # False: k and v are None, the cache is only read
    decode_only: bool = False


class Operands(NamedTuple):
    """The arrays of a call, checked. Optional ones are None where the feature is off."""

    q: jax.Array  # [T, N, H]
    k: jax.Array | None  # [T, K, H]
    v: jax.Array | None  # [T, K, H]
    kv_pages: jax.Array  # the implementation's layout
    layer: jax.Array  # int32 scalar
    kv_lens: jax.Array  # [R] int32
    page_tables: jax.Array  # [R, P] int32
    query_starts: jax.Array  # [R + 1] int32
    distribution: jax.Array  # [3] int32
    positions: jax.Array  # [T] int32
    token_rows: jax.Array  # [T] int32
    sinks: jax.Array | None  # [N] float32
    k_scale: jax.Array | None  # [K] float32
    v_scale: jax.Array | None  # [K] float32
