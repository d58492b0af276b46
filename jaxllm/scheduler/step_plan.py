"""One step while it is being decided."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from jaxllm.memory.manager import KVManager, NewPages, PageCopies
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
    page_copies: PageCopies  # by KV group; empty but for a new sibling that shares the prompt of another


class StepPlan:
    """Collects the pieces of a step. Each is added or withdrawn with all that it costs:

    tokens of the budget, pages of memory, and the request's own counts of what is on its way.
    """

    __slots__ = ("_kv", "_pieces", "budget")

    def __init__(self, kv: KVManager, budget: int) -> None:
        self._kv = kv
        self._pieces: dict[Request, Piece] = {}
        self.budget = budget  # tokens left to give

    @property
    def pieces(self) -> Collection[Piece]:
        return self._pieces.values()

    def num_tokens_before(self, request: Request) -> int:
        """Tokens of a request that are computed, or in flight from earlier plans than this one."""
        piece = self._pieces.get(request)
        return request.num_computed + request.num_in_flight if piece is None else piece.start

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
        request.num_in_flight += num_tokens
        request.num_pending += samples
        return True

    def withdraw(self, request: Request) -> None:
        """Take all pages from a request, and with them its piece of this step, if it has one."""
        piece = self._pieces.pop(request, None)
        if piece is not None:
            self.budget += piece.num_tokens
            request.num_in_flight -= piece.num_tokens
            request.num_pending -= piece.samples
        self._kv.release(request)

    def seal(self, step_id: int, *, preempted: Iterable[str], finished: Iterable[str]) -> SchedulerOutput:
        """The step as plain data, decode rows first, otherwise in the order of adding."""
        decodes = [piece for piece in self._pieces.values() if piece.is_decode]
        others = [piece for piece in self._pieces.values() if not piece.is_decode]
        pieces = decodes + others
        return SchedulerOutput(
            step_id=step_id,
            new=tuple(_new_request(piece.request) for piece in pieces if piece.is_new),
            rows=_rows(pieces, len(decodes)),
            page_diffs=_page_diffs(pieces),
            preempted=tuple(preempted),
            finished=tuple(finished),
            page_copies=_page_copies(pieces),
        )


def _slot(request: Request) -> int:
    if request.slot is None:
        raise RuntimeError(f"request {request.request_id} is in a step without a slot")
    return request.slot


def _new_request(request: Request) -> NewRequest:
    return NewRequest(
        request_id=request.request_id,
        slot=_slot(request),
        token_ids=request.token_ids(),
        num_prompt_tokens=request.num_prompt_tokens,
        params=request.params,
        seed=request.seed,
        num_cached=request.num_cached,
        adapter_id=request.adapter_id,
        bad_word_ids=request.bad_word_ids,
    )


def _rows(pieces: Sequence[Piece], num_decode: int) -> ScheduledRows:
    return ScheduledRows(
        request_ids=tuple([piece.request.request_id for piece in pieces]),
        slots=np.array([_slot(piece.request) for piece in pieces], np.int32),
        starts=np.array([piece.start for piece in pieces], np.int32),
        num_tokens=np.array([piece.num_tokens for piece in pieces], np.int32),
        samples=np.array([piece.samples for piece in pieces], np.bool_),
        num_decode=num_decode,
    )


def _page_copies(pieces: Sequence[Piece]) -> PageCopies:
    """By KV group, all copies of the step; empty if there are none."""
    copies = [piece.page_copies for piece in pieces if any(piece.page_copies)]
    return tuple(tuple(chain.from_iterable(group)) for group in zip(*copies, strict=True))


def _page_diffs(pieces: Sequence[Piece]) -> tuple[PageTableDiff, ...]:
    """Per group, the page table entries to write: all of a new request, else only what it took now."""
    return tuple(_group_diff(pieces, group) for group in range(len(pieces[0].new_pages)))


def _group_diff(pieces: Sequence[Piece], group: int) -> PageTableDiff:
    slots: list[int] = []
    indices: list[int] = []
    pages: list[int] = []
    for piece in pieces:
        entries = enumerate(piece.request.pages[group]) if piece.is_new else piece.new_pages[group]
        for index, page in entries:
            slots.append(_slot(piece.request))
            indices.append(index)
            pages.append(page)
    return PageTableDiff(np.array(slots, np.int32), np.array(indices, np.int32), np.array(pages, np.int32))
