"""Cost models from a recorded run: what each step of a trace took, and the fit to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from jaxllm.engine.trace import Collected, Decision, Ended, Header, Line, Planned
from jaxllm.engine.trace_file import read_trace
from jaxllm.errors import ConfigError
from jaxllm.sim.cost import StepShape, shape_of_rows
from jaxllm.sim.least_squares import FloatArray, robust
from jaxllm.sim.linear import COEFFICIENTS, Linear, Padding
from jaxllm.sim.table_cost import Table

Timing = Literal["step", "device"]
Fit = Callable[[Sequence["MeasuredStep"]], Linear | Table]

MIN_STEPS = 20
_NUM_FOLDS = 5
_CELLS_PER_DOUBLING = 2  # of a table's tokens, rows and context


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    shape: StepShape
    seconds: float


@dataclass(frozen=True, slots=True)
class Recorded:
    """A trace, as far as costs go."""

    header: Header
    steps: tuple[MeasuredStep, ...]
    num_untimed: int  # steps that are not in `steps`: nobody saw their end


@dataclass(frozen=True, slots=True)
class FitError:
    """How far predictions are from what was measured."""

    num_steps: int
    mean_relative: float  # of |predicted - measured| / measured
    median_relative: float
    p90_relative: float
    total_relative: float  # of the sums over all steps, signed: above 0 is predicted too slow

    def __str__(self) -> str:
        return (
            f"{self.num_steps} steps: median error {self.median_relative:.1%}, mean {self.mean_relative:.1%}, "
            f"90 % of steps within {self.p90_relative:.1%}, all together {self.total_relative:+.1%}"
        )


def read_steps(path: str | Path, *, timing: Timing = "step") -> Recorded:
    """The steps of a file that `--record-trace` wrote.

    With `timing` "step", a step takes from when it was planned, or from the end of the step before if
    that is later, to when the core looked at the clock next after its tokens were there: sampling,
    copies and the host's work that nothing hides are in it. Summed over a run that never idles, this is
    the run's time. With "device", it takes what the executor reported the model to take, and no more.

    Raises:
        ConfigError: the file cannot be read or is no trace, or times fewer than `MIN_STEPS` steps.
    """
    header, lines = read_trace(path)
    reader = _Reader(timing)
    for number, line in lines:
        try:
            reader.take(line)
        except (KeyError, ValueError, IndexError) as error:
            raise ConfigError(f"{path}, line {number}: {type(line).__name__.lower()}: {error}") from None
    if len(reader.steps) < MIN_STEPS:
        raise ConfigError(f"{path} times {len(reader.steps)} steps; accepted: a run of at least {MIN_STEPS}")
    return Recorded(header, tuple(reader.steps), reader.num_planned - len(reader.steps))


def fit_linear(steps: Sequence[MeasuredStep], *, padding: Padding | None = None, source: str = "unknown") -> Linear:
    """Non-negative, robust least squares; steps are padded first if it is told how."""
    shapes = [step.shape if padding is None else padding.pad(step.shape) for step in steps]
    features = np.array([(1.0, s.tokens, s.rows, s.samples, s.context, s.prefill_pairs) for s in shapes])
    found = robust(features, _seconds(steps))
    return Linear(**dict(zip(COEFFICIENTS, found.tolist(), strict=True)), padding=padding, source=source)


def fit_table(steps: Sequence[MeasuredStep], *, source: str = "unknown") -> Table:
    """Shapes of the same half doubling in tokens, rows and context become one: their mean shape and mean time.

    The slowest and fastest tenth of a cell is left out. Steps with one token a row are kept apart from others.
    """
    cells: dict[tuple[int, ...], list[tuple[float, ...]]] = {}
    for step in steps:
        s = step.shape
        key = (*_cell(s.tokens, s.rows, s.context), int(s.tokens == s.rows))
        cells.setdefault(key, []).append((s.tokens, s.rows, s.context, step.seconds))
    rows: dict[tuple[float, ...], float] = {}
    for members in cells.values():
        *shape, seconds = np.array(members).T
        rows[tuple(float(f"{column.mean():.6g}") for column in shape)] = _trimmed_mean(seconds)
    return Table(np.array([(*shape, seconds) for shape, seconds in sorted(rows.items())]), source)


def error_of(cost: Linear | Table, steps: Sequence[MeasuredStep]) -> FitError:
    return _error(np.array([cost.seconds(step.shape) for step in steps]), _seconds(steps))


def held_out_error(fit: Fit, steps: Sequence[MeasuredStep]) -> FitError:
    """The error on steps that were left out of the fit: each fifth in turn."""
    predicted = np.zeros(len(steps))
    for fold in range(_NUM_FOLDS):
        cost = fit([step for number, step in enumerate(steps) if number % _NUM_FOLDS != fold])
        for number in range(fold, len(steps), _NUM_FOLDS):
            predicted[number] = cost.seconds(steps[number].shape)
    return _error(predicted, _seconds(steps))


class _Reader:
    """Follows a trace's clock. Mutable; used once."""

    def __init__(self, timing: Timing) -> None:
        self.steps: list[MeasuredStep] = []
        self.num_planned = 0
        self._timing = timing
        self._in_flight: dict[int, tuple[StepShape, float]] = {}  # planned, not collected: and when that was
        self._collected: list[tuple[StepShape, float]] = []  # their end is when the clock is read next
        self._last_end_s = float("-inf")

    def take(self, line: Line) -> None:
        match line:
            case Planned():
                self._end_steps(line.now_s)
                if line.decision is not None:
                    self.num_planned += 1
                    self._in_flight[line.decision.step] = (_shape(line.decision), line.now_s)
            case Collected():
                self._collect(line)
            case Ended():
                pass
            case _:
                if not self._in_flight:  # the core may have slept until this came
                    self._collected.clear()

    def _collect(self, line: Collected) -> None:
        if line.step not in self._in_flight:
            raise ValueError(f"step={line.step} was not planned; accepted: {list(self._in_flight)}")
        shape, planned_s = self._in_flight.pop(line.step)
        if self._timing == "step":
            self._collected.append((shape, planned_s))
        elif line.device_s > 0:
            self.steps.append(MeasuredStep(shape, line.device_s))

    def _end_steps(self, now_s: float) -> None:
        for shape, planned_s in self._collected:
            seconds = now_s - max(planned_s, self._last_end_s)
            if seconds > 0:
                self.steps.append(MeasuredStep(shape, seconds))
            self._last_end_s = now_s
        self._collected.clear()


def _shape(decision: Decision) -> StepShape:
    columns = (np.array(decision.starts, np.int32), np.array(decision.num_tokens, np.int32))
    if len(columns[0]) != len(columns[1]):
        raise ValueError(f"starts has {len(columns[0])} rows, num_tokens {len(columns[1])}; accepted: as many of both")
    return shape_of_rows(*columns, np.array(decision.samples, np.bool_), decision.num_decode)


def _seconds(steps: Sequence[MeasuredStep]) -> FloatArray:
    return np.array([step.seconds for step in steps])


def _trimmed_mean(values: FloatArray) -> float:
    cut = len(values) // 10
    return float(np.sort(values)[cut : len(values) - cut].mean())


def _cell(*values: float) -> tuple[int, ...]:
    return tuple(round(_CELLS_PER_DOUBLING * float(np.log2(value))) for value in values)


def _error(predicted: FloatArray, measured: FloatArray) -> FitError:
    relative = np.abs(predicted - measured) / measured
    return FitError(
        num_steps=len(measured),
        mean_relative=float(relative.mean()),
        median_relative=float(np.median(relative)),
        p90_relative=float(np.quantile(relative, 0.9)),
        total_relative=float(predicted.sum() / measured.sum() - 1),
    )
