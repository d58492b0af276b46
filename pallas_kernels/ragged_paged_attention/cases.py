"""Named shapes as data.

Tags: `ci` small, run by every test; `full` small, run before a release; `primary` what serving looks like;
`model:<name>` the shapes of a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

Sequences = tuple[tuple[int, int], ...]  # (tokens of this step, tokens of the sequence after it), a row each


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    tags: tuple[str, ...]
    sequences: Sequences
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    page_size: int = 16
    num_layers: int = 2
    pad_tokens: int = 3
    pad_rows: int = 2
    q_dtype: str = "float32"
    kv_dtype: str = "float32"
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    scales: tuple[float, float] | None = None  # of keys and values
    writes: bool = True
    decode_only: bool = False
    capacity: tuple[int, int] | None = None  # (pages, pages a row), where there are more than the sequences need

    @property
    def static(self) -> dict[str, Any]:
        """The keyword arguments of the op that are not arrays."""
        scales = {} if self.scales is None else {"k_scale": self.scales[0], "v_scale": self.scales[1]}
        return {
            "scale": self.head_dim**-0.5,
            "window": self.window,
            "soft_cap": self.soft_cap,
            "decode_only": self.decode_only,
            **scales,
        }


@dataclass(frozen=True, slots=True)
class Step:
    """The arrays of a case on the host. Keys and values of the cache are ``[L, pages, S, K, H]``."""

    q: np.ndarray
    k: np.ndarray | None
    v: np.ndarray | None
    k_cache: np.ndarray
    v_cache: np.ndarray
    layer: int
    sinks: np.ndarray | None
    arrays: dict[str, np.ndarray]  # kv_lens, page_tables, query_starts, distribution, positions, token_rows


def step_arrays(
    sequences: Sequences,
    page_size: int,
    rng: np.random.Generator,
    *,
    num_tokens: int,
    num_rows: int,
    num_pages: int,
    pages_per_row: int,
) -> dict[str, np.ndarray]:
    """The ragged step of `sequences`, decode rows first, padded, with shuffled pages.

    Page 0 and the last page are no one's. Page tables hold anything in range past their ends.
    """
    lengths = [q for q, _ in sequences]
    kv_lens = np.zeros(num_rows, np.int32)
    kv_lens[: len(sequences)] = [kv for _, kv in sequences]
    starts = np.full(num_rows + 1, sum(lengths), np.int32)
    starts[: len(sequences) + 1] = np.cumsum([0, *lengths])
    owned = -(-kv_lens // page_size)
    tables = rng.integers(0, num_pages, (num_rows, pages_per_row)).astype(np.int32)
    free = iter(rng.permutation(np.arange(1, num_pages - 1)))
    positions, rows = np.zeros(num_tokens, np.int32), np.full(num_tokens, num_rows, np.int32)
    for row, (q_len, kv_len) in enumerate(sequences):
        tables[row, : owned[row]] = [next(free) for _ in range(owned[row])]
        span = slice(starts[row], starts[row + 1])
        positions[span], rows[span] = np.arange(kv_len - q_len, kv_len), row
    num_decode = next((i for i, n in enumerate(lengths) if n != 1), len(lengths))
    return {
        "kv_lens": kv_lens,
        "page_tables": tables,
        "query_starts": starts,
        "distribution": np.array([num_decode, len(sequences), len(sequences)], np.int32),
        "positions": positions,
        "token_rows": rows,
    }


def make_step(case: Case, seed: int = 0) -> Step:
    """Random arrays of a case. Cache slots that no row uses hold NaN where the cache's dtype has one."""
    rng = np.random.default_rng(seed)
    owned = [-(-kv // case.page_size) for _, kv in case.sequences]
    pages, pages_per_row = case.capacity or (sum(owned) + 3, max(owned))
    num_tokens = sum(q for q, _ in case.sequences) + (0 if case.decode_only else case.pad_tokens)
    num_rows = num_tokens if case.decode_only else len(case.sequences) + case.pad_rows
    arrays = step_arrays(
        case.sequences,
        case.page_size,
        rng,
        num_tokens=num_tokens,
        num_rows=num_rows,
        num_pages=pages,
        pages_per_row=pages_per_row,
    )
    heads = (case.num_kv_heads, case.head_dim)
    cache = (2, case.num_layers, pages, case.page_size, *heads)
    stored = rng.standard_normal(cache) if case.kv_dtype != "int8" else rng.integers(-127, 128, cache).astype(float)
    if case.kv_dtype != "int8":
        stored[:, ~used_slots(arrays, cache[1:4])] = np.nan
    new = rng.standard_normal((2, num_tokens, *heads))
    return Step(
        q=rng.standard_normal((num_tokens, case.num_heads, case.head_dim)),
        k=new[0] if case.writes else None,
        v=new[1] if case.writes else None,
        k_cache=stored[0],
        v_cache=stored[1],
        layer=case.num_layers - 1,
        sinks=rng.standard_normal(case.num_heads) if case.has_sinks else None,
        arrays=arrays,
    )


def used_slots(arrays: dict[str, np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
    """bool [L, pages, S]: the slots that hold a token of some row."""
    used = np.zeros(shape, bool)
    for table, kv_len in zip(arrays["page_tables"], arrays["kv_lens"], strict=True):
        place = np.arange(kv_len)
        used[:, table[place // shape[2]], place % shape[2]] = True
    return used


_MIXED: Sequences = ((1, 17), (1, 33), (5, 18), (15, 47), (20, 20), (3, 130))
_BORDERS: Sequences = ((1, 15), (1, 16), (1, 17), (1, 1), (16, 16), (17, 31), (2, 33))
_DECODE: Sequences = ((1, 18), (1, 129), (1, 297), (1, 1), (1, 64), (1, 16))
_SMOLLM2: dict[str, Any] = {"num_heads": 9, "num_kv_heads": 3, "head_dim": 64}
_LLAMA3_8B: dict[str, Any] = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128}
_SERVING: Sequences = (*((1, kv) for kv in (18, 129, 597, 122, 64, 322, 463, 181)), (120, 597), (251, 463))

CASES = (
    Case("mixed", ("ci",), _MIXED),
    Case("page borders", ("full",), _BORDERS),
    Case("decode", ("ci",), _DECODE, decode_only=True, page_size=32),
    Case("one row", ("full",), ((1, 300),), decode_only=True),
    Case("prefill over many groups", ("ci",), ((80, 700),), pad_rows=0),
    Case("page of one token", ("ci",), _MIXED, page_size=1, num_kv_heads=1),
    Case("page of three tokens", ("ci",), _BORDERS, page_size=3, num_kv_heads=4),
    Case("page longer than a group", ("ci",), ((1, 600), (30, 513)), page_size=512),
    Case("window", ("full",), _MIXED, window=7),
    Case("window across groups", ("ci",), ((1, 700), (70, 650)), window=300, page_size=32),
    Case("soft cap", ("full",), _MIXED, soft_cap=2.0),
    Case("sinks", ("full",), _MIXED, has_sinks=True),
    Case("window, soft cap and sinks", ("ci",), _MIXED, window=20, soft_cap=5.0, has_sinks=True),
    Case("read only", ("ci",), _MIXED, writes=False),
    Case("bfloat16", ("ci",), _MIXED, q_dtype="bfloat16", kv_dtype="bfloat16"),
    Case("float32 over bfloat16", ("full",), _MIXED, kv_dtype="bfloat16"),
    Case("float16", ("full",), _MIXED, q_dtype="float16", kv_dtype="float16"),
    Case("int8", ("ci",), _MIXED, kv_dtype="int8", scales=(0.03, 0.02)),
    Case("float8 e4m3", ("ci",), _MIXED, kv_dtype="float8_e4m3fn", scales=(0.5, 0.25)),
    Case("head dim 80", ("ci",), ((1, 40), (9, 40)), num_heads=5, num_kv_heads=5, head_dim=80),
    Case("smollm2 mixed", ("ci", "model:smollm2-135m"), ((1, 40), (1, 65), (40, 70)), **_SMOLLM2),
    Case("smollm2 decode 1", ("primary", "model:smollm2-135m"), ((1, 512),), decode_only=True, **_SMOLLM2),
    Case("smollm2 decode 8", ("primary", "model:smollm2-135m"), ((1, 512),) * 8, decode_only=True, **_SMOLLM2),
    Case("smollm2 decode 32", ("primary", "model:smollm2-135m"), ((1, 512),) * 32, decode_only=True, **_SMOLLM2),
    Case("smollm2 prefill", ("primary", "model:smollm2-135m"), ((512, 512),), pad_tokens=0, **_SMOLLM2),
    Case("llama3 8b decode", ("primary", "model:llama-3-8b"), ((1, 4096),) * 8, decode_only=True, **_LLAMA3_8B),
    Case("llama3 8b mixed", ("primary", "model:llama-3-8b"), _SERVING, page_size=64, **_LLAMA3_8B),
    Case("tiny mixed", ("primary", "model:tiny"), _SERVING, num_heads=4, num_kv_heads=2, head_dim=32),
)
