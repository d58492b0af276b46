"""How long a step takes on a device that is not here, and what of a step its time depends on."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from jaxllm.types.step import BoolArray, Int32Array, SchedulerOutput


class CostModel(Protocol):
    """Predicts steps. Frozen: the same plan always takes the same time."""

    def step_seconds(self, plan: SchedulerOutput) -> float:
        """Seconds between the device starting on a step and its tokens being on the host."""
        ...


class StepShape(NamedTuple):
    """The work of a step in a few numbers. Rows that are no decodes are prefills, of one token or more."""

    tokens: float  # that the step computes
    rows: float  # requests of the step
    samples: float  # of them, those that get a token
    context: float  # tokens that all rows attend to, those of the step included: what is read of the KV memory
    prefill_context: float = 0.0  # of `context`, what prefill rows read
    prefill_pairs: float = 0.0  # (query, key) pairs of the prefill rows, under the causal mask

    @property
    def decode_context(self) -> float:
        """Of `context`, what decode rows read; also their (query, key) pairs."""
        return self.context - self.prefill_context


def shape_of(plan: SchedulerOutput) -> StepShape:
    rows = plan.rows
    return shape_of_rows(rows.starts, rows.num_tokens, rows.samples, rows.num_decode)


def shape_of_rows(starts: Int32Array, num_tokens: Int32Array, samples: BoolArray, num_decode: int) -> StepShape:
    """The shape of a step from its columns; see `ScheduledRows`."""
    tokens = float(np.add.reduce(num_tokens))  # in int64
    context = tokens + float(np.add.reduce(starts))
    num_rows = len(starts)
    num_samples = int(np.count_nonzero(samples))
    if num_decode >= num_rows:
        return StepShape(tokens, num_rows, num_samples, context)
    begins, counts = starts[num_decode:].astype(np.float64), num_tokens[num_decode:].astype(np.float64)
    new = float(np.add.reduce(counts))
    pairs = float(begins @ counts) + (float(counts @ counts) + new) / 2  # in float64: products exceed int32
    return StepShape(tokens, num_rows, num_samples, context, float(np.add.reduce(begins)) + new, pairs)
