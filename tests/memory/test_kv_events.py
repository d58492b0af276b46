"""KV events tell exactly what the prefix cache can find: whoever replays them knows it too."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from jaxllm.memory.event_log import KVEventLog
from jaxllm.memory.manager import KVManager
from jaxllm.memory.plan import KVCachePlan, group_layers
from jaxllm.memory.prefix import PageHasher
from jaxllm.memory.spec import FullKV
from jaxllm.types.kv_events import CacheCleared, KVEvent, PageRemoved, PagesStored
from jaxllm.types.request import Request
from jaxllm.types.sampling import SamplingParams
from tests.memory.test_manager import finish, run

SIZE = 4


def make(num_pages: int = 10, *, groups: int = 1, events: bool = True) -> KVManager:
    plan = KVCachePlan(group_layers(tuple(FullKV(SIZE, 1, 8 * (i + 1)) for i in range(groups))), num_pages, SIZE)
    return KVManager(plan, enable_prefix_caching=True, events=events)


def ask(*tokens: int, adapter: str | None = None, salt: str | None = None) -> Request:
    return Request("r", tokens, SamplingParams(), 0.0, adapter_id=adapter, cache_salt=salt)


def digests_of(*tokens: int) -> tuple[bytes, ...]:
    found: list[bytes] = []
    PageHasher(SIZE).extend(ask(*tokens), found, [], len(tokens) // SIZE)
    return tuple(found)


class Subscriber:
    """What a reader of events believes: digests by group, each with the tokens it stands for and its parent."""

    def __init__(self) -> None:
        self.known: dict[tuple[int, bytes], tuple[tuple[int, ...], bytes | None]] = {}

    def hear(self, events: Sequence[KVEvent]) -> None:
        for event in events:
            match event:
                case PagesStored():
                    self._store(event)
                case PageRemoved():
                    del self.known[event.group, event.digest]  # never told of what was not stored
                case CacheCleared():
                    self.known.clear()

    def _store(self, event: PagesStored) -> None:
        assert len(event.token_ids) == event.page_size * len(event.digests)
        parent = event.parent
        for place, digest in enumerate(event.digests):
            assert (event.group, digest) not in self.known, "announced twice"
            tokens = event.token_ids[place * event.page_size : (place + 1) * event.page_size]
            self.known[event.group, digest] = tokens, parent
            parent = digest


def findable(kv: KVManager, digests: set[bytes]) -> set[tuple[int, bytes]]:
    """Asked of the pools one by one."""
    pools = kv._pools  # pyright: ignore[reportPrivateUsage]
    return {(g, digest) for g, pool in enumerate(pools) for digest in digests if pool.find(digest) is not None}


class Traffic:
    """Random requests over two token ids, so that many begin alike; `pages`: all that they were made of."""

    def __init__(self, kv: KVManager, seed: int) -> None:
        self.pages: dict[bytes, tuple[tuple[int, ...], bytes | None]] = {}  # by digest: tokens, parent
        self._kv, self._rng = kv, random.Random(seed)
        self._running: list[Request] = []

    def turn(self) -> None:
        kv, rng = self._kv, self._rng
        action = rng.choice(["start", "start", "decode", "decode", "plan", "end", "preempt", "reset"])
        if action == "reset":
            kv.reset_prefix_cache()
        elif action == "start" or not self._running:
            self._start()
        elif action == "end":
            finish(kv, self._running.pop(rng.randrange(len(self._running))))
        elif action == "preempt":
            kv.release(self._running.pop(rng.randrange(len(self._running))))
        else:
            request = rng.choice(self._running)
            if action == "plan":
                kv.commit_planned(request, rng.randrange(request.num_tokens + 1))
            elif kv.grow(request, request.num_tokens + 1) is not None:
                request.num_computed = request.num_tokens
                request.output_ids.append(rng.randrange(2))
                kv.commit(request)
        for request in self._running:
            self._note(request)

    def _start(self) -> None:
        rng = self._rng
        request = ask(*[rng.randrange(2) for _ in range(SIZE)] * rng.randrange(1, 4), *[rng.randrange(2)] * 3)
        self._kv.adopt_prefix(request)
        if self._kv.grow(request, request.num_tokens) is None:
            finish(self._kv, request)
        else:
            self._running.append(request)

    def _note(self, request: Request) -> None:
        tokens = request.prompt_ids + tuple(request.output_ids)
        parent = None
        for place, digest in enumerate(digests_of(*tokens)):
            self.pages[digest] = tokens[place * SIZE : (place + 1) * SIZE], parent
            parent = digest


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("seed", range(8))
def test_replayed_events_are_what_the_pools_find(seed: int, groups: int) -> None:
    kv, subscriber, num_removed = make(24, groups=groups), Subscriber(), 0
    traffic = Traffic(kv, seed)
    for _ in range(400):
        traffic.turn()
        events = kv.take_events()
        num_removed += sum(isinstance(event, PageRemoved) for event in events)
        subscriber.hear(events)
        assert set(subscriber.known) == findable(kv, set(traffic.pages))
        assert all(traffic.pages[digest] == told for (_, digest), told in subscriber.known.items())
        kv.check()
    assert num_removed > 20


def test_a_run_of_new_pages_is_one_event_that_begins_behind_what_was_cached() -> None:
    kv = make()
    tokens = tuple(range(14))
    finish(kv, run(kv, ask(*tokens[:9])))
    first, second, third = digests_of(*tokens[:12])
    assert kv.take_events() == [PagesStored(0, (first, second), None, tokens[:8], SIZE)]
    run(kv, ask(*tokens))
    assert kv.take_events() == [PagesStored(0, (third,), second, tokens[8:12], SIZE)]


def test_pages_around_one_that_is_known_are_runs_of_their_own() -> None:
    log, tokens = KVEventLog(SIZE), tuple(range(17))
    digests = digests_of(*tokens)
    log.stored(0, ask(*tokens), digests, [0, 1, 3])
    assert log.take() == [
        PagesStored(0, digests[:2], None, tokens[:8], SIZE),
        PagesStored(0, digests[3:], digests[2], tokens[12:16], SIZE),
    ]


def test_output_tokens_are_told_with_the_page_they_fill() -> None:
    kv = make()
    request = run(kv, ask(1, 2, 3, 4, 5, 6))
    kv.take_events()
    for token in (7, 8, 9, 10, 11):
        assert kv.grow(request, request.num_tokens + 1) is not None
        request.output_ids.append(token)
        request.num_computed = request.num_tokens - 1
        kv.commit(request)
    first, second = digests_of(*range(1, 9))
    assert kv.take_events() == [PagesStored(0, (second,), first, (5, 6, 7, 8), SIZE)]


def test_planned_pages_are_told_when_they_are_planned() -> None:
    kv = make()
    request = ask(*range(9))
    kv.adopt_prefix(request)
    kv.grow(request, 9)
    kv.commit_planned(request, 5)
    assert kv.take_events() == [PagesStored(0, digests_of(0, 1, 2, 3), None, (0, 1, 2, 3), SIZE)]
    request.num_computed = 5
    kv.commit(request)
    assert kv.take_events() == []


def test_of_twins_the_first_is_stored_and_the_last_removed() -> None:
    kv = make(num_pages=6)
    twins = [ask(*range(5)) for _ in range(2)]
    for request in twins:
        kv.adopt_prefix(request)
        kv.grow(request, 5)
    for request in twins:
        request.num_computed = 5
        kv.commit(request)
    (digest,) = digests_of(0, 1, 2, 3)
    assert kv.take_events() == [PagesStored(0, (digest,), None, (0, 1, 2, 3), SIZE)]
    finish(kv, twins[0])
    run(kv, ask(*range(50, 62)))  # 3 pages: all but one of those free, one of the twins among them
    assert not any(isinstance(event, PageRemoved) for event in kv.take_events())
    finish(kv, twins[1])
    run(kv, ask(*range(70, 77)))
    assert PageRemoved(0, digest) in kv.take_events()


def test_a_reset_is_one_event_and_a_refused_one_none() -> None:
    kv = make()
    request = run(kv, ask(*range(9)))
    kv.take_events()
    assert not kv.reset_prefix_cache()
    assert kv.take_events() == []
    finish(kv, request)
    assert kv.reset_prefix_cache()
    assert kv.take_events() == [CacheCleared()]


def test_adapter_salt_and_media_are_told_page_by_page() -> None:
    kv = make()
    plain, salted = ask(*range(9)), ask(*range(9), adapter="poet", salt="x")
    salted.media_keys = (("cat", 6, 3),)  # tokens 6 to 8: pages 1 and 2
    run(kv, plain)
    run(kv, salted)
    told = [event for event in kv.take_events() if isinstance(event, PagesStored)]
    assert [(event.adapter_id, event.extra_keys) for event in told] == [
        (None, None),
        ("poet", (("poet", "x"), ("poet", ("cat", 2)))),
    ]
    assert not set(told[0].digests) & set(told[1].digests)


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    kv = make(events=False)
    finish(kv, run(kv, ask(*range(9))))
    kv.reset_prefix_cache()
    assert kv.take_events() == []
