"""One row of int32 columns per sampled token: everything the sampler needs to know of a request."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.errors import RequestError
from jaxllm.types.sampling import GREEDY_BELOW, MAX_FORBIDDEN, SamplingParams
from jaxllm.types.step import Int32Array

# Floats are stored as their bits, so that one int32 array carries all.
_TEMPERATURE, _TOP_P, _TOP_K, _SEED_LOW, _SEED_HIGH, _MIN_POSITION, _POSITION, _SLOT = range(8)
_FORBIDDEN = slice(8, 8 + MAX_FORBIDDEN)
NUM_COLUMNS = _FORBIDDEN.stop

_NO_TOKEN = -1


def pack_row(params: SamplingParams, seed: int, num_prompt_tokens: int, eos_ids: Collection[int]) -> Int32Array:
    """The columns of one request that stay the same from step to step, [NUM_COLUMNS].

    Args:
        seed: any 64-bit integer, signed or not.
        eos_ids: held back, with params.stop_token_ids, until min_tokens tokens are out.

    Raises:
        RequestError: more than MAX_FORBIDDEN ids to hold back.
    """
    row = np.zeros(NUM_COLUMNS, np.int32)
    # Rounding to float32 must not lift a temperature to the other side of the bound.
    temperature = 0.0 if params.is_greedy else params.temperature
    row[[_TEMPERATURE, _TOP_P]] = np.array([temperature, params.top_p], np.float32).view(np.int32)
    row[_TOP_K] = min(params.top_k, np.iinfo(np.int32).max)
    row[[_SEED_LOW, _SEED_HIGH]] = np.array([seed & (2**64 - 1)], "<u8").view("<i4")
    row[_FORBIDDEN] = _NO_TOKEN
    if params.min_tokens > 0:
        held_back = _held_back(params, eos_ids)
        row[_MIN_POSITION] = num_prompt_tokens + params.min_tokens
        row[_FORBIDDEN.start : _FORBIDDEN.start + len(held_back)] = held_back
    return row


def _held_back(params: SamplingParams, eos_ids: Collection[int]) -> list[int]:
    ids = sorted({*eos_ids, *params.stop_token_ids})
    if len(ids) > MAX_FORBIDDEN:
        raise RequestError(
            f"min_tokens={params.min_tokens} with {len(ids)} stop and end-of-sequence ids; "
            f"accepted: at most {MAX_FORBIDDEN}",
            param="stop_token_ids",
        )
    return ids


def set_step(rows: Int32Array, positions: Int32Array, slots: Int32Array) -> None:
    """Fill the columns that change every step, in place.

    Args:
        rows: [N, NUM_COLUMNS].
        positions: [N] position, in its sequence, of the token about to be sampled.
        slots: [N] device slot of the request.
    """
    rows[:, _POSITION] = positions
    rows[:, _SLOT] = slots


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["temperature", "top_p", "top_k", "seeds", "min_positions", "positions", "slots", "forbidden"],
    meta_fields=[],
)
@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The columns, typed, on the device. A row of zeros is a greedy row that holds nothing back."""

    temperature: jax.Array  # [N] float32
    top_p: jax.Array  # [N] float32, at least 1: off
    top_k: jax.Array  # [N] int32, below 1 or at least V: off
    seeds: jax.Array  # [N, 2] uint32, high word first
    min_positions: jax.Array  # [N] int32, first position where `forbidden` ids are allowed
    positions: jax.Array  # [N] int32, of the token to sample
    slots: jax.Array  # [N] int32
    forbidden: jax.Array  # [N, MAX_FORBIDDEN] int32, -1 for none

    @property
    def is_greedy(self) -> jax.Array:
        """[N] bool."""
        return self.temperature < GREEDY_BELOW


def unpack(rows: jax.Array) -> SamplingRows:
    """rows [N, NUM_COLUMNS] int32, as `pack_row` and `set_step` left them."""
    return SamplingRows(
        temperature=lax.bitcast_convert_type(rows[:, _TEMPERATURE], jnp.float32),
        top_p=lax.bitcast_convert_type(rows[:, _TOP_P], jnp.float32),
        top_k=rows[:, _TOP_K],
        seeds=lax.bitcast_convert_type(jnp.stack([rows[:, _SEED_HIGH], rows[:, _SEED_LOW]], axis=1), jnp.uint32),
        min_positions=rows[:, _MIN_POSITION],
        positions=rows[:, _POSITION],
        slots=rows[:, _SLOT],
        forbidden=rows[:, _FORBIDDEN],
    )
