"""The oracle of model families: a tiny random checkpoint as transformers writes it, its logits, and ours.

    checkpoint = write_checkpoint(folder, "llama", hidden_size=64, …)     needs torch
    model = load_model(checkpoint.folder)                                 config, loader and family, as served
    logits = run_pieces(model, checkpoint.token_ids, [70])                one chunk; [33, 20, 17]; [40] + 30 * [1]

Every parameter is redrawn: default initialisation leaves norms at one, biases at zero and logits
nearly flat, so that a missing bias or norm would pass unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxllm.config.checkpoint import load_model_config
from jaxllm.layers.batch import BatchMetadata, Bucket
from jaxllm.models.base import Matrices, SplitModel, split_model
from jaxllm.weights.load import load_weights

FloatArray = npt.NDArray[np.float32]
NUM_TOKENS = 70
TOLERANCE = 1e-4  # of logits, in float32


@dataclass(frozen=True, slots=True)
class Checkpoint:
    folder: Path
    token_ids: npt.NDArray[np.int32]  # [NUM_TOKENS]
    logits: FloatArray  # [NUM_TOKENS, V], by transformers


def write_checkpoint(folder: Path, model_type: str, *, seed: int = 0, **config: Any) -> Checkpoint:
    """Make, redraw and save a model of `config`, and run it with eager attention in float32."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model_config = AutoConfig.for_model(model_type, **config)
    model = AutoModelForCausalLM.from_config(model_config, attn_implementation="eager").float()
    _redraw(model, seed)
    model.save_pretrained(folder)
    saved = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    token_ids = np.random.default_rng(seed).integers(3, model_config.vocab_size, NUM_TOKENS).astype(np.int32)
    with torch.no_grad():
        logits = saved(torch.from_numpy(token_ids).long()[None]).logits[0].float().numpy()
    return Checkpoint(folder, token_ids, logits)


def _redraw(model: Any, seed: int) -> None:
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if not tensor.is_floating_point():
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            is_norm = tensor.ndim == 1 and name.endswith("weight")
            tensor.copy_(tensor.mean() + 0.2 * noise if is_norm else 0.1 * noise)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    split: SplitModel
    weights: dict[str, jax.Array]
    forward: Callable[..., Any]  # jitted, so that the runs of a test file compile each shape once
    logits: Callable[..., Any]

    @property
    def leaves(self) -> tuple[jax.Array, ...]:
        return tuple(self.weights[name] for name in self.split.names)

    @property
    def head(self) -> tuple[jax.Array, ...]:
        return tuple(self.weights[name] for name in self.split.head_names)


def load_model(
    folder: Path, *, dtype: str = "float32", attention: str | None = None, matrices: Matrices | None = None
) -> LoadedModel:
    """A folder as the runner would load it."""
    split = split_model(load_model_config(folder), dtype, attention, matrices=matrices)
    weights = load_weights(folder, split.tensors, split.params)
    return LoadedModel(split, weights, jax.jit(split.forward, donate_argnums=1), jax.jit(split.logits))


def make_batch(
    pieces: Sequence[tuple[Sequence[int], int, Sequence[int]]],
    *,
    bucket: Bucket,
    num_decode: int = 0,
) -> BatchMetadata:
    """A padded step of (token ids, position of the first, page ids of the sequence), decodes first."""
    num_tokens, num_rows = bucket.num_tokens, bucket.num_requests
    ids, positions = np.zeros((2, num_tokens), np.int32)
    token_rows = np.full(num_tokens, num_rows, np.int32)
    page_tables = np.zeros((num_rows, bucket.pages_per_request), np.int32)
    seq_lens = np.zeros(num_rows, np.int32)
    lengths = np.zeros(num_rows, np.int32)
    at = 0
    for row, (token_ids, start, pages) in enumerate(pieces):
        tokens = slice(at, at + len(token_ids))
        ids[tokens], token_rows[tokens] = token_ids, row
        positions[tokens] = np.arange(start, start + len(token_ids))
        page_tables[row, : len(pages)] = pages
        lengths[row], seq_lens[row] = len(token_ids), start + len(token_ids)
        at += len(token_ids)
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    distribution = np.array([num_decode, num_decode, len(pieces)], np.int32)
    arrays = (ids, positions, token_rows, page_tables, starts, seq_lens, distribution)
    return BatchMetadata(*map(jnp.asarray, arrays), bucket=bucket)


def run_pieces(
    model: LoadedModel,
    token_ids: Sequence[int],
    lengths: Sequence[int],
    *,
    page_size: int = 4,
    kv_dtype: str = "float32",
) -> FloatArray:
    """Logits [sum of lengths, V] of one sequence, computed piece by piece over pages in shuffled order."""
    num_pages = -(-len(token_ids) // page_size)
    pages = (np.random.default_rng(1).permutation(num_pages) + 1).tolist()
    kv = tuple(jnp.zeros(s.shape, s.dtype) for s in model.split.kv_shapes(num_pages + 1, page_size, kv_dtype))
    buckets = {True: Bucket(1, 1, num_pages), False: Bucket(len(token_ids) + 3, 2, num_pages)}
    rows: list[FloatArray] = []
    start = 0
    for length in lengths:
        is_decode = length == 1
        piece = (token_ids[start : start + length], start, pages)
        batch = make_batch([piece], bucket=buckets[is_decode], num_decode=int(is_decode))
        hidden, kv = model.forward(model.leaves, kv, batch)
        rows.append(np.asarray(model.logits(model.head, hidden))[:length])
        start += length
    return np.concatenate(rows)
