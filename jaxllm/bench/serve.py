"""Load on any OpenAI-compatible server: what its users would see, and what that server gets done."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxllm.bench.dataset_files import BenchRequest
from jaxllm.bench.http_client import Address, HttpClient, ask
from jaxllm.bench.load import LoadRun, OnEnd, Planned, allow_connections, run_in_loop, run_load
from jaxllm.bench.serve_args import ServeArgs
from jaxllm.errors import JaxLLMError, shown

_POLL_S = 0.5
_QUICK_S = 60.0  # for answers that need no model


class ServerFailed(JaxLLMError):
    """The server cannot be reached, or does not answer as one (exit code 1)."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and the model asked for."""

    address: Address
    model: str

    def planned(self, args: ServeArgs, requests: Sequence[BenchRequest], times: Sequence[float]) -> list[Planned]:
        """Requests with their bytes and their times, seconds after the start."""
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream", **args.headers}
        return [
            Planned(request, self.address.message("POST", args.path, _body(self, args, request), headers), at_s)
            for request, at_s in zip(requests, times, strict=True)
        ]


def find_target(args: ServeArgs) -> Target:
    """Wait for the server as long as `ready_check_timeout_sec` says, and ask for a model if none is named.

    Raises:
        ConfigError: the address is none.
        ServerFailed: nothing answers there, or no model is listed.
    """
    address = Address.of(args.url)
    message = address.message("GET", "/v1/models", b"", args.headers)

    async def find() -> tuple[int, bytes]:
        timeout_s = min(_QUICK_S, max(1.0, args.ready_check_timeout_sec))
        client = HttpClient(address, timeout_s=timeout_s, verify=not args.insecure)
        deadline_s = time.monotonic() + args.ready_check_timeout_sec
        try:
            while True:
                try:
                    status, body = await ask(client, message)
                    if status < 500 or time.monotonic() >= deadline_s:
                        return status, body
                except OSError as error:
                    if time.monotonic() >= deadline_s:
                        raise ServerFailed(f"{address.url}: {error}; is a server running there?") from None
                await asyncio.sleep(_POLL_S)
        finally:
            client.close()

    status, body = run_in_loop(find())
    return Target(address, args.served_model_name or args.model or _first_model(address, status, body))


def _first_model(address: Address, status: int, body: bytes) -> str:
    try:
        if status == 200:
            return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        pass
    answer = shown(body.decode(errors="replace"))
    raise ServerFailed(f"{address.url}/v1/models answers {status} {answer}; name the model with --model")


def run_serve(
    args: ServeArgs,
    target: Target,
    requests: Sequence[BenchRequest],
    *,
    seed: int = 0,
    on_end: OnEnd | None = None,
) -> LoadRun:
    """Send the warm-ups, the last `num_warmups` of `requests`, then all others at their times.

    Raises:
        ServerFailed: every warm-up failed.
    """
    num_counted = len(requests) - args.num_warmups
    counted = target.planned(args, requests[:num_counted], args.arrivals.times(num_counted, seed))
    warm_ups = target.planned(args, requests[num_counted:], [0.0] * args.num_warmups)
    allow_connections(args.max_concurrency or len(requests))

    async def run() -> LoadRun:
        client = HttpClient(target.address, timeout_s=args.request_timeout_sec, verify=not args.insecure)
        try:
            if warm_ups:
                _check_warm_ups(await run_load(client, warm_ups, args.max_concurrency))
            return await run_load(client, counted, args.max_concurrency, on_end)
        finally:
            client.close()

    return run_in_loop(run())


def _check_warm_ups(run: LoadRun) -> None:
    errors = [answer.error for answer in run.answers if answer.error is not None]
    if len(errors) == len(run.answers):
        raise ServerFailed(f"all {len(errors)} warm-up requests failed, the first with: {errors[0]}")


def _body(target: Target, args: ServeArgs, request: BenchRequest) -> bytes:
    if args.backend == "openai-chat":
        asked: dict[str, Any] = {
            "messages": [{"role": "user", "content": request.prompt}],
            "max_completion_tokens": request.max_tokens,
        }
    else:
        asked = {"prompt": request.prompt, "max_tokens": request.max_tokens}
    body = {
        "model": target.model,
        **asked,
        "stream": True,
        "stream_options": {"include_usage": True},
        **args.extra,
    }
    return json.dumps(body).encode()
