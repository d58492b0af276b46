"""A pretend device whose KV pages hold numbers that depend on the whole history, as real KV does.

What is stored for a token mixes the value stored for the one before it, read from its page, with the
token. The next token follows from the last value. So a page read after somebody else wrote it, a
wrong page table, a missing page copy or a wrong prefix hit changes tokens, besides failing the check of
the history. Log probabilities follow from the stored values too.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import RepetitionDetection, SamplingParams
from jaxllm.types.step import Logprobs, NewRequest, PromptLogprobs, SchedulerOutput, StepOutput

VOCABULARY = 29
_MASK = 2**64 - 1


def root_value(adapter_id: str | None) -> int:
    return 1 if adapter_id is None else 2 + zlib.crc32(adapter_id.encode())


def mix(value: int, token: int) -> int:
    return (value * 6364136223846793005 + 2 * token + 1442695040888963407) & _MASK


def sampled_token(value: int, seed: int = 0) -> int:
    return ((value + seed * 0x9E3779B97F4A7C15 & _MASK) >> 40) % VOCABULARY


def continuation(tokens: Sequence[int], num: int, *, adapter_id: str | None = None, seed: int = 0) -> list[int]:
    """The next `num` tokens after these, whatever would end the request on the way."""
    value = root_value(adapter_id)
    for token in tokens:
        value = mix(value, token)
    following: list[int] = []
    for _ in range(num):
        following.append(sampled_token(value, seed))
        value = mix(value, following[-1])
    return following


def score(value: int, token: int) -> float:
    """The log probability of `token` after the one for which `value` is stored."""
    return -float((value >> 20 ^ 977 * token) % 4096) / 8


def prompt_scores(prompt: Sequence[int], adapter_id: str | None = None) -> list[float]:
    """What the prompt's tokens from position 1 on score alone."""
    value = root_value(adapter_id)
    scores: list[float] = []
    for token, following in pairwise(prompt):
        value = mix(value, token)
        scores.append(score(value, following))
    return scores


def repeats(output: Sequence[int], rule: RepetitionDetection | None) -> bool:
    """Whether the output ends in copies of a pattern, as the parameter's text says it."""
    if rule is None:
        return False
    for size in range(rule.min_pattern_size, rule.max_pattern_size + 1):
        copies = list(output[-size:]) * rule.min_count
        if len(output) >= len(copies) and list(output[-len(copies) :]) == copies:
            return True
    return False


def solo_run(
    prompt: Sequence[int],
    params: SamplingParams,
    *,
    eos_ids: Iterable[int],
    max_len: int,
    adapter_id: str | None = None,
    seed: int = 0,
) -> tuple[tuple[int, ...], FinishReason, int | str | None]:
    """What the request gives alone, without pages or batches: (output, finish reason, stop id)."""
    value = root_value(adapter_id)
    for token in prompt:
        value = mix(value, token)
    output: list[int] = []
    room = max_len - len(prompt)
    if params.max_tokens is not None:
        room = min(room, params.max_tokens)
    if room == 0:
        return (), FinishReason.LENGTH, None
    while True:
        token = sampled_token(value, seed)
        output.append(token)
        may_stop = len(output) >= params.min_tokens
        if may_stop and not params.ignore_eos and token in set(eos_ids):
            return tuple(output), FinishReason.STOP, None
        if may_stop and token in params.stop_token_ids:
            return tuple(output), FinishReason.STOP, token
        if len(output) == room:
            return tuple(output), FinishReason.LENGTH, None
        if may_stop and repeats(output, params.repetition_detection):
            return tuple(output), FinishReason.STOP, "repetition"
        value = mix(value, token)


@dataclass
class _Slot:
    """One device row: the tokens it was given, and the last it sampled with its position."""

    new: NewRequest
    root: int
    history: list[int]  # values that its pages must hold, by position
    last: tuple[int, int] | None = None  # (position, token)

    def token_at(self, position: int) -> int:
        if position < len(self.new.token_ids):
            return self.new.token_ids[position]
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
        self._copy_pages(plan)
        for new in plan.new:
            self._enter(new)
        self._apply_diffs(plan)
        rows = plan.rows
        pieces = list(
            zip(rows.request_ids, rows.slots.tolist(), rows.starts.tolist(), rows.num_tokens.tolist(), strict=True)
        )
        assert len(plan.draft_ids) in (0, len(pieces))
        drafts = plan.draft_ids or ((),) * len(pieces)
        self._check_nobody_writes_what_another_reads(pieces)
        for (request_id, slot, start, num_tokens), draft_ids in zip(pieces, drafts, strict=True):
            assert self.slots[slot].new.request_id == request_id
            self._check_history(slot, start)
            self._compute(slot, start, num_tokens, draft_ids)
        output = StepOutput(plan.step_id, {})
        for piece, draft_ids, samples in zip(pieces, drafts, rows.samples.tolist(), strict=True):
            request_id, slot, start, num = piece
            if samples:
                self._sample(request_id, slot, start + num - len(draft_ids), draft_ids, output)
            assert samples or not draft_ids
            self._score(slot, start, start + num, output)
        return output

    def _sample(self, request_id: str, slot: int, end: int, draft_ids: tuple[int, ...], output: StepOutput) -> None:
        """The token at `end`, and those after it as long as the drafts, which stand there, are right."""
        row = self.slots[slot]
        tokens: list[int] = []
        scores: list[float] = []
        for draft in (*draft_ids, None):
            value = self._load(0, slot, end - 1 + len(tokens))
            tokens.append(sampled_token(value, row.new.seed))
            scores.append(score(value, tokens[-1]))
            if tokens[-1] != draft:
                break
        del row.history[end + len(tokens) - 1 :]
        row.last = (end + len(tokens) - 1, tokens[-1])
        output.tokens[request_id] = tuple(tokens)
        if draft_ids:
            output.num_accepted[request_id] = len(tokens) - 1
        if row.new.params.logprobs is not None:
            output.logprobs[request_id] = _columns(tokens, scores)

    def _score(self, slot: int, start: int, end: int, output: StepOutput) -> None:
        new = self.slots[slot].new
        targets = list(new.token_ids[start + 1 : min(end + 1, new.num_prompt_tokens)])
        if new.params.prompt_logprobs is not None and targets:
            scores = [score(self._load(0, slot, start + i), token) for i, token in enumerate(targets)]
            output.prompt_logprobs[new.request_id] = PromptLogprobs(start + 1, _columns(targets, scores))

    def table(self, group: int, slot: int, num_pages: int) -> list[int]:
        return [self.tables[group, slot][index] for index in range(num_pages)]

    def _copy_pages(self, plan: SchedulerOutput) -> None:
        """All at once and before anything else of the step, as a device that copies in any order."""
        assert len(plan.page_copies) in (0, self.num_groups)
        copied: dict[tuple[int, int, int], int] = {}
        for group, copies in enumerate(plan.page_copies):
            targets = [target for _, target in copies]
            assert len(set(targets)) == len(targets) and not set(targets) & {source for source, _ in copies}
            for source, target in copies:
                for offset in range(self.page_size):
                    if (group, source, offset) in self.memory:
                        copied[group, target, offset] = self.memory[group, source, offset]
        self.memory.update(copied)

    def _enter(self, new: NewRequest) -> None:
        history: list[int] = []
        value = root = root_value(new.adapter_id)
        for token in new.token_ids[: new.num_cached]:
            value = mix(value, token)
            history.append(value)
        self.slots[new.slot] = _Slot(new, root, history)
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

    def _compute(self, slot: int, start: int, num_tokens: int, draft_ids: tuple[int, ...]) -> None:
        row = self.slots[slot]
        drafts = dict(enumerate(draft_ids, start + num_tokens - len(draft_ids)))
        for position in range(start, start + num_tokens):
            token = drafts[position] if position in drafts else row.token_at(position)
            for group in range(self.num_groups):
                before = self._load(group, slot, position - 1) if position else row.root
                self.memory[self._place(group, slot, position)] = value = mix(before, token)
            row.history.append(value)

    def _load(self, group: int, slot: int, position: int) -> int:
        return self.memory[self._place(group, slot, position)]

    def _place(self, group: int, slot: int, position: int) -> tuple[int, int, int]:
        index, offset = divmod(position, self.page_size)
        return group, self.tables[group, slot][index], offset


def _columns(token_ids: list[int], values: list[float]) -> Logprobs:
    return Logprobs(token_ids, values, [1] * len(values), [[]] * len(values), [[]] * len(values))
