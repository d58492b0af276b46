"""Ragged steps that serving makes: random ones, page borders, padding, memory that is not the reader's."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pallas_kernels._core.testing import Tolerance, check_close
from pallas_kernels.ragged_paged_attention import cases
from pallas_kernels.ragged_paged_attention.cases import Case
from tests.pallas_kernels import harness

CLOSE = Tolerance(2e-5, 2e-5)
NUM_TOKENS, NUM_ROWS, LONGEST = 40, 5, 300
BASE = Case("random", (), (), num_heads=4, num_kv_heads=2, head_dim=8)
each_fast = pytest.mark.parametrize("implementation", [harness.NATIVE, "xla"])


def padded(sequences, page_size, base=BASE, num_tokens=NUM_TOKENS, num_rows=NUM_ROWS):
    """A case of one shape for all `sequences` of a page size, so that it is compiled once."""
    per_row = -(-LONGEST // page_size)
    return replace(
        base,
        sequences=tuple(sequences),
        page_size=page_size,
        pad_tokens=num_tokens - sum(q for q, _ in sequences),
        pad_rows=num_rows - len(sequences),
        capacity=(num_rows * per_row + 2, per_row),
    )


@st.composite
def ragged(draw, page_size):
    """Decode rows, then rows with any number of tokens, none included; lengths like to sit at page borders."""
    border = st.builds(
        lambda pages, by: min(max(1, pages * page_size + by), LONGEST),
        st.integers(0, LONGEST // page_size),
        st.sampled_from((-1, 0, 1)),
    )
    length = st.one_of(st.integers(1, LONGEST), border)
    decode = [(1, kv) for kv in draw(st.lists(length, max_size=NUM_ROWS))]
    rows = decode
    for kv in draw(st.lists(length, max_size=NUM_ROWS - len(decode))):
        room = NUM_TOKENS - sum(q for q, _ in rows)
        q = min(kv, room, draw(st.integers(0, 20)))
        if q != 1:
            rows = [*rows, (q, kv)]
    return rows or [(1, 1)]


@each_fast
@pytest.mark.parametrize("page_size", [5, 16, 128])
def test_tpu_02_random_lengths_and_page_sizes_match_float64(page_size, implementation):
    @settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(ragged(page_size), st.integers(0, 2**31))
    def check(sequences, seed):
        case = padded(sequences, page_size)
        out, keys, values = harness.run(case, implementation, seed)
        want, want_keys, want_values = harness.expected(case, seed)
        check_close(out, want, CLOSE, str(sequences))
        np.testing.assert_array_equal(keys[:, 1:], want_keys[:, 1:])
        np.testing.assert_array_equal(values[:, 1:], want_values[:, 1:])

    check()


@pytest.mark.slow
@each_fast
@pytest.mark.parametrize("page_size", range(2, 128, 9))
def test_tpu_02_every_kind_of_page_size(page_size, implementation):
    sequences = [(1, page_size), (1, page_size + 1), (20, min(LONGEST, 2 * page_size + 19)), (5, max(5, page_size - 1))]
    case = padded(sequences, page_size)
    out, _, _ = harness.run(case, implementation)
    check_close(out, harness.expected(case)[0], CLOSE, str(page_size))


def solo(step, row):
    """`step` with all rows but one taken out, in the same shapes. The row keeps its pages."""
    arrays = step.arrays
    start, end = arrays["query_starts"][row : row + 2]
    length, num_rows = end - start, len(arrays["kv_lens"])
    alone = {name: np.zeros_like(array) for name, array in arrays.items()}
    alone["kv_lens"][0] = arrays["kv_lens"][row]
    alone["page_tables"][0] = arrays["page_tables"][row]
    alone["query_starts"][1:] = length
    alone["distribution"][:] = (int(length == 1), 1, 1)
    alone["positions"][:length] = arrays["positions"][start:end]
    alone["token_rows"][:] = np.where(np.arange(len(arrays["token_rows"])) < length, 0, num_rows)
    move = lambda x: np.concatenate([x[start:end], x[:start], x[end:]])  # noqa: E731
    return replace(step, q=move(step.q), k=move(step.k), v=move(step.v), arrays=alone)


@each_fast
def test_tpu_02_each_prompt_of_a_batch_equals_its_solo_run_to_the_bit(implementation):
    case = padded([(1, 1), (63, 63), (65, 65)], 64, num_tokens=136)
    step = cases.make_step(case)
    out, _, _ = harness.run_step(case, step, implementation)
    start = 0
    for row, (length, _) in enumerate(case.sequences):
        alone, _, _ = harness.run_step(case, solo(step, row), implementation)
        np.testing.assert_array_equal(alone[:length], out[start : start + length])
        start += length


@each_fast
def test_a_row_has_the_same_bits_in_every_padded_shape(implementation):
    wide = padded([(1, 290), (1, 37), (20, 270)], 16)
    step = cases.make_step(wide)
    out, _, _ = harness.run_step(wide, step, implementation)
    for num_tokens, num_rows, decode_only in ((20, 1, False), (80, 12, False), (1, 1, True), (12, 12, True)):
        for row, rows in ((0, slice(0, 1)), (1, slice(1, 2)), (2, slice(2, 22))):
            length = rows.stop - rows.start
            if length > num_tokens or (decode_only and length > 1):
                continue
            case = replace(wide, decode_only=decode_only)
            alone = reshaped(solo(step, row), num_tokens, num_rows)
            got, _, _ = harness.run_step(case, alone, implementation)
            np.testing.assert_array_equal(got[:length], out[rows], err_msg=f"{num_tokens} tokens, {num_rows} rows")


def reshaped(step, num_tokens, num_rows):
    """A step of one row in other padded shapes."""

    def fit(x, n, fill=0):
        more = np.full((max(0, n - len(x)), *x.shape[1:]), fill, x.dtype)
        return np.concatenate([x[:n], more])

    old = step.arrays
    rows = np.where(old["token_rows"] == 0, 0, num_rows).astype(np.int32)
    arrays = {
        "kv_lens": fit(old["kv_lens"], num_rows),
        "page_tables": fit(old["page_tables"], num_rows),
        "query_starts": fit(old["query_starts"], num_rows + 1, old["query_starts"][-1]),
        "distribution": old["distribution"],
        "positions": fit(old["positions"], num_tokens),
        "token_rows": fit(rows, num_tokens, num_rows),
    }
    q, k, v = (fit(x, num_tokens) for x in (step.q, step.k, step.v))
    return replace(step, q=q, k=k, v=v, arrays=arrays)


@each_fast
def test_decode_and_prefill_agree_on_the_same_position(implementation):
    case = padded([(20, 280)], 16)
    step = cases.make_step(case)
    out, _, _ = harness.run_step(case, step, implementation)
    # The last token again as a decode row, after the others were written.
    _, keys, values = harness.run_step(case, step, implementation)
    arrays = {name: array.copy() for name, array in step.arrays.items()}
    arrays["query_starts"][1:] = 1
    arrays["distribution"][0] = 1
    arrays["positions"][:] = 0
    arrays["positions"][0] = 279
    arrays["token_rows"][1:] = NUM_ROWS
    first = lambda x: np.concatenate([x[19:20], x[1:]])  # noqa: E731
    again = replace(
        step, q=first(step.q), k=first(step.k), v=first(step.v), k_cache=keys, v_cache=values, arrays=arrays
    )
    got, _, _ = harness.run_step(case, again, implementation)
    np.testing.assert_allclose(got[0], out[19], rtol=0, atol=1e-6)


@pytest.mark.parametrize("implementation", [harness.NATIVE, "xla", "reference"])
def test_tpu_04_padding_leaves_the_last_page_alone_and_reads_no_foreign_memory(implementation):
    case = padded([(1, 33), (7, 20)], 16)
    step = cases.make_step(case)
    assert case.pad_tokens > 0
    last = step.k_cache.shape[1] - 1
    step.arrays["page_tables"][0, 0] = last  # in use by the first row: full, so this step writes elsewhere
    step.k_cache[:, last] = step.v_cache[:, last] = np.arange(16)[:, None, None]
    out, keys, values = harness.run_step(case, step, implementation)
    np.testing.assert_array_equal(keys[:, last], step.k_cache[:, last].astype(np.float32))
    np.testing.assert_array_equal(values[:, last], step.v_cache[:, last].astype(np.float32))
    assert np.isfinite(out).all()
    check_close(out, harness.expected_step(case, step)[0], CLOSE, implementation)


@pytest.mark.parametrize("implementation", [harness.NATIVE, "xla", "reference"])
def test_tpu_04_a_page_table_shorter_than_the_sequence_reads_and_writes_nothing_else(implementation):
    case = padded([(1, 40), (4, 300)], 16)
    step = cases.make_step(case)
    kept = 2  # of the 3 and 19 pages that the sequences ask for
    arrays = step.arrays | {"page_tables": step.arrays["page_tables"][:, :kept].copy()}
    step = replace(step, arrays=arrays)
    out, keys, values = harness.run_step(case, step, implementation)
    np.testing.assert_array_equal(keys[:, 1:], step.k_cache[:, 1:].astype(np.float32))
    np.testing.assert_array_equal(values[:, 1:], step.v_cache[:, 1:].astype(np.float32))
    assert np.isfinite(out).all()
    pages = arrays["page_tables"][0]
    context = [cache[step.layer, pages].reshape(kept * 16, 2, 8) for cache in (step.k_cache, step.v_cache)]
    want = harness.numpy_attention.attend(step.q[0], *context, kept * 16 - 1, scale=case.static["scale"])
    check_close(out[0], want, CLOSE, implementation)


@pytest.mark.parametrize("implementation", [harness.NATIVE, "xla", "reference"])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_tpu_05_rows_that_see_nothing_give_zeros_and_leave_neighbours_alone(implementation, has_sinks):
    case = padded([(1, 30), (1, 20), (3, 50)], 16, replace(BASE, has_sinks=has_sinks))
    step = cases.make_step(case)
    want, _, _ = harness.expected_step(case, step)
    step.arrays["kv_lens"][1] = 0  # a decode row whose context is gone
    step.arrays["token_rows"][1] = NUM_ROWS
    out, _, _ = harness.run_step(case, step, implementation)
    assert (out[1] == 0).all()
    assert (out[5:] == 0).all()
    for token in (0, 2, 3, 4):
        check_close(out[token], want[token], CLOSE, f"token {token}")


@pytest.mark.parametrize("implementation", [harness.NATIVE, "xla", "reference"])
@pytest.mark.parametrize("offset", [-60_000, -3_000_000])
def test_tpu_05_very_negative_logits_keep_their_weights(implementation, offset):
    case = padded([(1, 290), (9, 40)], 16, replace(BASE, head_dim=16))  # scale 1/4
    step = cases.make_step(case)
    # Whole numbers, so that float32 holds the logits exactly: offset + (0, 1 or 2).
    for keys in (step.k, step.k_cache):
        keys[...] = np.where(np.isnan(keys), np.nan, 0)
        keys[..., 0] += 4
        keys[..., 1] += np.arange(keys.size // 16).reshape(keys.shape[:-1]) % 3
    step.q[...] = 0
    step.q[..., 0], step.q[..., 1] = offset, 4
    out, _, _ = harness.run_step(case, step, implementation)
    check_close(out, harness.expected_step(case, step)[0], Tolerance(1e-3, 0), implementation)
