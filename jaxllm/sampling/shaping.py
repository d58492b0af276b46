"""What a request may say, as changes to its logits before temperature: masks, bias, processors, penalties.

Nearly no request asks, so all of it sits behind one condition; behind that, each transform has its own.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from jaxllm.errors import ConfigError
from jaxllm.sampling import transforms
from jaxllm.sampling.state import USES_ALLOWED, USES_BAD_WORDS, USES_BIAS, USES_PENALTIES, SamplingRows
from jaxllm.sampling.tables import Tables
from jaxllm.types.processors import LogitsProcessor
from jaxllm.types.sampling import MAX_BAD_SEQUENCE_TOKENS

_COUNT_CHUNK = 128  # positions that one pass of the counting loop reads
_NOT_OUTPUT = -2  # matches no token, and no padding of a sequence


def shape_logits(
    logits: jax.Array, rows: SamplingRows, tables: Tables, processors: tuple[LogitsProcessor, ...]
) -> jax.Array:
    """logits [N, V] after everything that greedy rows know too, in vLLM's order."""

    def shape(logits: jax.Array) -> jax.Array:
        logits = where_needed(rows.uses(USES_ALLOWED), lambda x, on: _allow(x, rows, tables, on), logits)
        forbids = rows.uses(USES_BAD_WORDS) | rows.holds_back
        logits = where_needed(forbids, lambda x, on: _forbid(x, rows, tables, on), logits)
        logits = where_needed(rows.uses(USES_BIAS), lambda x, on: _bias(x, rows, tables, on), logits)
        for index, processor in enumerate(processors):
            logits = _process(processor, index, logits, rows)
        return where_needed(rows.uses(USES_PENALTIES), lambda x, on: _penalise(x, rows, tables, on), logits)

    return lax.cond(jnp.any((rows.flags != 0) | rows.holds_back), shape, lambda x: x, logits)


def where_needed(
    is_needed: jax.Array, transform: Callable[[jax.Array, jax.Array], jax.Array], logits: jax.Array
) -> jax.Array:
    """Apply transform(logits, is_needed [N]) if any row is_needed: most steps have none, and pay for none."""
    return lax.cond(jnp.any(is_needed), lambda x: transform(x, is_needed), lambda x: x, logits)


def _allow(logits: jax.Array, rows: SamplingRows, tables: Tables, is_active: jax.Array) -> jax.Array:
    return transforms.allow(logits, tables.allowed[rows.slots], is_active)


def _bias(logits: jax.Array, rows: SamplingRows, tables: Tables, is_active: jax.Array) -> jax.Array:
    return transforms.bias(logits, tables.bias_ids[rows.slots], tables.bias_values[rows.slots], is_active)


def _forbid(logits: jax.Array, rows: SamplingRows, tables: Tables, is_active: jax.Array) -> jax.Array:
    """What min_tokens hold back, and the ends of bad words unless nothing would be left beside them."""
    held_back = jnp.where(rows.holds_back[:, None], rows.forbidden, -1)
    logits = transforms.forbid(logits, held_back, is_active)
    ends = jnp.where(rows.uses(USES_BAD_WORDS)[:, None], _ends_of_bad_words(rows, tables), -1)
    banned = transforms.forbid(logits, ends, is_active)
    return jnp.where(jnp.max(banned, axis=1, keepdims=True) > -jnp.inf, banned, logits)


def _ends_of_bad_words(rows: SamplingRows, tables: Tables) -> jax.Array:
    """[N, MAX_BAD_SEQUENCES] int32: last token of each sequence whose other tokens end the output, or -1."""
    sequences = tables.bad_words[rows.slots]
    offsets = jnp.arange(1 - MAX_BAD_SEQUENCE_TOKENS, 0, dtype=jnp.int32)
    positions = rows.positions[:, None] + offsets
    ids = tables.history.at[rows.slots[:, None], jnp.maximum(positions, 0)].get(mode="clip")
    recent = jnp.where(positions >= rows.num_prompt_tokens[:, None], ids, _NOT_OUTPUT)
    beginnings, last = sequences[:, :, :-1], sequences[:, :, -1]
    is_match = jnp.all((beginnings < 0) | (beginnings == recent[:, None, :]), axis=-1)
    return jnp.where(is_match, last, -1)


def _process(processor: LogitsProcessor, index: int, logits: jax.Array, rows: SamplingRows) -> jax.Array:
    def process(logits: jax.Array, is_active: jax.Array) -> jax.Array:
        changed = processor.apply(logits, jnp.where(is_active, rows.arguments[:, index], 0.0))
        if getattr(changed, "shape", None) != logits.shape or changed.dtype != logits.dtype:
            raise ConfigError(
                f"logits processor {processor.name!r} gave {_described(changed)}; accepted: {_described(logits)}"
            )
        # What is forbidden stays so, also past a factor of 0 or a processor that counts from scratch.
        return jnp.where(is_active[:, None] & (logits > -jnp.inf), changed, logits)

    return where_needed(rows.uses_processor(index), process, logits)


def _described(value: object) -> str:
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    return type(value).__name__ if dtype is None else f"{dtype}{list(shape or ())}"


def _penalise(logits: jax.Array, rows: SamplingRows, tables: Tables, is_active: jax.Array) -> jax.Array:
    output_counts, is_seen = _count(rows, tables.history, logits.shape[1], is_active)
    penalties = (rows.presence, rows.frequency, rows.repetition)
    return transforms.penalise(logits, output_counts, is_seen, penalties, is_active)


def _count(
    rows: SamplingRows, history: jax.Array, vocab_size: int, is_active: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """([N, V] int32, occurrences in the output; [N, V] bool, in prompt or output), in time that follows the lengths."""
    num_rows = len(rows.slots)
    row_indices = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    lengths = jnp.where(is_active, rows.positions, 0)[:, None]

    def add_chunk(chunk: jax.Array, counts: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        output_counts, is_seen = counts
        positions = chunk * _COUNT_CHUNK + jnp.arange(_COUNT_CHUNK, dtype=jnp.int32)[None, :]
        ids = history.at[rows.slots[:, None], positions].get(mode="clip")
        ids = jnp.where(positions < lengths, ids, vocab_size)  # dropped
        is_output = (positions >= rows.num_prompt_tokens[:, None]).astype(jnp.int32)
        return (
            output_counts.at[row_indices, ids].add(is_output, mode="drop"),
            is_seen.at[row_indices, ids].set(True, mode="drop"),
        )

    num_chunks = (jnp.max(lengths) + _COUNT_CHUNK - 1) // _COUNT_CHUNK
    nothing = (jnp.zeros((num_rows, vocab_size), jnp.int32), jnp.zeros((num_rows, vocab_size), jnp.bool_))
    return lax.fori_loop(jnp.int32(0), num_chunks, add_chunk, nothing)
