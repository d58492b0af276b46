"""Linear costs: a sum of prices, for the shapes that an engine compiles."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from jaxllm.errors import ConfigError
from jaxllm.runner.buckets import build_buckets
from jaxllm.sim.cost import shape_of
from jaxllm.sim.linear import Linear, Padding
from scripts.calibrate_cost import _padding
from tests.helpers.step_plans import plan_of, random_plan

COST = Linear(step_s=1.0, token_s=0.1, row_s=0.01, sample_s=1e-3, context_s=1e-4, pair_s=1e-5, source="me")


def test_a_step_takes_the_sum_of_its_prices() -> None:
    plan = plan_of(decodes=(99,), prefills=((50, 10),), samples=(True, False))
    pairs = sum(range(51, 61))
    assert COST.step_seconds(plan) == pytest.approx(1 + 11 * 0.1 + 2 * 0.01 + 1e-3 + (100 + 60) * 1e-4 + pairs * 1e-5)


def test_steps_are_padded_to_the_shapes_that_an_engine_compiles() -> None:
    buckets, padding = build_buckets(48, 700, 1), _padding(48, 700)
    rng = np.random.default_rng(0)
    for _ in range(300):
        shape = shape_of(random_plan(rng, most_rows=20, most_tokens=30))
        if shape.tokens > 700:
            continue
        bucket = buckets.choose(int(shape.tokens), int(shape.rows))
        padded = padding.pad(shape)
        assert (padded.tokens, padded.rows) == (bucket.num_tokens, bucket.num_requests)
        assert padded.samples == buckets.num_logit_rows(bucket)
        assert padded.context == shape.context


def test_a_step_beyond_all_shapes_is_computed_as_it_is() -> None:
    shape = shape_of(plan_of(decodes=(9,) * 5, prefills=((0, 90),)))
    padding = Padding(decode=(1, 4), mixed=((16, 4),), samples=(4,))
    assert padding.pad(shape) == shape._replace(samples=6)
    assert padding.pad(shape_of(plan_of(decodes=(9,) * 5))).rows == 5


@pytest.mark.parametrize("padding", [None, Padding((1, 4), ((16, 4), (32, 8)), (1, 8))])
def test_what_is_saved_is_loaded(tmp_path: Path, padding: Padding | None) -> None:
    path = tmp_path / "cost.json"
    COST.padded(padding).save(path)
    assert Linear.load(path) == COST.padded(padding)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"token_s": -1}, r"line 4: token_s=-1; accepted: a number of at least 0"),
        ({"step_s": None}, r"step_s is missing"),
        ({"step_s": "1"}, r"step_s='1'; accepted: a number"),
        ({"kind": "table"}, r"kind='table'; accepted: linear"),
        ({"tokens": 1}, r"tokens=1 is not known"),
        ({"padding": {"decode": [[4], [1]], "mixed": [], "samples": []}}, r"padding.decode=\(4, 1\); accepted: asc"),
        ({"padding": {"decode": [[4, 1]], "mixed": [], "samples": []}}, r"padding.decode\[0\]=\[4, 1\]; accepted: 1 n"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    path = tmp_path / "cost.json"
    COST.save(path)
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not None}, indent=1))
    with pytest.raises(ConfigError, match=rf"cost.json.*{message}"):
        Linear.load(path)
