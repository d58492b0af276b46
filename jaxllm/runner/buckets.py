"""The padded shapes of a step: few enough to compile before ready, close enough not to waste work.

Pure: numbers in, `Bucket`s out. What a shape costs on a CPU decides which ones pay (linear layers
of a 135M model, float32): 1 row 5 ms, 2 rows 11, 8 rows 12, 32 rows 24, 128 rows 66. So between 1
and 4 rows nothing is gained by another decode program, above that padding is paid in proportion,
and a mixed step with few requests wants few logit rows as well as few tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

from jaxllm.layers.batch import Bucket

MAX_FORWARD_PROGRAMS = 24
MAX_SAMPLE_SIZES = 3
FIRST_DECODE_ROWS = 4  # after the smallest: two and three rows cost what four cost
FIRST_MIXED_TOKENS = 16
FEW_ROWS = 16  # of the mixed programs for steps with few requests


@dataclass(frozen=True, slots=True)
class Buckets:
    """Every shape a step can have, ascending."""

    decode: tuple[Bucket, ...]  # one token a row
    mixed: tuple[Bucket, ...]  # more tokens than rows
    sample_sizes: tuple[int, ...]  # rows of the sample programs, N

    @property
    def forward(self) -> tuple[Bucket, ...]:
        return self.decode + self.mixed

    @property
    def max_num_tokens(self) -> int:
        return max(bucket.num_tokens for bucket in self.forward)

    def choose(self, num_tokens: int, num_rows: int) -> Bucket:
        """The smallest bucket that holds `num_tokens` tokens of `num_rows` requests.

        Raises:
            ValueError: no bucket does; the plan broke its own token budget or row count.
        """
        candidates = self.decode if num_tokens == num_rows else self.mixed
        for bucket in candidates:
            if num_tokens <= bucket.num_tokens and num_rows <= bucket.num_requests:
                return bucket
        raise ValueError(f"a step of {num_tokens} tokens in {num_rows} rows exceeds every bucket, {candidates[-1:]}")

    def num_logit_rows(self, bucket: Bucket) -> int:
        """N, rows of logits that a step of `bucket` computes: the smallest sample size that holds its rows."""
        return next(size for size in self.sample_sizes if size >= bucket.num_requests)


def build_buckets(
    max_num_seqs: int, max_num_batched_tokens: int, pages_per_request: int, *, min_rows: int = 1
) -> Buckets:
    """At most `MAX_FORWARD_PROGRAMS` buckets, so that each reachable step has one.

    No bucket has more tokens than `max_num_batched_tokens` or more rows than `max_num_seqs` (the
    last of each kind has exactly that many, power of two or not), unless `min_rows` is more.
    """
    max_rows = max(min(max_num_seqs, max_num_batched_tokens), 1)
    for ratio in (2, 4, 8, 16):
        decode = _decode_rows(max_rows, min_rows, ratio)
        mixed = _mixed_shapes(max_rows, max_num_batched_tokens, ratio)
        if len(decode) + len(mixed) <= MAX_FORWARD_PROGRAMS:
            break
    return Buckets(
        decode=tuple(Bucket(rows, rows, pages_per_request) for rows in decode),
        mixed=tuple(Bucket(tokens, rows, pages_per_request) for tokens, rows in mixed),
        sample_sizes=_sample_sizes(decode[-1], min_rows),
    )


def _ladder(first: int, last: int, ratio: int) -> list[int]:
    """`first`, `first * ratio`, ... below `last`, then `last` itself."""
    steps: list[int] = []
    while first < last:
        steps.append(first)
        first *= ratio
    return [*steps, last]


def _decode_rows(max_rows: int, min_rows: int, ratio: int) -> list[int]:
    rows = {min_rows, *_ladder(FIRST_DECODE_ROWS, max_rows, ratio)}
    return sorted(r for r in rows if r >= min_rows)


def _first_tokens(num_rows: int) -> int:
    tokens = FIRST_MIXED_TOKENS
    while tokens <= num_rows:
        tokens *= 2
    return tokens


def _mixed_shapes(max_rows: int, max_tokens: int, ratio: int) -> list[tuple[int, int]]:
    """(tokens, rows), ascending: many rows from the first token count that exceeds them, few rows up to there."""
    if max_tokens < 2:
        return []  # one token is one row: a decode shape
    many = _ladder(_first_tokens(max_rows), max_tokens, ratio)
    few_rows = min(FEW_ROWS, max_rows)
    few = _ladder(_first_tokens(few_rows), min(many[0], max_tokens), ratio)
    shapes = {(t, min(few_rows, t - 1)) for t in few} | {(t, min(max_rows, t - 1)) for t in many}
    return sorted(shapes)


def _sample_sizes(max_rows: int, min_rows: int) -> tuple[int, ...]:
    """Fewest, all, and the power of two near their geometric mean."""
    middle = 1
    while middle * middle < FIRST_DECODE_ROWS * max_rows:
        middle *= 2
    return tuple(sorted({min_rows, max(min(middle, max_rows), min_rows), max_rows}))
