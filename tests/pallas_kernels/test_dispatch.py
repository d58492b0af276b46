"""Dispatch and validation: what is chosen, why the others are not, and what a wrong call is told."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import InvalidArgument, UnknownImplementation, Unsupported, kv_cache_shape, ragged_paged_attention
from pallas_kernels._core import dispatch
from pallas_kernels._core.dispatch import Implementation
from pallas_kernels._core.platform import default_platform
from pallas_kernels._core.testing import Tolerance, check_close
from pallas_kernels.ragged_paged_attention import choose
from pallas_kernels.ragged_paged_attention.problem import Problem

PROBLEM = Problem(num_kv_heads=2, head_dim=16, kv_dtype="float32")
XLA = "pallas_kernels.ragged_paged_attention.xla"


def call(**changes):
    """The op on abstract arrays: T = 5, N = 4, K = 2, H = 8, R = 3, P = 2, S = 16."""
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)  # noqa: E731
    i32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    arrays = {
        "q": f32(5, 4, 8),
        "k": f32(5, 2, 8),
        "v": f32(5, 2, 8),
        "kv_pages": f32(1, 9, 2, 2, 16, 8),
        "layer": i32(),
        "kv_lens": i32(3),
        "page_tables": i32(3, 2),
        "query_starts": i32(4),
        "distribution": i32(3),
        "positions": i32(5),
        "token_rows": i32(5),
    }
    static = {"scale": 1.0}
    for name, value in changes.items():
        (arrays if hasattr(value, "shape") or name in arrays else static)[name] = value
    return jax.eval_shape(lambda arrays: ragged_paged_attention(**arrays, **static), arrays)


def test_shapes_come_back_as_they_went_in():
    out, kv = call()
    assert (out.shape, kv.shape) == ((5, 4, 8), (1, 9, 2, 2, 16, 8))


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"k": jax.ShapeDtypeStruct((4, 2, 8), jnp.float32)}, ("k: ", "(4, 2, 8)", "T = 5")),
        ({"q": jax.ShapeDtypeStruct((5, 32), jnp.float32)}, ("q: ", "(5, 32)", "[T, N, H]")),
        ({"q": jax.ShapeDtypeStruct((5, 3, 8), jnp.float32)}, ("q: ", "3 heads", "multiple of the 2 kv heads")),
        ({"q": jax.ShapeDtypeStruct((5, 4, 8), jnp.int32)}, ("q: ", "int32", "float32 or bfloat16")),
        ({"query_starts": jax.ShapeDtypeStruct((3,), jnp.int32)}, ("query_starts: ", "(3,)", "R+1 = 4")),
        ({"positions": jax.ShapeDtypeStruct((5,), jnp.float32)}, ("positions: ", "float32", "int32")),
        ({"distribution": jax.ShapeDtypeStruct((2,), jnp.int32)}, ("distribution: ", "(2,)", "[3]")),
        ({"page_tables": jax.ShapeDtypeStruct((3, 0), jnp.int32)}, ("P = 0", "1 or more")),
        ({"sinks": jax.ShapeDtypeStruct((2,), jnp.float32)}, ("sinks: ", "(2,)", "N = 4")),
        ({"window": 0}, ("window: got 0", "above 0")),
        ({"soft_cap": -1.0}, ("soft_cap: got -1.0", "above 0")),
        ({"v": None}, ("k and v", "both")),
        ({"k_scale": 0.5}, ("k_scale and v_scale", "both or neither")),
        ({"kv_pages": jax.ShapeDtypeStruct((1, 9, 2, 2, 16, 8), jnp.int8)}, ("k_scale", "int8")),
        ({"k": None, "v": None, "kv_pages": jax.ShapeDtypeStruct((9, 16), jnp.float32)}, ("kv_pages", "(9, 16)")),
    ],
)
def test_a_wrong_argument_is_named_with_what_came_and_what_is_accepted(changes, parts):
    with pytest.raises(InvalidArgument) as error:
        call(**changes)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_unsupported_gives_one_reason_for_each_implementation_tried():
    with pytest.raises(Unsupported) as error:
        call(kv_pages=jax.ShapeDtypeStruct((1, 9, 16, 4, 8), jnp.float32))
    assert set(error.value.reasons) == {"native", "xla", "reference"}
    assert all("(1, 9, 16, 4, 8)" in reason for reason in error.value.reasons.values())
    with pytest.raises(Unsupported, match="int4"):
        kv_cache_shape(1, 2, 16, 2, 8, "int4")


def test_an_unknown_name_is_told_the_names_there_are():
    with pytest.raises(UnknownImplementation, match=r"'triton'.*xla, reference"):
        call(implementation="triton")
    with pytest.raises(ValueError, match="triton"):
        kv_cache_shape(1, 2, 16, 2, 8, "float32", implementation="triton")


def test_explicit_choice_wins_and_the_report_says_why_not_the_others():
    report = choose(PROBLEM, implementation="reference")
    asked = "reference was asked for"
    assert (report.chosen.name, report.why_not) == ("reference", {"native": asked, "xla": asked})
    report = choose(PROBLEM, platform="gpu")
    assert report.chosen.name == "xla"
    assert "xla" in report.why_not["reference"]
    assert report.why_not["native"] == "runs on cpu, not on gpu"


def test_the_next_implementation_serves_where_the_first_does_not():
    order = (
        Implementation("tpu", "no.such.module", platforms=("tpu",)),
        Implementation("new", "no_such_module_of_a_newer_jax"),
        Implementation("xla", XLA),
    )
    report = dispatch.choose("op", order, PROBLEM, platform="cpu")
    assert report.chosen.name == "xla"
    assert report.why_not["tpu"] == "runs on tpu, not on cpu"
    assert "no_such_module_of_a_newer_jax" in report.why_not["new"]
    with pytest.raises(Unsupported, match="runs on tpu"):
        dispatch.choose("op", order[:1], PROBLEM, platform="cpu")


def test_a_cache_that_would_be_copied_at_every_step_goes_to_the_next_implementation():
    report = choose(Problem(num_kv_heads=2, head_dim=16, kv_dtype="float8_e5m2"))
    assert report.chosen.name == "reference"
    assert "copies a whole float8_e5m2 cache" in report.why_not["xla"]


@pytest.mark.parametrize(("name", "value"), [("page_size", 0), ("num_kv_heads", -1), ("num_pages", 0)])
def test_a_cache_of_no_size_is_refused(name, value):
    sizes = {"num_layers": 1, "num_pages": 2, "page_size": 16, "num_kv_heads": 2, "head_dim": 8} | {name: value}
    with pytest.raises(InvalidArgument, match=f"{name}: got {value}"):
        kv_cache_shape(**sizes, dtype="float32")


def test_the_platform_is_read_from_the_configuration_first():
    assert default_platform() == "cpu"
    with jax.default_device("cpu"):
        assert default_platform() == "cpu"


def test_the_rig_sees_a_wrong_element_and_a_nan():
    want = jnp.ones((2, 3), jnp.float32)
    check_close(want, want, Tolerance(0, 0), "same")
    for wrong in (2.0, float("nan")):
        with pytest.raises(AssertionError, match=r"1 of 6 elements differ; at \(1, 2\)"):
            check_close(want.at[1, 2].set(wrong), want, Tolerance(1e-3, 0), "other")
