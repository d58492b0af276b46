"""Measured tables: what was measured is met, what is between lies between."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.sim.cost import StepShape
from jaxllm.sim.table_cost import COLUMNS, Table


def shapes(num: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    rows = rng.integers(1, 64, num)
    tokens = rows + rng.integers(0, 1000, num)
    return np.unique(np.column_stack([rows, tokens, tokens + rng.integers(0, 50_000, num)])[:, (1, 0, 2)], axis=0)


def shape(tokens: float, rows: float, context: float) -> StepShape:
    return StepShape(tokens, rows, rows, context)


def curved(at: np.ndarray) -> np.ndarray:
    """Seconds that no plane has: matrices in tiles of 128 tokens."""
    return 0.01 + 1e-4 * 128 * np.ceil(at[:, 0] / 128) + 1e-7 * at[:, 2]


def test_a_measured_shape_takes_what_was_measured() -> None:
    at = shapes(200)
    table = Table(np.column_stack([at, curved(at)]))
    for row, seconds in zip(at, curved(at), strict=True):
        assert table.seconds(shape(*row)) == pytest.approx(seconds, rel=1e-4)


def test_times_on_a_plane_are_met_everywhere() -> None:
    def plane(at: np.ndarray) -> np.ndarray:
        return 0.01 + at @ [1e-4, 2e-3, 3e-7]

    at, asked = shapes(50), shapes(50, seed=1) * 10
    table = Table(np.column_stack([at, plane(at)]))
    assert [table.seconds(shape(*row)) for row in asked] == pytest.approx(plane(asked).tolist(), rel=1e-6)


def test_a_shape_between_others_is_near_them() -> None:
    at, asked = shapes(2000), shapes(300, seed=1)
    table = Table(np.column_stack([at, curved(at)]))
    found = np.array([table.seconds(shape(*row)) for row in asked])
    assert np.median(np.abs(found / curved(asked) - 1)) < 0.05


def test_one_step_is_a_table() -> None:
    table = Table(np.array([[8.0, 8, 800, 0.02]]))
    assert table.seconds(shape(8, 8, 800)) == pytest.approx(0.02)
    assert table.seconds(shape(8000, 8, 8000)) > 0


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    at = shapes(20)
    table = Table(np.column_stack([at, curved(at)]), "me")
    table.save(tmp_path / "t.json")
    loaded = Table.load(tmp_path / "t.json")
    assert (loaded.steps == table.steps).all()
    assert loaded.source == "me"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": []}, r"steps=\[\]; accepted: at least one"),
        ({"steps": [[1, 1, 1, 0.5], [1, 1, 1]]}, r"steps\[1\]=\[1, 1, 1\]; accepted: 4 numbers"),
        ({"steps": [[1, 1, 1, "x"]]}, r"steps\[0\]=.*accepted: 4 numbers"),
        ({"steps": [[1, 2, 3, 0.5]]}, r"steps\[0\]=.*accepted: 1 <= rows <= tokens <= context"),
        ({"steps": [[1, 1, 3, 0]]}, r"steps\[0\]=.*seconds above 0"),
        ({"steps": [[1, 1, 3, 1], [1, 1, 3, 2]]}, r"steps\[1\]=.*each shape once"),
        ({"columns": ["rows"]}, r"columns=\('rows',\); accepted: \['tokens'"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "t.json"
    values = {"kind": "table", "source": "me", "columns": COLUMNS, "steps": [[1, 1, 1, 0.5]], **changes}
    path.write_text(json.dumps(values, indent=1))
    with pytest.raises(ConfigError, match=rf"t.json, line \d+: {message}"):
        Table.load(path)
