"""The server as a process: bind, load, serve, drain, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import sys
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import uvicorn

from jaxllm.config.engine import ServerConfig
from jaxllm.errors import ConfigError
from jaxllm.server.app import create_app
from jaxllm.server.lifecycle import Lifecycle
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


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not listening yet: clients are refused until the model is ready.

    Raises:
        ConfigError: the host does not resolve, or the port is taken or not allowed.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError, OverflowError) as error:
        raise ConfigError(f"--host {host!r} --port {port} is no address to listen on: {error}") from None
    family, kind, protocol, _, address = found[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _taken(host, port, error) from None
    return listener


def _taken(host: str, port: int, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on --host {host} --port {port}: {error.strerror}; choose a free --port")


def serve(load: Callable[[], Served], config: ServerConfig) -> int:
    """Serve until a signal or the engine's death, and return the exit code.

    The port is claimed first, then `load` builds the engine, then the server listens and prints
    ``jaxllm ready on http://HOST:PORT``. Until then a signal has its default effect.

    A dead engine, or a second signal, ends the process here with `os._exit(1)`: threads frozen in
    the device's driver would otherwise keep the interpreter from exiting.

    Raises:
        ConfigError: the address cannot be listened on.
        Exception: whatever `load` raises.
    """
    listener = bind(config.host, config.port)
    with contextlib.closing(listener):
        served = load()
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            exit_code = runner.run(_serve(served, config, listener))
    return exit_code


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not made for Windows
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


async def _serve(served: Served, config: ServerConfig, listener: socket.socket) -> int:
    state = ServerState(served.engine, config, chat_template=served.chat_template)
    server = Server(state, on_ready=lambda: print(f"jaxllm ready on {_url(config, listener)}", flush=True))
    lifecycle = Lifecycle(state, server.stop)
    lifecycle.start(handle_signals=True)
    try:
        await server.serve(sockets=[listener])
    except OSError as error:
        raise _taken(config.host, config.port, error) from None
    if lifecycle.finish():
        _leave(1)
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(served.engine.close(), _CLOSE_ENGINE_S)
    return 0


def _leave(exit_code: int) -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(exit_code)


def _url(config: ServerConfig, listener: socket.socket) -> str:
    host = f"[{config.host}]" if ":" in config.host else config.host
    return f"http://{host}:{listener.getsockname()[1]}"


class Server(uvicorn.Server):
    """uvicorn with our signals instead of its own, since its own stops listening before the drain."""

    def __init__(self, state: ServerState, *, on_ready: Callable[[], None] = lambda: None) -> None:
        level = state.config.uvicorn_log_level
        super().__init__(
            uvicorn.Config(
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
        )
        self._on_ready = on_ready

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        self._on_ready()

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield

    def stop(self) -> None:
        self.should_exit = True
