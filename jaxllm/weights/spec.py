"""What a checkpoint must hold, and what a reader of one offers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of the checkpoint, and the piece of a parameter that it becomes.

    The piece is `target[layer]` (all of `target` where `layer` is None), columns `offset` and up on
    its last axis. A matrix is stored (out, in); with `transpose` it goes in as (in, out).
    """

    name: str  # in Hugging Face's spelling, whatever the format
    shape: tuple[int, ...]  # as stored
    target: str  # path of the parameter
    layer: int | None = None  # index on the target's leading axis
    offset: int = 0  # first column on the target's last axis
    transpose: bool = False

    @property
    def size(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a file holds it."""

    stored_name: str  # the name in the file
    shape: tuple[int, ...]
    dtype: str  # in the format's own spelling
    num_bytes: int


class TensorSource(Protocol):
    """An opened checkpoint. `rows` may be called from several threads at once."""

    @property
    def path(self) -> Path: ...

    @property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """By Hugging Face's name; a tensor without one keeps its own."""
        ...

    def rows(self, name: str, start: int, stop: int) -> npt.NDArray[Any]:
        """Entries `start` to `stop` on the first axis, in Hugging Face's order, as some floating type.

        Raises:
            WeightsError: the tensor's type cannot be turned into floating point.
        """
        ...

    def close(self) -> None:
        """Release the files. Arrays that `rows` returned stay valid."""
        ...
