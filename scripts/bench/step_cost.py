"""What a step moves and computes, from shapes alone, and what that costs: least squares over measured steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

if TYPE_CHECKING:
    from jaxllm.runner.runner import Runner


@dataclass(frozen=True, slots=True)
class Rows:
    """The requests of a step: `num_rows` of them, `num_tokens` tokens each from position `start`."""

    num_rows: int
    num_tokens: int
    start: int

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class StepSize:
    """Bytes that a step must move and floating-point operations that it must do."""

    weight_bytes: int  # read once, however many rows there are
    kv_bytes: int  # pages read once a request, and written
    flops: int  # a multiplication and an addition count two

    @property
    def bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes


def step_size(runner: Runner, rows: Rows, page_size: int) -> StepSize:
    """Of the program that runs `rows`. XLA computes padding too; kernels that know the real rows do not."""
    num_tokens, num_logit_rows = rows.num_rows * rows.num_tokens, rows.num_rows
    if runner.model.matrices != "whole":
        bucket = runner.buckets.choose(num_tokens, rows.num_rows)
        num_tokens, num_logit_rows = bucket.num_tokens, runner.buckets.num_logit_rows(bucket)
    flops = _flops(runner, rows, num_tokens, num_logit_rows)
    return StepSize(_weight_bytes(runner), _kv_bytes(runner, rows, page_size), flops)


def _elements(runner: Runner) -> tuple[dict[str, int], dict[str, int]]:
    """Elements of the parameters that every token meets, and of those that make logits; a table alone is neither."""
    params = runner.model.params
    head = {name: math.prod(params[name].shape) for name in runner.model.head_names}
    layers = {n: math.prod(a.shape) for n, a in params.items() if n not in head and not n.startswith("embed")}
    return layers, head


def _weight_bytes(runner: Runner) -> int:
    params = runner.model.params
    return sum(count * params[name].dtype.itemsize for part in _elements(runner) for name, count in part.items())


def _kv_bytes(runner: Runner, rows: Rows, page_size: int) -> int:
    page_bytes = runner.kv_plan.page_bytes
    num_read = rows.num_rows * -(-rows.end // page_size)
    return num_read * page_bytes + rows.num_rows * rows.num_tokens * page_bytes // page_size


def _flops(runner: Runner, rows: Rows, num_tokens: int, num_logit_rows: int) -> int:
    layers, head = _elements(runner)
    width = sum(spec.attention.num_heads * spec.attention.head_dim for spec in runner.model.config.layers)
    num_pairs = rows.num_tokens * rows.start + rows.num_tokens * (rows.num_tokens + 1) // 2  # of query and key
    linear = 2 * num_tokens * sum(layers.values()) + 2 * num_logit_rows * sum(head.values())
    return linear + 4 * width * num_pairs * rows.num_rows


@dataclass(frozen=True, slots=True)
class Fit:
    """seconds = fixed_s + kv_bytes / kv_bytes_s + flops / flops_s.

    Every step of a model reads the same weights, so their bytes are part of the fixed cost. A rate
    of None: no measured step showed that cost beside the others.
    """

    fixed_s: float
    kv_bytes_s: float | None
    flops_s: float | None
    mean_error: float  # of a prediction, as a share of what was measured
    max_error: float

    def seconds(self, size: StepSize) -> float:
        parts = ((size.kv_bytes, self.kv_bytes_s), (size.flops, self.flops_s))
        return self.fixed_s + sum(amount / rate for amount, rate in parts if rate)


def fit(sizes: Sequence[StepSize], seconds: Sequence[float]) -> Fit:
    """The costs, none below zero, that leave the least squares of relative errors."""
    measured = np.asarray(seconds, np.float64)
    columns = np.asarray([(1, size.kv_bytes, size.flops) for size in sizes], np.float64)
    choices = [chosen for count in (1, 2, 3) for chosen in itertools.combinations(range(3), count)]
    solutions = [costs for chosen in choices if (costs := _solve(columns, measured, chosen)).min() >= 0]
    costs = min(solutions, key=lambda c: float(np.square(columns @ c / measured - 1).sum()))
    errors = np.abs(columns @ costs / measured - 1)
    kv_rate, flop_rate = (None if cost == 0 else float(1 / cost) for cost in costs[1:])
    return Fit(float(costs[0]), kv_rate, flop_rate, float(errors.mean()), float(errors.max()))


def _solve(columns: FloatArray, measured: FloatArray, chosen: tuple[int, ...]) -> FloatArray:
    """Costs of the chosen columns, zero for the others. One column alone never comes out below zero."""
    some = columns[:, chosen]
    scale = some.max(axis=0)
    costs = np.zeros(columns.shape[1])
    costs[list(chosen)] = (
        np.linalg.lstsq(some / scale / measured[:, None], np.ones(len(measured)), rcond=None)[0] / scale
    )
    return costs
