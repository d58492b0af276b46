"""The real server on the real engine with a scripted device, in a thread, on a free loopback port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvloop

from jaxllm.config.engine import ServerConfig
from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.server.lifecycle import Lifecycle
from jaxllm.server.listen import bind, tls_context
from jaxllm.server.run import Server
from jaxllm.server.state import ServerState
from jaxllm.testing.scripted import ScriptedExecutor
from jaxllm.tokenizer.chat import ChatTemplate
from tests.helpers.scripted_engine import Settings, make_parts

TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role == 'function' %}{{ raise_exception('no functions here') }}{% endif %}"
    "<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SETTINGS = Settings(max_num_seqs=64, num_pages=2049, max_num_batched_tokens=512, max_model_len=512)


@dataclass
class Running:
    url: str
    state: ServerState
    lifecycle: Lifecycle
    loop: asyncio.AbstractEventLoop
    http: httpx.Client

    def post(self, path: str, body: Any, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json=body, **kwargs)

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.http.get(path, **kwargs)

    def chat(self, text: str = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields})

    def complete(self, prompt: Any = "hi", **fields: Any) -> httpx.Response:
        return self.post("/v1/completions", {"prompt": prompt, **fields})

    def gauge(self, name: str) -> float:
        for line in self.get("/metrics").text.splitlines():
            if line.startswith(f"jaxllm:{name}{{"):
                return float(line.rsplit(" ", 1)[1])
        raise KeyError(name)

    def signal(self) -> None:
        self.loop.call_soon_threadsafe(self.lifecycle.on_signal)


@contextlib.contextmanager
def running(
    executor: ScriptedExecutor,
    settings: Settings = SETTINGS,
    *,
    template: str | None = TEMPLATE,
    parts: dict[str, Any] | None = None,
    **config: Any,
) -> Iterator[Running]:
    """Serve until the block ends. `config` are fields of `ServerConfig`, `parts` of `EngineParts`."""
    served_with = ServerConfig(port=0, uvicorn_log_level="warning", **config)
    listener = bind(served_with)
    engine = AsyncEngine(make_parts(executor, settings, **(parts or {})))
    state = ServerState(engine, served_with, chat_template=ChatTemplate(template) if template else None)
    ready = threading.Event()
    server = Server(state, tls=tls_context(served_with), on_ready=ready.set)
    lifecycle = Lifecycle(state, server.stop)
    loop = uvloop.new_event_loop()

    async def main() -> None:
        lifecycle.start(handle_signals=False)
        await server.serve(sockets=[listener.sock])
        lifecycle.finish()
        state.templates.close()
        executor.release()
        await engine.close()

    def serve() -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(main())

    thread = threading.Thread(target=serve, name="test-server")
    thread.start()
    try:
        assert ready.wait(10)
        transport = httpx.HTTPTransport(verify=False, uds=served_with.uds)
        url = "http://on-a-socket" if served_with.uds else listener.url
        with httpx.Client(base_url=url, timeout=20, transport=transport) as http:
            yield Running(url, state, lifecycle, loop, http)
    finally:
        server.stop()
        server.force_exit = True
        thread.join(15)
        listener.close()
        assert not thread.is_alive()


def events_of(text: str) -> list[Any]:
    """The data of each event of an SSE body; "[DONE]" stays text."""
    found = [block.removeprefix("data: ") for block in text.split("\n\n") if block]
    return [data if data == "[DONE]" else json.loads(data) for data in found]


def wait_until(condition: Any, timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.02)
