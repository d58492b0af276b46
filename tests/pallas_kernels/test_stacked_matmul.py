"""Every implementation against float64 numpy; the bits of `native`, whatever the number of rows; wrong arguments."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import InvalidArgument, UnknownImplementation, Unsupported, stacked_matmul
from pallas_kernels._core.testing import Tolerance, check_close
from pallas_kernels.stacked_matmul import choose
from pallas_kernels.stacked_matmul.api import IMPLEMENTATIONS
from pallas_kernels.stacked_matmul.problem import Problem
from tests.pallas_kernels import harness

L, MOST = 3, 70
# (K, N): vectors hold 4, 8 or 16 numbers, panels two of them, strips four or eight panels; 8 x 8 pieces are transposed.
SHAPES = [(64, 256), (37, 203), (1, 1), (130, 7), (8, 33)]
SERVING = [harness.NATIVE if i.name == "native" else i.name for i in IMPLEMENTATIONS]


@partial(jax.jit, static_argnames=("implementation", "transposed"), compiler_options=harness.QUICK)
def multiply(x, weights, index, num_rows, *, implementation, transposed):
    return stacked_matmul(x, weights, index, num_rows=num_rows, transposed=transposed, implementation=implementation)


def call(x, weights, index, num_rows, *, implementation, transposed=False):
    """On the host on both sides: slices there are not compiled."""
    scalars = np.int32(index), np.int32(num_rows)
    return np.asarray(multiply(x, weights, *scalars, implementation=implementation, transposed=transposed))


def problem(shape, dtype, transposed=False, x_dtype=None):
    """x [MOST, K] and weights [L, K, N] or [L, N, K], as `dtype` holds them."""
    rng, (k, n) = np.random.default_rng(0), shape
    x, weights = rng.standard_normal((MOST, k)), rng.standard_normal((L, n, k) if transposed else (L, k, n))
    return x.astype(jnp.dtype(x_dtype or dtype)), weights.astype(jnp.dtype(dtype))


def expected(x, weights, index, transposed):
    x, weight = x.astype(np.float64), weights[index].astype(np.float64)
    return x @ (weight.T if transposed else weight)


@pytest.mark.parametrize("implementation", SERVING)
@pytest.mark.parametrize("transposed", [False, True], ids=["as it lies", "transposed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_matches_float64_at_every_shape(implementation, transposed, dtype):
    for shape in SHAPES:
        x, weights = problem(shape, dtype, transposed)
        want = expected(x, weights, 1, transposed)
        for num_rows in (2, 9, MOST):
            got = call(x, weights, 1, num_rows, implementation=implementation, transposed=transposed)
            assert got.dtype == jnp.float32
            what = f"{implementation}, {shape}, {num_rows} rows"
            check_close(got[:num_rows], want[:num_rows], Tolerance(1e-5 * shape[0] ** 0.5, 1e-5), what)
            assert np.isfinite(got).all()


@harness.needs_native
@pytest.mark.parametrize("x_dtype", ["float32", "bfloat16"])
def test_native_takes_rows_and_matrices_of_different_types(x_dtype):
    w_dtype = {"float32": "bfloat16", "bfloat16": "float32"}[x_dtype]
    x, weights = problem((37, 203), w_dtype, x_dtype=x_dtype)
    got = call(x, weights, 2, MOST, implementation="native")
    check_close(got, expected(x, weights, 2, False), Tolerance(5e-5, 1e-5), x_dtype)


@pytest.mark.parametrize("implementation", SERVING)
def test_each_matrix_of_the_stack_is_found(implementation):
    x, weights = problem((37, 40), "bfloat16")
    for index in range(L):
        got = call(x, weights, index, MOST, implementation=implementation)
        check_close(got, expected(x, weights, index, False), Tolerance(5e-5, 1e-5), f"matrix {index}")


@harness.needs_native
@pytest.mark.parametrize("transposed", [False, True], ids=["as it lies", "transposed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_bits_of_a_native_row_depend_on_neither_t_nor_num_rows(dtype, transposed):
    for shape in SHAPES:
        x, weights = problem(shape, dtype, transposed)
        want = call(x, weights, 1, MOST, implementation="native", transposed=transposed)
        for num_rows in range(1, MOST):
            got = call(x, weights, 1, num_rows, implementation="native", transposed=transposed)
            np.testing.assert_array_equal(got[:num_rows], want[:num_rows], err_msg=f"{shape}, {num_rows}")
    for rows in range(1, 14):  # the last shape again, as arrays of their own and from the middle of the batch
        start = (MOST - rows) // 2
        alone = call(x[start : start + rows], weights, 1, rows, implementation="native", transposed=transposed)
        np.testing.assert_array_equal(alone, want[start : start + rows], err_msg=f"{rows} rows alone")


@pytest.mark.parametrize("implementation", SERVING)
def test_rows_that_do_not_count_may_hold_nan(implementation):
    x, weights = problem((37, 203), "float32")
    want = expected(x, weights, 0, False)
    for num_rows in (0, 1, 5, 33):
        counting = np.arange(MOST)[:, None] < num_rows
        got = call(np.where(counting, x, np.float32(np.nan)), weights, 0, num_rows, implementation=implementation)
        check_close(got[:num_rows], want[:num_rows], Tolerance(5e-5, 1e-5), f"{num_rows} rows")


@harness.needs_native
def test_a_number_of_rows_out_of_range_is_brought_into_it():
    x, weights = problem((8, 33), "float32")
    want = call(x, weights, 0, MOST, implementation="native")
    np.testing.assert_array_equal(call(x, weights, 0, MOST + 5, implementation="native"), want)
    assert (call(x, weights, 0, -1, implementation="native") == 0).all()


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"x": jnp.zeros((2, 3, 4), jnp.float32)}, ("x: ", "(2, 3, 4)", "[T, K]")),
        ({"weights": jnp.zeros((2, 5, 6), jnp.float32)}, ("weights: ", "(2, 5, 6)", "K = 4")),
        ({"transposed": True}, ("weights: ", "(2, 4, 6)", "[L, N, K]")),
        ({"x": jnp.zeros((2, 4), jnp.int32)}, ("x: ", "int32", "float32 or bfloat16")),
        ({"weights": jnp.zeros((2, 4, 6), jnp.int8)}, ("weights: ", "int8", "float32 or bfloat16")),
        ({"index": jnp.zeros(2, jnp.int32)}, ("index: ", "(2,)")),
        ({"num_rows": jnp.zeros(1, jnp.int32)}, ("num_rows: ", "(1,)")),
    ],
)
def test_a_wrong_argument_is_named_with_what_came_and_what_is_accepted(changes, parts):
    right = {"x": jnp.zeros((2, 4), jnp.float32), "weights": jnp.zeros((2, 4, 6), jnp.float32), "index": 0}
    with pytest.raises(InvalidArgument) as error:
        stacked_matmul(**(right | changes))
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_types_that_the_native_kernel_lacks_go_to_xla_and_the_report_says_why():
    report = choose(Problem("float16", "bfloat16"))
    assert report.chosen.name == "xla"
    assert report.why_not["native"] == "multiplies float32 and bfloat16 alone, not float16 with bfloat16"
    with pytest.raises(Unsupported, match="float16 with bfloat16"):
        choose(Problem("float16", "bfloat16"), implementation="native")
    with pytest.raises(UnknownImplementation, match=r"'mkl'.*native, xla"):
        choose(Problem("float32", "float32"), implementation="mkl")
    assert choose(Problem("float32", "float32"), platform="gpu").why_not["native"] == "runs on cpu, not on gpu"
