"""A model whose right answer is known by arithmetic: the next token is a hash of the whole history.

Its KV pages hold token ids, one row a run as a real cache has, and each logit depends on every token
of the sequence as read back through the page table. One wrong page, position, slot or token gives
another answer. `next_logits` is the same function in numpy, over a plain list of ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.layers.batch import BatchMetadata
from jaxllm.memory.spec import FullKV

VOCAB = 211  # below 256: ids and bytes of a hash are exact in bfloat16
NUM_BYTES = 4
_POSITION = np.int32(0x3C6EF35F)
_TOKEN = np.int32(0x19660D)
_VOCAB = np.int32(0x27D4EB2F)


def _mix(x: Any) -> Any:
    """Scramble int32 values; numpy and jax wrap around alike."""
    x = (x ^ (x >> 15)) * np.int32(0x2C1B3C6D)
    x = (x ^ (x >> 12)) * np.int32(0x297A2D39)
    return x ^ (x >> 15)


def next_logits(history: Sequence[int]) -> np.ndarray:
    """Logits [VOCAB] after `history`, by numpy alone."""
    ids = np.asarray(history, np.int32)
    positions = np.arange(len(ids), dtype=np.int32)
    with np.errstate(over="ignore"):
        state = _mix(positions * _POSITION + ids * _TOKEN + 1).sum(dtype=np.int32)
        mixed = _mix(state + np.arange(VOCAB, dtype=np.int32) * _VOCAB)
    return ((mixed >> 8) & 0xFFFF).astype(np.float32) / 8192


def greedy_continuation(prompt: Sequence[int], num_tokens: int) -> list[int]:
    """What a greedy request must return."""
    history = list(prompt)
    for _ in range(num_tokens):
        history.append(int(next_logits(history).argmax()))
    return history[len(prompt) :]


@dataclass(frozen=True)
class OracleModel:
    """Shaped like `models.base.SplitModel`; one run of `num_layers` layers, only the last of which is read."""

    dtype: str = "float32"
    num_layers: int = 2
    names: tuple[str, ...] = ("scale", "head")
    head_names: tuple[str, ...] = ("head",)
    tensors: tuple[Any, ...] = ()
    attention: str | None = None

    @property
    def params(self) -> dict[str, jax.ShapeDtypeStruct]:
        return {
            "scale": jax.ShapeDtypeStruct((NUM_BYTES,), self.dtype),
            "head": jax.ShapeDtypeStruct((VOCAB,), np.int32),
        }

    def weights(self) -> dict[str, jax.Array]:
        return {
            "scale": jnp.ones((NUM_BYTES,), self.dtype),
            "head": jnp.arange(VOCAB, dtype=np.int32),
        }

    def kv_specs(self, page_size: int, dtype: str) -> tuple[FullKV, ...]:
        return (FullKV(page_size, 1, 1, dtype),) * self.num_layers

    def kv_shapes(self, num_pages: int, page_size: int, dtype: str) -> tuple[jax.ShapeDtypeStruct, ...]:
        return (jax.ShapeDtypeStruct((self.num_layers, num_pages, page_size, 2), dtype),)

    def forward(
        self, leaves: tuple[jax.Array, ...], kv: tuple[jax.Array, ...], batch: BatchMetadata
    ) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        (pages,), page_size = kv, kv[0].shape[2]
        num_rows = batch.bucket.num_requests
        is_real = batch.token_rows < num_rows
        rows = jnp.minimum(batch.token_rows, num_rows - 1)
        own_page = batch.page_tables[rows, batch.positions // page_size]
        written = jnp.where(is_real, own_page, 0), batch.positions % page_size
        values = batch.token_ids.astype(pages.dtype)
        for layer in range(self.num_layers):
            pages = pages.at[layer, written[0], written[1]].set(values[:, None])
        history = pages[-1, batch.page_tables[rows], :, 0].reshape(len(rows), -1)
        positions = jnp.arange(history.shape[1], dtype=np.int32)
        is_seen = (positions[None] <= batch.positions[:, None]) & is_real[:, None]
        ids = jnp.where(is_seen, history, jnp.zeros_like(history)).astype(np.int32)
        terms = _mix(positions[None] * _POSITION + ids * _TOKEN + np.int32(1))
        state = jnp.where(is_seen, terms, 0).sum(axis=1, dtype=np.int32)
        parts = jnp.stack([(state >> (8 * i)) & 0xFF for i in range(NUM_BYTES)], axis=1)
        return parts.astype(self.dtype) * leaves[0], (pages,)

    def logits(self, head: tuple[jax.Array, ...], hidden: jax.Array, num_rows: jax.Array | None = None) -> jax.Array:
        parts = hidden.astype(np.int32)
        state = parts[:, 0] | parts[:, 1] << 8 | parts[:, 2] << 16 | parts[:, 3] << 24
        mixed = _mix(state[:, None] + head[0][None, :] * _VOCAB)
        return ((mixed >> 8) & 0xFFFF).astype(np.float32) / np.float32(8192)
