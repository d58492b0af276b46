"""The one array that the host sends a step, described once for the side that packs and the side that unpacks."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import jax
import numpy as np
import numpy.typing as npt

from jaxllm.layers.batch import Bucket
from jaxllm.memory.spec import pages_for
from jaxllm.sampling.state import NUM_COLUMNS
from jaxllm.types.step import Int32Array

FROM_DEVICE = -1  # token id: the slot's last sampled token, which never left the device
SPARE_DIFFS = 32  # page table entries a step can set beyond one new page a row: prefix hits, resumes

A = TypeVar("A", jax.Array, npt.NDArray[np.int32])


@dataclass(frozen=True, slots=True)
class PackedStep(Generic[A]):
    """Parts of a packed step, all int32: views of numpy memory on the host, slices in the program."""

    token_ids: A  # [T] FROM_DEVICE where only the device knows it
    positions: A  # [T]
    token_rows: A  # [T] R for padding
    slots: A  # [R] the spare slot for padding rows
    query_starts: A  # [R + 1]
    seq_lens: A  # [R]
    distribution: A  # [3]
    logit_rows: A  # [N] token row whose logits are wanted; 0 for padding
    sample_rows: A  # [N, C] sampling columns
    page_diffs: A  # [3, K] slot, index and page; padding sets index 0 of the spare slot to page 0


@dataclass(frozen=True, slots=True)
class PackedLayout:
    """Shapes of one bucket's packed step."""

    bucket: Bucket
    num_logit_rows: int
    max_page_diffs: int
    _spans: tuple[tuple[int, int, tuple[int, ...]], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Where each part lies: asked for in every step."""
        spans: list[tuple[int, int, tuple[int, ...]]] = []
        start = 0
        for shape in self.shapes().values():
            stop = start + math.prod(shape)
            spans.append((start, stop, shape))
            start = stop
        object.__setattr__(self, "_spans", tuple(spans))

    @staticmethod
    def of(bucket: Bucket, num_logit_rows: int, page_size: int) -> PackedLayout:
        """Room for every page that this step's own tokens can need, and `SPARE_DIFFS` more."""
        new_pages = bucket.num_requests + pages_for(bucket.num_tokens - bucket.num_requests, page_size)
        return PackedLayout(bucket, num_logit_rows, new_pages + SPARE_DIFFS)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of each part, in the order in which they lie in the array and in `PackedStep`."""
        tokens, rows = self.bucket.num_tokens, self.bucket.num_requests
        return {
            "token_ids": (tokens,),
            "positions": (tokens,),
            "token_rows": (tokens,),
            "slots": (rows,),
            "query_starts": (rows + 1,),
            "seq_lens": (rows,),
            "distribution": (3,),
            "logit_rows": (self.num_logit_rows,),
            "sample_rows": (self.num_logit_rows, NUM_COLUMNS),
            "page_diffs": (3, self.max_page_diffs),
        }

    @property
    def size(self) -> int:
        return self._spans[-1][1]

    def split(self, packed: A) -> PackedStep[A]:
        """Parts of `packed` [size] int32, without a copy."""
        flat = [packed[start:stop] for start, stop, _ in self._spans]
        return PackedStep(
            *[a if len(span[2]) == 1 else a.reshape(span[2]) for a, span in zip(flat, self._spans, strict=True)]
        )

    def allocate(self) -> Int32Array:
        """A fresh array a step: jax may read the memory of the last one until that step has run."""
        return np.zeros(self.size, np.int32)
