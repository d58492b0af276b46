"""The rig that runs every implementation of an op on its cases and compares it with the op's reference."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import jax.numpy as jnp
import numpy as np

from pallas_kernels._core.dispatch import Implementation


class TaggedCase(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def tags(self) -> tuple[str, ...]: ...


C = TypeVar("C", bound=TaggedCase)


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|got - want| <= absolute + relative * |want|."""

    absolute: float
    relative: float


TOLERANCES = {
    "float32": Tolerance(2e-5, 2e-5),
    "bfloat16": Tolerance(2e-2, 2e-2),
    "float16": Tolerance(2e-3, 2e-3),
}


def tagged(cases: Iterable[C], tag: str) -> tuple[C, ...]:
    """The cases that carry `tag`, in their order."""
    return tuple(case for case in cases if tag in case.tags)


def pairs(implementations: Sequence[Implementation], cases: Iterable[C]) -> list[tuple[str, C]]:
    """Every implementation with every case."""
    return [(implementation.name, case) for case in cases for implementation in implementations]


def check_close(got: Any, want: Any, tolerance: Tolerance, what: str) -> None:
    """Raise AssertionError, naming the worst element, unless `got` is finite and within `tolerance` of `want`."""
    left, right = np.asarray(got).astype(np.float64), np.asarray(want).astype(np.float64)
    if left.shape != right.shape:
        raise AssertionError(f"{what}: shape {left.shape}, expected {right.shape}")
    error = np.abs(left - right) - tolerance.relative * np.abs(right)
    bad = ~(error <= tolerance.absolute)
    if bad.any():
        worst = np.unravel_index(int(np.argmax(np.where(np.isnan(error), np.inf, error))), error.shape)
        where = tuple(int(i) for i in worst)
        values = f"{left[worst]}, expected {right[worst]}"
        raise AssertionError(f"{what}: {int(bad.sum())} of {bad.size} elements differ; at {where}: {values}")


def check_against_reference(
    call: Callable[[str], tuple[Any, Any]], implementation: str, case: TaggedCase, *, reference: str = "reference"
) -> None:
    """Run ``call(implementation)`` and ``call(reference)``, which give (output, state), and compare them.

    Outputs must agree within the tolerance of their dtype, state (memory that the op wrote) exactly.
    """
    got, got_state = call(implementation)
    want, want_state = call(reference)
    what = f"{case.name}, {implementation} against {reference}"
    check_close(got, want, TOLERANCES[jnp.dtype(want.dtype).name], what)
    # Narrow floats have NaN, but numpy cannot ask them.
    states = (np.asarray(state).astype(np.float64) for state in (got_state, want_state))
    np.testing.assert_array_equal(*states, err_msg=what)
