"""Batches for the sampler, built as the runner builds them: packed rows, and tables by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxllm.sampling.logprobs import DeviceLogprobs, LogprobsSpec
from jaxllm.sampling.sampler import sample
from jaxllm.sampling.state import pack_row, set_step, unpack
from jaxllm.sampling.tables import Tables, pack_tables, set_history, set_tables, table_shapes
from jaxllm.types.processors import LogitsProcessor
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import Int32Array, NewRequest
from tests.sampling.reference import Row

MAX_MODEL_LEN = 400  # three chunks of the counting loop and a bit
NUM_SLOTS = 12
_PADDED_SIZES = (8, 512, 4096)  # few shapes, so that few programs are compiled
_CHUNK = _PADDED_SIZES[-1]


@partial(jax.jit, static_argnames=("greedy", "vocab_size", "logprobs", "processors"))
def sample_packed(
    logits: jax.Array,
    packed: jax.Array,
    tables: Tables,
    *,
    greedy: bool = False,
    vocab_size: int | None = None,
    logprobs: LogprobsSpec | None = None,
    processors: tuple[LogitsProcessor, ...] = (),
) -> tuple[jax.Array, DeviceLogprobs | None]:
    rows = unpack(packed)
    return sample(logits, rows, tables, greedy=greedy, vocab_size=vocab_size, logprobs=logprobs, processors=processors)


set_tables_jit = jax.jit(set_tables, donate_argnums=0)
set_history_jit = jax.jit(set_history, donate_argnums=0)


def empty_tables(vocab_size: int, num_slots: int = NUM_SLOTS, max_model_len: int = MAX_MODEL_LEN) -> Tables:
    """As a stale slot may look: full of ids that nobody asked for."""
    return jax.tree.map(lambda s: jnp.ones(s.shape, s.dtype), table_shapes(num_slots, vocab_size, max_model_len))


def place(tables: Tables, row: Row, slot: int, vocab_size: int) -> Tables:
    """Send what `row` needs to its slot."""
    new = NewRequest(
        request_id="r",
        slot=slot,
        token_ids=row.tokens,
        num_prompt_tokens=row.num_prompt_tokens,
        params=row.params,
        seed=row.seed,
        num_cached=0,
        bad_word_ids=row.bad_word_ids,
    )
    packed, history = pack_tables(new, vocab_size)
    if packed is not None:
        tables = set_tables_jit(tables, packed)
    for chunk in history:
        tables = set_history_jit(tables, chunk)
    return tables


def pack(rows: Sequence[Row], slots: Sequence[int], processor_names: Sequence[str] = ()) -> Int32Array:
    packed = np.stack([pack_row(r.params, r.seed, r.num_prompt_tokens, r.eos_ids, processor_names) for r in rows])
    set_step(packed, np.array([len(r.tokens) for r in rows], np.int32), np.array(slots, np.int32))
    return packed


def run(
    rows: Sequence[Row],
    *,
    slots: Sequence[int] | None = None,
    size: int = 8,
    processors: tuple[LogitsProcessor, ...] = (),
    **options: Any,
) -> tuple[np.ndarray, DeviceLogprobs | None]:
    """Sample a batch padded to `size` rows (8: few programs); tokens [N], and log probabilities as NumPy arrays."""
    slots = range(len(rows)) if slots is None else slots
    vocab_size = options.get("vocab_size") or len(rows[0].logits)
    tables = empty_tables(vocab_size)
    for row, slot in zip(rows, slots, strict=True):
        tables = place(tables, row, slot, vocab_size)
    num_padding = size - len(rows)
    packed = np.pad(pack(rows, slots, [p.name for p in processors]), ((0, num_padding), (0, 0)))
    set_step(packed[len(rows) :], np.zeros(num_padding, np.int32), np.full(num_padding, NUM_SLOTS - 1, np.int32))
    logits = np.pad(np.stack([r.logits for r in rows]), ((0, num_padding), (0, 0)))
    tokens, logprobs = sample_packed(logits, packed, tables, processors=processors, **options)
    return jax.tree.map(lambda a: np.asarray(a)[: len(rows)], (tokens, logprobs))


def sampled(rows: Sequence[Row], **options: Any) -> tuple[np.ndarray, np.ndarray]:
    """(ids [N], the logits [N, V] that they are drawn from, as the log probabilities show them)."""
    vocab_size = options.get("vocab_size") or len(rows[0].logits)
    ids, logprobs = run(rows, logprobs=LogprobsSpec(vocab_size, "processed_logits"), **options)
    assert logprobs is not None
    logits = np.full((len(rows), vocab_size), np.nan, np.float32)
    np.put_along_axis(logits, np.asarray(logprobs.top_ids), np.asarray(logprobs.top_values), axis=1)
    return ids, logits


def processed_logits(rows: Sequence[Row], **options: Any) -> np.ndarray:
    """[N, V]: what `sampled` draws from."""
    return sampled(rows, **options)[1]


def rows_of(
    params: Sequence[SamplingParams],
    *,
    seeds: Sequence[int] | None = None,
    positions: Sequence[int] | None = None,
    eos_ids: tuple[int, ...] = (),
    num_prompt_tokens: int = 0,
) -> Int32Array:
    """Packed rows, one for each of `params`, with slots 0, 1, …"""
    seeds = range(len(params)) if seeds is None else seeds
    packed = np.stack([pack_row(p, seed, num_prompt_tokens, eos_ids) for p, seed in zip(params, seeds, strict=True)])
    places = np.zeros(len(params), np.int32) if positions is None else np.asarray(positions, np.int32)
    set_step(packed, places, np.arange(len(params), dtype=np.int32))
    return packed


def draw(
    logits: np.ndarray,
    packed: Int32Array,
    *,
    greedy: bool = False,
    vocab_size: int | None = None,
    padded: bool = True,
    tables: Tables | None = None,
) -> np.ndarray:
    """Token ids of logits [N, V]; `padded` False keeps the program at N rows exactly."""
    num_rows = len(packed)
    if num_rows > _CHUNK:
        parts = [slice(start, start + _CHUNK) for start in range(0, num_rows, _CHUNK)]
        return np.concatenate([draw(logits[p], packed[p], greedy=greedy, tables=tables) for p in parts])
    size = next(n for n in _PADDED_SIZES if n >= num_rows) if padded else num_rows
    logits, packed = (np.pad(a, ((0, size - num_rows), (0, 0))) for a in (logits, packed))
    tables = empty_tables(vocab_size or logits.shape[1]) if tables is None else tables
    tokens, _ = sample_packed(logits, packed, tables, greedy=greedy, vocab_size=vocab_size)
    return np.asarray(tokens)[:num_rows]


def draw_many(row: Row, num_draws: int) -> np.ndarray:
    """Draws of one request, each with a seed of its own: ids [num_draws]."""
    packed = pack([replace(row, seed=row.seed + i) for i in range(num_draws)], [0] * num_draws)
    tables = place(empty_tables(len(row.logits)), row, 0, len(row.logits))
    return draw(np.broadcast_to(row.logits, (num_draws, len(row.logits))), packed, tables=tables)


def kept(logits: Any) -> np.ndarray:
    return np.isfinite(np.asarray(logits))
