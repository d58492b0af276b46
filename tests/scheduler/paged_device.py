"""A pretend device whose KV pages hold numbers that depend on the whole history, as real KV does.

What is stored for a token mixes the value stored for the one before it, read from its page, with the
token. The next token follows from the last value. So a page read after somebody else wrote it, a
wrong page table or a wrong prefix hit changes tokens, besides failing the check of the history.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import NewRequest, SchedulerOutput, StepOutput

VOCABULARY = 29
_MASK = 2**64 - 1


def root_value(adapter_id: str | None) -> int:
    return 1 if adapter_id is None else 2 + zlib.crc32(adapter_id.encode())


def mix(value: int, token: int) -> int:
    return (value * 6364136223846793005 + 2 * token + 1442695040888963407) & _MASK


def sampled_token(value: int) -> int:
    return (value >> 40) % VOCABULARY


def solo_run(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos_ids: Iterable[int],
    max_len: int,
    adapter_id: str | None = None,
) -> tuple[tuple[int, ...], FinishReason, int | None]:
    """What the request gives alone, without pages or batches: (output, finish reason, stop id)."""
    value = root_value(adapter_id)
    for token in prompt:
        value = mix(value, token)
    output: list[int] = []
    room = max_len - len(prompt)
    if params.max_tokens is not None:
        room = min(room, params.max_tokens)
    while True:
        token = sampled_token(value)
        output.append(token)
        may_stop = len(output) >= params.min_tokens
        if may_stop and not params.ignore_eos and token in set(eos_ids):
            return tuple(output), FinishReason.STOP, None
        if may_stop and token in params.stop_token_ids:
            return tuple(output), FinishReason.STOP, token
        if len(output) == room:
            return tuple(output), FinishReason.LENGTH, None
        value = mix(value, token)


@dataclass
class _Slot:
    """One device row: the tokens it was given, and the last it sampled with its position."""

    request_id: str
    known: tuple[int, ...]
    root: int
    history: list[int]  # values that its pages must hold, by position
    last: tuple[int, int] | None = None  # (position, token)

    def token_at(self, position: int) -> int:
        if position < len(self.known):
            return self.known[position]
        assert self.last is not None and self.last[0] == position, "a token is wanted that the device never sampled"
        return self.last[1]


@dataclass
class PagedDevice:
    """Runs a plan when it is submitted: plans are submitted in device order."""

    page_size: int
    num_groups: int = 1
    slots: dict[int, _Slot] = field(default_factory=dict)
    tables: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)  # (group, slot) -> index -> page
    memory: dict[tuple[int, int, int], int] = field(default_factory=dict)  # (group, page, offset) -> value

    def run(self, plan: SchedulerOutput) -> StepOutput:
        for new in plan.new:
            self._enter(new)
        self._apply_diffs(plan)
        rows = plan.rows
        pieces = list(
            zip(rows.request_ids, rows.slots.tolist(), rows.starts.tolist(), rows.num_tokens.tolist(), strict=True)
        )
        self._check_nobody_writes_what_another_reads(pieces)
        for request_id, slot, start, num_tokens in pieces:
            assert self.slots[slot].request_id == request_id
            self._check_history(slot, start)
            self._compute(slot, start, num_tokens)
        tokens: dict[str, tuple[int, ...]] = {}
        for (request_id, slot, start, num), samples in zip(pieces, rows.samples.tolist(), strict=True):
            if samples:
                token = sampled_token(self._load(0, slot, start + num - 1))
                self.slots[slot].last = (start + num, token)
                tokens[request_id] = (token,)
        return StepOutput(plan.step_id, tokens)

    def table(self, group: int, slot: int, num_pages: int) -> list[int]:
        return [self.tables[group, slot][index] for index in range(num_pages)]

    def _enter(self, new: NewRequest) -> None:
        history: list[int] = []
        value = root = root_value(new.adapter_id)
        for token in new.token_ids[: new.num_cached]:
            value = mix(value, token)
            history.append(value)
        self.slots[new.slot] = _Slot(new.request_id, new.token_ids, root, history)
        for group in range(self.num_groups):
            self.tables[group, new.slot] = {}

    def _apply_diffs(self, plan: SchedulerOutput) -> None:
        assert len(plan.page_diffs) == self.num_groups
        for group, diff in enumerate(plan.page_diffs):
            for slot, index, page in zip(diff.slots.tolist(), diff.indices.tolist(), diff.pages.tolist(), strict=True):
                assert page != 0, "the null page was given out"
                self.tables[group, slot][index] = page

    def _check_nobody_writes_what_another_reads(self, pieces: list[tuple[str, int, int, int]]) -> None:
        for group in range(self.num_groups):
            writers: dict[int, int] = {}
            for _, slot, start, num in pieces:
                for index in range(start // self.page_size, (start + num - 1) // self.page_size + 1):
                    assert writers.setdefault(self.tables[group, slot][index], slot) == slot
            for _, slot, start, num in pieces:
                used = self.table(group, slot, (start + num - 1) // self.page_size + 1)
                assert all(writers.get(page, slot) == slot for page in used)

    def _check_history(self, slot: int, start: int) -> None:
        history = self.slots[slot].history
        assert len(history) == start, "a piece does not begin where the one before it ended"
        for group in range(self.num_groups):
            assert [self._load(group, slot, position) for position in range(start)] == history

    def _compute(self, slot: int, start: int, num_tokens: int) -> None:
        row = self.slots[slot]
        for position in range(start, start + num_tokens):
            for group in range(self.num_groups):
                before = self._load(group, slot, position - 1) if position else row.root
                self.memory[self._place(group, slot, position)] = value = mix(before, row.token_at(position))
            row.history.append(value)

    def _load(self, group: int, slot: int, position: int) -> int:
        return self.memory[self._place(group, slot, position)]

    def _place(self, group: int, slot: int, position: int) -> tuple[int, int, int]:
        index, offset = divmod(position, self.page_size)
        return group, self.tables[group, slot][index], offset
