"""The scheduler's only door to memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

from jaxllm.memory.beginnings import PageBeginnings
from jaxllm.memory.event_log import KVEventLog
from jaxllm.memory.group import rules_for
from jaxllm.memory.page_pool import NULL_PAGE, PagePool
from jaxllm.memory.plan import KVCachePlan
from jaxllm.memory.prefix import PageHasher
from jaxllm.types.kv_events import KVEvent
from jaxllm.types.request import Request

NewPages = tuple[tuple[tuple[int, int], ...], ...]  # by group: (index in the page table, page id)
PageCopies = tuple[tuple[tuple[int, int], ...], ...]  # by group: (from page, to page)


@dataclass(slots=True)
class _Record:
    """What the manager keeps of a request. Token ids never change, so digests outlive a preemption."""

    digests: list[bytes] = field(default_factory=list[bytes])
    contents: list[bytes] = field(default_factory=list[bytes])  # what those are of that begin within the prompt
    num_indexed: int = 0  # of the pages held now, how many are found by digest; they are the first
    num_prompt_pages: int = 0  # pages that begin within the prompt
    num_pending: int = 0  # first page that is not announced as being filled; at least num_indexed where any is


class KVManager:
    """Gives pages to requests and finds cached prefixes. Mutable; owned by the scheduler.

    Each KV group has its own pool of `plan.num_pages` pages; a request grows in all groups or in
    none. Only full pages of confirmed tokens are indexed, and a hit leaves at least one token to
    compute, since its logits are wanted: a fully cached prompt of whole pages gives up its last one.
    Of a page that agrees with a prompt only at its beginning that beginning is copied.
    """

    def __init__(
        self,
        plan: KVCachePlan,
        *,
        enable_prefix_caching: bool,
        enable_partial_page_reuse: bool = True,
        events: bool = False,
    ) -> None:
        """`events`: keep what `take_events` hands over. Somebody must take it then, since it grows."""
        self.page_size = plan.page_size
        self.num_pages = plan.num_pages
        self.capacity_tokens = plan.capacity_tokens  # most tokens one request can have in pages
        self._caching = enable_prefix_caching
        self._rules = tuple(rules_for(group.spec) for group in plan.groups)
        self._events = log = KVEventLog(plan.page_size) if events else None
        self._pools = tuple(
            PagePool(plan.num_pages, None if log is None else partial(log.removed, group))
            for group in range(len(plan.groups))
        )
        self._hasher = PageHasher(plan.page_size)
        is_partial = enable_prefix_caching and enable_partial_page_reuse and plan.page_size > 1
        self._beginnings = PageBeginnings(plan.page_size, plan.num_pages, self._is_cached) if is_partial else None
        # Pages to be copied before the step that is being planned, with the levels they go back to: until then
        # they are held, so that nobody is given one to copy to.
        self._copied: list[tuple[PagePool, int, int]] = []
        self._records: dict[Request, _Record] = {}
        self._no_pages: NewPages = tuple(() for _ in plan.groups)
        # Digests of prompt pages that requests hold and have not planned to fill yet, with how many do.
        self._pending: Counter[bytes] = Counter()

    @property
    def num_groups(self) -> int:
        return len(self._pools)

    @property
    def num_free_pages(self) -> int:
        """Pages that can be given out in every group: free and cached ones."""
        return min(pool.num_free for pool in self._pools)

    @property
    def usage(self) -> float:
        """Share of the pages that requests hold, 0 to 1."""
        return 1.0 - self.num_free_pages / (self.num_pages - 1)

    def match_prefix(self, request: Request) -> int:
        """Tokens whose KV is cached: whole pages, at most num_tokens - 1. Gives out nothing."""
        return len(self._hits(request)[0]) * self.page_size

    def can_fit(self, request: Request, num_tokens: int) -> bool:
        """Whether the request could hold `num_tokens` tokens now.

        Pages it would find cached need not be taken; those without a holder stop being free.
        """
        held = request.pages or self._hits(request)
        for rules, pool, pages in zip(self._rules, self._pools, held, strict=True):
            num_unfree = 0 if request.pages else sum(pool.num_refs(page) == 0 for page in pages)
            if rules.num_pages(num_tokens) - len(pages) > pool.num_free - num_unfree:
                return False
        return True

    def adopt_prefix(self, request: Request) -> PageCopies:
        """Start a request with what is cached of its prompt: `num_cached` tokens.

        Whole pages are shared. A page that agrees with the request only at its beginning is to be copied
        before the step, to one of the request's own, if the whole request still fits beside it.
        """
        if request.pages:
            raise RuntimeError(f"request {request.request_id} holds pages already")
        hits = self._hits(request)
        for pool, pages in zip(self._pools, hits, strict=True):
            pool.share(pages)
        request.pages = hits
        record = self._record(request)
        record.num_indexed = len(hits[0])
        record.num_prompt_pages = -(-len(request.prompt_ids) // self.page_size)
        record.num_pending = len(record.digests)
        self._pending.update(record.digests[record.num_indexed :])
        request.num_cached = request.num_computed = len(hits[0]) * self.page_size
        return self._adopt_beginning(request, record)

    def _adopt_beginning(self, request: Request, record: _Record) -> PageCopies:
        if self._beginnings is None or not self._reads_cache(request):
            return self._no_pages
        found = self._beginnings.find(request, record.digests, record.num_indexed)
        if found is None:
            return self._no_pages
        digest, num_tokens = found
        sources = [page for pool in self._pools if (page := pool.find(digest)) is not None]
        self._hold_copied(sources)
        if not self.can_fit(request, request.num_tokens):
            self.let_go_of_copied(len(sources))
            return self._no_pages
        self.grow(request, request.num_cached + num_tokens)
        request.num_cached = request.num_computed = request.num_cached + num_tokens
        return tuple(((source, pages[-1]),) for source, pages in zip(sources, request.pages, strict=True))

    def _hold_copied(self, sources: Iterable[int]) -> None:
        """By KV group, pages that are copied before the step that is being planned."""
        for pool, page in zip(self._pools, sources, strict=True):
            self._copied.append((pool, page, pool.level(page)))
            pool.share((page,))

    def let_go_of_copied(self, num: int | None = None) -> None:
        """The step is planned: pages that it copies (the last `num`; None: all) may be given to others."""
        num = len(self._copied) if num is None else num
        for _ in range(num):
            pool, page, level = self._copied.pop()
            pool.release((page,), level)

    def fork(self, request: Request, first: Request) -> PageCopies | None:
        """Start a request on the prompt of another; None, and no change, if pages are short.

        `first` has the same prompt of P tokens, computed before the step that is being planned. All
        full pages below position P - 1 are shared. The page of that position is the request's own,
        and if other tokens of the prompt stand in it, it is to be copied before the step. The last
        prompt token is left to compute, since its logits are wanted.
        """
        if request.pages:
            raise RuntimeError(f"request {request.request_id} holds pages already")
        num_kept = request.num_prompt_tokens - 1
        num_shared, num_partial = divmod(num_kept, self.page_size)
        if any(
            rules.num_pages(num_kept + 1) - num_shared > pool.num_free
            for rules, pool in zip(self._rules, self._pools, strict=True)
        ):
            return None
        request.pages = [pages[:num_shared] for pages in first.pages]
        for pool, pages in zip(self._pools, request.pages, strict=True):
            pool.share(pages)
        record = self._record(request)
        if not record.digests:
            known = self._record(first)
            record.digests, record.contents = known.digests[:num_shared], known.contents[:num_shared]
        self.grow(request, num_kept + 1)
        request.num_cached = request.num_computed = num_kept
        if num_partial == 0:
            return self._no_pages
        sources = [pages[num_shared] for pages in first.pages]
        self._hold_copied(sources)
        return tuple(((source, own[num_shared]),) for source, own in zip(sources, request.pages, strict=True))

    def grow(self, request: Request, num_tokens: int) -> NewPages | None:
        """Make room for `num_tokens` tokens in all; None, and no change, if pages are short."""
        if request.pages and num_tokens <= len(request.pages[0]) * self.page_size:
            return self._no_pages  # most calls: page tables have the same length in all groups
        if not request.pages:
            request.pages = [[] for _ in self._pools]
            self._record(request)
        missing = [
            rules.num_pages(num_tokens) - len(pages) for rules, pages in zip(self._rules, request.pages, strict=True)
        ]
        for num, pool in zip(missing, self._pools, strict=True):
            if num > pool.num_free:
                return None
        return tuple(
            [_append(pool, pages, num) for num, pool, pages in zip(missing, self._pools, request.pages, strict=True)]
        )

    def pending_prefix(self, request: Request) -> int:
        """Tokens behind a waiting request's cached prefix that requests with pages are going to compute.

        They are found in the cache as soon as the step that computes them is planned.
        """
        if not self._pending:
            return 0
        num_hits = len(self._hits(request)[0])
        digests = self._record(request).digests[num_hits : (request.num_tokens - 1) // self.page_size]
        num_pending = next((i for i, digest in enumerate(digests) if digest not in self._pending), len(digests))
        return num_pending * self.page_size

    def commit(self, request: Request) -> None:
        """Let the pages filled up to `num_computed` be found. Their tokens must be confirmed."""
        if self._caching:
            self._index(request, request.num_computed // self.page_size)

    def commit_planned(self, request: Request, num_tokens: int) -> None:
        """Let pages of known tokens be found that planned steps fill, up to `num_tokens` tokens of the request.

        Only a later step can share them, and the device runs steps in order: whatever becomes of the
        request meanwhile, they are full before that step reads them.
        """
        if self._caching:
            self._index(request, min(num_tokens, request.num_tokens) // self.page_size)

    def _index(self, request: Request, num_full: int) -> None:
        record = self._records.get(request) or self._record(request)
        first = record.num_indexed
        if first >= num_full:
            return
        digests = record.digests
        if len(digests) < num_full:
            self._hasher.extend(request, digests, record.contents, num_full)
        if self._events is not None:
            self._log_stored(self._events, request, digests, first, num_full)
        for group, pool in enumerate(self._pools):
            pool.index(request.pages[group], digests, first, num_full)
        if self._beginnings is not None and first < record.num_prompt_pages:  # for those of output nobody looks
            self._beginnings.add(request, digests, record.contents, first, num_full)
        if record.num_pending > first:
            self._settle(record, first, num_full)
        record.num_indexed = num_full

    def _log_stored(self, log: KVEventLog, request: Request, digests: list[bytes], first: int, end: int) -> None:
        """To be called before these pages are indexed: a digest that another page has is no news."""
        for group, pool in enumerate(self._pools):
            log.stored(group, request, digests, [n for n in range(first, end) if pool.find(digests[n]) is None])

    def _settle(self, record: _Record, first: int, end: int) -> None:
        """Pages `first` to `end` - 1 are no longer going to be filled: they are, or never will be."""
        for digest in record.digests[first : min(end, record.num_pending)]:
            self._pending[digest] -= 1
            if not self._pending[digest]:
                del self._pending[digest]

    def release(self, request: Request) -> None:
        """Give all pages back, the tail to be evicted first. Committed ones stay matchable.

        The request's retention is that of its whole pages within `retention_tokens`.
        """
        service = request.service
        num_at_level = None if service.retention_tokens is None else service.retention_tokens // self.page_size
        for pool, pages in zip(self._pools, request.pages, strict=False):
            pool.release(pages, service.retention_priority, num_at_level)
        request.pages = []
        record = self._records.get(request)
        if record is None:
            return
        self._settle(record, record.num_indexed, record.num_pending)
        record.num_indexed = record.num_pending = 0
        if request.is_finished:
            del self._records[request]

    def reset_prefix_cache(self) -> bool:
        """Forget every cached page. Refused (False) while a request holds pages."""
        if any(pool.num_free != pool.num_pages - 1 for pool in self._pools):
            return False
        for pool in self._pools:
            pool.evict(range(NULL_PAGE + 1, pool.num_pages))
        if self._events is not None:
            self._events.cleared()
        return True

    def take_events(self) -> list[KVEvent]:
        """What changed in the prefix cache since the last call; nothing unless made with `events`."""
        return [] if self._events is None else self._events.take()

    def check(self) -> None:
        """Raise RuntimeError unless every page is in one state and held by exactly who counts for it."""
        pending = Counter(digest for r in self._records.values() for digest in r.digests[r.num_indexed : r.num_pending])
        if pending != self._pending:
            raise RuntimeError(f"{len(self._pending)} pages count as going to be filled, not {len(pending)}")
        for group, pool in enumerate(self._pools):
            pool.check()
            holders = Counter(page for request in self._records if request.pages for page in request.pages[group])
            holders.update(page for owner, page, _ in self._copied if owner is pool)
            for page in range(pool.num_pages):
                if holders[page] != pool.num_refs(page):
                    raise RuntimeError(
                        f"page {page} of group {group} counts {pool.num_refs(page)} holders "
                        f"and is in the page tables of {holders[page]}"
                    )

    def _record(self, request: Request) -> _Record:
        record = self._records.get(request)
        if record is None:
            record = self._records[request] = _Record()
        return record

    def _reads_cache(self, request: Request) -> bool:
        params = request.params
        return self._caching and not params.skip_reading_prefix_cache and params.prompt_logprobs is None

    def _is_cached(self, digest: bytes) -> bool:
        """Whether pages with this digest can be found in every group."""
        return all(pool.find(digest) is not None for pool in self._pools)

    def _hits(self, request: Request) -> list[list[int]]:
        """Pages by group of the longest prefix that every group has cached."""
        if not self._reads_cache(request):
            return [[] for _ in self._pools]
        num_pages = (request.num_tokens - 1) // self.page_size
        record = self._record(request)
        digests = record.digests
        self._hasher.extend(request, digests, record.contents, num_pages)
        usable = digests[:num_pages]
        hits = [rules.longest_hit(usable, pool) for rules, pool in zip(self._rules, self._pools, strict=True)]
        shortest = min(map(len, hits))
        return [pages[:shortest] for pages in hits]


def _append(pool: PagePool, pages: list[int], num: int) -> tuple[tuple[int, int], ...]:
    taken = pool.take(max(num, 0)) or ()
    first = len(pages)
    pages.extend(taken)
    return tuple(enumerate(taken, first))
