"""ggml's block types to floating point.

Every type that the `gguf` package dequantises is served through it. The commonest ones are also
written out here, with the same operations in the same order, so with the same bits: the package
works 16 rows at a time, which costs more in calls than in arithmetic.
Formats: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from jaxllm.errors import WeightsError

Bytes = npt.NDArray[np.uint8]


def dequantize(raw: Bytes, block_type: str) -> npt.NDArray[Any]:
    """Whole blocks, uint8 [num_bytes], to their elements, flat.

    float32, except for F16 and BF16, which come back as they are stored (a view).

    Raises:
        WeightsError: no way is known to dequantise `block_type`.
    """
    if block_type in _PLAIN:
        return raw.view(_PLAIN[block_type])
    if block_type in _FAST:
        return _FAST[block_type](raw)
    return _with_package(raw, block_type)


def _with_package(raw: Bytes, block_type: str) -> npt.NDArray[Any]:
    import gguf

    try:
        # One row, so that the package takes all blocks at once.
        return gguf.dequantize(raw.reshape(1, -1), gguf.GGMLQuantizationType[block_type]).reshape(-1)
    except NotImplementedError:
        raise WeightsError(f"the gguf package cannot dequantise block type {block_type}") from None


def _scales(blocks: Bytes, start: int) -> npt.NDArray[np.float32]:
    """The float16 at byte `start` of each block, as float32 [blocks, 1]."""
    return blocks[:, start : start + 2].copy().view("<f2").astype(np.float32)


def _nibbles(packed: Bytes) -> npt.NDArray[np.float32]:
    """[blocks, 16] bytes to float32 [blocks, 32]: all low halves of a block, then all high ones."""
    values = np.empty((len(packed), 2, 16), np.float32)
    np.bitwise_and(packed, 15, out=values[:, 0], casting="unsafe")
    np.right_shift(packed, 4, out=values[:, 1], casting="unsafe")
    return values.reshape(-1, 32)


def _q4_0(raw: Bytes) -> npt.NDArray[np.float32]:
    """Scale, 32 nibbles: d * (q - 8)."""
    blocks = raw.reshape(-1, 18)
    values = _nibbles(blocks[:, 2:])
    values -= 8
    values *= _scales(blocks, 0)
    return values.reshape(-1)


def _q4_1(raw: Bytes) -> npt.NDArray[np.float32]:
    """Scale, minimum, 32 nibbles: d * q + m."""
    blocks = raw.reshape(-1, 20)
    values = _nibbles(blocks[:, 4:])
    values *= _scales(blocks, 0)
    values += _scales(blocks, 2)
    return values.reshape(-1)


def _q8_0(raw: Bytes) -> npt.NDArray[np.float32]:
    """Scale, 32 signed bytes: d * q."""
    blocks = raw.reshape(-1, 34)
    values = blocks[:, 2:].view(np.int8).astype(np.float32)
    values *= _scales(blocks, 0)
    return values.reshape(-1)


_PLAIN: dict[str, Any] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype(ml_dtypes.bfloat16)}
_FAST: dict[str, Callable[[Bytes], npt.NDArray[np.float32]]] = {"Q4_0": _q4_0, "Q4_1": _q4_1, "Q8_0": _q8_0}
