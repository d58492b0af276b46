"""C++ on CPUs: pages are read where they lie, each once, and the loop over rows runs on XLA's threads.

The layout is that of `xla`, so either serves a cache that the other wrote.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels._core import native
from pallas_kernels.ragged_paged_attention import layout
from pallas_kernels.ragged_paged_attention.layout import cache_struct, num_kv_heads, pack, unpack
from pallas_kernels.ragged_paged_attention.problem import Operands, Problem

__all__ = ["cache_struct", "num_kv_heads", "pack", "run", "unpack", "why_not"]

_FLOATS = ("float32", "bfloat16")
_KV_ARGUMENT = 3


def why_not(problem: Problem) -> str | None:
    if problem.kv_dtype not in _FLOATS or problem.q_dtype not in (None, *_FLOATS):
        return f"computes from {' or '.join(_FLOATS)} alone, not q {problem.q_dtype} and KV {problem.kv_dtype}"
    if problem.has_scales:
        return "has no scales of keys and values"
    return layout.why_not(problem) or native.why_not()


def run(operands: Operands, problem: Problem) -> tuple[jax.Array, jax.Array]:
    kv, q = operands.kv_pages, operands.q
    new = tuple(x for x in (operands.k, operands.v) if x is not None)
    # One type of all three. A wider key must not lose digits on its way to the pages.
    held = q.dtype if all(x.dtype == q.dtype for x in new) else jnp.dtype("float32")
    sinks = jnp.zeros(1, jnp.float32) if operands.sinks is None else operands.sinks
    call = jax.ffi.ffi_call(
        native.native().targets["attention"],
        (jax.ShapeDtypeStruct(q.shape, held), jax.ShapeDtypeStruct(kv.shape, kv.dtype)),
        input_output_aliases={_KV_ARGUMENT: 1},
    )
    out, kv = call(
        *(x.astype(held) for x in (q, *(new or (q, q)))),  # where nothing is written, k and v are not looked at
        *(kv, operands.layer, operands.kv_lens, operands.page_tables, operands.query_starts),
        *(operands.distribution, operands.positions, operands.token_rows, sinks),
        scale=np.float32(problem.scale),
        window=np.int64(problem.window or 0),
        soft_cap=np.float32(problem.soft_cap or 0.0),
        has_sinks=operands.sinks is not None,
        writes=bool(new),
    )
    return out.astype(q.dtype), kv
