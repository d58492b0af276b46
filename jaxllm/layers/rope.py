"""Rotary position embedding (Su et al., 2021), half-split: element i turns with element i + half."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxllm.config.model import RopeSpec

RopeTable = tuple[jax.Array, jax.Array]  # cos, sin: [T, rotary_dim / 2] float32


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> npt.NDArray[np.float32]:
    """Radians per position, [rotary_dim / 2], highest first.

    "linear" divides all by `factor`. "llama3" divides those whose wavelength is longer than
    original_max_positions / low_freq_factor, keeps those shorter than original_max_positions /
    high_freq_factor, and blends in between (Llama 3.1 model card).
    """
    rotary_dim = spec.rotary_dim or head_dim
    frequencies = spec.theta ** -(np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    if spec.kind == "linear":
        frequencies = frequencies / spec.factor
    elif spec.kind == "llama3":
        turns = spec.original_max_positions * frequencies / (2 * math.pi)
        kept = (turns - spec.low_freq_factor) / (spec.high_freq_factor - spec.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        frequencies = frequencies * (kept + (1.0 - kept) / spec.factor)
    return frequencies.astype(np.float32)


def rope_table(positions: jax.Array, spec: RopeSpec, head_dim: int) -> RopeTable:
    """Angles of positions [T]: made once a forward and shared by all layers with this spec."""
    angles = positions.astype(jnp.float32)[:, None] * jnp.asarray(inverse_frequencies(spec, head_dim))[None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, table: RopeTable) -> jax.Array:
    """x [T, heads, H] turned by its token's angles, in float32 -> the same shape, float32.

    Elements past the table's rotary_dim stay as they are.
    """
    cos, sin = (part[:, None, :] for part in table)
    half = cos.shape[-1]
    exact = x.astype(jnp.float32)
    first, second, rest = exact[..., :half], exact[..., half : 2 * half], exact[..., 2 * half :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
