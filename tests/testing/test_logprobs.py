"""The rule of the scripted log probabilities, by hand and against itself."""

from __future__ import annotations

import math

import numpy as np
import pytest

from jaxllm.testing.logprobs import scripted_columns, scripted_logprob, scripted_rank, scripted_top


def test_the_rule_by_hand() -> None:
    at = ord("H")  # 72 = 10 * 7 + 2, so the group begins with 70, "F"
    assert (scripted_logprob(at), scripted_rank(at)) == (-3.0, 3)
    assert scripted_top(at, 4) == [70, 71, 72, 73]
    assert [scripted_logprob(at, x) for x in (70, 73, 69, 0)] == [-1.0, -4.0, -260.0, -191.0]
    assert scripted_top(2, 3, vocab_size=2) == [0, 1]


@pytest.mark.parametrize("at", [0, 6, 7, 100, 259])
def test_each_position_ranks_the_whole_vocabulary_once(at: int) -> None:
    ids = scripted_top(at, -1)
    values = [scripted_logprob(at, x) for x in ids]
    assert sorted(ids) == list(range(260))
    assert values == sorted(values, reverse=True)
    assert [scripted_rank(at, x) for x in ids] == list(range(1, 261))
    assert sum(map(math.exp, values)) < 1
    assert np.array(values, np.float32).tolist() == values
    assert scripted_top(at, 5) == ids[:5]


def test_columns_hold_what_was_asked() -> None:
    top = scripted_columns([72, 7], num_top=2)
    assert (top.token_ids, top.values, top.ranks) == ([72, 7], [-3.0, -1.0], [3, 1])
    assert (top.top_ids, top.top_values) == ([[70, 71], [7, 8]], [[-1.0, -2.0]] * 2)
    assert top.is_ranked
    chosen = scripted_columns([72], chosen_ids=(74, 70))
    assert (chosen.top_ids, chosen.top_values, chosen.is_ranked) == ([[74, 70]], [[-5.0, -1.0]], False)
    assert scripted_columns([72]).top_ids == [[]]
