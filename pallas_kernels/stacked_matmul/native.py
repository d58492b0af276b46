"""C++ on CPUs: the matrix is read where it lies in the stack, on XLA's threads."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels._core import native
from pallas_kernels.stacked_matmul.problem import Operands, Problem

_FLOATS = ("float32", "bfloat16")


def why_not(problem: Problem) -> str | None:
    if problem.x_dtype not in _FLOATS or problem.w_dtype not in _FLOATS:
        return f"multiplies {' and '.join(_FLOATS)} alone, not {problem.x_dtype} with {problem.w_dtype}"
    return native.why_not()


def run(operands: Operands, problem: Problem) -> jax.Array:
    num_out = operands.weights.shape[1 if problem.transposed else 2]
    out = jax.ShapeDtypeStruct((operands.x.shape[0], num_out), jnp.float32)
    call = jax.ffi.ffi_call(native.native().targets["matmul"], out)
    return call(*operands, transposed=problem.transposed)
