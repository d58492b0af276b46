"""What the routes share: the engine, the names it is served under, and whether new work is taken."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from starlette.requests import Request
from starlette.types import Receive

import jaxllm
from jaxllm.config.engine import ServerConfig
from jaxllm.errors import EngineDead, RequestError
from jaxllm.server.errors import shutting_down
from jaxllm.server.guard import Guard
from jaxllm.server.schema import UnknownFields
from jaxllm.server.templates import Templates
from jaxllm.types.service import DEFAULT_SERVICE, ServiceParams

if TYPE_CHECKING:
    from jaxllm.engine.inputs import Prompt
    from jaxllm.tokenizer.base import Tokenizer
    from jaxllm.tokenizer.chat import ChatTemplate
    from jaxllm.types.outputs import RequestOutput
    from jaxllm.types.sampling import BeamSearchParams, SamplingParams


class Metrics(Protocol):
    def render(self, accept: str | None = None) -> tuple[bytes, str]:
        """The metrics in the one of Prometheus' formats that an Accept header asks for, and its content type."""
        ...


class ServingEngine(Protocol):
    """What the server needs of an engine; `engine.AsyncEngine` is the real one."""

    @property
    def model_name(self) -> str: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def max_logprobs(self) -> int: ...
    @property
    def default_params(self) -> Mapping[str, Any]: ...
    @property
    def metrics(self) -> Metrics: ...

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        service: ServiceParams = DEFAULT_SERVICE,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Outputs of one request; closing the iterator aborts it."""
        ...

    async def beam_search(
        self,
        prompt: Prompt,
        params: BeamSearchParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        service: ServiceParams = DEFAULT_SERVICE,
    ) -> RequestOutput:
        """The most likely sequences, best first; cancelling the task aborts the search."""
        ...

    async def reset_prefix_cache(self) -> bool:
        """Forget every cached page; False where a request holds some. Raises: EngineDead."""
        ...

    def check_health(self) -> None:
        """Raise EngineDead once the device loop stopped, froze or died."""
        ...

    def start_profile(self, folder: str) -> None:
        """Begin a trace of the device. Any thread may call it. Raises: RequestError: it cannot be taken."""
        ...

    def stop_profile(self) -> Path:
        """End the trace; returns its folder. Any thread may call it. Raises: RequestError: none is being taken."""
        ...

    async def close(self) -> None: ...


@runtime_checkable
class TextEngine(Protocol):
    """An engine that can hand out news that is text alone past the stream of outputs, which costs less."""

    @property
    def pushes_text(self) -> bool: ...

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str | None = None,
        service: ServiceParams = DEFAULT_SERVICE,
        on_text: Callable[[str], bool] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """As `ServingEngine.stream`, but what is no more than text goes to `on_text` while the caller waits.

        What that answers False to, the first output and the last one come as items.
        """
        ...


class ServerState:
    """Mutable; owned by one application. `draining` and `failure` only ever turn on."""

    def __init__(
        self,
        engine: ServingEngine,
        config: ServerConfig,
        *,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self.engine = engine
        self.text_engine: TextEngine | None = engine if isinstance(engine, TextEngine) else None
        self.config = config
        self.templates = Templates(chat_template, config)
        self.default_params = engine.default_params
        self.model_names = config.served_model_names or (engine.model_name,)
        self.created_s = int(time.time())
        self.fingerprint = f"jaxllm-{jaxllm.__version__}"
        self.unknown_fields = UnknownFields()
        self.draining = False
        self.failure: str | None = None
        self._running: set[Guard] = set()
        self._num_requests = 0

    @property
    def num_running(self) -> int:
        return len(self._running)

    def check_accepting(self) -> None:
        """Raise EngineDead or HTTPError 503 unless a new request may start."""
        self.check_alive()
        if self.draining:
            raise shutting_down()

    def check_alive(self) -> None:
        if self.failure is not None:
            raise EngineDead(self.failure)
        self.engine.check_health()

    def resolve_model(self, name: str | None) -> str:
        """The served name a request means; absent means the first."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            known = ", ".join(map(repr, self.model_names))
            message = f"model={name[:200]!r} is not served here; accepted: {known}"
            raise RequestError(message, param="model", code="model_not_found")
        return name

    def guard(self, receive: Receive) -> Guard:
        """Covers one generation: a disconnect, or `interrupt_all`, ends what runs inside."""
        return Guard(receive, self._running, self.check_accepting)

    def interrupt_all(self, why: str) -> None:
        for guard in tuple(self._running):
            guard.interrupt(why)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs, at most `timeout_s`; whether that came to be."""
        deadline = time.monotonic() + timeout_s
        while self._running and time.monotonic() < deadline:
            await asyncio.sleep(min(0.05, max(0.0, deadline - time.monotonic())))
        return not self._running

    def engine_request_id(self, visible_id: str) -> str:
        """An id the engine has not seen yet, though clients may send the same one twice."""
        self._num_requests += 1
        return f"{visible_id}-{self._num_requests}"


def state_of(request: Request) -> ServerState:
    return request.app.state.server
