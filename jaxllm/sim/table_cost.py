"""Step times from measured steps: those of the nearest shapes, carried over to the shape that is asked for."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from jaxllm.sim.cost import StepShape, shape_of
from jaxllm.sim.cost_fields import Fields, read_json
from jaxllm.sim.least_squares import FloatArray, robust
from jaxllm.types.step import SchedulerOutput

COLUMNS = ("tokens", "rows", "context", "seconds")
_SAME = 1e-12  # square of a distance that is none


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """A `CostModel` of measured shapes.

    Through them goes a plane, seconds = a + b tokens + c rows + d context with no coefficient below
    0. A step takes what the plane says, times how much the measured shapes took more or less than the
    plane, weighted by the inverse sixth power of their distance in logarithms: the nearest decide. So a
    measured shape takes what was measured, and a step far from all of them grows as the plane does.
    """

    steps: FloatArray  # [N, 4], see COLUMNS; shapes are distinct
    source: str = "unknown"
    _plane: tuple[float, ...] = field(init=False, repr=False)
    _logs: FloatArray = field(init=False, repr=False)  # [N, 3]
    _ratios: FloatArray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        shapes, seconds = self.steps[:, :3], self.steps[:, 3]
        features = np.column_stack([np.ones(len(shapes)), shapes])
        plane = robust(features, seconds)
        object.__setattr__(self, "_plane", tuple(plane.tolist()))
        object.__setattr__(self, "_logs", np.log(shapes))
        object.__setattr__(self, "_ratios", seconds / (features @ plane))

    def step_seconds(self, plan: SchedulerOutput) -> float:
        return self.seconds(shape_of(plan))

    def seconds(self, shape: StepShape) -> float:
        tokens, rows, context = max(shape.tokens, 1.0), max(shape.rows, 1.0), max(shape.context, 1.0)
        apart = self._logs - np.array((math.log(tokens), math.log(rows), math.log(context)))
        squares = np.maximum(np.einsum("ij,ij->i", apart, apart), _SAME)
        closeness = 1 / (squares * squares * squares)
        ratio = float(closeness @ self._ratios) / float(np.add.reduce(closeness))
        step_s, token_s, row_s, context_s = self._plane
        return ratio * (step_s + token_s * tokens + row_s * rows + context_s * context)

    def save(self, path: str | Path) -> None:
        rows = ",\n  ".join(json.dumps(row) for row in self.steps.tolist())
        head = json.dumps({"kind": "table", "source": self.source, "columns": COLUMNS})
        Path(path).write_text(f'{head[:-1]}, "steps": [\n  {rows}\n]}}\n', encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Table:
        """
        Raises:
            ConfigError: the file cannot be read, or a field of it is wrong.
        """
        fields = read_json(Path(path))
        fields.choice("kind", ("table",))
        columns = fields.texts("columns")
        if columns != COLUMNS:
            raise fields.error("columns", columns, f"{list(COLUMNS)}")
        steps = np.array(_checked(fields), np.float64)
        found = Table(steps, fields.text("source", default="unknown"))
        fields.done()
        return found


def _checked(fields: Fields) -> list[list[float]]:
    steps = fields.rows("steps", len(COLUMNS))
    if not steps:
        raise fields.error("steps", steps, "at least one measured step")
    seen: set[tuple[float, ...]] = set()
    for number, (tokens, rows, context, seconds) in enumerate(steps):
        shape = (tokens, rows, context)
        if not (1 <= rows <= tokens <= context and seconds > 0) or shape in seen:
            raise fields.error(
                f"steps[{number}]", steps[number], "1 <= rows <= tokens <= context, seconds above 0, each shape once"
            )
        seen.add(shape)
    return steps
