"""How the server ends: by signal with a drain, by a second signal at once, or after the engine died."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable
from typing import Any

from jaxllm.errors import EngineDead
from jaxllm.server.state import ServerState

logger = logging.getLogger("jaxllm.server")

_HEALTH_INTERVAL_S = 0.25
_LAST_WORDS_S = 1.0  # for interrupted requests to write their error
_FORCED_EXIT_S = 1.5  # after a second signal, whatever still hangs
_DEAD_ENGINE_S = 2.0  # for the engine to end its own requests with its own words


class Lifecycle:
    """Watches signals and the engine's health, and tells uvicorn when to stop. One per server."""

    def __init__(
        self,
        state: ServerState,
        stop_serving: Callable[[], None],
        *,
        at_forced_exit: Callable[[], None] = lambda: None,
    ) -> None:
        """`at_forced_exit` is the last thing called where a second signal has to end a process that hangs."""
        self._state = state
        self._stop_serving = stop_serving
        self._at_forced_exit = at_forced_exit
        self._num_signals = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._forced = False

    def start(self, *, handle_signals: bool) -> None:
        """Call inside the event loop; signals only in the main thread."""
        self._spawn(self._watch_health())
        if handle_signals:
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.on_signal)

    def finish(self) -> int:
        """Stop watching. The exit code: 0 after one signal, 1 after a second or with a dead engine."""
        for task in tuple(self._tasks):
            task.cancel()
        if self._forced:
            return 1
        try:
            self._state.check_alive()
        except EngineDead:
            return 1
        return 0

    def on_signal(self) -> None:
        """First: take no new work, drain, stop. Second: cut what runs and be gone within 2 s."""
        self._num_signals += 1
        if self._num_signals == 1:
            self._state.draining = True
            self._spawn(self._drain())
        elif self._num_signals == 2:
            self._forced = True
            self._state.interrupt_all("the server was told to stop at once")
            self._stop_serving()
            # Not a timer of the loop: the loop itself may be what hangs.
            signal.signal(signal.SIGALRM, lambda *_: self._exit_by_force())
            signal.setitimer(signal.ITIMER_REAL, _FORCED_EXIT_S)

    def _exit_by_force(self) -> None:
        self._at_forced_exit()
        os._exit(1)

    async def _drain(self) -> None:
        timeout_s = self._state.config.shutdown_timeout_s
        if not await self._state.wait_idle(timeout_s):
            logger.warning("%d requests were cut: the drain took %g s", self._state.num_running, timeout_s)
            self._state.interrupt_all("the server is shutting down")
            await self._state.wait_idle(_LAST_WORDS_S)
        self._stop_serving()

    async def _watch_health(self) -> None:
        state = self._state
        while True:
            try:
                state.check_alive()
            except EngineDead as error:
                state.failure = str(error)
                break
            await asyncio.sleep(_HEALTH_INTERVAL_S)
        grace_s = state.config.engine_dead_grace_s
        logger.error("the engine is dead: %s; the server answers 503 and exits in %g s", state.failure, grace_s)
        await asyncio.sleep(min(_DEAD_ENGINE_S, grace_s))
        state.interrupt_all(f"the engine is dead: {state.failure}")
        await asyncio.sleep(max(0.0, grace_s - _DEAD_ENGINE_S))
        self._stop_serving()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
