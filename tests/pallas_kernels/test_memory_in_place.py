"""The cache is updated where it lies, and positions and pages past 16 and 32 bits are found."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels import kv_cache_shape, ragged_paged_attention
from tests.pallas_kernels import harness

L, N, K, H, S = 4, 9, 3, 64, 16


def shapes(num_tokens, num_rows, pages_per_row):
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    return {
        "kv_lens": i32(num_rows),
        "page_tables": i32(num_rows, pages_per_row),
        "query_starts": i32(num_rows + 1),
        "distribution": i32(3),
        "positions": i32(num_tokens),
        "token_rows": i32(num_tokens),
    }


def layers(kv, q, k, arrays, *, decode_only):
    """A model's use of the op: one after the other over the layers, the cache in the carry."""

    def layer(carry, index):
        x, kv = carry
        x, kv = ragged_paged_attention(x, k, k, kv, index, scale=0.125, decode_only=decode_only, **arrays)
        return (x, kv), None

    (x, kv), _ = lax.scan(layer, (q, kv), jnp.arange(kv.shape[0], dtype=jnp.int32))
    return x, kv


def compiled(kv, num_tokens, num_rows, *, decode_only):
    q, k = (jax.ShapeDtypeStruct((num_tokens, heads, H), jnp.float32) for heads in (N, K))
    run = jax.jit(layers, static_argnames="decode_only", donate_argnames="kv", compiler_options=harness.QUICK)
    return run.lower(kv, q, k, shapes(num_tokens, num_rows, 64), decode_only=decode_only).compile()


@pytest.mark.parametrize(
    ("num_tokens", "num_rows", "dtype"),
    [(1, 1, "float32"), (8, 8, "float32"), (128, 8, "float32"), (8, 8, "bfloat16")],
)
def test_the_cache_is_aliased_and_never_copied_in_a_scan_over_layers(num_tokens, num_rows, dtype):
    kv = kv_cache_shape(L, 1000, S, K, H, dtype)
    program = compiled(kv, num_tokens, num_rows, decode_only=num_tokens == num_rows)
    num_bytes = kv.size * kv.dtype.itemsize
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes == num_bytes
    assert memory.temp_size_in_bytes < num_bytes / L
    layer_dims = ",".join(map(str, kv.shape[1:]))
    copies = re.findall(rf"= \w+\[(?:\d+,)?{layer_dims}\][^=]* (?:copy|transpose|convert)\(", program.as_text())
    assert copies == []


def test_tpu_07_a_cache_past_2_31_elements_is_indexed_one_axis_at_a_time():
    kv = kv_cache_shape(32, 200_000, S, 8, 128, "float32")
    assert kv.size > 2**34
    q, k = (jax.ShapeDtypeStruct((16, heads, 128), jnp.float32) for heads in (32, 8))
    run = jax.jit(layers, static_argnames="decode_only", donate_argnames="kv", compiler_options=harness.QUICK)
    program = run.lower(kv, q, k, shapes(16, 16, 64), decode_only=True)
    dims = "x".join(map(str, kv.shape))
    # No other view of the cache exists: a flat index would need one, and would not fit 32 bits.
    assert set(re.findall(r"tensor<([\dx]+)xf32>", program.as_text())) & {dims} == {dims}
    assert not re.search(rf"reshape[^\n]*tensor<{dims}xf32>", program.as_text())
    assert program.compile().memory_analysis().alias_size_in_bytes == kv.size * 4


@pytest.mark.slow
def test_tpu_07_pages_either_side_of_2_31_elements_are_written_and_read():
    page = 2 * S * H  # elements of a page of one layer
    edge = 2**31 // page
    num_pages = edge + 4
    kv = jnp.zeros(kv_cache_shape(1, num_pages, S, 1, H, "int8").shape, jnp.int8)
    assert kv.size > 2**31
    tables = jnp.asarray([[edge - 1], [edge], [num_pages - 1]], jnp.int32)
    arrays = {
        "kv_lens": jnp.ones(3, jnp.int32),
        "page_tables": tables,
        "query_starts": jnp.arange(4, dtype=jnp.int32),
        "distribution": jnp.full(3, 3, jnp.int32),
        "positions": jnp.zeros(3, jnp.int32),
        "token_rows": jnp.arange(3, dtype=jnp.int32),
    }
    v = jnp.asarray([[[1.0]], [[2.0]], [[3.0]]], jnp.float32) * jnp.ones((3, 1, H), jnp.float32)
    run = jax.jit(
        lambda kv, v: ragged_paged_attention(
            v, v, v, kv, 0, scale=1.0, k_scale=1.0, v_scale=1.0, decode_only=True, **arrays
        ),
        donate_argnums=0,
    )
    out, kv = run(kv, v)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(v))
    for row, page_id in enumerate(tables[:, 0].tolist()):
        np.testing.assert_array_equal(np.asarray(kv[0, page_id, :, 0, 0]), row + 1)
    assert int(jnp.count_nonzero(kv[0, edge + 1])) == 0


def test_positions_past_2_16_attend_to_their_whole_context():
    num_pages = 70_000 // S + 2
    kv_len = 66_001
    keys = jnp.zeros(kv_cache_shape(1, num_pages, S, 1, 1, "float32").shape, jnp.float32)
    place = jnp.arange(1, num_pages, dtype=jnp.int32)  # pages in order; each token's value is its position
    values = jnp.arange((num_pages - 1) * S, dtype=jnp.float32).reshape(-1, 1, S, 1)
    kv = keys.at[0, 1:, 1].set(values)
    one = jnp.ones((1, 1, 1), jnp.float32)
    out, kv = jax.jit(ragged_paged_attention, static_argnames=("scale", "decode_only"))(
        one,
        one * 0,
        one * (kv_len - 1),
        kv,
        jnp.int32(0),
        kv_lens=jnp.asarray([kv_len], jnp.int32),
        page_tables=place[None],
        query_starts=jnp.asarray([0, 1], jnp.int32),
        distribution=jnp.ones(3, jnp.int32),
        positions=jnp.asarray([kv_len - 1], jnp.int32),
        token_rows=jnp.zeros(1, jnp.int32),
        scale=1.0,
        decode_only=True,
    )
    np.testing.assert_allclose(float(out[0, 0, 0]), (kv_len - 1) / 2, rtol=1e-5)
    last = kv_len - 1
    assert float(kv[0, 1 + last // S, 1, 0, last % S, 0]) == last
