"""Events that are pushed past their task keep the order, and leave waiting to the task."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Message

from jaxllm.config.engine import ServerConfig
from jaxllm.server.direct import DirectSend
from jaxllm.server.openai import replies
from jaxllm.server.sse import DONE, EventStream, TextEvent, event
from jaxllm.server.state import ServerState
from tests.server.canned import CannedEngine


class Connection:
    """What a server gives an application; takes what is sent while it is `open`."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self.body = b""
        self.starts = 0

    async def send(self, message: Message) -> None:
        if not self.open.is_set():
            await self.open.wait()
        self.starts += message["type"] == "http.response.start"
        self.body += message.get("body", b"")

    async def receive(self) -> Message:
        await asyncio.Event().wait()
        raise AssertionError("nobody leaves")


class Events:
    """Events as an engine would give them: items, and what is pushed while the next one is waited for."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.push: Callable[[bytes], bool] = lambda _: False

    async def run(self, push: Callable[[bytes], bool]) -> AsyncGenerator[bytes, None]:
        self.push = push
        while (item := await self.items.get()) is not None:
            yield item


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


def stream(steps: Callable[[Connection, Events], AsyncGenerator[None, None]]) -> Connection:
    """Run a stream; `steps` yields wherever the others shall have their turns, and then it ends."""

    async def main() -> Connection:
        connection, events = Connection(), Events()
        app = DirectSend(EventStream(ServerState(CannedEngine([]), ServerConfig()), events.run))
        task = asyncio.create_task(app({"type": "http"}, connection.receive, connection.send))
        await turns()
        async for _ in steps(connection, events):
            await turns()
        events.items.put_nowait(None)
        await asyncio.wait_for(task, 5)
        return connection

    return asyncio.run(main())


def test_pushed_events_stand_between_the_items() -> None:
    async def steps(connection: Connection, events: Events) -> AsyncGenerator[None, None]:
        assert not events.push(b"too early, the answer has no beginning;")
        events.items.put_nowait(b"one;")
        yield
        assert events.push(b"two;") and connection.body == b"one;two;"
        events.items.put_nowait(b"three;")
        yield

    connection = stream(steps)
    assert (connection.body, connection.starts) == (b"one;two;three;" + DONE, 1)


def test_what_a_full_connection_does_not_take_is_not_half_sent() -> None:
    async def steps(connection: Connection, events: Events) -> AsyncGenerator[None, None]:
        events.items.put_nowait(b"one;")
        yield
        connection.open.clear()
        assert not events.push(b"two;") and connection.body == b"one;"
        events.items.put_nowait(b"two;")
        yield
        connection.open.set()
        yield
        assert events.push(b"three;")

    assert stream(steps).body == b"one;two;three;" + DONE


def test_a_push_that_fails_is_left_to_the_task() -> None:
    async def steps(connection: Connection, events: Events) -> AsyncGenerator[None, None]:
        events.items.put_nowait(b"one;")
        yield
        connection.body = None  # type: ignore[assignment]  # what is sent now fails
        assert not events.push(b"two;")
        connection.body = b""

    assert stream(steps).body == DONE


@given(st.text(), st.sampled_from(["text", "content", '"content":"text"', "\u2028\\"]))
def test_a_filled_in_event_is_the_one_that_is_made(text: str, model: str) -> None:
    def chunk(content: str) -> replies.ChatChunk:
        choice = replies.ChunkChoice(index=0, delta=replies.Delta(content=content))
        return replies.ChatChunk(id="x", created=1, model=model, system_fingerprint="content", choices=(choice,))

    made = TextEvent(chunk("text"), "content", "text")(text)
    assert made == event(chunk(text))
    assert json.loads(made.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == text


def test_an_event_that_shows_its_text_twice_is_no_template() -> None:
    with pytest.raises(ValueError, match="not once"):
        TextEvent({"a": {"text": "word"}, "text": "word"}, "text", "word")
