"""What an implementation is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import jax


@dataclass(frozen=True, slots=True)
class Problem:
    """Axis letters: T rows, L matrices, K in, N out."""

    x_dtype: str
    w_dtype: str
    transposed: bool = False  # the matrices are [N, K]


class Operands(NamedTuple):
    x: jax.Array  # [T, K]
    weights: jax.Array  # [L, K, N], or [L, N, K]
    index: jax.Array  # int32 scalar
    num_rows: jax.Array  # int32 scalar
