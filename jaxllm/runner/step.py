"""The programs of a step: `forward` per bucket and `sample` per row count.

Each takes one packed host array at most and donates what it changes, so that KV pages, page tables,
last tokens and sampling tables are updated in place. Nothing else in the hot path touches the device;
`side_programs` has what only some steps need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.stages import Traced, Wrapped

from jaxllm.layers.batch import BatchMetadata, Bucket
from jaxllm.runner.kv_buffers import Device, DeviceShapes, HeadShape
from jaxllm.runner.packed import PackedLayout, PackedStep
from jaxllm.sampling.logprobs import DeviceLogprobs, LogprobsSpec
from jaxllm.sampling.sampler import sample as sample_tokens
from jaxllm.sampling.state import NUM_COLUMNS, unpack
from jaxllm.sampling.tables import Tables, record
from jaxllm.types.processors import LogitsProcessor

if TYPE_CHECKING:
    from jaxllm.models.base import SplitModel

Arrays = tuple[jax.Array, ...]


@dataclass(frozen=True, slots=True)
class ProgramSpec:
    """A jitted function to compile before ready, with the shapes it will be called with."""

    name: str
    jitted: Wrapped
    arguments: tuple[Any, ...]  # pytrees of ShapeDtypeStruct
    is_kept: bool = True  # in the store on disk; not if it holds a function that the store cannot tell from others

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


class SampleVariant(NamedTuple):
    """What picks a sample program in the hot path.

    Log probabilities come from programs that draw, which serve greedy rows as well: each program
    costs a start 40 to 130 CPU-milliseconds, and a draw is little beside a sum over the vocabulary.
    """

    num_rows: int  # N
    greedy: bool  # every row is greedy, so nothing is drawn
    with_logprobs: bool = False

    def __str__(self) -> str:
        how = "greedy" if self.greedy else "drawn"
        return f"{self.num_rows} rows, {how}{', log probabilities' if self.with_logprobs else ''}"


@dataclass(frozen=True, slots=True)
class SamplingSetup:
    """What is the same in all programs that make tokens or log probabilities of hidden rows."""

    head: HeadShape
    logprobs: LogprobsSpec
    processors: tuple[LogitsProcessor, ...] = ()


def make_forward(model: SplitModel, layout: PackedLayout, page_size: int) -> Callable[..., Any]:
    """(leaves, kv, page_table, hidden, last_tokens, packed) -> what they become, as `forward` says."""

    def forward(
        leaves: Arrays,
        kv: Arrays,
        page_table: jax.Array,
        all_hidden: jax.Array,
        last_tokens: jax.Array,
        packed: jax.Array,
    ) -> tuple[jax.Array, jax.Array, Arrays, jax.Array, jax.Array]:
        """(hidden rows [N, D] to sample from, sample rows [N, C], kv, page_table, hidden with this step's T rows)."""
        step = layout.split(packed)
        page_table = set_pages(page_table, step.page_diffs)
        batch = _batch(step, layout.bucket, page_table, last_tokens, page_size)
        hidden, kv = model.forward(leaves, kv, batch)
        all_hidden = lax.dynamic_update_slice(all_hidden, hidden, (0, 0))
        return hidden[step.logit_rows], step.sample_rows, tuple(kv), page_table, all_hidden

    return forward


def make_sample(model: SplitModel, setup: SamplingSetup, variant: SampleVariant) -> Callable[..., Any]:
    """(head leaves, hidden rows [N, D], sample rows [N, C], tables, last_tokens, history) -> as `sample` says."""

    def sample(
        head: Arrays,
        hidden: jax.Array,
        sample_rows: jax.Array,
        tables: Tables,
        last_tokens: jax.Array,
        history: jax.Array,
    ) -> tuple[jax.Array, DeviceLogprobs | None, jax.Array, jax.Array]:
        """(tokens [N], their log probabilities if wanted, last_tokens, history with the tokens)."""
        rows, tables = unpack(sample_rows), replace(tables, history=history)
        tokens, logprobs = sample_tokens(
            model.logits(head, hidden, _num_real(rows.slots, spare_slot=last_tokens.shape[0] - 1)),
            rows,
            tables,
            greedy=variant.greedy,
            logprobs=setup.logprobs if variant.with_logprobs else None,
            processors=setup.processors,
        )
        last_tokens = last_tokens.at[rows.slots].set(tokens, mode="promise_in_bounds")
        return tokens, logprobs, last_tokens, record(tables, rows, tokens).history

    return sample


def _num_real(slots: jax.Array, spare_slot: int) -> jax.Array:
    """int32 scalar: rows up to the last one that samples; the rest is padding."""
    places = jnp.arange(1, slots.shape[0] + 1, dtype=jnp.int32)
    return jnp.max(jnp.where(slots == spare_slot, 0, places))


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
    state = (shapes.kv, shapes.page_table, shapes.hidden)
    return ProgramSpec.of(
        name=f"forward[{bucket.num_tokens} tokens, {bucket.num_requests} rows]",
        function=make_forward(model, layout, page_size),
        arguments=(leaves, *state, shapes.last_tokens, int32(layout.size)),
        donated=(1, 2, 3),
    )


def sample_spec(model: SplitModel, setup: SamplingSetup, shapes: DeviceShapes, variant: SampleVariant) -> ProgramSpec:
    num_rows = variant.num_rows
    head = tuple(model.params[name] for name in model.head_names)
    details = f", {setup.logprobs}" if variant.with_logprobs else ""
    spec = ProgramSpec.of(
        name=f"sample[{variant}{details}]",
        function=make_sample(model, setup, variant),
        arguments=(
            *(head, setup.head.hidden(num_rows), int32(num_rows, NUM_COLUMNS)),
            *(shapes.tables, shapes.last_tokens, shapes.history),
        ),
        donated=(4, 5),
    )
    return replace(spec, is_kept=not setup.processors)
