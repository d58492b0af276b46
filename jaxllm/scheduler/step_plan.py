"""One step while it is being decided."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from jaxllm.memory.manager import KVManager, NewPages, PageCopies
from jaxllm.scheduler.decode_rows import DecodeRow, DecodeRows, DecodeStep, slot_of
from jaxllm.types.request import Request
from jaxllm.types.step import NewRequest, PageTableDiff, ScheduledRows, SchedulerOutput


class Piece(NamedTuple):
    """What one request gets in one step. A named tuple: hundreds are made in every step."""

    request: Request
    epoch: int  # the request's num_preemptions when this was decided
    start: int  # position of its first token
    num_tokens: int
    samples: bool
    is_decode: bool  # one token, past the prompt
    is_new: bool
    new_pages: NewPages
    page_copies: PageCopies  # by KV group; empty but for a new request that begins within a page of another
    draft_ids: tuple[int, ...] = ()  # the last of its tokens, if they turn out to be right


def decode_piece(row: DecodeRow, start: int) -> Piece:
    """A decode as the piece it would have been."""
    return Piece(
        row.request, row.epoch, start, 1, samples=True, is_decode=True, is_new=False, new_pages=(), page_copies=()
    )


class StepPlan:
    """Collects what is computed in a step: first decodes, by number alone, then pieces.

    Each piece is added or withdrawn with all that it costs: tokens of the budget, pages of memory,
    and the request's own counts of what is on its way. A decode costs its token and perhaps a page
    as soon as it is given; the rest is counted when the step is sealed.
    """

    __slots__ = (
        "_decodes",
        "_kv",
        "_longest_piece",
        "_pieces",
        "_prompt_budget",
        "_whole_budget",
        "budget",
        "num_decodes",
    )

    def __init__(self, kv: KVManager, decodes: DecodeRows, budget: int) -> None:
        self._kv = kv
        self._decodes = decodes
        self._pieces: dict[Request, Piece] = {}
        self.num_decodes = 0  # the first of `decodes`
        self._whole_budget = budget
        self.budget = budget  # tokens left to give
        self._prompt_budget = budget  # of those, what pieces may take together
        self._longest_piece = budget

    @property
    def pieces(self) -> Collection[Piece]:
        return self._pieces.values()

    @property
    def is_empty(self) -> bool:
        return not self.num_decodes and not self._pieces

    @property
    def num_given(self) -> int:
        """Tokens of the budget that are given away."""
        return self._whole_budget - self.budget

    def give_decodes(self) -> None:
        """Give each decode its token, or as many as there are tokens; all of these must have their pages."""
        self.num_decodes = self._decodes.num_left_of(self.budget)
        self.budget -= self.num_decodes

    def limit_pieces(self, budget: int, longest: int) -> None:
        """From now on pieces take at most `budget` tokens together and `longest` each."""
        self._prompt_budget, self._longest_piece = budget, longest

    def tokens_for(self, num_wanted: int) -> int:
        """Tokens of those that a request wants which a piece of this step may still have."""
        return max(0, min(num_wanted, self.budget, self._prompt_budget, self._longest_piece))

    def num_tokens_before(self, request: Request) -> int:
        """Tokens of a request that are computed, or in flight from earlier plans than this one.

        None of one that starts in this: what is copied for it is not there before the step.
        """
        piece = self._pieces.get(request)
        if piece is None:
            return request.num_computed + request.num_in_flight
        return 0 if piece.is_new else piece.start

    def add(self, request: Request, num_tokens: int, *, is_new: bool = False, page_copies: PageCopies = ()) -> bool:
        """Give a request its next `num_tokens` tokens; False, and no change, if pages are short.

        It samples if its last token, known or promised by a step in flight, is among them.
        """
        start = request.num_computed + request.num_in_flight
        new_pages = self._kv.grow(request, start + num_tokens)
        if new_pages is None:
            return False
        samples = start + num_tokens == request.num_tokens + request.num_pending
        is_decode = num_tokens == 1 and start >= len(request.prompt_ids)
        self._pieces[request] = Piece(
            request, request.num_preemptions, start, num_tokens, samples, is_decode, is_new, new_pages, page_copies
        )
        self.budget -= num_tokens
        self._prompt_budget -= num_tokens
        request.num_in_flight += num_tokens
        request.num_pending += samples
        return True

    def add_decode(self, request: Request, drafts: tuple[int, ...] = ()) -> bool:
        """Give a request that knows all its tokens the last of them and `drafts`; False, and no change, if pages
        are short."""
        start, num_tokens = request.num_computed, 1 + len(drafts)
        new_pages = self._kv.grow(request, start + num_tokens)
        if new_pages is None:
            return False
        self._pieces[request] = Piece(
            request=request,
            epoch=request.num_preemptions,
            start=start,
            num_tokens=num_tokens,
            samples=True,
            is_decode=not drafts,
            is_new=False,
            new_pages=new_pages,
            page_copies=(),
            draft_ids=drafts,
        )
        self.budget -= num_tokens
        request.num_in_flight += num_tokens
        request.num_placeholders += len(drafts)
        request.num_pending += 1
        return True

    def withdraw(self, request: Request) -> None:
        """Take all pages from a request, and with them its piece or token of this step, if it has one."""
        piece = self._pieces.pop(request, None)
        if piece is not None:
            self.budget += piece.num_tokens
            self._prompt_budget += piece.num_tokens
            request.num_in_flight -= piece.num_tokens
            request.num_placeholders -= len(piece.draft_ids)
            request.num_pending -= piece.samples
        if self.num_decodes and self._decodes.is_of_first(request, self.num_decodes):
            self.budget += 1
            self.num_decodes -= 1
        self._decodes.leave(request)
        self._kv.release(request)

    def seal(self, step_id: int, *, preempted: Iterable[str], finished: Iterable[str]) -> PlannedStep:
        """The step as plain data, decode rows first, otherwise in the order of adding."""
        decodes = self._decodes.take(self.num_decodes)
        pieces = tuple(self._pieces.values())
        if pieces:  # those of resumed requests may be one token past the prompt
            pieces = (*(p for p in pieces if p.is_decode), *(p for p in pieces if not p.is_decode))
        output = SchedulerOutput(
            step_id=step_id,
            new=tuple([_new_request(piece.request) for piece in pieces if piece.is_new]),
            rows=_rows(decodes, pieces),
            page_diffs=tuple([_group_diff(decodes, pieces, group) for group in range(self._kv.num_groups)]),
            preempted=tuple(preempted),
            finished=tuple(finished),
            page_copies=_page_copies(pieces) if pieces else (),
            draft_ids=_draft_ids(len(decodes.rows), pieces) if pieces else (),
        )
        return PlannedStep(output, decodes, pieces)


class PlannedStep(NamedTuple):
    output: SchedulerOutput
    decodes: DecodeStep  # the first rows of the output
    pieces: tuple[Piece, ...]  # the others


def _new_request(request: Request) -> NewRequest:
    return NewRequest(
        request_id=request.request_id,
        slot=slot_of(request),
        token_ids=request.token_ids(),
        num_prompt_tokens=request.num_prompt_tokens,
        params=request.params,
        seed=request.seed,
        num_cached=request.num_cached,
        adapter_id=request.adapter_id,
        bad_word_ids=request.bad_word_ids,
    )


def _rows(decodes: DecodeStep, pieces: Sequence[Piece]) -> ScheduledRows:
    num = len(decodes.rows)
    if not pieces:
        ones, trues = np.ones(num, np.int32), np.ones(num, np.bool_)
        return ScheduledRows(decodes.request_ids, decodes.slots, decodes.starts, ones, trues, num)
    return ScheduledRows(
        request_ids=(*decodes.request_ids, *[piece.request.request_id for piece in pieces]),
        slots=np.array([*decodes.slots.tolist(), *[slot_of(piece.request) for piece in pieces]], np.int32),
        starts=np.array([*decodes.starts.tolist(), *[piece.start for piece in pieces]], np.int32),
        num_tokens=np.array([1] * num + [piece.num_tokens for piece in pieces], np.int32),
        samples=np.array([True] * num + [piece.samples for piece in pieces], np.bool_),
        num_decode=num + sum(piece.is_decode for piece in pieces),
    )


def _draft_ids(num_decodes: int, pieces: Sequence[Piece]) -> tuple[tuple[int, ...], ...]:
    """By row; empty if there are none."""
    if not any(piece.draft_ids for piece in pieces):
        return ()
    return (*[()] * num_decodes, *[piece.draft_ids for piece in pieces])


def _page_copies(pieces: Sequence[Piece]) -> PageCopies:
    """By KV group, all copies of the step; empty if there are none."""
    copies = [piece.page_copies for piece in pieces if any(piece.page_copies)]
    return tuple(tuple(chain.from_iterable(group)) for group in zip(*copies, strict=True))


def _group_diff(decodes: DecodeStep, pieces: Sequence[Piece], group: int) -> PageTableDiff:
    """The page table entries of a group to write: all of a new request, else only what was taken now."""
    slots: list[int] = []
    indices: list[int] = []
    page_ids: list[int] = []
    for request, new_pages in decodes.new_pages.items():
        for index, page in new_pages[group]:
            slots.append(slot_of(request))
            indices.append(index)
            page_ids.append(page)
    for piece in pieces:
        entries = enumerate(piece.request.pages[group]) if piece.is_new else piece.new_pages[group]
        for index, page in entries:
            slots.append(slot_of(piece.request))
            indices.append(index)
            page_ids.append(page)
    if not slots:
        return _NO_DIFF
    return PageTableDiff(np.array(slots, np.int32), np.array(indices, np.int32), np.array(page_ids, np.int32))


_NO_DIFF = PageTableDiff()
