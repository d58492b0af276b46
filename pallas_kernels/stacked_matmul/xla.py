"""XLA's own matmul, on a slice of the stack."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.stacked_matmul.problem import Operands, Problem


def why_not(problem: Problem) -> str | None:
    return None


def run(operands: Operands, problem: Problem) -> jax.Array:
    weights = operands.weights
    # Of a stack of one nothing is sliced, and so nothing copied.
    weight = weights[0] if weights.shape[0] == 1 else lax.dynamic_index_in_dim(weights, operands.index, keepdims=False)
    # Accelerators multiply float32 in bfloat16 or TF32 pieces unless told otherwise.
    precision = lax.Precision.HIGHEST if weight.dtype == jnp.float32 else lax.Precision.DEFAULT
    contracted = (((1,), (1 if problem.transposed else 0,)), ((), ()))
    return lax.dot_general(operands.x, weight, contracted, precision=precision, preferred_element_type=jnp.float32)
