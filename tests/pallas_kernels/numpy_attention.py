"""Ragged paged attention in float64 numpy, written from the contract and from nothing else of the package."""

from __future__ import annotations

import numpy as np


def attend(q, keys, values, position, *, scale, window=None, soft_cap=None, sinks=None):
    """q [N, H] at `position` against keys, values [C, K, H], all positions of one sequence -> [N, H]."""
    num_heads, num_kv_heads = q.shape[0], keys.shape[1]
    first = 0 if window is None else max(0, position - window + 1)
    seen = slice(first, min(position + 1, len(keys)))
    out = np.zeros_like(q, dtype=np.float64)
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        logits = keys[seen, kv_head] @ q[head] * scale
        if soft_cap is not None:
            logits = soft_cap * np.tanh(logits / soft_cap)
        if not len(logits):
            continue
        extra = [] if sinks is None else [sinks[head]]
        top = max([logits.max(), *extra])
        weights = np.exp(logits - top)
        total = weights.sum() + sum(np.exp(s - top) for s in extra)
        out[head] = weights @ values[seen, kv_head] / total
    return out


def step(q, k, v, k_cache, v_cache, layer, arrays, **options):
    """The whole op on host arrays. Returns (out [T, N, H], k_cache, v_cache) in float64; caches are copies.

    `k`, `v` are what the cache will hold, already rounded. The null page is left alone: what it holds is no one's.
    """
    k_cache, v_cache = k_cache.copy(), v_cache.copy()
    page_size = k_cache.shape[2]
    starts, tables, kv_lens = arrays["query_starts"], arrays["page_tables"], arrays["kv_lens"]
    out = np.zeros(q.shape, np.float64)
    for row in range(int(arrays["distribution"][2])):
        length = int(starts[row + 1] - starts[row])
        kv_len = int(kv_lens[row])
        for token in range(starts[row], starts[row + 1]):
            position = kv_len - length + token - starts[row]
            page, slot = tables[row, position // page_size], position % page_size
            if k is not None:
                k_cache[layer, page, slot], v_cache[layer, page, slot] = k[token], v[token]
    for row in range(int(arrays["distribution"][2])):
        length = int(starts[row + 1] - starts[row])
        kv_len = int(kv_lens[row])
        pages = tables[row, : -(-kv_len // page_size)]
        keys = k_cache[layer, pages].reshape(-1, *k_cache.shape[3:])[:kv_len]
        values = v_cache[layer, pages].reshape(-1, *v_cache.shape[3:])[:kv_len]
        for token in range(starts[row], starts[row + 1]):
            position = kv_len - length + token - starts[row]
            out[token] = attend(q[token], keys, values, position, **options)
    return out, k_cache, v_cache
