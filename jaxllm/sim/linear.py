"""Step times as a sum of what a step does, each with a price: the coefficients of a fit."""

from __future__ import annotations

import json
from bisect import bisect_left
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxllm.sim.cost import StepShape, shape_of
from jaxllm.sim.cost_fields import Fields, read_json
from jaxllm.types.step import SchedulerOutput

COEFFICIENTS = ("step_s", "token_s", "row_s", "sample_s", "context_s", "pair_s")


@dataclass(frozen=True, slots=True)
class Padding:
    """The shapes an engine compiled: a step takes as long as the smallest that holds it. All ascending."""

    decode: tuple[int, ...]  # rows of steps with one token a row
    mixed: tuple[tuple[int, int], ...]  # (tokens, rows) of the others
    samples: tuple[int, ...]  # rows that logits are computed for

    def pad(self, shape: StepShape) -> StepShape:
        """The shape that is computed. One that exceeds all is computed as it is."""
        tokens, rows = self._padded(shape)
        return shape._replace(tokens=tokens, rows=rows, samples=_next(self.samples, rows))

    def _padded(self, shape: StepShape) -> tuple[float, float]:
        if shape.tokens == shape.rows:
            rows = _next(self.decode, shape.rows)
            return rows, rows
        for tokens, rows in self.mixed:
            if tokens >= shape.tokens and rows >= shape.rows:
                return tokens, rows
        return shape.tokens, shape.rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Linear:
    """A `CostModel`. Seconds, at least 0: of a step, and of each of what its shape counts."""

    step_s: float
    token_s: float = 0.0
    row_s: float = 0.0
    sample_s: float = 0.0
    context_s: float = 0.0  # a token that a row attends to
    pair_s: float = 0.0  # a (query, key) pair of a prefill row
    padding: Padding | None = None
    source: str = "unknown"  # what it was fitted to

    def step_seconds(self, plan: SchedulerOutput) -> float:
        return self.seconds(shape_of(plan))

    def seconds(self, shape: StepShape) -> float:
        if self.padding is not None:
            shape = self.padding.pad(shape)
        return (
            self.step_s
            + self.token_s * shape.tokens
            + self.row_s * shape.rows
            + self.sample_s * shape.samples
            + self.context_s * shape.context
            + self.pair_s * shape.prefill_pairs
        )

    @property
    def coefficients(self) -> dict[str, float]:
        return {name: getattr(self, name) for name in COEFFICIENTS}

    def padded(self, padding: Padding | None) -> Linear:
        """The same prices for an engine that compiled other shapes."""
        return replace(self, padding=padding)

    def save(self, path: str | Path) -> None:
        values: dict[str, Any] = {"kind": "linear", **self.coefficients}
        if self.padding is not None:
            values["padding"] = {
                "decode": [[rows] for rows in self.padding.decode],
                "mixed": self.padding.mixed,
                "samples": [[rows] for rows in self.padding.samples],
            }
        Path(path).write_text(json.dumps({**values, "source": self.source}, indent=1) + "\n", encoding="utf-8")

    @staticmethod
    def load(path: str | Path) -> Linear:
        """
        Raises:
            ConfigError: the file cannot be read, or a field of it is wrong.
        """
        fields = read_json(Path(path))
        fields.choice("kind", ("linear",))
        found = Linear(
            **{name: fields.number(name, default=None if name == "step_s" else 0.0) for name in COEFFICIENTS},
            padding=_padding(fields.section("padding")) if "padding" in fields else None,
            source=fields.text("source", default="unknown"),
        )
        fields.done()
        if not any(found.coefficients.values()):
            raise fields.error("step_s", found.step_s, "one price above 0")
        return found


def _next(sizes: tuple[int, ...], size: float) -> float:
    at = bisect_left(sizes, size)
    return sizes[at] if at < len(sizes) else size


def _padding(fields: Fields) -> Padding:
    found = Padding(
        tuple(int(rows) for (rows,) in fields.rows("decode", 1)),
        tuple((int(tokens), int(rows)) for tokens, rows in fields.rows("mixed", 2)),
        tuple(int(rows) for (rows,) in fields.rows("samples", 1)),
    )
    for name, sizes in (("decode", found.decode), ("mixed", found.mixed), ("samples", found.samples)):
        if list(sizes) != sorted(sizes):
            raise fields.error(name, sizes, "ascending sizes")
        if any(size < 1 for row in sizes for size in (row if isinstance(row, tuple) else (row,))):
            raise fields.error(name, sizes, "sizes of at least 1")
    fields.done()
    return found
