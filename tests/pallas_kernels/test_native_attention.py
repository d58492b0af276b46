"""What is particular to the native kernel: parts of 512 tokens, blocks of 64, vectors of 4 to 16 numbers."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import ragged_paged_attention
from pallas_kernels._core.testing import TOLERANCES, Tolerance, check_close
from pallas_kernels.ragged_paged_attention import cases, layout
from pallas_kernels.ragged_paged_attention.cases import Case
from tests.pallas_kernels import harness

pytestmark = harness.needs_native
PART = 512  # tokens of a decode row that one thread takes
CLOSE = Tolerance(2e-5, 2e-5)
LONG = ((1, 3 * PART), (1, PART + 1), (1, 2 * PART - 1), (1, PART), (1, 7), (40, PART + 23))
BASE = Case("long", (), LONG, num_heads=6, num_kv_heads=2, head_dim=8, page_size=48)


def run(case, seed=0):
    return harness.run(case, "native", seed)[0]


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"page_size": PART},
        {"page_size": 1, "num_kv_heads": 6},
        {"window": PART},
        {"window": PART + 200},
        {"window": 3},
        {"has_sinks": True},
        {"soft_cap": 2.0},
        {"window": 700, "has_sinks": True, "soft_cap": 2.0},
    ],
    ids=str,
)
def test_contexts_of_several_parts_match_float64(options, kv_dtype):
    case = replace(BASE, kv_dtype=kv_dtype, **options)
    check_close(run(case), harness.expected(case)[0], CLOSE, str(options))


@pytest.mark.parametrize("head_dim", [1, 6, 20, 40, 72, 100])
def test_any_head_dim_matches_float64(head_dim):
    """Whole vectors and panels, what is left over of them, and less than one."""
    case = replace(BASE, head_dim=head_dim, sequences=((1, 130), (9, 70)))
    check_close(run(case), harness.expected(case)[0], CLOSE, str(head_dim))


@pytest.mark.parametrize("num_heads", [1, 2, 3, 5, 7, 12])
def test_any_number_of_query_heads_a_kv_head_matches_float64(num_heads):
    case = replace(BASE, num_heads=num_heads, num_kv_heads=1, sequences=((1, 130), (9, 70)))
    check_close(run(case), harness.expected(case)[0], CLOSE, str(num_heads))


@pytest.mark.parametrize(("q_dtype", "kv_dtype"), [("bfloat16", "bfloat16"), ("bfloat16", "float32")])
def test_bfloat16_queries_over_both_kinds_of_pages(q_dtype, kv_dtype):
    case = replace(BASE, q_dtype=q_dtype, kv_dtype=kv_dtype)
    out, keys, values = harness.run(case, "native")
    want, want_keys, want_values = harness.expected(case)
    check_close(out, want, TOLERANCES[q_dtype], q_dtype)
    np.testing.assert_array_equal(keys[:, 1:], want_keys[:, 1:])
    np.testing.assert_array_equal(values[:, 1:], want_values[:, 1:])


def alone(step, row, num_tokens=1):
    """The step of one row, in the smallest shapes; the row keeps its pages."""
    start, arrays = int(step.arrays["query_starts"][row]), step.arrays
    span = slice(start, start + num_tokens)
    small = {
        "kv_lens": arrays["kv_lens"][row : row + 1],
        "page_tables": arrays["page_tables"][row : row + 1],
        "query_starts": np.array([0, num_tokens], np.int32),
        "distribution": np.array([num_tokens == 1, 1, 1], np.int32),
        "positions": arrays["positions"][span],
        "token_rows": np.zeros(num_tokens, np.int32),
    }
    return replace(step, q=step.q[span], k=step.k[span], v=step.v[span], arrays=small)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"window": 700, "has_sinks": True, "soft_cap": 2.0}], ids=str)
def test_a_decode_row_has_the_same_bits_alone_and_in_a_batch(options, kv_dtype):
    case = replace(BASE, kv_dtype=kv_dtype, **options)
    step = cases.make_step(case)
    out, _, _ = harness.run_step(case, step, "native")
    for row in range(5):
        single, _, _ = harness.run_step(case, alone(step, row), "native")
        np.testing.assert_array_equal(single[0], out[row], err_msg=f"row {row}")


@pytest.mark.parametrize("options", [{}, {"window": 100, "has_sinks": True, "soft_cap": 2.0}], ids=str)
def test_a_prompt_has_the_same_bits_in_any_chunks(options):
    """Chunks of two tokens and more. One token is a decode row, which is another sum."""
    length = 300
    case = replace(BASE, sequences=((length, length),), pad_tokens=0, pad_rows=0, **options)
    step = cases.make_step(case)
    whole, *want_pages = harness.run_step(case, step, "native")
    for sizes in ((150, 150), (2, 64, 100, 134), (63, 65, 129, 43)):
        cache, done = (step.k_cache, step.v_cache), 0
        for size in sizes:
            span = slice(done, done + size)
            arrays = step.arrays | {
                "kv_lens": np.array([done + size], np.int32),
                "query_starts": np.array([0, size], np.int32),
                "positions": np.arange(done, done + size, dtype=np.int32),
                "token_rows": np.zeros(size, np.int32),
            }
            chunk = replace(step, q=step.q[span], k=step.k[span], v=step.v[span], arrays=arrays)
            chunk = replace(chunk, k_cache=cache[0], v_cache=cache[1])
            out, *cache = harness.run_step(case, chunk, "native")
            np.testing.assert_array_equal(out, whole[span], err_msg=f"{size} of {sizes}")
            done += size
        for got, want in zip(cache, want_pages, strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_what_lies_in_unused_slots_reaches_no_row(kv_dtype):
    """The cases hold NaN there already; infinities and huge numbers change no bit either."""
    case = replace(BASE, kv_dtype=kv_dtype, window=700)
    step = cases.make_step(case)
    out, _, _ = harness.run_step(case, step, "native")
    assert np.isfinite(out).all()
    unused = ~cases.used_slots(step.arrays, step.k_cache.shape[:3])
    for (length, kv_len), table in zip(case.sequences, step.arrays["page_tables"], strict=False):
        behind = np.arange(max(0, kv_len - length + 1 - 700))  # the window of the row's first query
        unused[:, table[behind // case.page_size], behind % case.page_size] = True
    for foreign in (np.nan, np.inf, -3e38):
        k_cache, v_cache = (np.where(unused[..., None, None], foreign, c) for c in (step.k_cache, step.v_cache))
        again, _, _ = harness.run_step(case, replace(step, k_cache=k_cache, v_cache=v_cache), "native")
        np.testing.assert_array_equal(again, out)


def test_keys_wider_than_the_queries_keep_their_digits():
    case = replace(BASE, sequences=((1, 70), (9, 40)))
    step = cases.make_step(case)
    new = [jnp.asarray(x, jnp.float32) for x in (step.k, step.v)]
    out, kv = ragged_paged_attention(
        jnp.asarray(step.q, jnp.bfloat16),
        *new,
        layout.pack(step.k_cache, step.v_cache, "float32"),
        step.layer,
        scale=1.0,
        implementation="native",
        **jax.tree.map(jnp.asarray, step.arrays),
    )
    assert out.dtype == jnp.bfloat16
    keys, _ = layout.unpack(kv)
    page, slot = step.arrays["page_tables"][0, 69 // 48], 69 % 48
    np.testing.assert_array_equal(keys[step.layer, page, slot], np.asarray(new[0][0]))
