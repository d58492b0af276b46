"""What the sync and the async engine share: everything on the people's side of the transport."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import msgspec

from jaxllm.engine.clock import Clock, MonotonicClock
from jaxllm.engine.core import EngineCore
from jaxllm.engine.core_thread import CoreThread
from jaxllm.engine.inputs import InputProcessor
from jaxllm.engine.messages import AbortRequests, AddRequest, CoreFailed, Shutdown, StepDeltas, ToFrontEnd
from jaxllm.engine.outputs import Deliver, OutputProcessor
from jaxllm.engine.parts import EngineParts
from jaxllm.engine.transport import InProcessTransport
from jaxllm.engine.watchdog import Heartbeat, Watchdog
from jaxllm.errors import EngineDead, RequestError
from jaxllm.metrics.stats import EngineStats, NoObserver, Observer

_log = logging.getLogger("jaxllm.engine")

_JOIN_S = 10.0  # how long closing waits for a core that is alive
_JOIN_DEAD_S = 1.0  # and for one that failed (releasing the device) or froze (for ever)


class FrontEnd:
    """Open requests, the core thread and the watchdog. Mutable; owned by one engine and one thread.

    How a request ends, one rule everywhere: `deliver` gets exactly one finished `RequestOutput`
    ("stop", "length" or "abort"), or one exception: `EngineDead` once the core has failed, frozen
    or died (also in the middle of a stream), `RequestError` or `CapacityError` when the core
    refuses the request.
    """

    def __init__(self, parts: EngineParts, observer: Observer | None = None, clock: Clock | None = None) -> None:
        self.clock = clock or MonotonicClock()
        self.transport = InProcessTransport()
        self.inputs = InputProcessor(
            parts.tokenizer,
            max_model_len=parts.max_model_len,
            vocab_size=parts.vocab_size,
            eos_ids=parts.eos_ids,
            seed=parts.seed,
        )
        self._outputs = OutputProcessor(parts.tokenizer, observer or NoObserver())
        heartbeat = Heartbeat(self.clock)
        core = EngineCore(
            parts.executor,
            parts.scheduler,
            parts.kv,
            self.clock,
            async_scheduling=parts.async_scheduling,
            heartbeat=heartbeat,
        )
        self._thread = CoreThread(core, self.transport, heartbeat)
        self._watchdog = Watchdog(heartbeat, self._thread.is_alive, parts.watchdog_s)
        self._core_stats = core.stats()
        self._count_compilations = parts.compilations_after_ready
        self._serial = 0
        self._dead: str | None = None
        self._closed = False
        self._thread.start()

    @property
    def num_open(self) -> int:
        return self._outputs.num_open

    @property
    def watch_interval_s(self) -> float:
        return self._watchdog.interval_s

    def add(self, message: AddRequest, prompt: str | None, deliver: Deliver) -> None:
        """Accept a request under the caller's own id, `message.request_id`.

        Raises:
            RequestError: a request of this id is open.
            EngineDead: the engine has stopped or was closed.
        """
        self.check_alive()
        request_id = message.request_id
        if self._outputs.is_open(request_id):
            raise RequestError(
                f"request_id={request_id!r} is in use by a request that has not ended; accepted: an unused id",
                param="request_id",
            )
        # The core never sees an id twice, so what it still sends for an ended request cannot be
        # taken for news of a later request of the same name.
        self._serial += 1
        message = msgspec.structs.replace(message, request_id=f"{request_id}#{self._serial}")
        self._outputs.open(message, request_id, prompt, deliver)
        self.transport.to_core.put(message)
        self.watch()  # with a request open, the watchdog may count on being asked again

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests now, wherever they are; unknown and ended ones are ignored."""
        self._drop_in_core(self._outputs.abort(request_ids, self.clock.now_s()))

    def pump(self) -> None:
        """Deliver everything the core has sent."""
        try:
            for message in self.transport.to_front.take():
                self._take_in(message)
        except Exception as error:  # messages may be lost now: better every request ends than one hangs
            _log.error("the front end failed", exc_info=error)
            self._die(f"the front end failed: {type(error).__name__}: {error}")

    def watch(self) -> None:
        """Ask the watchdog; a dead core ends every open request."""
        if self._dead is None and not self._closed:
            verdict = self._watchdog.verdict(asks_again=self.num_open > 0)
            if verdict is not None:
                self.pump()  # it may have said why
                self._die(verdict)

    def check_alive(self) -> None:
        """Raises: EngineDead: the engine has stopped or was closed."""
        self.watch()
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._closed:
            raise EngineDead("the engine is closed")

    def stats(self) -> EngineStats:
        return EngineStats(
            core=self._core_stats,
            totals=self._outputs.totals.copy(),
            num_open_requests=self._outputs.num_open,
            compilations_after_ready=self._count_compilations() if self._count_compilations else 0,
        )

    def shut_down(self) -> None:
        """Abort what is open and tell the core to leave; does not wait."""
        if not self._closed:
            self._outputs.abort_all(self.clock.now_s())
            self._closed = True
            self.transport.to_core.put(Shutdown())

    def join(self) -> bool:
        """Wait for the core to leave; False if it has not, because it is frozen."""
        return self._thread.join(_JOIN_S if self._dead is None else _JOIN_DEAD_S)

    def _take_in(self, message: ToFrontEnd) -> None:
        if self._dead is not None:
            return  # a frozen core that came back: its requests have ended
        match message:
            case StepDeltas():
                self._core_stats = message.stats
                self._drop_in_core(self._outputs.process(message, self.clock.now_s()))
            case CoreFailed():
                self._die(message.message)

    def _drop_in_core(self, core_ids: list[str]) -> None:
        if core_ids:
            self.transport.to_core.put(AbortRequests(tuple(core_ids)))

    def _die(self, message: str) -> None:
        if self._dead is None:
            self._dead = message
            self._outputs.fail_all(message, self.clock.now_s())
            self.transport.to_core.put(Shutdown())  # should a frozen core ever come back
