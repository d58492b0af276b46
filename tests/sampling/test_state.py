from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxllm.errors import RequestError
from jaxllm.sampling.state import (
    NUM_COLUMNS,
    USES_ALLOWED,
    USES_BAD_WORDS,
    USES_BIAS,
    USES_PENALTIES,
    SamplingRows,
    pack_row,
    set_step,
    unpack,
)
from jaxllm.types.sampling import MAX_FORBIDDEN, SamplingParams
from tests.sampling.drawing import rows_of

unpack_jit = jax.jit(unpack)


def typed_rows_of(*args: Any, **kwargs: Any) -> SamplingRows:
    return unpack_jit(rows_of(*args, **kwargs))


def test_columns_come_back_as_they_went_in() -> None:
    params = SamplingParams(
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        repetition_penalty=1.5,
        min_tokens=3,
        max_tokens=5,
        stop_token_ids=(7,),
    )
    rows = typed_rows_of([params], seeds=[2**40 + 5], positions=[12], eos_ids=(2,), num_prompt_tokens=10)
    assert rows.temperature[0] == np.float32(0.7)
    assert rows.top_p[0] == np.float32(0.9)
    assert rows.top_k[0] == 40
    assert rows.min_p[0] == np.float32(0.05)
    assert (rows.presence[0], rows.frequency[0], rows.repetition[0]) == (0.5, -0.25, 1.5)
    assert rows.num_prompt_tokens[0] == 10
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


USES = {
    USES_ALLOWED: SamplingParams(allowed_token_ids=(1,)),
    USES_BIAS: SamplingParams(logit_bias={1: 0.5}),
    USES_PENALTIES: SamplingParams(frequency_penalty=0.1),
}


@pytest.mark.parametrize("flag", USES)
def test_flags_name_what_a_request_uses_and_nothing_else(flag: int) -> None:
    rows = typed_rows_of([USES[flag], SamplingParams(top_k=3, min_p=0.1, logprobs=2)])
    assert rows.flags.tolist() == [flag, 0]
    assert rows.uses(flag).tolist() == [True, False]


def test_bad_words_use_the_mask_and_the_sequences() -> None:
    assert typed_rows_of([SamplingParams(bad_words=("x",))]).flags.tolist() == [USES_ALLOWED | USES_BAD_WORDS]


def test_processors_are_on_for_the_requests_that_name_them() -> None:
    params = [
        SamplingParams(extra_args={"b": 2.5}),
        SamplingParams(extra_args={"a": 0, "c": -1}),
        SamplingParams(),
    ]
    packed = np.stack([pack_row(p, 0, 4, (), ("a", "b", "c")) for p in params])
    rows = unpack_jit(packed)
    assert [rows.uses_processor(i).tolist() for i in range(3)] == [
        [False, True, False],
        [True, False, False],
        [False, True, False],
    ]
    assert rows.arguments[:, :3].tolist() == [[0.0, 2.5, 0.0], [0.0, 0.0, -1.0], [0.0, 0.0, 0.0]]


def test_a_row_of_zeros_asks_for_nothing() -> None:
    rows = unpack_jit(np.zeros((1, NUM_COLUMNS), np.int32))
    assert rows.is_greedy.tolist() == [True]
    assert rows.flags.tolist() == [0] and rows.holds_back.tolist() == [False]


def test_a_repetition_penalty_beyond_float32_stays_finite() -> None:
    assert np.isfinite(typed_rows_of([SamplingParams(repetition_penalty=1e300)]).repetition).all()
