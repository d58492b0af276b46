from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.errors import RequestError
from jaxllm.sampling.state import NUM_COLUMNS, SamplingRows, pack_row, set_step, unpack
from jaxllm.types.sampling import MAX_FORBIDDEN, SamplingParams
from tests.sampling.drawing import rows_of

unpack_jit = jax.jit(unpack)


def typed_rows_of(*args: Any, **kwargs: Any) -> SamplingRows:
    return unpack_jit(rows_of(*args, **kwargs))


def test_columns_come_back_as_they_went_in() -> None:
    params = SamplingParams(temperature=0.7, top_p=0.9, top_k=40, min_tokens=3, max_tokens=5, stop_token_ids=(7,))
    rows = typed_rows_of([params], seeds=[2**40 + 5], positions=[12], eos_ids=(2,), num_prompt_tokens=10)
    assert rows.temperature[0] == np.float32(0.7)
    assert rows.top_p[0] == np.float32(0.9)
    assert rows.top_k[0] == 40
    assert rows.seeds.tolist() == [[2**8, 5]]
    assert rows.min_positions[0] == 13
    assert rows.positions[0] == 12
    assert rows.forbidden[0].tolist() == [2, 7] + [-1] * (MAX_FORBIDDEN - 2)
    assert rows.is_greedy.tolist() == [False]


def test_set_step_changes_position_and_slot_alone() -> None:
    packed = np.stack([pack_row(SamplingParams(top_k=3), 1, 4, (2,))] * 2)
    before = packed.copy()
    set_step(packed, np.array([100, 200], np.int32), np.array([5, 6], np.int32))
    changed = np.flatnonzero((packed != before).any(axis=0))
    assert len(changed) == 2
    assert sorted(packed[:, changed].T.tolist()) == [[5, 6], [100, 200]]


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0.0, True), (0.00999999999, True), (0.01, False)])
def test_rounding_moves_no_temperature_over_the_greedy_bound(temperature: float, is_greedy: bool) -> None:
    assert typed_rows_of([SamplingParams(temperature=temperature)]).is_greedy.tolist() == [is_greedy]


def test_eos_ids_are_held_back_only_with_min_tokens() -> None:
    row = pack_row(SamplingParams(), 0, 4, (2, 3))
    assert row.shape == (NUM_COLUMNS,) and row.dtype == np.int32
    assert (typed_rows_of([SamplingParams()], eos_ids=(2, 3)).forbidden == -1).all()


def test_more_ids_than_a_row_holds_are_refused() -> None:
    params = SamplingParams(min_tokens=1, stop_token_ids=tuple(range(MAX_FORBIDDEN)))
    with pytest.raises(RequestError, match=f"{MAX_FORBIDDEN + 1} stop and end-of-sequence ids; accepted: at most"):
        pack_row(params, 0, 4, (MAX_FORBIDDEN,))
