"""The servers that clients are tried against: `jaxllm serve` in processes of its own, on free loopback ports."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path

from scripts.clients.checks import Server

REPO = Path(__file__).resolve().parents[2]
KEY = "sesame"
SCRIPT = {
    "responses": [
        {"prompt_contains": "unicode", "text": "Ä 🫠 日本 ok"},
        {"prompt_contains": "stopping", "text": "one two STOP three"},
        {"prompt_contains": "silent", "text": ""},
        {"prompt_contains": "forever", "text": "over and over ", "repeat": True},
    ],
    "default": {"text": "Hello there."},
}
MODEL_FLAGS = ("--dtype=float32", "--max-model-len=512", "--max-num-seqs=16", "--max-num-batched-tokens=128")
BUSY_FLAGS = ("--max-num-queued-reqs=1", "--max-model-len=8000")


@contextmanager
def all_servers(folder: Path, start_s: float) -> Iterator[dict[str, Server]]:
    """Every server by the name that `checks.Servers` gives it; logs stay in `folder`."""
    quick, slow = folder / "script.json", folder / "busy.json"
    quick.write_text(json.dumps(SCRIPT))
    slow.write_text(json.dumps({**SCRIPT, "step_s": 0.05}))
    plans = {
        "model": (*MODEL_FLAGS, "--generation-config=vllm", f"--api-key={KEY}"),
        "scripted": (f"--executor=scripted:{quick}",),
        "busy": (f"--executor=scripted:{slow}", *BUSY_FLAGS),
    }
    with ExitStack() as stack:
        started = {name: stack.enter_context(server_process(name, flags, folder)) for name, flags in plans.items()}
        for name, (process, server) in started.items():
            wait_until_ready(name, process, server, start_s, folder)
        yield {name: server for name, (_, server) in started.items()}


def as_argument(servers: Mapping[str, Server]) -> str:
    return json.dumps({name: asdict(server) for name, server in servers.items()})


@contextmanager
def server_process(name: str, flags: tuple[str, ...], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Server]]:
    port = _free_port()
    command = [sys.executable, "-m", "jaxllm", "serve", f"--port={port}", f"--served-model-name={name}", *flags]
    environment = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu"), "PYTHONPATH": str(REPO)}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder)
    try:
        yield process, Server(url=f"http://127.0.0.1:{port}", key=KEY, model=name)
    finally:
        for _ in range(2):  # the second one ends what the first one waits for
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_ready(name: str, process: subprocess.Popen[bytes], server: Server, start_s: float, folder: Path) -> None:
    """Raises: SystemExit: the server ended, or was not ready in time; with the end of its log."""
    deadline = time.monotonic() + start_s
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(server.url + "/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    end = (folder / f"{name}.log").read_text(errors="replace")[-3000:]
    state = "was not ready in time" if process.poll() is None else f"ended with code {process.returncode}"
    raise SystemExit(f"the server {name!r} {state}:\n{end}")


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
