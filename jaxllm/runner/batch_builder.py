"""A decided step becomes one packed numpy array. No jax here: nothing compiles, nothing waits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxllm.layers.batch import Bucket
from jaxllm.runner.buckets import Buckets
from jaxllm.runner.logprob_columns import SampledRow, ScoredPiece
from jaxllm.runner.packed import FROM_DEVICE, PackedLayout, PackedStep
from jaxllm.runner.slots import Slots, asks_for_logprobs
from jaxllm.sampling.state import set_step
from jaxllm.types.step import Int32Array, PageTableDiff, ScheduledRows, SchedulerOutput

DIFF_CHUNK = 1024  # page table entries that one call of the overflow program sets
COPY_CHUNK = 64  # pages that one call of the copying program copies
SCORE_ROWS = 64  # hidden rows that one call of the scoring program turns into logits


@dataclass(frozen=True, slots=True, eq=False)
class HostScores:
    """The rows of a step whose next token is a known one to be scored."""

    slices: tuple[Int32Array, ...]  # [2, SCORE_ROWS] each: token row of the step, next token; padding (0, 0)
    tokens: Int32Array  # [n] the next tokens again, without padding
    pieces: tuple[ScoredPiece, ...]


@dataclass(frozen=True, slots=True, eq=False)
class HostBatch:
    """One step, ready to dispatch."""

    bucket: Bucket
    packed: Int32Array
    overflow: tuple[Int32Array, ...]  # [3, DIFF_CHUNK] each, to be applied before the step
    copies: tuple[Int32Array, ...]  # [2, COPY_CHUNK] each, as well
    sampled_ids: tuple[str, ...]  # requests that get a token, in the order of the sample rows
    all_greedy: bool
    logprob_rows: tuple[SampledRow, ...]  # those of them that ask for log probabilities
    scores: HostScores | None  # None where no prompt is scored


class BatchBuilder:
    """Packs steps for a fixed set of buckets."""

    def __init__(self, buckets: Buckets, page_size: int, spare_slot: int) -> None:
        self._buckets = buckets
        self._spare_slot = spare_slot
        self.layouts = {b: PackedLayout.of(b, buckets.num_logit_rows(b), page_size) for b in buckets.forward}

    def build(self, plan: SchedulerOutput, slots: Slots) -> HostBatch:
        """Pack `plan`; its new requests must already be placed in `slots`."""
        rows = plan.rows
        bucket = self._buckets.choose(rows.total_tokens, rows.num_rows)
        layout = self.layouts[bucket]
        packed = layout.allocate()
        step = layout.split(packed)
        _fill_tokens(step, rows, slots)
        _fill_rows(step, rows, bucket, self._spare_slot)
        sampled = np.flatnonzero(rows.samples).astype(np.int32)
        self._fill_samples(step, rows, sampled, slots)
        overflow = self._fill_diffs(step, plan.page_diffs[0] if plan.page_diffs else PageTableDiff())
        all_sample = len(sampled) == rows.num_rows  # as in most steps
        sampled_ids = rows.request_ids if all_sample else tuple([rows.request_ids[i] for i in sampled.tolist()])
        wants_logprobs = slots.wants_logprobs[rows.slots].any()  # few steps do, and only they look closer
        return HostBatch(
            bucket=bucket,
            packed=packed,
            overflow=overflow,
            copies=pack_copies(plan.page_copies[0]) if plan.page_copies else (),
            sampled_ids=sampled_ids,
            all_greedy=bool(slots.is_greedy[rows.slots[sampled]].all()),
            logprob_rows=_logprob_rows(sampled_ids, rows.slots[sampled], slots) if wants_logprobs else (),
            scores=_scores(rows, step.query_starts, slots) if wants_logprobs else None,
        )

    def _fill_samples(
        self, step: PackedStep[Int32Array], rows: ScheduledRows, sampled: Int32Array, slots: Slots
    ) -> None:
        size, num_sampled = len(step.logit_rows), len(sampled)
        positions = np.zeros(size, np.int32)
        row_slots = np.full(size, self._spare_slot, np.int32)
        step.logit_rows[:num_sampled] = step.query_starts[sampled + 1] - 1
        positions[:num_sampled] = rows.starts[sampled] + rows.num_tokens[sampled]
        row_slots[:num_sampled] = rows.slots[sampled]
        step.sample_rows[:num_sampled] = slots.sampling[row_slots[:num_sampled]]
        set_step(step.sample_rows, positions, row_slots)

    def _fill_diffs(self, step: PackedStep[Int32Array], diff: PageTableDiff) -> tuple[Int32Array, ...]:
        if not len(diff):
            step.page_diffs[0] = self._spare_slot
            return ()
        entries = np.stack([diff.slots, diff.indices, diff.pages])
        capacity = step.page_diffs.shape[1]
        overflow = entries[:, capacity:]
        _place_diffs(step.page_diffs, entries[:, :capacity], self._spare_slot)
        return tuple(
            self.pack_diffs(overflow[:, start : start + DIFF_CHUNK])
            for start in range(0, overflow.shape[1], DIFF_CHUNK)
        )

    def pack_diffs(self, entries: Int32Array) -> Int32Array:
        """`entries` [3, at most DIFF_CHUNK] padded to the overflow program's shape."""
        chunk = np.zeros((3, DIFF_CHUNK), np.int32)
        _place_diffs(chunk, entries, self._spare_slot)
        return chunk


def pack_copies(copies: Sequence[tuple[int, int]]) -> tuple[Int32Array, ...]:
    """(from page, to page) each, in the copying program's shape; padding names the null page."""
    chunks: list[Int32Array] = []
    for start in range(0, len(copies), COPY_CHUNK):
        some = copies[start : start + COPY_CHUNK]
        chunk = np.zeros((2, COPY_CHUNK), np.int32)
        chunk[:, : len(some)] = np.asarray(some, np.int32).T
        chunks.append(chunk)
    return tuple(chunks)


def _logprob_rows(sampled_ids: Sequence[str], sampled_slots: Int32Array, slots: Slots) -> tuple[SampledRow, ...]:
    asking = [(i, slots.params[slot]) for i, slot in enumerate(sampled_slots.tolist())]
    return tuple(SampledRow(sampled_ids[i], i, params) for i, params in asking if asks_for_logprobs(params))


def _scores(rows: ScheduledRows, query_starts: Int32Array, slots: Slots) -> HostScores | None:
    """A prompt's last token has no known one after it: what comes there is sampled."""
    counts = np.minimum(rows.num_tokens, slots.num_scored[rows.slots] - 1 - rows.starts)
    if not (counts > 0).any():
        return None
    pieces: list[ScoredPiece] = []
    columns: list[Int32Array] = []
    first = 0
    for i in np.flatnonzero(counts > 0).tolist():
        count, start, slot = int(counts[i]), int(rows.starts[i]), int(rows.slots[i])
        num_top = slots.params[slot].prompt_logprobs or 0
        pieces.append(ScoredPiece(rows.request_ids[i], start + 1, first, count, num_top))
        token_rows = np.arange(query_starts[i], query_starts[i] + count, dtype=np.int32)
        columns.append(np.stack([token_rows, slots.token_ids[slot, start + 1 : start + 1 + count]]))
        first += count
    scored = np.concatenate(columns, axis=1)
    return HostScores(_score_slices(scored), scored[1], tuple(pieces))


def _score_slices(scored: Int32Array) -> tuple[Int32Array, ...]:
    slices = np.zeros((-(-scored.shape[1] // SCORE_ROWS), 2, SCORE_ROWS), np.int32)
    for start, packed in zip(range(0, scored.shape[1], SCORE_ROWS), slices, strict=True):
        some = scored[:, start : start + SCORE_ROWS]
        packed[:, : some.shape[1]] = some
    return tuple(slices)


def _place_diffs(target: Int32Array, entries: Int32Array, spare_slot: int) -> None:
    count = entries.shape[1]
    target[:, :count] = entries
    target[0, count:] = spare_slot


def _fill_tokens(step: PackedStep[Int32Array], rows: ScheduledRows, slots: Slots) -> None:
    """Ids, positions and owners of the step's tokens; ids past the known ones are left to the device."""
    num_rows = rows.num_rows
    ends = np.cumsum(rows.num_tokens, dtype=np.int32)
    total = int(ends[-1]) if num_rows else 0
    step.query_starts[1 : num_rows + 1] = ends
    step.query_starts[num_rows + 1 :] = total
    owners = np.arange(num_rows, dtype=np.int32)
    positions, token_slots = rows.starts, rows.slots
    if total > num_rows:
        owners = np.repeat(owners, rows.num_tokens)
        positions = np.arange(total, dtype=np.int32) + (positions - step.query_starts[:num_rows])[owners]
        token_slots = token_slots[owners]
    is_known = positions < slots.num_known[token_slots]
    known_positions = np.where(is_known, positions, 0)
    step.token_ids[:total] = np.where(is_known, slots.token_ids[token_slots, known_positions], FROM_DEVICE)
    step.positions[:total] = positions
    step.token_rows[:total] = owners
    step.token_rows[total:] = len(step.slots)


def _fill_rows(step: PackedStep[Int32Array], rows: ScheduledRows, bucket: Bucket, spare_slot: int) -> None:
    num_rows = rows.num_rows
    step.slots[:num_rows] = rows.slots
    step.slots[num_rows:] = spare_slot
    step.seq_lens[:num_rows] = rows.starts + rows.num_tokens
    # A decode program treats each row as one token after its context, whatever the row is to the scheduler.
    num_decode = num_rows if bucket.is_decode else rows.num_decode
    step.distribution[:] = (num_decode, num_decode, num_rows)
