"""What the front end promises its watchdog."""

from __future__ import annotations

import threading

from jaxllm.engine.clock import ManualClock
from jaxllm.engine.executor import Ticket
from jaxllm.engine.front_end import FrontEnd
from jaxllm.engine.messages import AddRequest
from jaxllm.testing.faults import Fault, FaultKind
from jaxllm.testing.scripted import ScriptedExecutor
from jaxllm.types.sampling import SamplingParams
from jaxllm.types.step import SchedulerOutput, StepOutput
from tests.helpers.scripted_engine import make_parts, scripted

LIMIT_S = 8.0


class Announced:
    """Says when a step was handed over: from there the core is silent until it is collected."""

    def __init__(self, inner: ScriptedExecutor) -> None:
        self.inner = inner
        self.is_collecting = threading.Event()

    def submit(self, plan: SchedulerOutput) -> Ticket:
        return self.inner.submit(plan)

    def collect(self, ticket: Ticket) -> StepOutput:
        self.is_collecting.set()
        return self.inner.collect(ticket)

    def close(self) -> None:
        self.inner.close()


def test_a_process_that_stands_still_right_after_a_request_came_is_not_frozen() -> None:
    clock = ManualClock(100.0)
    executor = Announced(scripted(faults=[Fault(1, FaultKind.FREEZE)]))
    front = FrontEnd(make_parts(executor, watchdog_s=LIMIT_S), clock=clock)
    try:
        front.add(AddRequest("a", (1, 2), SamplingParams(max_tokens=4), clock.now_s(), seed=0), None, lambda news: None)
        assert executor.is_collecting.wait(10)
        clock.advance(1000)  # the whole process: nobody could ask meanwhile
        front.check_alive()
        assert front.num_open == 1
    finally:
        executor.inner.release()
        front.shut_down()
        assert front.join()
