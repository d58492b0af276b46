"""XLA's own matmul, on a slice of the stack."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.stacked_matmul.problem import Operands, Problem


def why_not(problem: Problem) -> str | None:
    return None


def run(operands: Operands, problem: Problem) -> jax.Array:
    weight = lax.dynamic_index_in_dim(operands.weights, operands.index, keepdims=False)
    # Accelerators multiply float32 in bfloat16 or TF32 pieces unless told otherwise.
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else lax.Precision.DEFAULT
    contracted = (((1,), (1 if problem.transposed else 0,)), ((), ()))
    return lax.dot_general(operands.x, weight, contracted, precision=precision, preferred_element_type=jnp.float32)
