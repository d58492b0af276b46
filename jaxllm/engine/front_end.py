"""What the sync and the async engine share: everything on the people's side of the transport."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from jaxllm.engine.clock import Clock, MonotonicClock
from jaxllm.engine.cores import Cores
from jaxllm.engine.inputs import InputProcessor
from jaxllm.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreFailed,
    PrefixCacheReset,
    Shutdown,
    StepDeltas,
    ToFrontEnd,
)
from jaxllm.engine.open_request import Deliver, PushText
from jaxllm.engine.outputs import OutputProcessor
from jaxllm.engine.parts import EngineParts
from jaxllm.engine.resets import OnReset, Resets
from jaxllm.engine.siblings import split_siblings
from jaxllm.errors import EngineDead, RequestError
from jaxllm.metrics.stats import EngineStats, FinishedRequest, NoObserver, Observer
from jaxllm.types.profile import PhaseClock, StepProfile

_FRESH_S = 0.01  # a verdict of the watchdog so young is not asked for again: a request asks several times

_CLOSED = "the engine is closed"

_log = logging.getLogger("jaxllm.engine")


class FrontEnd:
    """Open requests and the cores that run them. Mutable; owned by one engine and one thread.

    How a request ends, one rule everywhere: `deliver` gets exactly one finished `RequestOutput`
    ("stop", "length" or "abort"), or one exception: `EngineDead` once a core has failed, frozen
    or died (also in the middle of a stream), `RequestError` or `CapacityError` when the core
    refuses the request.
    """

    def __init__(self, parts: EngineParts, observer: Observer | None = None, clock: Clock | None = None) -> None:
        self.clock = clock or MonotonicClock()
        self.inputs = InputProcessor(
            parts.tokenizer,
            max_model_len=parts.max_model_len,
            vocab_size=parts.vocab_size,
            eos_ids=parts.eos_ids,
            seed=parts.seed,
            max_logprobs=parts.max_logprobs,
            processor_names=parts.processor_names,
        )
        self.phases = PhaseClock()
        self._cores = Cores(parts, self.clock, self.phases)
        self._outputs = OutputProcessor(parts.tokenizer, observer or NoObserver(), len(self._cores.all), self.phases)
        self._resets = Resets(len(self._cores.all))
        self._count_compilations = parts.compilations_after_ready
        self._serial = 0
        self._watched_s = self.clock.now_s()
        self._dead: str | None = None
        self._closed = False
        self._cores.start()

    @property
    def num_open(self) -> int:
        """Requests, and resets of the prefix cache, that the cores owe an answer."""
        return self._outputs.num_open + len(self._resets)

    @property
    def watch_interval_s(self) -> float:
        return self._cores.watch_interval_s

    def is_open(self, request_id: str) -> bool:
        return self._outputs.is_open(request_id)

    def add(
        self,
        message: AddRequest,
        prompt: str | None,
        deliver: Deliver,
        *,
        is_counted: bool = True,
        push_text: PushText | None = None,
    ) -> None:
        """Accept a request under the caller's own id, `message.request_id`.

        All its sequences go to one core, where they share the prompt: the one with the fewest to run.

        Raises:
            RequestError: a request of this id is open.
            EngineDead: the engine has stopped or was closed.
        """
        self.check_alive()
        request_id = message.request_id
        if self._outputs.is_open(request_id):
            raise id_in_use(request_id)
        # The core never sees an id twice, so what it still sends for an ended request cannot be
        # taken for news of a later request of the same name.
        self._serial += 1
        siblings = split_siblings(message, f"{request_id}#{self._serial}")
        core_ids = [sibling.request_id for sibling in siblings]
        loads = self._outputs.loads
        core = loads.index(min(loads))
        self._outputs.open(message, core_ids, prompt, deliver, core=core, is_counted=is_counted, push_text=push_text)
        self._cores.send(core, *siblings)
        self.watch()  # from here on the watchdog is asked at intervals, and may count on it

    def abort(self, request_ids: Iterable[str]) -> None:
        """End these requests now, wherever they are; unknown and ended ones are ignored."""
        for core, core_ids in self._outputs.abort(request_ids, self.clock.now_s()).items():
            self._drop(core, core_ids)

    def reset_prefix_cache(self, on_reset: OnReset) -> None:
        """Have every core forget its cached pages; `on_reset` hears whether all did, or `EngineDead`.

        A core refuses while a request holds pages there.

        Raises:
            EngineDead: the engine has stopped or was closed.
        """
        self.check_alive()
        self._cores.send_all(self._resets.ask(on_reset))
        self.watch()

    def count(self, request: FinishedRequest | None) -> None:
        """Count a request that ran as many others, each added with `is_counted` false; None: it was refused."""
        if request is not None:
            self._outputs.count(request)

    def pump(self) -> None:
        """Deliver everything the cores have sent."""
        try:
            for number, core in enumerate(self._cores.all):
                if inbox := core.transport.to_front:
                    for message in inbox.take():
                        self._take_in(number, message)
        except Exception as error:  # messages may be lost now: better every request ends than one hangs
            _log.error("the front end failed", exc_info=error)
            self._die(f"the front end failed: {type(error).__name__}: {error}")

    def wait(self) -> None:
        """Sleep until there is something to deliver, and deliver it; now and then ask the watchdog."""
        if self._cores.wait(self.watch_interval_s):
            self.pump()
        if self.clock.now_s() >= self._watched_s + self.watch_interval_s:  # one busy core must not hide a frozen one
            self.watch()

    def wake_with(self, on_first: Callable[[], None]) -> None:
        """Call `on_first`, in a core's thread, whenever there is something to `pump` after there was nothing."""
        self._cores.wake_with(on_first)

    def watch(self) -> None:
        """Ask the watchdog; a dead core ends every open request."""
        self._watched_s = self.clock.now_s()
        if self._dead is None and not self._closed:
            verdict = self._cores.verdict(asks_again=self.num_open > 0)
            if verdict is not None:
                self.pump()  # it may have said why
                self._die(verdict)

    def check_alive(self) -> None:
        """Raises: EngineDead: the engine has stopped or was closed."""
        if self.clock.now_s() >= self._watched_s + _FRESH_S:
            self.watch()
        if self._dead is not None:
            raise EngineDead(self._dead)
        if self._closed:
            raise EngineDead(_CLOSED)

    def stats(self) -> EngineStats:
        return EngineStats(
            core=self._cores.stats(),
            totals=self._outputs.totals.copy(),
            num_open_requests=self._outputs.num_open,
            compilations_after_ready=self._count_compilations() if self._count_compilations else 0,
        )

    def step_profiles(self) -> list[StepProfile]:
        """Steps recorded since the last call, as far as they are kept: the last 8,192 of each core."""
        return self._cores.step_profiles()

    def shut_down(self) -> None:
        """Abort what is open and tell the cores to leave; does not wait."""
        if not self._closed:
            self._outputs.abort_all(self.clock.now_s())
            self._resets.fail_all(EngineDead(_CLOSED))
            self._closed = True
            self._cores.send_all(Shutdown())

    def join(self) -> bool:
        """Wait for the cores to leave; False if one has not, because it is frozen."""
        return self._cores.join(dead=self._dead is not None)

    def _take_in(self, number: int, message: ToFrontEnd) -> None:
        if self._dead is not None:
            return  # a frozen core that came back: its requests have ended
        match message:
            case StepDeltas():
                self._cores.all[number].stats = message.stats
                self._drop(number, self._outputs.process(message, self.clock.now_s()))
            case PrefixCacheReset():
                self._resets.take_in(message)
            case CoreFailed():
                self._die(message.message)

    def _drop(self, core: int, core_ids: list[str]) -> None:
        if core_ids:
            self._cores.send(core, AbortRequests(tuple(core_ids)))

    def _die(self, message: str) -> None:
        if self._dead is None:
            self._dead = message
            self._outputs.fail_all(message, self.clock.now_s())
            self._resets.fail_all(EngineDead(message))
            self._cores.send_all(Shutdown())  # should a frozen core ever come back


def id_in_use(request_id: str) -> RequestError:
    return RequestError(
        f"request_id={request_id!r} is in use by a request that has not ended; accepted: an unused id",
        param="request_id",
    )
