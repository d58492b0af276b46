"""Send requests at their times, at most so many at once, and say how late this client itself was."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import math
import time
from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxllm.bench.answers import Answer, read_answer
from jaxllm.bench.dataset_files import BenchRequest
from jaxllm.bench.http_client import HttpClient

_TICK_S = 0.02
_MOST_HELD_BYTES = 2**28  # of answers that wait to be read
OnEnd = Callable[[], None]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Planned:
    """A request, the bytes that ask for it, and when they are due."""

    request: BenchRequest
    message: bytes
    at_s: float = 0.0  # after the start


@dataclass(frozen=True, slots=True)
class LoadRun:
    """All requests together. Moments within answers are those of `time.perf_counter`."""

    answers: tuple[Answer, ...]  # in the order of the requests
    start_s: float
    duration_s: float  # until the last answer ended
    client_cpu_s: float  # of the whole process
    lags_s: tuple[float, ...]  # how late the client was, each 20 ms
    send_lags_s: tuple[float, ...]  # how much later than due each request was ready to go
    num_most_running: int  # requests in flight at once


async def run_load(
    client: HttpClient, planned: Sequence[Planned], max_concurrency: int | None, on_end: OnEnd | None = None
) -> LoadRun:
    """Send all; failed requests are answers with an error.

    Answers are read after the last one has ended, unless they are too many to hold: reading takes
    time in which no arrival is seen. `on_end` hears of each end.
    """
    load = _Load(client, asyncio.Semaphore(max_concurrency or max(1, len(planned))), on_end)
    with _without_collections():
        watch = asyncio.create_task(load.watch())
        cpu_s, start_s = time.process_time(), time.perf_counter()
        try:
            ended = await load.send_all(planned, start_s)
        finally:
            watch.cancel()
        ended_s, cpu_s = time.perf_counter(), time.process_time() - cpu_s
    return LoadRun(
        answers=tuple(read() for read in ended),
        start_s=start_s,
        duration_s=ended_s - start_s,
        client_cpu_s=cpu_s,
        lags_s=tuple(load.lags_s) or (0.0,),
        send_lags_s=tuple(load.send_lags_s) or (0.0,),
        num_most_running=load.num_most_running,
    )


ReadLater = Callable[[], Answer]


def _same(answer: Answer) -> Answer:
    return answer


class _Load:
    """One run. Mutable; owned by `run_load`."""

    def __init__(self, client: HttpClient, turns: asyncio.Semaphore, on_end: OnEnd | None) -> None:
        self._client = client
        self._turns = turns
        self._on_end = on_end
        self._num_running = 0
        self._held_bytes = 0
        self.num_most_running = 0
        self.lags_s: list[float] = []
        self.send_lags_s: list[float] = []

    async def send_all(self, planned: Sequence[Planned], start_s: float) -> list[ReadLater]:
        async with asyncio.TaskGroup() as group:
            tasks: list[asyncio.Task[ReadLater]] = []
            for each in planned:
                due_s = start_s + each.at_s
                while (wait_s := due_s - time.perf_counter()) > 0:
                    await asyncio.sleep(math.ceil(wait_s * 1e3) / 1e3)  # uvloop rounds to milliseconds, also down
                self.send_lags_s.append(max(0.0, time.perf_counter() - due_s))
                tasks.append(group.create_task(self._one(each, due_s)))
        return [task.result() for task in tasks]

    async def _one(self, planned: Planned, due_s: float) -> ReadLater:
        async with self._turns:
            self._num_running += 1
            self.num_most_running = max(self.num_most_running, self._num_running)
            reply = await self._client.send(planned.message)
            self._num_running -= 1
        if self._on_end is not None:
            self._on_end()
        self._held_bytes += sum(len(data) for _, data in reply.pieces)
        later = functools.partial(read_answer, planned.request, due_s, reply)
        return later if self._held_bytes <= _MOST_HELD_BYTES else functools.partial(_same, later())

    async def watch(self) -> None:
        """How late the event loop is: by so much any moment that was measured may be wrong."""
        while True:
            start_s = time.perf_counter()
            await asyncio.sleep(_TICK_S)
            self.lags_s.append(max(0.0, time.perf_counter() - start_s - _TICK_S))


@contextlib.contextmanager
def _without_collections() -> Generator[None]:
    """No pause for garbage while the clock runs."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def run_in_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run on uvloop where there is one."""
    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        return runner.run(main)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop


def allow_connections(count: int) -> None:
    """Let this process open as many sockets, as far as the system lets it."""
    try:
        import resource
    except ImportError:  # no such limit there
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + 128
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(ValueError, OSError):
            limit = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
