"""Dequantisation of every block type, against the gguf package called as it means to be called."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from jaxllm.errors import WeightsError
from jaxllm.weights.blocks import dequantize

KINDS = sorted(kind.name for kind in gguf.GGMLQuantizationType)


def random_blocks(kind: str, num_rows: int, blocks_in_row: int) -> np.ndarray:
    """Random bytes: every pattern of bits is a sound block of every type, though some scales are NaN."""
    _, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    return np.random.default_rng(1).integers(0, 256, (num_rows, blocks_in_row * block_bytes), np.uint8)


def package_serves(kind: str) -> bool:
    try:
        with np.errstate(all="ignore"):
            gguf.dequantize(random_blocks(kind, 1, 1), gguf.GGMLQuantizationType[kind])
    except NotImplementedError:
        return False
    return True


SERVED = [kind for kind in KINDS if package_serves(kind)]


def test_the_types_that_files_are_published_in_are_served() -> None:
    published = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS IQ3_S IQ2_XXS IQ1_S"
    assert set(published.split()) <= set(SERVED)


@pytest.mark.parametrize("kind", SERVED)
def test_every_type_gives_the_bits_of_the_gguf_package(kind: str) -> None:
    raw = random_blocks(kind, 37, 6)
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).reshape(-1)
        found = dequantize(raw.reshape(-1), kind).astype(np.float32)
    assert found.size and np.isfinite(found).any()
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_quantised_numbers_come_back_near_what_they_were(kind: str) -> None:
    values = np.random.default_rng(2).uniform(-1, 1, (8, 256)).astype(np.float32)
    raw = gguf.quantize(values, gguf.GGMLQuantizationType[kind]).view(np.uint8).reshape(-1)
    error = np.abs(dequantize(raw, kind).astype(np.float32) - values.reshape(-1)).max()
    assert error < {"F16": 1e-3, "BF16": 5e-3, "Q8_0": 5e-3, "Q5_0": 0.07, "Q5_1": 0.04}.get(kind, 0.14)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SERVED])
def test_a_type_that_cannot_be_dequantised_is_named(kind: str) -> None:
    with pytest.raises(WeightsError, match=f"cannot dequantise block type {kind}$"):
        dequantize(random_blocks(kind, 1, 1).reshape(-1), kind)
