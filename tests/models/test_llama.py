"""Llama against transformers: same checkpoint, same tokens, whole-prompt logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.helpers.oracle import (
    NUM_TOKENS,
    TOLERANCE,
    Checkpoint,
    LoadedModel,
    load_model,
    run_pieces,
    write_checkpoint,
)

# The oracle leg: torch has no wheel for every Python this runs on, and there these tests say so.
pytest.importorskip("torch")

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "rope_parameters": LLAMA3_ROPE,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama3_rope_untied_equal_heads_head_dim_24": {"num_key_value_heads": 4, "head_dim": 24},
    "linear_rope_tied_one_kv_head": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        "tie_word_embeddings": True,
        "num_key_value_heads": 1,
    },
    "default_rope_biases_three_heads_a_kv_head": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": True,
        "mlp_bias": True,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_hidden_layers": 3,
        "rms_norm_eps": 1e-3,
    },
}


Oracle = tuple[Checkpoint, LoadedModel]


def write_variant(name: str, factory: pytest.TempPathFactory) -> Checkpoint:
    return write_checkpoint(factory.mktemp(name), "llama", **{**TINY, **VARIANTS[name]})


@pytest.fixture(scope="module", params=VARIANTS)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    checkpoint = write_variant(request.param, tmp_path_factory)
    return checkpoint, load_model(checkpoint.folder)


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return write_variant("default_rope_biases_three_heads_a_kv_head", tmp_path_factory)


@pytest.mark.parametrize(
    "lengths",
    [[NUM_TOKENS], [33, 20, 17], [40] + 30 * [1]],
    ids=["one_chunk", "three_chunks", "decode_steps"],
)
def test_logits_equal_transformers(oracle: Oracle, lengths: list[int]) -> None:
    checkpoint, model = oracle
    logits = run_pieces(model, checkpoint.token_ids.tolist(), lengths)
    np.testing.assert_allclose(logits, checkpoint.logits, atol=TOLERANCE, rtol=0)


def test_logits_are_the_same_when_matrices_are_stacked(biased: Checkpoint) -> None:
    logits = run_pieces(load_model(biased.folder, matrices="scanned"), biased.token_ids.tolist(), [NUM_TOKENS])
    np.testing.assert_allclose(logits, biased.logits, atol=TOLERANCE, rtol=0)


def test_bfloat16_logits_stay_near(biased: Checkpoint) -> None:
    model = load_model(biased.folder, dtype="bfloat16")
    logits = run_pieces(model, biased.token_ids.tolist(), [50, 20], kv_dtype="bfloat16")
    assert logits.dtype == np.float32
    assert np.abs(logits - biased.logits).mean() < 0.05 * biased.logits.std()
