"""Runs a case of ragged paged attention, on an implementation or on the float64 reference of these tests."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention
from pallas_kernels._core import native
from pallas_kernels.ragged_paged_attention import api, cases
from tests.pallas_kernels import numpy_attention

needs_native = pytest.mark.skipif(native.why_not() is not None, reason=str(native.why_not()))
NATIVE = pytest.param("native", marks=needs_native)


def module(implementation):
    return next(i for i in api.IMPLEMENTATIONS if i.name == implementation).load()


# What XLA's backend does after its own passes is half the compile time of these tests and none of their matter.
QUICK = {"xla_backend_optimization_level": 0}


@partial(jax.jit, static_argnames=("implementation", "static"), compiler_options=QUICK)
def call(q, k, v, kv_pages, layer, sinks, arrays, *, implementation, static):
    return ragged_paged_attention(
        q, k, v, kv_pages, layer, sinks=sinks, implementation=implementation, **arrays, **dict(static)
    )


def rounded(x, dtype):
    """To `dtype` and back: what an array of that type holds of `x`, in float64."""
    return None if x is None else np.asarray(np.asarray(x, np.float32).astype(jnp.dtype(dtype))).astype(np.float64)


def run(case, implementation, seed=0):
    """-> (out, keys [L, pages, S, K, H], values), as the implementation left them."""
    return run_step(case, cases.make_step(case, seed), implementation)


def run_step(case, step, implementation):
    home = module(implementation)
    cast = lambda x, dtype: None if x is None else jnp.asarray(x, jnp.float32).astype(dtype)  # noqa: E731
    kv_pages = home.pack(step.k_cache, step.v_cache, case.kv_dtype)
    out, kv_pages = call(
        cast(step.q, case.q_dtype),
        cast(step.k, case.q_dtype),
        cast(step.v, case.q_dtype),
        kv_pages,
        jnp.int32(step.layer),
        None if step.sinks is None else jnp.asarray(step.sinks, jnp.float32),
        {name: jnp.asarray(array) for name, array in step.arrays.items()},
        implementation=implementation,
        static=tuple(sorted(case.static.items())),
    )
    return (np.asarray(out), *home.unpack(kv_pages))


def expected(case, seed=0):
    """The same from float64 numpy, with the rounding that the case's dtypes ask for."""
    return expected_step(case, cases.make_step(case, seed))


def expected_step(case, step):
    k_scale, v_scale = case.scales or (1.0, 1.0)
    static = {name: case.static[name] for name in ("scale", "window", "soft_cap")}
    out, k_cache, v_cache = numpy_attention.step(
        rounded(step.q, case.q_dtype),
        stored(rounded(step.k, case.q_dtype), k_scale, case.kv_dtype) * k_scale if case.writes else None,
        stored(rounded(step.v, case.q_dtype), v_scale, case.kv_dtype) * v_scale if case.writes else None,
        rounded(step.k_cache, case.kv_dtype) * k_scale,
        rounded(step.v_cache, case.kv_dtype) * v_scale,
        step.layer,
        step.arrays,
        sinks=step.sinks,
        **static,
    )
    raw = (np.rint(c / s) if case.kv_dtype == "int8" else c / s for c, s in ((k_cache, k_scale), (v_cache, v_scale)))
    return (out, *raw)


def stored(x, scale, dtype):
    """What a cache of `dtype` keeps of `x`."""
    if dtype == "int8":
        return np.clip(np.rint(x / scale), -127, 127)
    return rounded(x / scale, dtype)
