"""Running requests that only want their next token, kept as columns from step to step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from jaxllm.memory.manager import KVManager, NewPages
from jaxllm.scheduler.answers import asks_logprobs
from jaxllm.scheduler.stop import StopRules
from jaxllm.types.request import Request
from jaxllm.types.step import BoolArray, Int32Array


class DecodeRow(NamedTuple):
    """What taking in a token needs to know; it stays the same while the request decodes."""

    request: Request
    request_id: str
    epoch: int  # the request's num_preemptions
    end_ids: frozenset[int]  # tokens that may end it
    full_length: int  # tokens, prompt and output together, that end it
    is_watched: bool  # a token alone is not all of its answer, or does not tell alone whether it ends


class DecodeStep(NamedTuple):
    """One token for each of some requests, in one step."""

    rows: Sequence[DecodeRow]  # [R] shared with other steps: not to be changed
    request_ids: tuple[str, ...]  # [R]
    slots: Int32Array  # [R] likewise
    starts: Int32Array  # [R] position of the token that is computed
    new_pages: Mapping[Request, NewPages]  # what some of them took for it


class DecodeRows:
    """The decodes of the next step. Mutable; owned by the scheduler.

    A request joins once a step is planned that samples after all tokens it has; from then on each
    step gives it one token, until it has its full length, ends, or is preempted. So the next step
    differs from the last by one added to `starts`, by who joined or left, and by the pages of the few
    whose last page is full: nothing is worked out again for the others.

    Rows of those who left go when the next step begins, all at once.
    """

    __slots__ = (
        "_full_at",
        "_ids",
        "_kv",
        "_members",
        "_new_pages",
        "_page_ends",
        "_rows",
        "_slots",
        "_starts",
        "_stop",
    )

    def __init__(self, kv: KVManager, stop: StopRules) -> None:
        self._kv = kv
        self._stop = stop
        self._members: set[Request] = set()
        self._new_pages: dict[Request, NewPages] = {}  # since the last step
        # One entry a row, in the order of joining. Lists, tuples and slots are never changed in place.
        self._rows: list[DecodeRow] = []
        self._ids: tuple[str, ...] = ()
        self._slots = np.zeros(0, np.int32)
        self._starts = np.zeros(0, np.int32)  # position of the next token
        self._page_ends = np.zeros(0, np.int32)  # first position without a page
        self._full_at = np.zeros(0, np.int32)  # position that is sampled and never computed

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, request: Request) -> bool:
        return request in self._members

    def join(self, requests: Iterable[Request]) -> None:
        """Take in requests all of whose tokens but the last are computed or on their way."""
        joining = [request for request in requests if not self._stop.is_full(request, _num_promised(request))]
        if not joining:
            return
        self._drop_gone()
        rows = [self._row(request) for request in joining]
        self._members.update(joining)
        self._rows = self._rows + rows
        self._ids = (*self._ids, *(row.request_id for row in rows))
        self._slots = _appended(self._slots, [slot_of(request) for request in joining])
        self._starts = _appended(self._starts, [_num_promised(request) - 1 for request in joining])
        self._page_ends = _appended(self._page_ends, [len(r.pages[0]) * self._kv.page_size for r in joining])
        self._full_at = _appended(self._full_at, [row.full_length - 1 for row in rows])

    def leave(self, request: Request) -> None:
        """Forget a request, if it is here, and the pages it took since the last step."""
        self._members.discard(request)
        self._new_pages.pop(request, None)

    def begin(self, budget: int) -> list[int]:
        """Rows, of the first `budget`, that need a page before the next step, by number.

        The numbers hold until the next `join`, `begin` or `take`. Who has its full length leaves.
        """
        is_full = self._starts >= self._full_at
        if is_full.any():
            for number in np.flatnonzero(is_full).tolist():
                self.leave(self._rows[number].request)
        self._drop_gone()
        return np.flatnonzero(self._starts[:budget] >= self._page_ends[:budget]).tolist()

    def num_left_of(self, budget: int) -> int:
        """How many of the first `budget` rows, as `begin` counted them, have not left since."""
        if len(self._members) == len(self._rows):
            return min(len(self._rows), budget)
        return sum(row.request in self._members for row in self._rows[:budget])

    def is_of_first(self, request: Request, num: int) -> bool:
        """Whether a request has one of the first `num` rows, of those that have not left."""
        if request not in self._members or num >= len(self._members):
            return request in self._members
        staying = (row.request for row in self._rows if row.request in self._members)
        return any(each is request for each in islice(staying, num))

    def request(self, number: int) -> Request:
        return self._rows[number].request

    def grow(self, number: int) -> bool:
        """Take a page for the next token of a row; False, and no change, if there is none."""
        request = self._rows[number].request
        new_pages = self._kv.grow(request, int(self._starts[number]) + 1)
        if new_pages is None:
            return False
        self._new_pages[request] = new_pages
        self._page_ends[number] = len(request.pages[0]) * self._kv.page_size
        return True

    def take(self, num: int) -> DecodeStep:
        """Give the first `num` rows their token."""
        self._drop_gone()
        is_all = num == len(self._rows)
        rows = self._rows if is_all else self._rows[:num]
        for row in rows:
            request = row.request
            request.num_in_flight += 1
            request.num_pending += 1
        starts = self._starts
        self._starts = starts + 1
        self._starts[num:] -= 1
        new_pages, self._new_pages = self._new_pages, {}
        return DecodeStep(rows, self._ids if is_all else self._ids[:num], self._slots[:num], starts[:num], new_pages)

    def _row(self, request: Request) -> DecodeRow:
        return DecodeRow(
            request,
            request.request_id,
            request.num_preemptions,
            self._stop.end_ids(request.params),
            self._stop.max_tokens(request),
            asks_logprobs(request.params) or request.params.repetition_detection is not None,
        )

    def _drop_gone(self) -> None:
        if len(self._members) == len(self._rows):
            return
        stays: BoolArray = np.fromiter((row.request in self._members for row in self._rows), np.bool_, len(self._rows))
        self._rows = [row for row in self._rows if row.request in self._members]
        self._ids = tuple([row.request_id for row in self._rows])
        self._slots = self._slots[stays]
        self._starts = self._starts[stays]
        self._page_ends = self._page_ends[stays]
        self._full_at = self._full_at[stays]


def slot_of(request: Request) -> int:
    if request.slot is None:
        raise RuntimeError(f"request {request.request_id} is in a step without a slot")
    return request.slot


def _num_promised(request: Request) -> int:
    return request.num_tokens + request.num_pending


def _appended(column: Int32Array, values: Sequence[int]) -> Int32Array:
    return np.concatenate([column, np.array(values, np.int32)])
