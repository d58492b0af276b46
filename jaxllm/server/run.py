"""The server as a process: bind, load, serve, drain, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import socket
import ssl
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from jaxllm.config.engine import ServerConfig
from jaxllm.server.app import create_app
from jaxllm.server.lifecycle import Lifecycle
from jaxllm.server.listen import Listener, bind, refusal, tls_context
from jaxllm.server.loading import leaving_at_signals
from jaxllm.server.state import ServerState, ServingEngine

if TYPE_CHECKING:
    from jaxllm.tokenizer.chat import ChatTemplate

_CLOSE_ENGINE_S = 5.0
_KEEP_ALIVE_S = 75.0  # longer than clients keep idle connections, so that they, not we, close them
_WRITE_OUT_S = 1  # for the last bytes of answers after the drain


@dataclass(frozen=True, slots=True)
class Served:
    """What `serve` puts behind HTTP."""

    engine: ServingEngine
    chat_template: ChatTemplate | None = None  # None: /v1/chat/completions answers 400


def serve(load: Callable[[], Served], config: ServerConfig) -> int:
    """Serve until a signal or the engine's death, and return the exit code.

    The address is claimed first, then `load` builds the engine, then the server listens and prints
    ``jaxllm ready on URL``: ``http://HOST:PORT``, ``https://HOST:PORT`` or ``unix:PATH``. Until then a
    signal ends the process at once, with 128 + its number.

    A dead engine, or a second signal, ends the process here with `os._exit(1)`: threads frozen in
    the device's driver would otherwise keep the interpreter from exiting.

    Raises:
        ConfigError: the address cannot be listened on, or the certificate cannot be used.
        Exception: whatever `load` raises.
    """
    tls = tls_context(config)
    listener = bind(config)
    with contextlib.closing(listener):
        with leaving_at_signals(listener.remove):
            served = load()
        _forget_garbage()
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            exit_code = runner.run(_serve(served, config, listener, tls))
    return exit_code


def _forget_garbage() -> None:
    """Take what loading made out of the garbage collector's sight.

    Weights, vocabularies and libraries stay until the end; a full collection looks at all of them,
    and each few hundred requests cause one.
    """
    gc.collect()
    gc.freeze()


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(served: Served, config: ServerConfig, listener: Listener, tls: ssl.SSLContext | None) -> int:
    state = ServerState(served.engine, config, chat_template=served.chat_template)
    server = Server(state, tls=tls, on_ready=lambda: print(f"jaxllm ready on {listener.url}", flush=True))
    lifecycle = Lifecycle(state, server.stop, at_forced_exit=listener.remove)
    lifecycle.start(handle_signals=True)
    listener.check()
    try:
        await server.serve(sockets=[listener.sock])
    except OSError as error:
        raise refusal(config, error) from None
    state.templates.close()
    if lifecycle.finish():
        listener.remove()
        _leave(1)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(served.engine.close(), _CLOSE_ENGINE_S)
    return 0


def _leave(exit_code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


class Server(uvicorn.Server):
    """uvicorn with our signals instead of its own, since its own stops listening before the drain."""

    def __init__(
        self,
        state: ServerState,
        *,
        tls: ssl.SSLContext | None = None,
        on_ready: Callable[[], None] = lambda: None,
    ) -> None:
        level = state.config.uvicorn_log_level
        config = uvicorn.Config(
            create_app(state),
            loop="none",
            http="httptools",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=level,
            access_log=level in ("debug", "trace"),
            server_header=False,
            timeout_keep_alive=int(_KEEP_ALIVE_S),
            timeout_graceful_shutdown=_WRITE_OUT_S,
        )
        config.load()
        config.ssl = tls
        super().__init__(config)
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def stop(self) -> None:
        self.should_exit = True
