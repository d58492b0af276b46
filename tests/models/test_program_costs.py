"""Bytes and operations of a compiled step, as its compiler counts them: no clock, so the same on every machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import pytest

from jaxllm.layers.batch import Bucket
from jaxllm.models.base import split_model
from pallas_kernels.ragged_paged_attention import choose
from pallas_kernels.ragged_paged_attention.problem import Problem
from tests.helpers.oracle import make_batch
from tests.models.test_split_model import CONFIG, LAYER

# One layer, because the compiler counts the body of a loop once; its matmuls are XLA's own, which it can count.
ONE_LAYER = replace(CONFIG, layers=(LAYER,))
MATRIX_ELEMENTS = 64 * 128 + 64 * 64 + 64 * 256 + 128 * 64  # qkv, out, gate and up, down
LAYER_BYTES = 4 * (MATRIX_ELEMENTS + 2 * 64)


def costs(num_tokens: int, num_pages: int = 64, implementation: str | None = None) -> tuple[float, float, int]:
    """(operations, bytes read and written, bytes of temporaries) of a step; four requests, or one token each."""
    split = split_model(ONE_LAYER, "float32", implementation, matrices="scanned")
    bucket = Bucket(num_tokens, min(num_tokens, 4), 8)
    batch: Any = jax.eval_shape(lambda: make_batch([], bucket=bucket))
    leaves = tuple(split.params[name] for name in split.names)
    kv = split.kv_shapes(num_pages, 16, "float32")
    compiled = jax.jit(split.forward, donate_argnums=1).lower(leaves, kv, batch).compile()
    analysis: Any = compiled.cost_analysis()
    memory: Any = compiled.memory_analysis()
    return analysis["flops"], analysis["bytes accessed"], memory.temp_size_in_bytes


def is_native() -> bool:
    return choose(Problem(2, 16, "float32", q_dtype="float32")).chosen.name == "native"


def test_a_token_more_costs_its_share_of_the_matrices_and_little_else() -> None:
    (few, *_), (many, *_) = costs(64), costs(128)
    per_token = (many - few) / 64
    assert 2 * MATRIX_ELEMENTS <= per_token <= 2 * MATRIX_ELEMENTS * 1.6  # norms, rotations; attention where XLA's


def test_a_step_reads_its_weights_once_and_rows_in_proportion() -> None:
    (_, few, temporary), (_, many, more_temporary) = costs(64), costs(128)
    row_bytes = 4 * (64 * 8 + 128 * 3 + 256 * 3)  # every array of a row written and read again, and then some
    if is_native():
        assert LAYER_BYTES <= few <= LAYER_BYTES + 64 * 3 * row_bytes
        assert (many - few) / 64 <= 3 * row_bytes
    assert temporary <= 64 * row_bytes and more_temporary <= 128 * row_bytes


def test_no_byte_is_moved_for_pages_that_nobody_uses() -> None:
    if not is_native():
        pytest.skip("XLA counts a gather as if it read its whole operand")
    assert costs(4, num_pages=64) == costs(4, num_pages=1024)


def test_temporaries_do_not_grow_with_the_number_of_pages() -> None:
    for implementation in ("xla", None):
        assert costs(64, 64, implementation)[2] == costs(64, 512, implementation)[2]
