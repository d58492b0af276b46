"""Checkpoint to parameters on the device, one parameter at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxllm.config.checkpoint import is_gguf
from jaxllm.errors import WeightsError
from jaxllm.weights.gguf import GGUFSource
from jaxllm.weights.safetensors import SafetensorsSource
from jaxllm.weights.spec import TensorSource, TensorSpec

Progress = Callable[[int, int], None]  # (bytes done, bytes in all), as stored

_SLICE_ELEMENTS = 2**18  # of a tensor at once: 1 MiB of float32, so the pieces stay in the cache
_MIN_SLICE_ROWS = 64  # fewer rows make a transposed copy write single cache lines
_ALIGNMENT = 64  # bytes; a CPU device takes an array that is so aligned without a copy
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq",)  # buffers of old checkpoints, computed here


def load_weights(
    path: Path,
    tensors: Sequence[TensorSpec],
    params: Mapping[str, jax.ShapeDtypeStruct],
    *,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Read the parameters `params` from a .gguf file or a folder of safetensors.

    Tensors are read slice by slice into one array per parameter, which goes to the device as soon
    as it is full: the host holds about one parameter beside the ones on the device.

    Args:
        tensors: which tensor of the checkpoint becomes which piece of which parameter.
        params: shape and dtype of each parameter, and its sharding where it has one.
        progress: called from this thread with the stored bytes read so far and in all.

    A stored `lm_head.weight` that no spec asks for is ignored: the model's configuration alone
    decides whether embeddings are tied.

    Raises:
        WeightsError: a file is broken, or a tensor is missing, extra or of another shape; the
            message names up to five.
    """
    source: TensorSource = GGUFSource(path) if is_gguf(path) else SafetensorsSource(path)
    try:
        _check_names(source, tensors)
        _check_shapes(source, tensors)
        _check_cover(tensors, params)
        return _Loading(source, tensors, progress).run(params)
    finally:
        source.close()


@dataclass(frozen=True, slots=True)
class _Slice:
    spec: TensorSpec
    start: int
    stop: int
    num_bytes: int


class _Loading:
    """One run of `load_weights`; counts the bytes."""

    def __init__(self, source: TensorSource, tensors: Sequence[TensorSpec], progress: Progress | None) -> None:
        self._source = source
        self._progress = progress
        self._by_target: dict[str, list[TensorSpec]] = {}
        for spec in tensors:
            self._by_target.setdefault(spec.target, []).append(spec)
        self._total_bytes = sum(source.tensors[spec.name].num_bytes for spec in tensors)
        self._done_bytes = 0

    def run(self, params: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        loaded: dict[str, jax.Array] = {}
        with ThreadPoolExecutor(min(8, os.cpu_count() or 1), "weights") as pool:
            for name, param in params.items():
                loaded[name] = jax.device_put(self._read(name, param, pool), param.sharding)
        return loaded

    def _read(self, name: str, param: jax.ShapeDtypeStruct, pool: ThreadPoolExecutor) -> npt.NDArray[Any]:
        array = _empty(param.shape, np.dtype(param.dtype))
        slices = [piece for spec in self._by_target[name] for piece in self._slices(spec)]
        for num_bytes in pool.map(partial(self._fill, array), slices):
            self._report(num_bytes)
        return array

    def _slices(self, spec: TensorSpec) -> Iterator[_Slice]:
        num_rows = spec.shape[0]
        stored_bytes = self._source.tensors[spec.name].num_bytes
        step = max(_MIN_SLICE_ROWS, _SLICE_ELEMENTS // math.prod(spec.shape[1:]))
        if len(spec.shape) == 1:
            step = num_rows
        for start in range(0, num_rows, step):
            stop = min(start + step, num_rows)
            yield _Slice(spec, start, stop, stored_bytes * stop // num_rows - stored_bytes * start // num_rows)

    def _fill(self, array: npt.NDArray[Any], piece: _Slice) -> int:
        spec, start, stop = piece.spec, piece.start, piece.stop
        place = array if spec.layer is None else array[spec.layer]
        values = self._source.rows(spec.name, start, stop)
        try:
            with np.errstate(over="raise"):
                _place(place, spec, start, stop, values)
        except FloatingPointError:
            raise WeightsError(
                f"{self._source.path}: tensor {spec.name!r} has values beyond {array.dtype}; try bfloat16 or float32"
            ) from None
        return piece.num_bytes

    def _report(self, num_bytes: int) -> None:
        self._done_bytes += num_bytes
        if self._progress is not None:
            self._progress(self._done_bytes, self._total_bytes)


def _place(place: npt.NDArray[Any], spec: TensorSpec, start: int, stop: int, values: npt.NDArray[Any]) -> None:
    """Write rows `start` to `stop` of a tensor into its piece of a parameter."""
    if spec.transpose:
        place[..., spec.offset + start : spec.offset + stop] = values.T
    elif len(spec.shape) == 1:
        place[spec.offset + start : spec.offset + stop] = values
    else:
        place[start:stop, ..., spec.offset : spec.offset + spec.shape[-1]] = values


def _empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An uninitialised array, aligned so that a CPU device can take it as it is."""
    num_bytes = math.prod(shape) * dtype.itemsize
    buffer = np.empty(num_bytes + _ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % _ALIGNMENT
    return buffer[start : start + num_bytes].view(dtype).reshape(shape)


def _check_names(source: TensorSource, tensors: Sequence[TensorSpec]) -> None:
    wanted = {spec.name for spec in tensors}
    missing = [spec.name for spec in tensors if spec.name not in source.tensors]
    extra = [
        tensor.stored_name
        for name, tensor in source.tensors.items()
        if name not in wanted and name != "lm_head.weight" and not name.endswith(_IGNORED_SUFFIXES)
    ]
    if missing:
        raise WeightsError(f"{source.path} lacks {_listed(missing)}")
    if extra:
        raise WeightsError(f"{source.path} has {_listed(extra)} that this model has no use for")


def _check_shapes(source: TensorSource, tensors: Sequence[TensorSpec]) -> None:
    wrong = [
        f"{spec.name} {source.tensors[spec.name].shape}, not {spec.shape}"
        for spec in tensors
        if source.tensors[spec.name].shape != spec.shape
    ]
    if wrong:
        raise WeightsError(f"{source.path} has another shape in {_listed(wrong)}")


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''}: {'; '.join(names[:5])}{more}"


def _check_cover(tensors: Sequence[TensorSpec], params: Mapping[str, jax.ShapeDtypeStruct]) -> None:
    """Each parameter must be filled completely: the array it is read into is uninitialised."""
    filled = dict.fromkeys(params, 0)
    for spec in tensors:
        if spec.target not in filled:
            raise WeightsError(f"tensor {spec.name} belongs to parameter {spec.target}, which the model does not have")
        filled[spec.target] += spec.size
    for name, size in filled.items():
        if size != math.prod(params[name].shape):
            raise WeightsError(f"parameter {name} {params[name].shape} is given {size} elements by the checkpoint")
