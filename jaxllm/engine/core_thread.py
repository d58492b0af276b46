"""The thread that runs the core."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from jaxllm.engine.core import EngineCore
from jaxllm.engine.messages import (
    AbortRequests,
    AddRequest,
    PrefixCacheReset,
    ResetPrefixCache,
    Shutdown,
    StepDeltas,
    ToCore,
    TokenDelta,
)
from jaxllm.engine.transport import InProcessTransport
from jaxllm.engine.watchdog import Heartbeat

_log = logging.getLogger("jaxllm.engine")

_STALL_S = 0.01  # a policy that admits nobody is asked again after this long


class CoreThread:
    """Takes messages in, steps the core, sends deltas out; sleeps while there is nothing to do.

    A daemon thread: a frozen executor cannot keep the process alive. Anything raised, even
    SystemExit, ends each request with an error and is the last thing sent.
    """

    def __init__(self, core: EngineCore, transport: InProcessTransport, heartbeat: Heartbeat) -> None:
        self._core = core
        self._transport = transport
        self._heartbeat = heartbeat
        self._resets: list[int] = []  # serials of those not answered, oldest first
        self._thread = threading.Thread(target=self._run, name="jaxllm-core", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def join(self, timeout_s: float) -> bool:
        """Whether the thread has ended within `timeout_s` seconds."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # SystemExit too: a core that ends must never end in silence
            _log.error("the engine loop failed", exc_info=error)
            self._transport.to_front.put(*self._core.fail(_describe(error)))
        finally:
            self._close()

    def _turn(self) -> bool:
        """One round; False after a shutdown message."""
        if not self._core.has_work:
            self._heartbeat.rest()
            self._core.recorder.rest()
            self._transport.to_core.wait()
        self._heartbeat.beat()
        messages = self._transport.to_core.take()
        refusals = self._handle(messages)
        if any(isinstance(message, Shutdown) for message in messages):
            return False
        stepped = self._core.step() if self._core.has_work else None
        if stepped is not None:
            self._send(refusals, stepped)
        elif messages:
            self._send(refusals, StepDeltas((), self._core.stats()))
        elif self._core.is_stalled:
            self._transport.to_core.wait(_STALL_S)
        if self._resets:
            self._answer_resets()
        return True

    def _handle(self, messages: Sequence[ToCore]) -> list[TokenDelta]:
        refusals: list[TokenDelta] = []
        for message in messages:
            match message:
                case AddRequest():
                    refusal = self._core.add(message)
                    if refusal is not None:
                        refusals.append(refusal)
                case AbortRequests():
                    self._core.abort(message)
                case ResetPrefixCache():
                    self._resets.append(message.serial)
                case Shutdown():
                    break
        return refusals

    def _answer_resets(self) -> None:
        is_done = self._core.reset_prefix_cache()
        if is_done is not None:
            self._transport.to_front.put(*[PrefixCacheReset(serial, is_done) for serial in self._resets])
            self._resets.clear()

    def _send(self, refusals: list[TokenDelta], step: StepDeltas) -> None:
        deltas = (*refusals, *step.deltas)
        self._transport.to_front.put(StepDeltas(deltas, step.stats, step.num_scheduled_tokens))

    def _close(self) -> None:
        try:
            self._core.close()
        except Exception as error:
            _log.error("closing the executor failed", exc_info=error)


def _describe(error: BaseException) -> str:
    text = str(error)
    name = type(error).__name__
    return f"the engine stopped: {name}: {text}" if text else f"the engine stopped: {name}"
