"""Which chats are rendered in the event loop's own thread: short ones, by a template that has been quick."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from jaxllm.config.engine import ServerConfig
from jaxllm.errors import RequestError
from jaxllm.server import templates
from jaxllm.server.templates import Templates
from jaxllm.tokenizer.chat import ChatTemplate

SAY = [{"role": "user", "content": "hi"}]


class Recording(ChatTemplate):
    """Says which threads it is asked from, and lets a render take as much processor time as a test likes."""

    threads: list[str] = []  # noqa: RUF012
    seconds = 0.0
    clock_s = 0.0

    def render(self, messages: Sequence[Any], /, **kwargs: Any) -> str:
        cls = Recording
        cls.threads.append("loop" if threading.current_thread() is threading.main_thread() else "other")
        cls.clock_s += cls.seconds
        return super().render(messages, **kwargs)


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("jaxllm.tokenizer.chat.ChatTemplate", Recording)
    monkeypatch.setattr(templates.time, "thread_time", lambda: Recording.clock_s)
    Recording.threads, Recording.seconds = [], 0.0001
    made = Templates(Recording("{% for m in messages %}{{ m.content }}{% endfor %}"), ServerConfig())
    yield lambda messages=SAY, **kwargs: asyncio.run(made.render(messages, **kwargs))
    made.close()


def test_a_template_that_was_quick_three_times_needs_no_thread(served: Any) -> None:
    assert [served() for _ in range(5)] == ["hi"] * 5
    assert Recording.threads == ["other"] * 3 + ["loop"] * 2


def test_one_slow_render_ends_the_trust_until_it_is_earned_again(served: Any) -> None:
    for seconds in (0.0001, 0.0001, 0.0001, 0.5, 0.0001, 0.0001, 0.0001, 0.0001):
        Recording.seconds = seconds
        served()
    assert Recording.threads == ["other"] * 3 + ["loop"] + ["other"] * 3 + ["loop"]


@pytest.mark.parametrize(
    ("messages", "kwargs"),
    [
        ([{"role": "user", "content": "x" * 9000}], {}),
        (SAY * 40, {}),
        ([{"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}], {}),
        (SAY, {"kwargs": {"n": 10**9}}),
    ],
    ids=["long", "many", "nested", "variables"],
)
def test_what_could_take_long_is_left_to_a_thread(served: Any, messages: Any, kwargs: Any) -> None:
    for _ in range(4):
        served()
    served(messages, **kwargs)
    assert Recording.threads[-2:] == ["loop", "other"]


def test_an_error_in_the_loops_thread_is_told_by_another(served: Any) -> None:
    for _ in range(4):
        served()
    with pytest.raises(RequestError, match="must be an object with a role"):
        served([{"content": "no role"}])
    assert Recording.threads[-2:] == ["loop", "other"]
