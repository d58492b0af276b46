"""Traces of the device on demand, under vLLM's names. Only where `--profiler-dir` says where they go."""

from __future__ import annotations

import asyncio

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from jaxllm.config.engine import ServerConfig
from jaxllm.server.state import state_of


async def start(request: Request) -> Response:
    """Begin a trace; 400 where one is being taken, or the engine has no device to trace."""
    state = state_of(request)
    state.check_accepting()
    folder = str(state.config.profiler_dir)
    await asyncio.to_thread(state.engine.start_profile, folder)
    return _answer("started", folder)


async def stop(request: Request) -> Response:
    """End the trace and write it, which takes seconds; 400 where none is being taken."""
    folder = await asyncio.to_thread(state_of(request).engine.stop_profile)
    return _answer("stopped", str(folder))


def _answer(status: str, folder: str) -> Response:
    return Response(msgspec.json.encode({"status": status, "profiler_dir": folder}), media_type="application/json")


def profiling_routes(config: ServerConfig) -> list[Route]:
    """None by default: a trace slows everybody down and fills the disk."""
    if config.profiler_dir is None:
        return []
    return [
        Route("/start_profile", start, methods=["POST"]),
        Route("/stop_profile", stop, methods=["POST"]),
    ]
