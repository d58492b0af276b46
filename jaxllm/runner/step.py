"""The programs of a step: `forward` per bucket, `sample` per row count, and the page table overflow.

Each takes one packed host array at most and donates what it changes, so that KV pages, page tables
and last tokens are updated in place. Nothing else in the hot path touches the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.stages import Traced, Wrapped

from jaxllm.layers.batch import BatchMetadata, Bucket
from jaxllm.runner.batch_builder import DIFF_CHUNK
from jaxllm.runner.kv_buffers import Device, DeviceShapes
from jaxllm.runner.packed import PackedLayout, PackedStep
from jaxllm.sampling.sampler import sample as sample_tokens
from jaxllm.sampling.state import NUM_COLUMNS, unpack

if TYPE_CHECKING:
    from jaxllm.models.base import SplitModel

Arrays = tuple[jax.Array, ...]
SampleKey = tuple[int, bool]  # (rows N, all greedy)


class HiddenShape(Protocol):
    """Shape and dtype of hidden rows, whoever tells them."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """A jitted function to compile before ready, with the shapes it will be called with."""

    name: str
    jitted: Wrapped
    arguments: tuple[Any, ...]  # pytrees of ShapeDtypeStruct

    @staticmethod
    def of(
        name: str, function: Callable[..., Any], arguments: tuple[Any, ...], donated: tuple[int, ...]
    ) -> ProgramSpec:
        """`donated`: positions of the arguments whose memory the results take."""
        return ProgramSpec(name, jax.jit(function, donate_argnums=donated), arguments)

    def trace(self, device: Device) -> Traced:
        """Trace for `device`. jax keeps the trace, so a second call for the same device is cheap."""
        placement = jax.sharding.SingleDeviceSharding(device)
        placed = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=placement), self.arguments)
        return self.jitted.trace(*placed)


def int32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, np.int32)


def make_forward(model: SplitModel, layout: PackedLayout, page_size: int) -> Callable[..., Any]:
    """(leaves, kv, page_table, last_tokens, packed) -> (hidden rows [N, D], kv, page_table, sample rows [N, C])."""

    def forward(
        leaves: Arrays, kv: Arrays, page_table: jax.Array, last_tokens: jax.Array, packed: jax.Array
    ) -> tuple[jax.Array, Arrays, jax.Array, jax.Array]:
        step = layout.split(packed)
        page_table = set_pages(page_table, step.page_diffs)
        batch = _batch(step, layout.bucket, page_table, last_tokens, page_size)
        hidden, kv = model.forward(leaves, kv, batch)
        return hidden[step.logit_rows], tuple(kv), page_table, step.sample_rows

    return forward


def make_sample(model: SplitModel, *, greedy: bool) -> Callable[..., Any]:
    """(head leaves, hidden rows [N, D], sample rows [N, C], last_tokens) -> (tokens [N], last_tokens)."""

    def sample(
        head: Arrays, hidden: jax.Array, sample_rows: jax.Array, last_tokens: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        rows = unpack(sample_rows)
        tokens = sample_tokens(model.logits(head, hidden), rows, greedy=greedy)
        return tokens, last_tokens.at[rows.slots].set(tokens, mode="promise_in_bounds")

    return sample


def set_pages(page_table: jax.Array, diffs: jax.Array) -> jax.Array:
    """page_table [slots, P] with ``table[slot, index] = page`` for each column of `diffs` [3, K]."""
    slots, indices, pages = diffs
    return page_table.at[slots, indices].set(pages, mode="promise_in_bounds")


def _batch(
    step: PackedStep[jax.Array], bucket: Bucket, page_table: jax.Array, last_tokens: jax.Array, page_size: int
) -> BatchMetadata:
    # A slot's row keeps entries of a longer request that held it before: past the end they read as page 0.
    page_starts = jnp.arange(bucket.pages_per_request, dtype=np.int32) * page_size
    is_held = page_starts[None, :] < step.seq_lens[:, None]
    row_pages = page_table.at[step.slots].get(mode="promise_in_bounds")
    token_slots = step.slots.at[step.token_rows].get(mode="clip")
    device_ids = last_tokens.at[token_slots].get(mode="promise_in_bounds")
    return BatchMetadata(
        token_ids=jnp.where(step.token_ids < 0, device_ids, step.token_ids),
        positions=step.positions,
        token_rows=step.token_rows,
        page_tables=jnp.where(is_held, row_pages, 0),
        query_starts=step.query_starts,
        seq_lens=step.seq_lens,
        distribution=step.distribution,
        bucket=bucket,
    )


def forward_spec(model: SplitModel, layout: PackedLayout, shapes: DeviceShapes, page_size: int) -> ProgramSpec:
    bucket = layout.bucket
    leaves = tuple(model.params[name] for name in model.names)
    return ProgramSpec.of(
        name=f"forward[{bucket.num_tokens} tokens, {bucket.num_requests} rows]",
        function=make_forward(model, layout, page_size),
        arguments=(leaves, shapes.kv, shapes.page_table, shapes.last_tokens, int32(layout.size)),
        donated=(1, 2),
    )


def sample_spec(model: SplitModel, hidden: HiddenShape, shapes: DeviceShapes, greedy: bool) -> ProgramSpec:
    """`hidden` [N, D] is what `forward` returns first."""
    num_rows = hidden.shape[0]
    head = tuple(model.params[name] for name in model.head_names)
    return ProgramSpec.of(
        name=f"sample[{num_rows} rows, {'greedy' if greedy else 'drawn'}]",
        function=make_sample(model, greedy=greedy),
        arguments=(head, hidden, int32(num_rows, NUM_COLUMNS), shapes.last_tokens),
        donated=(3,),
    )


def set_pages_spec(shapes: DeviceShapes) -> ProgramSpec:
    return ProgramSpec.of("set_pages", set_pages, (shapes.page_table, int32(3, DIFF_CHUNK)), (0,))


@dataclass(frozen=True, slots=True)
class ProgramSpecs:
    """All programs of a Runner, by what picks them in the hot path."""

    forward: dict[Bucket, ProgramSpec]
    sample: dict[SampleKey, ProgramSpec]
    set_pages: ProgramSpec

    def __iter__(self) -> Iterator[ProgramSpec]:
        """Largest first, so that the pool of compiling threads ends evenly."""
        yield from sorted(self.forward.values(), key=lambda s: -s.arguments[-1].shape[0])
        yield from self.sample.values()
        yield self.set_pages


def program_specs(
    model: SplitModel,
    forward: dict[Bucket, ProgramSpec],
    sizes: Iterable[int],
    shapes: DeviceShapes,
    hidden: HiddenShape,
) -> ProgramSpecs:
    """`hidden`: hidden rows [., D] of any of the forward programs."""
    sample = {
        (n, greedy): sample_spec(model, jax.ShapeDtypeStruct((n, hidden.shape[-1]), hidden.dtype), shapes, greedy)
        for n in sizes
        for greedy in (True, False)
    }
    return ProgramSpecs(forward, sample, set_pages_spec(shapes))
