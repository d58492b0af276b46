"""Checks of shapes, dtypes and values while tracing. Messages name the argument, what came and what is accepted."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
import numpy as np

from pallas_kernels._core.errors import InvalidArgument


class Axes:
    """Lengths of the axis letters met so far: the first argument that has a letter fixes it for the others."""

    def __init__(self, **known: int) -> None:
        self._length: dict[str, int] = dict(known)

    def __getitem__(self, letter: str) -> int:
        return self._length[letter]

    def __contains__(self, letter: str) -> bool:
        return letter in self._length

    def bind(self, argument: str, array: Any, axes: str) -> None:
        """Check that `array` has the axes named in `axes` ("T N H", "R+1", "3"; "" is a scalar)."""
        names = axes.split()
        shape = tuple(np.shape(array))
        if len(shape) != len(names):
            raise InvalidArgument(argument, f"shape {shape}", self._describe(names))
        for name, length in zip(names, shape, strict=True):
            if name.isalpha() and name not in self._length:
                self._length[name] = length
            elif self._expected(name) != length:
                raise InvalidArgument(argument, f"shape {shape}", self._describe(names))

    def _expected(self, name: str) -> int:
        letter, _, more = name.partition("+")
        return (self._length[letter] if letter.isalpha() else int(letter)) + int(more or 0)

    def _describe(self, names: list[str]) -> str:
        known = [f"{name} = {self._expected(name)}" for name in names if name.partition("+")[0] in self._length]
        return f"shape [{', '.join(names)}]" + (f" with {', '.join(known)}" if known else "")


def check_dtype(argument: str, array: Any, accepted: Iterable[Any]) -> None:
    names = [jnp.dtype(dtype).name for dtype in accepted]
    got = jnp.dtype(array.dtype).name if hasattr(array, "dtype") else type(array).__name__
    if got not in names:
        raise InvalidArgument(argument, got, " or ".join(names))


def check_positive(argument: str, value: float | None) -> None:
    """None passes: the feature is off."""
    if value is not None and not value > 0:
        raise InvalidArgument(argument, value, "a number above 0, or None")
