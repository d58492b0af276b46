"""One row of int32 columns per sampled token: everything the sampler needs to know of a request."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxllm.errors import RequestError
from jaxllm.types.processors import MAX_PROCESSORS
from jaxllm.types.sampling import GREEDY_BELOW, MAX_FORBIDDEN, SamplingParams
from jaxllm.types.step import Int32Array

# Floats are stored as their bits, so that one int32 array carries all.
_TEMPERATURE, _TOP_P, _TOP_K, _SEED_LOW, _SEED_HIGH, _MIN_POSITION, _POSITION, _SLOT = range(8)
_MIN_P, _PRESENCE, _FREQUENCY, _REPETITION, _NUM_PROMPT_TOKENS, _FLAGS = range(8, 14)
_FORBIDDEN = slice(14, 14 + MAX_FORBIDDEN)
_ARGUMENTS = slice(_FORBIDDEN.stop, _FORBIDDEN.stop + MAX_PROCESSORS)
NUM_COLUMNS = _ARGUMENTS.stop

_NO_TOKEN = -1

# What a request uses of the tables of its slot, and which transforms it asks for.
USES_ALLOWED, USES_BAD_WORDS, USES_BIAS, USES_PENALTIES = 1, 2, 4, 8
_FIRST_PROCESSOR = 16  # doubled for each processor after the first


def pack_row(
    params: SamplingParams,
    seed: int,
    num_prompt_tokens: int,
    eos_ids: Collection[int],
    processor_names: Sequence[str] = (),
) -> Int32Array:
    """The columns of one request that stay the same from step to step, [NUM_COLUMNS].

    Args:
        seed: any 64-bit integer, signed or not.
        eos_ids: held back, with params.stop_token_ids, until min_tokens tokens are out.
        processor_names: in the order of declaration; those that params.extra_args names are on.

    Raises:
        RequestError: more than MAX_FORBIDDEN ids to hold back.
    """
    row = np.zeros(NUM_COLUMNS, np.int32)
    _pack_floats(row, params)
    row[_TOP_K] = min(params.top_k, np.iinfo(np.int32).max)
    row[[_SEED_LOW, _SEED_HIGH]] = np.array([seed & (2**64 - 1)], "<u8").view("<i4")
    row[_NUM_PROMPT_TOKENS] = num_prompt_tokens
    row[_FLAGS] = _flags(params)
    row[_FORBIDDEN] = _NO_TOKEN
    if params.min_tokens > 0:
        held_back = _held_back(params, eos_ids)
        row[_MIN_POSITION] = num_prompt_tokens + params.min_tokens
        row[_FORBIDDEN.start : _FORBIDDEN.start + len(held_back)] = held_back
    _pack_arguments(row, params, processor_names)
    return row


def _pack_floats(row: Int32Array, params: SamplingParams) -> None:
    # Rounding to float32 must not lift a temperature to the other side of the bound, nor a penalty to infinity.
    temperature = 0.0 if params.is_greedy else params.temperature
    repetition = min(params.repetition_penalty, float(np.finfo(np.float32).max))
    floats = [temperature, params.top_p, params.min_p, params.presence_penalty, params.frequency_penalty, repetition]
    columns = [_TEMPERATURE, _TOP_P, _MIN_P, _PRESENCE, _FREQUENCY, _REPETITION]
    row[columns] = np.array(floats, np.float32).view(np.int32)


def has_penalties(params: SamplingParams) -> bool:
    return params.presence_penalty != 0.0 or params.frequency_penalty != 0.0 or params.repetition_penalty != 1.0


def _flags(params: SamplingParams) -> int:
    # Whether bad words are single tokens, which the mask forbids, or sequences is known to the tables alone.
    uses = {
        USES_ALLOWED: params.allowed_token_ids is not None or bool(params.bad_words),
        USES_BAD_WORDS: bool(params.bad_words),
        USES_BIAS: params.logit_bias is not None,
        USES_PENALTIES: has_penalties(params),
    }
    return sum(flag for flag, is_used in uses.items() if is_used)


def _pack_arguments(row: Int32Array, params: SamplingParams, processor_names: Sequence[str]) -> None:
    arguments = params.extra_args or {}
    for index, name in enumerate(processor_names):
        if name in arguments:
            row[_FLAGS] |= _FIRST_PROCESSOR << index
            row[_ARGUMENTS.start + index] = np.array([arguments[name]], np.float32).view(np.int32)[0]


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


@partial(jax.tree_util.register_dataclass, data_fields=["packed"], meta_fields=[])
@dataclass(frozen=True, slots=True)
class SamplingRows:
    """The columns, typed, on the device. A row of zeros is a greedy row that asks for nothing.

    Columns are cut out where they are used: cut out at once, each would be an array, and a kernel
    to compile, of its own wherever a condition lies between.
    """

    packed: jax.Array  # [N, NUM_COLUMNS] int32

    def _floats(self, column: int | slice) -> jax.Array:
        return lax.bitcast_convert_type(self.packed[:, column], jnp.float32)

    @property
    def temperature(self) -> jax.Array:
        """[N] float32."""
        return self._floats(_TEMPERATURE)

    @property
    def top_p(self) -> jax.Array:
        """[N] float32, at least 1: off."""
        return self._floats(_TOP_P)

    @property
    def top_k(self) -> jax.Array:
        """[N] int32, below 1 or at least V: off."""
        return self.packed[:, _TOP_K]

    @property
    def min_p(self) -> jax.Array:
        """[N] float32, 0: off."""
        return self._floats(_MIN_P)

    @property
    def presence(self) -> jax.Array:
        """[N] float32."""
        return self._floats(_PRESENCE)

    @property
    def frequency(self) -> jax.Array:
        """[N] float32."""
        return self._floats(_FREQUENCY)

    @property
    def repetition(self) -> jax.Array:
        """[N] float32, 1: off."""
        return self._floats(_REPETITION)

    @property
    def seeds(self) -> jax.Array:
        """[N, 2] uint32, high word first."""
        words = jnp.stack([self.packed[:, _SEED_HIGH], self.packed[:, _SEED_LOW]], axis=1)
        return lax.bitcast_convert_type(words, jnp.uint32)

    @property
    def min_positions(self) -> jax.Array:
        """[N] int32, first position where `forbidden` ids are allowed."""
        return self.packed[:, _MIN_POSITION]

    @property
    def positions(self) -> jax.Array:
        """[N] int32, of the token to sample."""
        return self.packed[:, _POSITION]

    @property
    def slots(self) -> jax.Array:
        """[N] int32."""
        return self.packed[:, _SLOT]

    @property
    def num_prompt_tokens(self) -> jax.Array:
        """[N] int32."""
        return self.packed[:, _NUM_PROMPT_TOKENS]

    @property
    def forbidden(self) -> jax.Array:
        """[N, MAX_FORBIDDEN] int32, -1 for none."""
        return self.packed[:, _FORBIDDEN]

    @property
    def arguments(self) -> jax.Array:
        """[N, MAX_PROCESSORS] float32."""
        return self._floats(_ARGUMENTS)

    @property
    def flags(self) -> jax.Array:
        """[N] int32, see `uses`."""
        return self.packed[:, _FLAGS]

    @property
    def is_greedy(self) -> jax.Array:
        """[N] bool."""
        return self.temperature < GREEDY_BELOW

    @property
    def holds_back(self) -> jax.Array:
        """[N] bool: min_tokens are not out yet."""
        return self.positions < self.min_positions

    def uses(self, flag: int) -> jax.Array:
        """[N] bool; `flag` is one of USES_*."""
        return self.flags & flag != 0

    def uses_processor(self, index: int) -> jax.Array:
        """[N] bool."""
        return self.uses(_FIRST_PROCESSOR << index)


def unpack(rows: jax.Array) -> SamplingRows:
    """rows [N, NUM_COLUMNS] int32, as `pack_row` and `set_step` left them."""
    return SamplingRows(rows)
