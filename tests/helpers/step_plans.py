"""Plans of steps for cost models: rows of (start, tokens), decodes first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jaxllm.types.step import ScheduledRows, SchedulerOutput

Row = tuple[int, int]  # position of its first token, tokens


def plan_of(
    decodes: Sequence[int] = (), prefills: Sequence[Row] = (), *, samples: Sequence[bool] | None = None
) -> SchedulerOutput:
    """A step of decodes at these positions and prefills of these rows; all rows sample unless it is told."""
    rows = [(start, 1) for start in decodes] + list(prefills)
    columns = ScheduledRows(
        request_ids=tuple(str(number) for number in range(len(rows))),
        slots=np.arange(len(rows), dtype=np.int32),
        starts=np.array([start for start, _ in rows], np.int32),
        num_tokens=np.array([num for _, num in rows], np.int32),
        samples=np.array([True] * len(rows) if samples is None else samples, np.bool_),
        num_decode=len(decodes),
    )
    return SchedulerOutput(0, (), columns, ())


def random_plan(rng: np.random.Generator, *, most_rows: int = 8, most_tokens: int = 300) -> SchedulerOutput:
    decodes = rng.integers(1, 4000, rng.integers(0, most_rows)).tolist()
    num_prefills = int(rng.integers(0 if decodes else 1, most_rows))
    starts = rng.integers(0, 4000, num_prefills).tolist()
    prefills = [(start, int(rng.integers(1, most_tokens))) for start in starts]
    return plan_of(decodes, prefills, samples=rng.integers(0, 2, len(decodes) + num_prefills).astype(bool).tolist())
