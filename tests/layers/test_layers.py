"""Small layers against NumPy in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config.model import MLPSpec
from jaxllm.layers.embed import Embed
from jaxllm.layers.linear import Linear, matmul, matmul_transposed
from jaxllm.layers.mlp import GatedMLP
from jaxllm.layers.norm import RMSNorm

RNG = np.random.default_rng(0)
F32 = jnp.dtype("float32")
BF16 = jnp.dtype("bfloat16")


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(size=shape).astype(np.float32)


def test_linear_adds_its_bias() -> None:
    layer = Linear(5, 7, F32, bias=True)
    weight, bias, x = normal(5, 7), normal(7), normal(3, 5)
    layer.weight[...], layer.bias[...] = jnp.asarray(weight), jnp.asarray(bias)
    np.testing.assert_allclose(layer(jnp.asarray(x)), x @ weight + bias, atol=1e-5)


def test_bfloat16_products_are_summed_in_float32() -> None:
    """4096 products of one: a sum in bfloat16 stops growing at 256."""
    ones = jnp.ones((2, 4096), BF16)
    result = matmul(ones, jnp.ones((4096, 3), BF16))
    assert result.dtype == jnp.float32
    np.testing.assert_array_equal(result, np.full((2, 3), 4096.0))


def test_transposed_weights_give_the_same_product() -> None:
    x, weight = jnp.asarray(normal(3, 5)), jnp.asarray(normal(5, 7))
    np.testing.assert_allclose(matmul_transposed(x, weight.T), matmul(x, weight), atol=1e-6)


@pytest.mark.parametrize(("dtype", "tolerance"), [(F32, 1e-6), (BF16, 2e-2)])
@pytest.mark.parametrize("magnitude", [1e-4, 1.0, 1e4])
def test_norm_divides_by_the_root_of_the_mean_square(dtype: Any, tolerance: float, magnitude: float) -> None:
    layer = RMSNorm(64, 1e-5, dtype)
    weight, x = normal(64), normal(3, 64) * magnitude
    layer.weight[...] = jnp.asarray(weight, dtype)
    expected = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * weight
    result = layer(jnp.asarray(x, dtype))
    assert result.dtype == dtype
    np.testing.assert_allclose(np.asarray(result, np.float32), expected, rtol=tolerance, atol=tolerance)


def _gelu_tanh(x: float) -> float:
    return 0.5 * x * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        ("silu", lambda x: x / (1 + math.exp(-x))),
        ("gelu", lambda x: 0.5 * x * (1 + math.erf(x / math.sqrt(2)))),
        ("gelu_tanh", _gelu_tanh),
        ("relu", lambda x: max(x, 0.0)),
    ],
)
def test_gated_mlp(activation: Any, function: Callable[[float], float]) -> None:
    layer = GatedMLP(MLPSpec(6, activation=activation), 4, F32)
    gate, up, down, x = normal(4, 6), normal(4, 6), normal(6, 4), normal(3, 4)
    layer.gate_up.weight[...] = jnp.asarray(np.concatenate([gate, up], axis=1))
    layer.down.weight[...] = jnp.asarray(down)
    expected = (np.vectorize(function)(x @ gate) * (x @ up)) @ down
    np.testing.assert_allclose(layer(jnp.asarray(x)), expected, atol=1e-5)


def test_embed_looks_up_rows_and_is_its_own_head() -> None:
    layer = Embed(10, 4, F32)
    table = normal(10, 4)
    layer.weight[...] = jnp.asarray(table)
    np.testing.assert_array_equal(layer(jnp.array([3, 0, 9], jnp.int32)), table[[3, 0, 9]])
    np.testing.assert_allclose(layer.logits(jnp.asarray(table)), table @ table.T, atol=1e-5)
