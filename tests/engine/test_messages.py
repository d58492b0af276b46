"""Messages survive being sent to another process, though for now they are handed over."""

from __future__ import annotations

import threading

import msgspec
import pytest

from jaxllm.engine.messages import (
    AbortRequests,
    AddRequest,
    CoreFailed,
    ErrorKind,
    RequestFailure,
    Shutdown,
    StepDeltas,
    ToCore,
    ToFrontEnd,
    TokenDelta,
)
from jaxllm.engine.transport import Mailbox
from jaxllm.metrics.stats import CoreStats
from jaxllm.types.request import FinishReason
from jaxllm.types.sampling import OutputKind, SamplingParams

PARAMS = SamplingParams(stop=("x",), stop_token_ids=(3,), seed=-(2**63), output_kind=OutputKind.DELTA, max_tokens=5)


@pytest.mark.parametrize(
    "message",
    [
        AddRequest("a", (1, 2), PARAMS, 1.5, seed=2**62, priority=-1, cache_salt="s"),
        AbortRequests(("a", "b")),
        Shutdown(),
    ],
)
def test_messages_to_the_core_round_trip(message: ToCore) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToCore) == message


@pytest.mark.parametrize(
    "message",
    [
        StepDeltas(
            (
                TokenDelta("a", (1, 2), FinishReason.STOP, 7, 16, 0.5),
                TokenDelta("b", error=RequestFailure(ErrorKind.REQUEST, "no", "prompt", "code")),
            ),
            CoreStats(num_running=2, kv_usage=0.5),
            12,
        ),
        CoreFailed("gone"),
    ],
)
def test_messages_to_the_front_end_round_trip(message: ToFrontEnd) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToFrontEnd) == message


def test_a_mailbox_wakes_its_reader_once_until_it_is_read() -> None:
    box: Mailbox[int] = Mailbox()
    wakes: list[int] = []
    box.wake_with(lambda: wakes.append(1))
    box.put(1, 2)
    box.put(3)
    assert (box.take(), len(wakes)) == ([1, 2, 3], 1)
    box.put(4)
    assert (box.take(), len(wakes)) == ([4], 2)
    box.put()
    assert len(wakes) == 2


def test_waiting_on_a_mailbox_ends_with_a_message_or_in_time() -> None:
    box: Mailbox[int] = Mailbox()
    assert box.wait(0.01) is False
    timer = threading.Timer(0.02, box.put, (1,))
    timer.start()
    assert box.wait(5.0) is True
    timer.join()
