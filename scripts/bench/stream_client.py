"""A workload sent to any OpenAI-compatible server, by the load client of `jaxllm bench serve`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from jaxllm.bench.dataset_files import BenchRequest
from jaxllm.bench.http_client import Address, HttpClient
from jaxllm.bench.load import LoadRun, Planned, run_in_loop, run_load
from scripts.bench.workload import Request, Workload

_HEADERS = {"Content-Type": "application/json", "Accept": "text/event-stream"}


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go, and what every body holds beside the prompt."""

    url: str  # without /v1
    model: str
    extra: Mapping[str, Any] = field(default_factory=dict[str, Any])


def run_workload(target: Target, workload: Workload, timeout_s: float) -> LoadRun:
    """Send every request of `workload`; one that fails or takes longer than `timeout_s` is an answer with an error."""
    address = Address.of(target.url)
    planned = [_planned(target, address, workload, request) for request in workload.requests]

    async def run() -> LoadRun:
        client = HttpClient(address, timeout_s=timeout_s)
        try:
            return await run_load(client, planned, workload.concurrency)
        finally:
            client.close()

    return run_in_loop(run())


def _planned(target: Target, address: Address, workload: Workload, request: Request) -> Planned:
    body = {
        "model": target.model,
        "prompt": request.prompt,
        "max_tokens": request.max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        **target.extra,
    }
    return Planned(
        BenchRequest(request.prompt, request.num_prompt_tokens, request.max_tokens),
        address.message("POST", "/v1/completions", json.dumps(body).encode(), _HEADERS),
        request.arrival_s if workload.concurrency is None else 0.0,
    )
