"""Rotary embedding against complex numbers in float64, and its scalings against transformers."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxllm.config.model import RopeSpec
from jaxllm.layers.rope import apply_rope, inverse_frequencies, rope_table

HEAD_DIM = 16
SPECS = {
    "default": RopeSpec(theta=10000.0),
    "linear": RopeSpec(theta=10000.0, kind="linear", factor=4.0),
    "llama3": RopeSpec(
        theta=500000.0,
        kind="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=64,
    ),
    "partial": RopeSpec(theta=10000.0, rotary_dim=8),
}


def exact_frequencies(spec: RopeSpec) -> np.ndarray:
    rotary_dim = spec.rotary_dim or HEAD_DIM
    frequencies = np.array([spec.theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)])
    if spec.kind == "linear":
        return frequencies / spec.factor
    if spec.kind == "default":
        return frequencies
    scaled: list[float] = []
    for frequency in frequencies:
        wavelength = 2 * np.pi / frequency
        if wavelength > spec.original_max_positions / spec.low_freq_factor:
            scaled.append(frequency / spec.factor)
        elif wavelength < spec.original_max_positions / spec.high_freq_factor:
            scaled.append(frequency)
        else:
            blend = spec.original_max_positions / wavelength - spec.low_freq_factor
            blend /= spec.high_freq_factor - spec.low_freq_factor
            scaled.append((1 - blend) * frequency / spec.factor + blend * frequency)
    return np.array(scaled)


def turned(x: np.ndarray, positions: np.ndarray, spec: RopeSpec) -> np.ndarray:
    frequencies = exact_frequencies(spec)
    half = len(frequencies)
    pairs = x[..., :half] + 1j * x[..., half : 2 * half].astype(np.float64)
    pairs = pairs * np.exp(1j * positions[:, None, None] * frequencies)
    return np.concatenate([pairs.real, pairs.imag, x[..., 2 * half :]], axis=-1)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_heads_turn_by_position_times_frequency(spec: RopeSpec) -> None:
    rng = np.random.default_rng(0)
    positions = rng.integers(0, 2000, 20).astype(np.int32)
    x = rng.normal(size=(20, 3, HEAD_DIM)).astype(np.float32)
    table = rope_table(jnp.asarray(positions), spec, HEAD_DIM)
    np.testing.assert_allclose(
        apply_rope(jnp.asarray(x), table), turned(x.astype(np.float64), positions, spec), atol=5e-4
    )


@pytest.mark.parametrize("position", [8191, 131071])
def test_far_positions_stay_within_the_rounding_of_float32(position: int) -> None:
    spec = RopeSpec(theta=500000.0)
    cos, _ = rope_table(jnp.array([position], jnp.int32), spec, 128)
    frequencies = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    np.testing.assert_allclose(np.asarray(cos)[0], np.cos(position * frequencies), atol=position * 2.0**-23)


def test_scores_depend_on_distance_alone() -> None:
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, HEAD_DIM)).astype(np.float32)

    def score(q_position: int, k_position: int) -> float:
        rows = [
            np.asarray(apply_rope(jnp.asarray(x), rope_table(jnp.array([p], jnp.int32), SPECS["default"], HEAD_DIM)))
            for x, p in ((q, q_position), (k, k_position))
        ]
        return float((rows[0] * rows[1]).sum())

    assert score(7, 3) == pytest.approx(score(107, 103), abs=1e-4)
    assert score(7, 3) != pytest.approx(score(8, 3), abs=1e-2)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("default", {"rope_theta": 10000.0}),
        ("linear", {"rope_theta": 10000.0, "factor": 4.0}),
        (
            "llama3",
            {
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
    ],
)
def test_frequencies_equal_transformers(name: str, parameters: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=HEAD_DIM, rope_parameters={"rope_type": name, **parameters}
    )
    expected = LlamaRotaryEmbedding(config).inv_freq.to(torch.float64).numpy()
    np.testing.assert_allclose(inverse_frequencies(SPECS[name], HEAD_DIM), expected, rtol=1e-6)
