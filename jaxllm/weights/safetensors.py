"""Safetensors checkpoints: one file, or shards named by an index.

Format: https://huggingface.co/docs/safetensors. The library checks the header against the file.
With an index only the tensors it names are read, from the shards it names; other files of the
folder are left alone.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path, PurePath
from typing import Any

import ml_dtypes  # noqa: F401  (registers bfloat16 with numpy, which the library asks for by name)
import numpy as np
import numpy.typing as npt

from jaxllm.config.checkpoint import read_json
from jaxllm.errors import WeightsError
from jaxllm.weights.spec import StoredTensor

_INDEX = "model.safetensors.index.json"
_DTYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class SafetensorsSource:
    """A `TensorSource` over a folder.

    Raises:
        WeightsError: there is no safetensors file, or only a pickle; the index or a file is broken
            or missing; or a tensor the index names is not there.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder
        self.tensors: dict[str, StoredTensor] = {}
        self._slices: dict[str, Any] = {}
        self._stack = ExitStack()
        try:
            for file, names in _files(folder).items():
                self._open(file, names)
        except BaseException:
            self.close()
            raise

    def _open(self, file: Path, names: list[str] | None) -> None:
        """Map a file; `names` are the tensors to take from it, None for all."""
        import safetensors

        try:
            handle = self._stack.enter_context(safetensors.safe_open(file, framework="np"))
        except (safetensors.SafetensorError, OSError) as error:
            raise WeightsError(f"{file}: cannot read the file, it is broken or cut off: {error}") from error
        present = set(handle.keys())
        for name in sorted(present) if names is None else names:
            if name not in present:
                raise WeightsError(f"{file} lacks tensor {name!r}, which {_INDEX} says is in it")
            piece = handle.get_slice(name)
            shape, dtype = tuple(piece.get_shape()), str(piece.get_dtype())
            self.tensors[name] = StoredTensor(name, shape, dtype, int(np.prod(shape)) * _DTYPE_BYTES.get(dtype, 1))
            self._slices[name] = piece

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        dtype = self.tensors[name].dtype
        if dtype not in _DTYPE_BYTES:
            accepted = ", ".join(_DTYPE_BYTES)
            raise WeightsError(f"{self.path}: tensor {name!r} has dtype {dtype}; accepted: {accepted}")
        return self._slices[name][start:stop]

    def close(self) -> None:
        self._slices.clear()
        self._stack.close()


def _files(folder: Path) -> dict[Path, list[str] | None]:
    """The files to read, each with the tensors to take from it (None: all)."""
    index = read_json(folder / _INDEX, WeightsError)
    if index is not None:
        return dict(_shards(folder, index))
    if (folder / "model.safetensors").is_file():
        return {folder / "model.safetensors": None}
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return {found[0]: None}
    if found:
        raise WeightsError(f"{folder} has {len(found)} safetensors files and no {_INDEX}: which belong together?")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")) or any(folder.glob("*.pth")):
        raise WeightsError(
            f"{folder} has its weights as a pickle, which could run code when read; accepted: safetensors (convert it)"
        )
    raise WeightsError(f"{folder} has no weights; accepted: model.safetensors, or shards with {_INDEX}")


def _shards(folder: Path, index: dict[str, Any]) -> dict[Path, list[str]]:
    weight_map: Any = index.get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{folder / _INDEX}: key 'weight_map' is no object of tensor names and files")
    shards: dict[Path, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or PurePath(file).name != file or not file.endswith(".safetensors"):
            raise WeightsError(f"{folder / _INDEX}: tensor {name!r} is in {file!r}; accepted: a .safetensors file here")
        if not (folder / file).is_file():
            raise WeightsError(f"{folder / file} is missing; {_INDEX} says that tensor {name!r} is in it")
        shards.setdefault(folder / file, []).append(name)
    return shards
