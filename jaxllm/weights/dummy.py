"""Random weights, for measurements that need no answers."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

_CHUNK = 2**20  # elements drawn at once


def dummy_weights(params: Mapping[str, jax.ShapeDtypeStruct], seed: int) -> dict[str, jax.Array]:
    """Parameters drawn on the host, so the same ones on every device.

    Norms are one and biases zero. Matrices are uniform with a variance that keeps activations near
    one: 1 / (inputs) for layouts [..., in, out], and 1 / D for an embedding [V, D].
    """
    loaded: dict[str, jax.Array] = {}
    for name, param in params.items():
        loaded[name] = jax.device_put(_draw(name, param, seed), param.sharding)
    return loaded


def _draw(name: str, param: jax.ShapeDtypeStruct, seed: int) -> npt.NDArray[Any]:
    array = np.empty(param.shape, np.dtype(param.dtype))
    if name.endswith("norm.weight"):
        array[...] = 1
        return array
    if name.endswith(".bias"):
        array[...] = 0
        return array
    inputs = param.shape[-1] if len(param.shape) == 2 else param.shape[-2]
    bound = np.float32((3 / inputs) ** 0.5)  # of a uniform distribution with variance 1 / inputs
    # The name joins the seed, so that a parameter does not depend on the ones drawn before it.
    generator = np.random.Generator(np.random.SFC64([seed, zlib.crc32(name.encode())]))
    flat = array.reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        piece = flat[start : start + _CHUNK]
        piece[...] = (2 * generator.random(piece.size, np.float32) - 1) * bound
    return array
