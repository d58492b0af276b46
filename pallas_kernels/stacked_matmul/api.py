"""The public face of the stacked matmul: signature, checks, dispatch."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels._core import dispatch
from pallas_kernels._core.dispatch import Choice, Implementation
from pallas_kernels._core.validate import Axes, check_dtype
from pallas_kernels.stacked_matmul.problem import Operands, Problem

OP = "stacked_matmul"
_HOME = "pallas_kernels.stacked_matmul"
IMPLEMENTATIONS = (
    Implementation("native", f"{_HOME}.native", platforms=("cpu",)),
    Implementation("xla", f"{_HOME}.xla"),
)
_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def choose(problem: Problem, *, implementation: str | None = None, platform: str | None = None) -> Choice:
    """The implementation that serves `problem` here (or on `platform`), and why not the others.

    Raises: UnknownImplementation, Unsupported.
    """
    return dispatch.choose(OP, IMPLEMENTATIONS, problem, implementation=implementation, platform=platform)


def stacked_matmul(
    x: jax.Array,
    weights: jax.Array,
    index: jax.Array | int,
    *,
    num_rows: jax.Array | int | None = None,
    transposed: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """``x @ weights[index]``, summed in float32, without a copy of that matrix.

    Args:
        x: [T, K] float32, bfloat16 or float16.
        weights: [L, K, N], or [L, N, K] where `transposed`; of the same types.
        index: int32 scalar, 0 to L - 1.
        num_rows: int32 scalar: rows of `x` that count, from the first on; None: all. What the others give is
            finite where `x` is, and nothing else is promised of it.
        implementation: a name of IMPLEMENTATIONS; None: the best that serves here.

    Returns: [T, N] float32. A row's bits do not depend on `num_rows` or, with `native`, on T.
    Raises: InvalidArgument, UnknownImplementation, Unsupported; all while tracing.
    """
    axes = Axes()
    axes.bind("x", x, "T K")
    axes.bind("weights", weights, "L N K" if transposed else "L K N")
    check_dtype("x", x, _FLOATS)
    check_dtype("weights", weights, _FLOATS)
    rows = axes["T"] if num_rows is None else num_rows
    operands = Operands(x, weights, jnp.asarray(index, jnp.int32), jnp.asarray(rows, jnp.int32))
    for name in ("index", "num_rows"):
        axes.bind(name, getattr(operands, name), "")
    problem = Problem(x.dtype.name, weights.dtype.name, transposed)
    return choose(problem, implementation=implementation).chosen.load().run(operands, problem)
