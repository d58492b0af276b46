"""What the rare sampling parameters need on the device, by slot: sent once, when a request enters its slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.errors import RequestError
from jaxllm.sampling.state import SamplingRows, has_penalties
from jaxllm.types.sampling import (
    MAX_BAD_SEQUENCE_TOKENS,
    MAX_BAD_SEQUENCES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROB_TOKEN_IDS,
    SamplingParams,
)
from jaxllm.types.step import Int32Array, NewRequest

HISTORY_CHUNK = 1024  # tokens that one call of `set_history` writes
HISTORY_SIZE = 3 + HISTORY_CHUNK  # of its packed array: slot, first position, number of tokens, tokens
_WORD_BITS = 32
_NO_TOKEN = -1
_BAD_WORDS_SIZE = MAX_BAD_SEQUENCES * MAX_BAD_SEQUENCE_TOKENS


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["history", "allowed", "bias_ids", "bias_values", "bad_words", "logprob_ids"],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True)
class Tables:
    """A row a slot, S of them. A row that its request does not use is stale: the request's flags say so."""

    history: Any  # [S, max_model_len] int32, token ids by position
    allowed: Any  # [S, ceil(V / 32)] uint32, bit v % 32 of word v // 32: token v may be sampled
    bias_ids: Any  # [S, MAX_LOGIT_BIAS] int32, -1 for none
    bias_values: Any  # [S, MAX_LOGIT_BIAS] float32
    bad_words: Any  # [S, MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS] int32, right-aligned, -1 for none
    logprob_ids: Any  # [S, MAX_LOGPROB_TOKEN_IDS] int32, -1 for none


def table_shapes(num_slots_with_spare: int, vocab_size: int, max_model_len: int) -> Tables:
    """`Tables` of `jax.ShapeDtypeStruct`. They start as zeros."""

    def shape(dtype: type, *dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_slots_with_spare, *dims), dtype)

    return Tables(
        history=shape(np.int32, max_model_len),
        allowed=shape(np.uint32, _num_words(vocab_size)),
        bias_ids=shape(np.int32, MAX_LOGIT_BIAS),
        bias_values=shape(np.float32, MAX_LOGIT_BIAS),
        bad_words=shape(np.int32, MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS),
        logprob_ids=shape(np.int32, MAX_LOGPROB_TOKEN_IDS),
    )


def tables_size(vocab_size: int) -> int:
    """Length of the packed int32 array that `set_tables` takes."""
    return 1 + _num_words(vocab_size) + 2 * MAX_LOGIT_BIAS + _BAD_WORDS_SIZE + MAX_LOGPROB_TOKEN_IDS


def pack_tables(new: NewRequest, vocab_size: int) -> tuple[Int32Array | None, tuple[Int32Array, ...]]:
    """What `new` needs in the tables of its slot.

    Returns:
        One array [tables_size] for `set_tables`, None where no table but the history is used; and the
        arrays [HISTORY_SIZE] for `set_history`, none unless something looks at earlier tokens.

    Raises:
        RequestError: more bad words, or longer ones, than a row holds.
    """
    params = new.params
    sequences = [ids for ids in new.bad_word_ids if len(ids) > 1]
    row = None
    if params.allowed_token_ids is not None or params.bad_words or params.logit_bias or params.logprob_token_ids:
        parts = (
            np.array([new.slot], np.int32),
            _pack_allowed(params, new.bad_word_ids, vocab_size),
            *_pack_bias(params),
            _pack_bad_words(sequences),
            _padded(params.logprob_token_ids or (), MAX_LOGPROB_TOKEN_IDS),
        )
        row = np.concatenate(parts)
    return row, _pack_history(new) if has_penalties(params) or sequences else ()


def _num_words(vocab_size: int) -> int:
    return -(-vocab_size // _WORD_BITS)


def _padded(ids: Sequence[int], size: int) -> Int32Array:
    row = np.full(size, _NO_TOKEN, np.int32)
    row[: len(ids)] = ids
    return row


def _pack_allowed(params: SamplingParams, bad_words: Sequence[Sequence[int]], vocab_size: int) -> Int32Array:
    allowed = params.allowed_token_ids
    bits = np.zeros(_num_words(vocab_size) * _WORD_BITS, np.bool_)
    bits[slice(vocab_size) if allowed is None else np.array(allowed)] = True
    bits[[ids[0] for ids in bad_words if len(ids) == 1]] = False
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32).view(np.int32)


def _pack_bias(params: SamplingParams) -> tuple[Int32Array, Int32Array]:
    bias = params.logit_bias or {}
    values = np.zeros(MAX_LOGIT_BIAS, np.float32)
    values[: len(bias)] = list(bias.values())
    return _padded(list(bias), MAX_LOGIT_BIAS), values.view(np.int32)


def _pack_bad_words(sequences: Sequence[Sequence[int]]) -> Int32Array:
    longest = max(map(len, sequences), default=0)
    if len(sequences) > MAX_BAD_SEQUENCES or longest > MAX_BAD_SEQUENCE_TOKENS:
        raise RequestError(
            f"bad_words are {len(sequences)} sequences of up to {longest} tokens; "
            f"accepted: at most {MAX_BAD_SEQUENCES} of at most {MAX_BAD_SEQUENCE_TOKENS}",
            param="bad_words",
        )
    rows = np.full((MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS), _NO_TOKEN, np.int32)
    for row, ids in zip(rows, sequences, strict=False):
        row[-len(ids) :] = ids
    return rows.reshape(-1)


def _pack_history(new: NewRequest) -> tuple[Int32Array, ...]:
    chunks: list[Int32Array] = []
    for start in range(0, len(new.token_ids), HISTORY_CHUNK):
        ids = new.token_ids[start : start + HISTORY_CHUNK]
        packed = np.zeros(HISTORY_SIZE, np.int32)
        packed[:3] = (new.slot, start, len(ids))
        packed[3 : 3 + len(ids)] = ids
        chunks.append(packed)
    return tuple(chunks)


def set_tables(tables: Tables, packed: jax.Array) -> Tables:
    """Overwrite a slot's row of every table but the history; to be jitted with `tables` donated.

    packed [tables_size] int32.
    """
    num_words = tables.allowed.shape[1]
    sizes = (1, num_words, MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, _BAD_WORDS_SIZE, MAX_LOGPROB_TOKEN_IDS)
    slot, allowed, bias_ids, bias_values, bad_words, logprob_ids = jnp.split(packed, np.cumsum(sizes)[:-1])

    def set_row(table: jax.Array, row: jax.Array) -> jax.Array:
        return table.at[slot[0]].set(row, mode="promise_in_bounds")

    return replace(
        tables,
        allowed=set_row(tables.allowed, lax.bitcast_convert_type(allowed, jnp.uint32)),
        bias_ids=set_row(tables.bias_ids, bias_ids),
        bias_values=set_row(tables.bias_values, lax.bitcast_convert_type(bias_values, jnp.float32)),
        bad_words=set_row(tables.bad_words, bad_words.reshape(MAX_BAD_SEQUENCES, MAX_BAD_SEQUENCE_TOKENS)),
        logprob_ids=set_row(tables.logprob_ids, logprob_ids),
    )


def set_history(tables: Tables, packed: jax.Array) -> Tables:
    """Write a run of known tokens. packed [HISTORY_SIZE] int32; to be jitted, `tables` donated."""
    slot, start, num_tokens = packed[:3]
    offsets = jnp.arange(HISTORY_CHUNK, dtype=np.int32)
    positions = jnp.where(offsets < num_tokens, start + offsets, tables.history.shape[1])
    return replace(tables, history=tables.history.at[slot, positions].set(packed[3:], mode="drop"))


def record(tables: Tables, rows: SamplingRows, tokens: jax.Array) -> Tables:
    """Write the tokens [N] just sampled for `rows`; a position past the end of the history is dropped."""
    return replace(tables, history=tables.history.at[rows.slots, rows.positions].set(tokens, mode="drop"))
