"""Counter-based random numbers: a function of seed, position and column, with no state to carry.

jax.random would do, but on CPUs it keeps its rounds in a loop over arrays; here all is one fusion.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA
_NUM_GROUPS = 5  # of four rounds: the 20 rounds of the reference
_SERIES_BELOW = 2.0**-8


def threefry(key: tuple[jax.Array, jax.Array], counter: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Threefry-2x32-20 (Salmon et al., 2011): two uint32 words from a key and a counter of two each."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + keys[0], counter[1] + keys[1]
    for group in range(_NUM_GROUPS):
        for distance in _ROTATIONS[group % 2]:
            x = x + y
            y = (y << distance | y >> (32 - distance)) ^ x
        x = x + keys[(group + 1) % 3]
        y = y + keys[(group + 2) % 3] + jnp.uint32(group + 1)
    return x, y


def exponential(seeds: jax.Array, positions: jax.Array, num_columns: int) -> jax.Array:
    """Standard exponential variates, all above 0 and finite: [N, num_columns] float32.

    A row is a function of its seeds [N, 2] uint32 and its positions [N] int32 alone.
    """
    pairs = jnp.arange((num_columns + 1) // 2, dtype=jnp.uint32)[None, :]
    positions = positions.astype(jnp.uint32)[:, None]
    words = threefry((seeds[:, :1], seeds[:, 1:]), (jnp.broadcast_to(positions, (len(seeds), pairs.size)), pairs))
    bits = jnp.concatenate(words, axis=1)[:, :num_columns]
    # 1 - u for a uniform u. The race is won by the smallest variates, so it is near 0 that all 32
    # bits must count; log(1 - tail) would round them off there, and the series does not.
    tail = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)
    series = tail * (1.0 + tail * (0.5 + tail / 3.0))
    return jnp.where(tail < _SERIES_BELOW, series, -jnp.log(1.0 - tail))
