"""The shape of a step is what loops over its rows count."""

from __future__ import annotations

import numpy as np

from jaxllm.sim.cost import StepShape, shape_of
from jaxllm.types.step import SchedulerOutput
from tests.helpers.step_plans import plan_of, random_plan


def counted(plan: SchedulerOutput) -> StepShape:
    """With plain loops: each token of a row attends to all before it, and to itself."""
    rows = list(zip(plan.rows.starts.tolist(), plan.rows.num_tokens.tolist(), strict=True))
    prefills = rows[plan.rows.num_decode :]
    return StepShape(
        tokens=sum(num for _, num in rows),
        rows=len(rows),
        samples=sum(plan.rows.samples.tolist()),
        context=sum(start + num for start, num in rows),
        prefill_context=sum(start + num for start, num in prefills),
        prefill_pairs=sum(sum(range(start + 1, start + num + 1)) for start, num in prefills),
    )


def test_a_shape_counts_what_loops_count() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        plan = random_plan(rng)
        assert shape_of(plan) == counted(plan)


def test_a_decode_attends_to_what_came_before_and_itself() -> None:
    shape = shape_of(plan_of(decodes=(7, 99)))
    assert shape == StepShape(2, 2, 2, 108)
    assert shape.decode_context == 108


def test_a_long_prompt_has_more_pairs_than_an_int32_holds() -> None:
    shape = shape_of(plan_of(prefills=((900_000, 100_000), (1_000_000, 50_000))))
    assert shape.prefill_pairs == 900_000 * 100_000 + 100_000 * 100_001 // 2 + 10**6 * 50_000 + 50_000 * 50_001 // 2
