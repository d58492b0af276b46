"""Portable and fast: loops over groups of pages with run-time bounds, and an online softmax in float32.

Cost follows what is used: no context is gathered whole, nothing is padded to the longest possible length. A group
is a fixed number of tokens at a fixed place in the sequence, so the order of every sum depends on the row alone,
never on who else is in the batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.ragged_paged_attention import layout
from pallas_kernels.ragged_paged_attention.layout import cache_struct, num_kv_heads, pack, unpack
from pallas_kernels.ragged_paged_attention.problem import Operands, Problem

__all__ = ["cache_struct", "num_kv_heads", "pack", "run", "unpack", "why_not"]

GROUP_TOKENS = 128  # one turn of the inner loop: enough work to hide its cost, few enough to stay in cache
ROWS_PER_BLOCK = 8  # decode rows that share a loop; the longest of them bounds it
QUERIES_PER_TILE = 32  # prefill queries of one request that share a loop
SMALL_PAGE = 16  # below, the pages of a group are joined before the matmul


def why_not(problem: Problem) -> str | None:
    return layout.why_not(problem) or layout.why_not_in_place(problem)


def run(operands: Operands, problem: Problem) -> tuple[jax.Array, jax.Array]:
    kv = layout.write(operands)
    cache = _Cache(kv, operands.layer, _whole_groups(operands.page_tables, kv.shape[4]), operands.page_tables.shape[1])
    num_tokens = operands.q.shape[0]
    if problem.decode_only:
        out = _decode(operands, problem, cache, jnp.zeros_like(operands.q))
        return out, kv
    # The last tile may run past the end: a margin of one tile takes what it writes there.
    q = jnp.pad(operands.q, ((0, QUERIES_PER_TILE), (0, 0), (0, 0)))
    out = _decode(operands, problem, cache, jnp.zeros_like(q))
    out = _prefill(operands._replace(q=q), problem, cache, out)
    return out[:num_tokens], kv


class _Cache(NamedTuple):
    kv: jax.Array  # [L, pages, 2, K, S, H]
    layer: jax.Array
    tables: jax.Array  # [R, whole groups of pages]
    pages_per_row: int

    @property
    def page_size(self) -> int:
        return self.kv.shape[4]

    @property
    def group(self) -> int:
        """Pages in a group."""
        return max(1, GROUP_TOKENS // self.page_size)


def _whole_groups(page_tables: jax.Array, page_size: int) -> jax.Array:
    """Pad the tables with null pages to whole groups: a slice that runs past the end would be shifted in silence."""
    group = max(1, GROUP_TOKENS // page_size)
    return jnp.pad(page_tables, ((0, 0), (0, -page_tables.shape[1] % group)))


class _Queries(NamedTuple):
    """B rows of the batch, each with M query rows per kv head."""

    q: jax.Array  # [B, K, M, H] float32, scaled
    positions: jax.Array  # [B, M], or [B, 1] if all are the same; -1: sees nothing
    tables: jax.Array  # [B, whole groups of pages]
    first: jax.Array  # [B] the first position that any of them sees
    last: jax.Array  # [B] the last; -1: none
    sinks: jax.Array | None  # [K, M] float32


def _decode(operands: Operands, problem: Problem, cache: _Cache, out: jax.Array) -> jax.Array:
    """Rows with one token each, in blocks. Token and row have the same index."""
    num_rows = min(operands.kv_lens.shape[0], operands.q.shape[0])
    block = min(ROWS_PER_BLOCK, num_rows)
    num_decode = operands.distribution[0]

    def attend(index: jax.Array, out: jax.Array) -> jax.Array:
        # The last block is moved back to fit; rows done twice give the same bits twice.
        start = jnp.minimum(index * block, num_rows - block)
        q = lax.dynamic_slice_in_dim(operands.q, start, block)
        lens = lax.dynamic_slice_in_dim(operands.kv_lens, start, block)
        lens = jnp.where(start + jnp.arange(block, dtype=jnp.int32) < num_decode, lens, 0)
        tables = lax.dynamic_slice_in_dim(cache.tables, start, block)
        heads = q.reshape(block, cache.kv.shape[3], -1, q.shape[2])
        queries = _Queries(
            _scaled(heads, operands, problem),
            lens[:, None] - 1,
            tables,
            _window_start(lens - 1, problem),
            lens - 1,
            None if operands.sinks is None else operands.sinks.reshape(heads.shape[1:3]),
        )
        attended = _attend(queries, operands, problem, cache, join=cache.page_size < SMALL_PAGE)
        return lax.dynamic_update_slice_in_dim(out, attended.reshape(q.shape).astype(out.dtype), start, 0)

    if block == num_rows:
        return lax.cond(num_decode > 0, lambda: attend(jnp.int32(0), out), lambda: out)
    return lax.fori_loop(0, (num_decode + block - 1) // block, attend, out)


def _prefill(operands: Operands, problem: Problem, cache: _Cache, out: jax.Array) -> jax.Array:
    """Rows with several tokens, in tiles of the queries of one row. `operands.q` and `out` have a margin of a tile."""
    tile = QUERIES_PER_TILE  # whatever T is: the bits of a matmul may depend on its number of rows
    rows = jnp.arange(operands.kv_lens.shape[0], dtype=jnp.int32)
    lengths = jnp.diff(operands.query_starts)
    lengths = jnp.where((rows >= operands.distribution[0]) & (rows < operands.distribution[2]), lengths, 0)
    tiles = (lengths + tile - 1) // tile
    ends = jnp.cumsum(tiles, dtype=jnp.int32)
    num_kv_heads, group = cache.kv.shape[3], operands.q.shape[1] // cache.kv.shape[3]
    lane = jnp.arange(tile, dtype=jnp.int32)

    def attend(index: jax.Array, out: jax.Array) -> jax.Array:
        row = jnp.sum(ends <= index, dtype=jnp.int32)
        done = (index - (ends[row] - tiles[row])) * tile
        start = operands.query_starts[row] + done
        first = operands.kv_lens[row] - lengths[row] + done
        real = lane < lengths[row] - done
        q = lax.dynamic_slice_in_dim(operands.q, start, tile)  # [tile, N, H]
        heads = q.reshape(tile, num_kv_heads, group, -1).swapaxes(0, 1).reshape(1, num_kv_heads, tile * group, -1)
        sinks = None if operands.sinks is None else jnp.tile(operands.sinks.reshape(num_kv_heads, group), (1, tile))
        queries = _Queries(
            _scaled(heads, operands, problem),
            jnp.repeat(jnp.where(real, first + lane, -1), group)[None],
            lax.dynamic_slice_in_dim(cache.tables, row, 1),
            _window_start(first, problem)[None],
            jnp.minimum(first + tile, operands.kv_lens[row])[None] - 1,
            sinks,
        )
        attended = _attend(queries, operands, problem, cache, join=True)
        attended = attended.reshape(num_kv_heads, tile, group, -1).swapaxes(0, 1).reshape(q.shape)
        # Lanes past the row's end belong to a later tile, which comes later and overwrites them, or to padding.
        return lax.dynamic_update_slice_in_dim(out, attended.astype(out.dtype), start, 0)

    return lax.fori_loop(0, ends[-1], attend, out)


def _scaled(heads: jax.Array, operands: Operands, problem: Problem) -> jax.Array:
    """[B, K, M, H] -> float32, times everything that multiplies q·k."""
    heads = heads.astype(jnp.float32) * problem.scale
    return heads if operands.k_scale is None else heads * operands.k_scale[:, None, None]


def _window_start(position: jax.Array, problem: Problem) -> jax.Array:
    if problem.window is None:
        return jnp.zeros_like(position)
    return jnp.maximum(position - (problem.window - 1), 0)


def _attend(queries: _Queries, operands: Operands, problem: Problem, cache: _Cache, *, join: bool) -> jax.Array:
    """-> [B, K, M, H] float32; zeros for queries that see nothing."""
    group_tokens = cache.group * cache.page_size
    begin = jnp.min(jnp.where(queries.last >= 0, queries.first, jnp.iinfo(jnp.int32).max)) // group_tokens
    end = jnp.minimum(jnp.max(queries.last) // group_tokens + 1, queries.tables.shape[1] // cache.group)
    rows = queries.q.shape[:3]
    accumulated = jnp.zeros(queries.q.shape, jnp.float32)
    if queries.sinks is None:
        state = jnp.full(rows, -jnp.inf, jnp.float32), jnp.zeros(rows, jnp.float32), accumulated
    else:
        # A sink is a key that has a logit and a value of zero: the softmax starts with it.
        state = jnp.broadcast_to(queries.sinks, rows), jnp.ones(rows, jnp.float32), accumulated

    precision = lax.Precision.HIGHEST if problem.q_dtype == "float32" else lax.Precision.DEFAULT

    def fold(index: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        keys, values, places = _group(queries, cache, index, join)
        logits = jnp.einsum("bkmh,bpksh->bpkms", queries.q, keys, precision=precision)
        if problem.soft_cap is not None:
            logits = problem.soft_cap * jnp.tanh(logits / problem.soft_cap)
        at = queries.positions[:, None, None, :, None]
        visible = (places[None, :, None, None] <= at) & (places < cache.pages_per_row * cache.page_size)[:, None, None]
        if problem.window is not None:
            visible &= places[None, :, None, None] > at - problem.window
        return _online_softmax(state, jnp.where(visible, logits, -jnp.inf), values, precision)

    _, total, weighted = lax.fori_loop(begin, end, fold, state)
    out = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)[..., None] * weighted
    return out if operands.v_scale is None else out * operands.v_scale[:, None, None]


def _group(queries: _Queries, cache: _Cache, index: jax.Array, join: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One group of pages: keys, values [B, p, K, s, H] float32 and the places of their tokens [p, s].

    p pages of s tokens as they lie in the cache, or one of p * s if they are to be joined.
    """
    pages = lax.dynamic_slice_in_dim(queries.tables, index * cache.group, cache.group, 1)
    keys, values = (
        layout.as_float32(cache.kv.at[cache.layer, pages, i].get(mode="promise_in_bounds")) for i in range(2)
    )
    place = jnp.arange(cache.group * cache.page_size, dtype=jnp.int32).reshape(cache.group, cache.page_size)
    places = index * (cache.group * cache.page_size) + place
    # Places that no query sees may hold NaN, and 0 * NaN is NaN. (Such a key's logits are replaced later.)
    first, last = (x[:, None, None] for x in (queries.first, queries.last))
    used = (places >= first) & (places <= last) & (places < cache.pages_per_row * cache.page_size)
    values = jnp.where(used[:, :, None, :, None], values, 0)
    if join:
        shape = (values.shape[0], 1, values.shape[2], -1, values.shape[4])
        keys, values = (x.swapaxes(1, 2).reshape(shape) for x in (keys, values))
        places = places.reshape(1, -1)
    return keys, values, places


def _online_softmax(
    state: tuple[jax.Array, jax.Array, jax.Array], logits: jax.Array, values: jax.Array, precision: lax.Precision
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Fold logits [B, p, K, M, s] and values [B, p, K, s, H] into (largest [B, K, M], total, weighted [B, K, M, H])."""
    largest, total, weighted = state
    new_largest = jnp.maximum(largest, jnp.max(logits, axis=(1, 4)))
    # While nothing was visible the largest is -inf, and -inf - -inf is NaN: subtract 0 instead.
    shift = jnp.where(jnp.isneginf(new_largest), 0, new_largest)
    weights = jnp.exp(logits - shift[:, None, :, :, None])
    keep = jnp.exp(largest - shift)
    new = jnp.einsum("bpkms,bpksh->bpkmh", weights, values, precision=precision)
    total = total * keep + _sum(_sum(weights, 4), 1)
    return new_largest, total, weighted * keep[..., None] + _sum(new, 1)


def _sum(x: jax.Array, axis: int) -> jax.Array:
    """Sum over an axis by halves, in an order that the program states.

    XLA picks the order of a reduction by the size of the whole array, and so by the number of rows in the batch.
    """
    while x.shape[axis] > 1:
        half, odd = divmod(x.shape[axis], 2)
        parts = [lax.slice_in_dim(x, i * half, (i + 1) * half, axis=axis) for i in range(2)]
        folded = parts[0] + parts[1]
        x = jnp.concatenate([folded, lax.slice_in_dim(x, 2 * half, None, axis=axis)], axis) if odd else folded
    return jnp.squeeze(x, axis)
