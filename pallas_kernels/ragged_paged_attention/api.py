"""The public face of ragged paged attention: signature, checks, dispatch.

A step is R rows (requests) with T tokens in all, row after row, decode rows first.

    kv_lens [R]           tokens of each sequence once this step's are written; 0 for padding rows
    page_tables [R, P]    pages of each row in order; past its end, any page id in range
    query_starts [R + 1]  first token of each row; padding rows repeat the total
    distribution [3]      (decode rows, decode and prefill rows, all real rows): a decode row has exactly one token,
                          so its token has its index; rows past the last number are padding and have none
    positions [T]         place of each token in its sequence, from 0; the tokens of a row are its sequence's last
    token_rows [T]        row of each token; R for padding

All int32. Padding tokens come last and give zeros; what they write goes to the null page, page 0, which no row may
own. Pages beyond a sequence's end, slots past it and pages behind its window may hold anything, NaN too.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._core import dispatch
from pallas_kernels._core.dispatch import Choice, Implementation
from pallas_kernels._core.errors import InvalidArgument
from pallas_kernels._core.validate import Axes, check_dtype, check_positive
from pallas_kernels.ragged_paged_attention.problem import Operands, Problem, logical_dtype

OP = "ragged_paged_attention"
_HOME = "pallas_kernels.ragged_paged_attention"
IMPLEMENTATIONS = (
    Implementation("native", f"{_HOME}.native", platforms=("cpu",)),
    Implementation("xla", f"{_HOME}.xla"),
    Implementation("reference", f"{_HOME}.reference"),
)
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def choose(problem: Problem, *, implementation: str | None = None, platform: str | None = None) -> Choice:
    """The implementation that serves `problem` here (or on `platform`: "cpu", "gpu", "tpu"), and why not the others.

    Raises:
        UnknownImplementation: `implementation` is not one of this op's.
        Unsupported: none serves, with one reason each.
    """
    return dispatch.choose(OP, IMPLEMENTATIONS, problem, implementation=implementation, platform=platform)


def kv_cache_shape(
    num_layers: int,
    num_pages: int,
    page_size: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: Any,
    *,
    implementation: str | None = None,
) -> jax.ShapeDtypeStruct:
    """Shape and dtype of the stacked pages of `num_layers` layers, in the layout of the implementation that serves.

    Only ``[layer, page, ...]`` is common to all layouts: a page can be copied, the rest is the implementation's,
    the dtype too: it may be an unsigned integer that holds the bits of `dtype` (zero is zero in both).

    Raises: InvalidArgument, UnknownImplementation, Unsupported.
    """
    counts = {
        "num_layers": num_layers,
        "num_pages": num_pages,
        "page_size": page_size,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
    }
    for name, value in counts.items():
        if value < 1:
            raise InvalidArgument(name, value, "1 or more")
    problem = Problem(num_kv_heads, head_dim, jnp.dtype(dtype).name, page_size=page_size)
    chosen = choose(problem, implementation=implementation).chosen
    return chosen.load().cache_struct(problem, num_layers, num_pages)


def ragged_paged_attention(
    q: jax.Array,
    k: jax.Array | None,
    v: jax.Array | None,
    kv_pages: jax.Array,
    layer: jax.Array | int,
    *,
    kv_lens: jax.Array,
    page_tables: jax.Array,
    query_starts: jax.Array,
    distribution: jax.Array,
    positions: jax.Array,
    token_rows: jax.Array,
    scale: float,
    window: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    k_scale: jax.Array | float | None = None,
    v_scale: jax.Array | float | None = None,
    implementation: str | None = None,
    decode_only: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Write this step's keys and values into the pages of one layer, then attend causally over the pages.

    The step's own arrays (`kv_lens` to `token_rows`) are described at the top of this module.

    Args:
        q: [T, N, H] float32, bfloat16 or float16; N is a multiple of K.
        k, v: [T, K, H], or both None to read only (layers that share another layer's KV).
        kv_pages: stacked cache of all layers, of `kv_cache_shape`; donate it and it is updated in place.
        layer: int32 scalar, index into the leading axis of `kv_pages`.
        scale: multiplies q·k.
        window: positions that a query sees, itself included; None: all.
        soft_cap: logits become ``soft_cap * tanh(logits / soft_cap)``; None: off.
        sinks: [N], a logit a head that takes its share of the softmax and adds nothing; None: none.
        k_scale, v_scale: a number or [K], by which stored keys and values are multiplied when read, and divided
            when written. An int8 cache needs them.
        implementation: a name of IMPLEMENTATIONS; None: the best that serves here.
        decode_only: static promise that every real row is a decode row; the prefill half is left out.

    Returns: (attended [T, N, H] in the dtype of q, kv_pages with this step's keys and values).
    Raises: InvalidArgument, UnknownImplementation, Unsupported; all while tracing.
    """
    layer = jnp.asarray(layer, jnp.int32) if isinstance(layer, int) else layer
    step = (kv_lens, page_tables, query_starts, distribution, positions, token_rows)
    operands = Operands(q, k, v, kv_pages, layer, *step, sinks, None, None)
    operands, problem = _checked(operands, k_scale, v_scale, implementation)
    problem = replace(problem, scale=float(scale), window=window, soft_cap=soft_cap, decode_only=decode_only)
    for name in ("scale", "window", "soft_cap"):
        check_positive(name, getattr(problem, name))
    return choose(problem, implementation=implementation).chosen.load().run(operands, problem)


def _checked(operands: Operands, k_scale: Any, v_scale: Any, implementation: str | None) -> tuple[Operands, Problem]:
    """The operands with their scales as arrays, and what their shapes and dtypes say of the problem."""
    axes = Axes(**_kv_heads_of_cache(operands, implementation))
    _check_tokens(axes, operands)
    _check_step(axes, operands)
    kv_dtype = logical_dtype(operands.kv_pages.dtype)
    if (k_scale is None) != (v_scale is None):
        raise InvalidArgument("k_scale and v_scale", "one of them", "both or neither")
    if kv_dtype == "int8" and k_scale is None:
        raise InvalidArgument("k_scale", None, "a number or [K] for an int8 cache")
    if operands.sinks is not None:
        axes.bind("sinks", operands.sinks, "N")
        operands = operands._replace(sinks=operands.sinks.astype(jnp.float32))
    problem = Problem(
        num_kv_heads=axes["K"],
        head_dim=axes["H"],
        kv_dtype=kv_dtype,
        num_heads=axes["N"],
        q_dtype=jnp.dtype(operands.q.dtype).name,
        cache_shape=tuple(operands.kv_pages.shape),
        has_sinks=operands.sinks is not None,
        has_scales=k_scale is not None,
        writes=operands.k is not None,
    )
    scales = (_scale(axes, "k_scale", k_scale), _scale(axes, "v_scale", v_scale))
    return operands._replace(k_scale=scales[0], v_scale=scales[1]), problem


def _kv_heads_of_cache(operands: Operands, implementation: str | None) -> dict[str, int]:
    """K, where no key says it: as the first implementation whose layout fits reads it off the cache."""
    if operands.k is not None:
        return {}
    asked = [i for i in IMPLEMENTATIONS if implementation in (None, i.name)]
    found = (candidate.load().num_kv_heads(tuple(operands.kv_pages.shape)) for candidate in asked)
    known = next((k for k in found if k is not None), None)
    return {} if known is None else {"K": known}


def _check_tokens(axes: Axes, operands: Operands) -> None:
    axes.bind("q", operands.q, "T N H")
    check_dtype("q", operands.q, _FLOATS)
    if (operands.k is None) != (operands.v is None):
        raise InvalidArgument("k and v", "one of them", "both, or None for both")
    for name in ("k", "v"):
        array = getattr(operands, name)
        if array is not None:
            axes.bind(name, array, "T K H")
            check_dtype(name, array, _FLOATS)
    if "K" not in axes:
        raise InvalidArgument("kv_pages", f"shape {operands.kv_pages.shape}", "a shape that kv_cache_shape gives")
    if axes["N"] % axes["K"]:
        raise InvalidArgument("q", f"{axes['N']} heads", f"a multiple of the {axes['K']} kv heads")


def _check_step(axes: Axes, operands: Operands) -> None:
    shapes = {
        "layer": "",
        "kv_lens": "R",
        "page_tables": "R P",
        "query_starts": "R+1",
        "distribution": "3",
        "positions": "T",
        "token_rows": "T",
    }
    for name, shape in shapes.items():
        axes.bind(name, getattr(operands, name), shape)
        check_dtype(name, getattr(operands, name), (jnp.int32,))
    for letter in "TRP":
        if axes[letter] < 1:
            raise InvalidArgument("q, kv_lens and page_tables", f"{letter} = 0", "1 or more tokens, rows and pages")


def _scale(axes: Axes, name: str, value: Any) -> jax.Array | None:
    if value is None:
        return None
    array = jnp.asarray(value, jnp.float32)
    if array.ndim:
        axes.bind(name, array, "K")
    return jnp.broadcast_to(array, (axes["K"],))
