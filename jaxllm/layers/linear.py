"""Matrix multiplication with weights stored (in, out)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

import pallas_kernels
from pallas_kernels.stacked_matmul import choose
from pallas_kernels.stacked_matmul.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class LayerMatrices:
    """The matrices [in, out] of equal layers, one array each: the value of a parameter that is not stacked.

    On CPUs a matmul in a scan reads its matrix through a copy, because the library that multiplies
    takes no slice of a stack. One array a layer is read where it lies, and the scan still compiles
    its body once. Deliberately no pytree: a scan passes it by, and `at` picks from it.
    """

    matrices: tuple[jax.Array, ...]

    def at(self, layer: jax.Array) -> LayerMatrix:
        """`layer`: int32 scalar."""
        return LayerMatrix(self.matrices, layer)


@dataclass(frozen=True, slots=True, eq=False)
class LayerMatrix:
    """One of `matrices`, by an index that is known when the program runs."""

    matrices: tuple[jax.Array, ...]
    layer: jax.Array


@dataclass(frozen=True, slots=True, eq=False)
class LayerStack:
    """The matrices [L, in, out] of a run, for a kernel that reads one where it lies. No pytree either: see above."""

    stack: jax.Array

    def at(self, layer: jax.Array) -> StackedMatrix:
        """`layer`: int32 scalar."""
        return StackedMatrix(self.stack, layer)


@dataclass(frozen=True, slots=True, eq=False)
class StackedMatrix:
    """One of a stack, by an index that is known when the program runs."""

    stack: jax.Array
    layer: jax.Array


Matrix = jax.Array | LayerMatrix | StackedMatrix


def has_native_matmul(dtype: jnp.dtype) -> bool:
    """Whether matrices of `dtype` are best multiplied where they lie in their stack: on CPUs with a C++ compiler."""
    name = jnp.dtype(dtype).name
    return choose(Problem(name, name)).chosen.name == "native"


def matmul(x: jax.Array, weight: Matrix, num_rows: jax.Array | None = None) -> jax.Array:
    """x [T, in] times weight [in, out] -> [T, out] float32, summed in float32 whatever the inputs.

    `num_rows` (int32 scalar; None: all): the rows that count. What the others give means nothing.
    """
    if isinstance(weight, StackedMatrix):
        return pallas_kernels.stacked_matmul(x, weight.stack, weight.layer, num_rows=num_rows)
    if isinstance(weight, LayerMatrix):
        return lax.switch(weight.layer, [partial(_dot, weight=m) for m in weight.matrices], x)
    return _dot(x, weight)


def matmul_transposed(x: jax.Array, weight: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
    """x [T, in] times weight [out, in], without a transposed copy of it -> [T, out] float32; `num_rows` as above."""
    return pallas_kernels.stacked_matmul(x, weight[None], 0, num_rows=num_rows, transposed=True)


def _dot(x: jax.Array, weight: jax.Array) -> jax.Array:
    """XLA's own, whatever else there is: the form that it can fuse, and slice where layers are scanned."""
    return pallas_kernels.stacked_matmul(x, weight[None], 0, implementation="xla")


class Linear(nnx.Module):
    """weight [in, out], bias [out] or None, both of `dtype`."""

    def __init__(self, num_in: int, num_out: int, dtype: jnp.dtype, *, bias: bool = False) -> None:
        self.weight = nnx.Param(jnp.zeros((num_in, num_out), dtype))
        self.bias = nnx.Param(jnp.zeros((num_out,), dtype)) if bias else None

    def __call__(self, x: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        """x [T, in] -> [T, out] float32: the caller rounds to its own type, once. `num_rows`: see `matmul`."""
        y = matmul(x, self.weight.get_value(), num_rows)
        return y if self.bias is None else y + self.bias[...].astype(jnp.float32)
