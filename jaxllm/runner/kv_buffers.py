"""The arrays that live on the device from start to end: KV pages, page tables, last sampled tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from jaxlib._jax import Device  # to a type checker jax.Device is a variable, not a type

    from jaxllm.models.base import SplitModel
else:
    Device = jax.Device


@dataclass(frozen=True, slots=True)
class DeviceShapes:
    """Shapes of the arrays that steps carry. Slot `spare_slot` belongs to padding: its pages are all page 0."""

    kv: tuple[jax.ShapeDtypeStruct, ...]  # one stacked page array a run of layers
    page_table: jax.ShapeDtypeStruct  # [slots + 1, P] int32
    last_tokens: jax.ShapeDtypeStruct  # [slots + 1] int32

    @staticmethod
    def of(
        model: SplitModel, *, num_pages: int, page_size: int, kv_dtype: str, num_slots: int, pages_per_request: int
    ) -> DeviceShapes:
        return DeviceShapes(
            kv=tuple(model.kv_shapes(num_pages, page_size, kv_dtype)),
            page_table=jax.ShapeDtypeStruct((num_slots + 1, pages_per_request), np.int32),
            last_tokens=jax.ShapeDtypeStruct((num_slots + 1,), np.int32),
        )

    @property
    def spare_slot(self) -> int:
        return self.last_tokens.shape[0] - 1

    @property
    def kv_bytes(self) -> int:
        return sum(num_bytes(a) for a in self.kv)

    @property
    def table_bytes(self) -> int:
        return num_bytes(self.page_table) + num_bytes(self.last_tokens)


@dataclass(slots=True)
class DeviceState:
    """Mutable; owned by the Runner: each step consumes these arrays and gives them back in place."""

    kv: tuple[jax.Array, ...]
    page_table: jax.Array
    last_tokens: jax.Array


def num_bytes(array: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize


def allocate(shapes: DeviceShapes, device: Device) -> DeviceState:
    """Zeroed arrays on `device`, made once before ready."""
    zeros = [jnp.zeros(a.shape, a.dtype, device=device) for a in (*shapes.kv, shapes.page_table, shapes.last_tokens)]
    jax.block_until_ready(zeros)
    return DeviceState(kv=tuple(zeros[:-2]), page_table=zeros[-2], last_tokens=zeros[-1])
