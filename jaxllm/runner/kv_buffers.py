"""The arrays that live on the device from start to end: KV pages, page tables, last tokens, sampling tables."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sampling.tables import Tables, table_shapes

if TYPE_CHECKING:
    from jaxlib._jax import Device  # to a type checker jax.Device is a variable, not a type

    from jaxllm.models.base import SplitModel
else:
    Device = jax.Device


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a model hands to its head, and what the head makes of it."""

    hidden_size: int  # D
    vocab_size: int  # V, columns of the logits
    dtype: str  # of hidden rows

    def hidden(self, num_rows: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_rows, self.hidden_size), np.dtype(self.dtype))


@dataclass(frozen=True, slots=True)
class DeviceShapes:
    """Shapes of the arrays that steps carry. Slot `spare_slot` belongs to padding: its pages are all page 0."""

    kv: tuple[jax.ShapeDtypeStruct, ...]  # one stacked page array a run of layers
    page_table: jax.ShapeDtypeStruct  # [slots + 1, P] int32
    last_tokens: jax.ShapeDtypeStruct  # [slots + 1] int32
    hidden: jax.ShapeDtypeStruct  # [largest T, D] the last step's rows, for those that are scored
    history: jax.ShapeDtypeStruct  # [slots + 1, max_model_len] int32, the one of `Tables` that most steps write
    tables: Tables  # of shapes, [slots + 1, ...] each; `history` None

    @staticmethod
    def of(
        model: SplitModel,
        head: HeadShape,
        *,
        num_pages: int,
        page_size: int,
        kv_dtype: str,
        num_slots: int,
        pages_per_request: int,
        max_model_len: int,
        max_num_tokens: int,
    ) -> DeviceShapes:
        """`max_num_tokens`: T of the largest bucket."""
        tables = table_shapes(num_slots + 1, head.vocab_size, max_model_len)
        return DeviceShapes(
            kv=tuple(model.kv_shapes(num_pages, page_size, kv_dtype)),
            page_table=jax.ShapeDtypeStruct((num_slots + 1, pages_per_request), np.int32),
            last_tokens=jax.ShapeDtypeStruct((num_slots + 1,), np.int32),
            hidden=head.hidden(max_num_tokens),
            history=tables.history,
            tables=replace(tables, history=None),
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

    @property
    def sampling_bytes(self) -> int:
        """Of what sampling and scoring keep between programs."""
        return num_bytes(self.hidden) + sum(num_bytes(a) for a in jax.tree.leaves((self.history, self.tables)))


@dataclass(slots=True)
class DeviceState:
    """Mutable; owned by the Runner: each step consumes these arrays and gives them back in place."""

    kv: tuple[jax.Array, ...]
    page_table: jax.Array
    last_tokens: jax.Array
    hidden: jax.Array
    history: jax.Array
    tables: Tables  # `history` None

    def delete(self) -> None:
        """Give the memory back now, whoever else still holds the arrays."""
        arrays = (*self.kv, self.page_table, self.last_tokens, self.hidden, self.history, *jax.tree.leaves(self.tables))
        for array in arrays:
            array.delete()


def num_bytes(array: jax.ShapeDtypeStruct) -> int:
    return int(np.prod(array.shape, dtype=np.int64)) * np.dtype(array.dtype).itemsize


def allocate(shapes: DeviceShapes, device: Device) -> DeviceState:
    """Zeroed arrays on `device`, made once before ready."""

    def small(shape: jax.ShapeDtypeStruct) -> jax.Array:
        """Sent, not filled on the device: that would compile a program a shape."""
        return jax.device_put(np.zeros(shape.shape, shape.dtype), device)

    state = DeviceState(
        kv=tuple(jnp.zeros(a.shape, a.dtype, device=device) for a in shapes.kv),
        page_table=small(shapes.page_table),
        last_tokens=small(shapes.last_tokens),
        hidden=small(shapes.hidden),
        history=small(shapes.history),
        tables=jax.tree.map(small, shapes.tables),
    )
    jax.block_until_ready((state.kv, state.hidden, state.tables))
    return state
