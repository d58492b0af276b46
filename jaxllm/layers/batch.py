"""The device arrays of one step, and the shape they are padded to."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax


@dataclass(frozen=True, slots=True, order=True)
class Bucket:
    """Padded shape of a step: the whole compile key of `forward`.

    A decode bucket has ``num_tokens == num_requests``: each request has one token. A mixed bucket
    always has more tokens than requests.
    """

    num_tokens: int  # T
    num_requests: int  # R
    pages_per_request: int  # P, width of a page table row

    @property
    def is_decode(self) -> bool:
        return self.num_tokens == self.num_requests


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["token_ids", "positions", "token_rows", "page_tables", "query_starts", "seq_lens", "distribution"],
    meta_fields=["bucket"],
)
@dataclass(frozen=True, slots=True)
class BatchMetadata:
    """One ragged step. Rows are requests, decodes first; padding rows are empty and come last.

    Padding tokens have position 0 and `token_rows` R, and write to the null page. All int32.
    """

    token_ids: jax.Array  # [T]
    positions: jax.Array  # [T] position of the token in its sequence
    token_rows: jax.Array  # [T] row of the request the token belongs to; R for padding
    page_tables: jax.Array  # [R, P] page ids of each row, 0 past the end
    query_starts: jax.Array  # [R + 1] first token of each row; padding rows repeat the total
    seq_lens: jax.Array  # [R] tokens of the sequence after this step; 0 for padding rows
    distribution: jax.Array  # [3] = (num_decode, num_decode_and_prefill, num_requests)
    bucket: Bucket

    @property
    def num_tokens(self) -> jax.Array:
        """int32 scalar: the real ones, which come first."""
        return self.query_starts[-1]
