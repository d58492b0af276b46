"""Programs beside the step, for steps that hold something rare. One of each, whatever the bucket.

As in `step`, each takes one packed host array and donates what it changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.runner.batch_builder import COPY_CHUNK, DIFF_CHUNK, SCORE_ROWS
from jaxllm.runner.kv_buffers import DeviceShapes
from jaxllm.runner.step import Arrays, ProgramSpec, SamplingSetup, int32, set_pages
from jaxllm.sampling.logprobs import DeviceLogprobs, LogprobsSpec, logprobs_of
from jaxllm.sampling.tables import HISTORY_SIZE, Tables, set_history, set_tables, tables_size

if TYPE_CHECKING:
    from jaxllm.models.base import SplitModel

P = TypeVar("P")
Q = TypeVar("Q")


@dataclass(frozen=True, slots=True)
class SidePrograms(Generic[P]):
    """One of each, as specification or compiled."""

    set_pages: P  # (page_table, [3, DIFF_CHUNK]) -> page_table
    copy_pages: P  # (kv, [2, COPY_CHUNK]) -> kv
    set_tables: P  # (tables, [tables_size]) -> tables
    set_history: P  # (history, [HISTORY_SIZE]) -> history
    score: P  # (head leaves, hidden [., D], [2, SCORE_ROWS]) -> DeviceLogprobs

    def __iter__(self) -> Iterator[P]:
        return (getattr(self, f.name) for f in fields(self))

    def map(self, function: Callable[[P], Q]) -> SidePrograms[Q]:
        return SidePrograms(*map(function, self))


def copy_pages(kv: Arrays, copies: jax.Array) -> Arrays:
    """kv with each page ``copies[1, i]`` as page ``copies[0, i]`` was, in all layers, one after the other.

    `copies` [2, K] int32: real ones first; the rest name page 0, the null page, and are not made. A
    loop with as many turns as there are copies: one page is in flight at a time, and no more is paid.
    """
    sources, targets = copies

    def copy(index: jax.Array, kv: Arrays) -> Arrays:
        source, target = sources[index], targets[index]
        return tuple(
            lax.dynamic_update_slice_in_dim(a, lax.dynamic_slice_in_dim(a, source, 1, axis=1), target, axis=1)
            for a in kv
        )

    return lax.fori_loop(0, jnp.sum(targets > 0), copy, kv)


def write_history(history: jax.Array, packed: jax.Array) -> jax.Array:
    """`set_history` of the history alone: the other tables are not in the way."""
    return set_history(Tables(history, None, None, None, None, None), packed).history


def raw_spec(spec: LogprobsSpec) -> LogprobsSpec:
    """The kind that prompts get: nothing is sampled there, so there is nothing to be processed."""
    return LogprobsSpec(spec.num_top, "raw_logits" if spec.mode.endswith("logits") else "raw_logprobs")


def make_score(model: SplitModel, spec: LogprobsSpec) -> Callable[..., Any]:
    """(head leaves, hidden [T, D], packed [2, SCORE_ROWS]) -> log probabilities of given tokens."""
    spec = raw_spec(spec)

    def score(head: Arrays, hidden: jax.Array, packed: jax.Array) -> DeviceLogprobs:
        """Row i is about token ``packed[1, i]`` after hidden row ``packed[0, i]``."""
        rows, tokens = packed
        logits = model.logits(head, hidden.at[rows].get(mode="promise_in_bounds"))
        return logprobs_of(logits, tokens, spec, jnp.zeros((SCORE_ROWS, 0), jnp.int32))

    return score


def side_specs(model: SplitModel, setup: SamplingSetup, shapes: DeviceShapes) -> SidePrograms[ProgramSpec]:
    head = tuple(model.params[name] for name in model.head_names)
    packed_tables = int32(tables_size(setup.head.vocab_size))
    return SidePrograms(
        set_pages=ProgramSpec.of("set_pages", set_pages, (shapes.page_table, int32(3, DIFF_CHUNK)), (0,)),
        copy_pages=ProgramSpec.of("copy_pages", copy_pages, (shapes.kv, int32(2, COPY_CHUNK)), (0,)),
        set_tables=ProgramSpec.of("set_tables", set_tables, (shapes.tables, packed_tables), (0,)),
        set_history=ProgramSpec.of("set_history", write_history, (shapes.history, int32(HISTORY_SIZE)), (0,)),
        score=ProgramSpec.of(
            f"score[{SCORE_ROWS} rows, {raw_spec(setup.logprobs)}]",
            make_score(model, setup.logprobs),
            (head, shapes.hidden, int32(2, SCORE_ROWS)),
            (),
        ),
    )
