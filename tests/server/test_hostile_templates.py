"""SEC-05 over HTTP: what a template may do, whose it may be, and that it stops nobody else."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from jaxllm.config.engine import ServerConfig
from jaxllm.errors import ConfigError
from tests.helpers.scripted_engine import scripted
from tests.server.harness import Running, running, wait_until

HI = [{"role": "user", "content": "hi"}]
LOOP = "{% for i in range(100000) %}{% for j in range(100000) %}{% set x = i * j %}{% endfor %}{% endfor %}"
ESCAPE = "{{ ''.__class__.__mro__[1].__subclasses__() }}"


@pytest.fixture(scope="module")
def trusting() -> Iterator[Running]:
    kwargs = '{"mood": "calm", "documents": [{"text": "the server\'s"}]}'
    template = "{{ mood }} {{ documents[0].text }} {{ messages[0].content }}"
    config = {"trust_request_chat_template": True, "default_chat_template_kwargs": kwargs}
    with running(scripted(), template=template, **config) as served:
        yield served


def _prompt(served: Running, **fields: Any) -> str:
    tokens = served.post("/tokenize", {"messages": HI, **fields}).json()["tokens"]
    return served.post("/detokenize", {"tokens": tokens}).json()["prompt"]


def test_the_requests_variables_win_over_the_servers(trusting: Running) -> None:
    assert _prompt(trusting) == "calm the server's hi"
    assert _prompt(trusting, chat_template_kwargs={"mood": "wild"}) == "wild the server's hi"
    documents = [{"text": "mine"}]
    assert _prompt(trusting, chat_template_kwargs={"documents": documents}) == "calm mine hi"
    assert _prompt(trusting, documents=documents) == "calm mine hi"


def test_a_trusted_requests_template_renders_with_the_models_tokens(trusting: Running) -> None:
    assert _prompt(trusting, chat_template="[{{ messages[0].content }}|{{ mood }}]") == "[hi|calm]"
    assert trusting.chat("hi", chat_template="{{ messages[0].content }}").status_code == 200


@pytest.mark.parametrize(
    "template",
    [
        ESCAPE,
        "{% for %}",
        "{{ messages.append(1) }}",
        "{{ 1 / 0 }}",
        "{{ 'a' * 10**12 }}",
        "x" * 40_000,
        "{{a~b}}" * 4000,
        "(" * 5000,
    ],
    ids=lambda template: template[:20],
)
@pytest.mark.parametrize("stream", [False, True])
def test_sec_05_a_requests_bad_template_is_400(trusting: Running, template: str, stream: bool) -> None:
    source = template if template.startswith(("{", "x")) else "{{ " + template + " }}"
    reply = trusting.chat("hi", chat_template=source, stream=stream)
    assert reply.status_code == 400
    assert "template" in reply.json()["error"]["message"]
    assert len(reply.json()["error"]["message"]) < 1000


@pytest.mark.parametrize(
    "fields", [{"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}]
)
def test_sec_05_request_templates_are_off_by_default_in_both_spellings(server: Running, fields: Any) -> None:
    for reply in (server.chat("hi", **fields), server.post("/tokenize", {"messages": HI, **fields})):
        assert reply.status_code == 400
        assert "chat_template" in reply.json()["error"]["param"]


def test_sec_05_in_kwargs_a_template_is_refused_even_where_requests_are_trusted(trusting: Running) -> None:
    assert trusting.chat("hi", chat_template_kwargs={"chat_template": LOOP}).status_code == 400


def _health_times(served: Running, until: threading.Event) -> list[float]:
    times: list[float] = []
    while not until.is_set():
        start = time.monotonic()
        assert served.get("/health").status_code == 200
        times.append(time.monotonic() - start)
        time.sleep(0.01)
    return times


@pytest.mark.parametrize("whose", ["model", "request"])
def test_sec_05_health_answers_while_hostile_templates_loop(whose: str) -> None:
    with (
        running(scripted(), template=LOOP if whose == "model" else "x", trust_request_chat_template=True) as served,
        ThreadPoolExecutor(9) as threads,
    ):
        fields = {} if whose == "model" else {"chat_template": LOOP}
        done = threading.Event()
        health = threads.submit(_health_times, served, done)
        calls = [threads.submit(served.chat, "hi", stream=bool(i % 2), **fields) for i in range(4)]
        replies = [call.result(30) for call in calls]
        done.set()
        assert all(reply.status_code == 400 for reply in replies)
        assert all("too long" in reply.json()["error"]["message"] for reply in replies)
        # An event loop that renders answers once a render, and not in a fifth of a second; the median forgives
        # a machine that is busy with something else.
        assert len(health.result()) > 10
        assert statistics.median(health.result()) < 0.2
        assert served.complete("hi").status_code == 200
        wait_until(lambda: served.state.num_running == 0, 2, "nothing runs")


@pytest.mark.parametrize("text", ["{", "[1]", "3", "null", '{"tools": []}', '{"add_generation_prompt": false}'])
def test_default_kwargs_that_cannot_be_are_refused_at_start(text: str) -> None:
    with pytest.raises(ConfigError, match="default_chat_template_kwargs"):
        ServerConfig(default_chat_template_kwargs=text)
