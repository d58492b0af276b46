"""Processor time of the front end: microseconds a streamed token, and a short request.

Starts the real server (HTTP, templates, tokeniser, engine with its scheduler and pages) on a device
that only says what a script says, drives it over loopback, and reads the processor time of the
server's process less that of its core's thread. Two sizes of the same work give the cost of a token
or of a request by their difference, so that what is fixed cancels. Sizes take turns; the medians are
given with the least and the largest. The floor is what uvicorn and Starlette take to give the same
requests back.

    python -m scripts.bench.front_end [--streams 64] [--repeats 5] [--only request] [--profile] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_TEXT = (
    " The town lies by the river, and in the morning the boats go out to the sea with the tide."
    " People say that the old bridge was built by a king who never came back to see it."
)
_STREAM_TOKENS = (20, 120)
_REQUESTS = (100, 500)
_EVENTS_BESIDE = 3  # of a stream: the role, the finish reason, [DONE]
_RECV_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Cost:
    """Microseconds of processor time of the front end, for one more of something."""

    of: str
    median_us: float
    least_us: float
    most_us: float
    core_us: float  # median; the core's thread, not counted above
    events_per_unit: float  # below 1: outputs were merged, and the cost is that of fewer events


class Server:
    """The child process."""

    def __init__(self, program: str, script: Path, num_seqs: int, model: str | None) -> None:
        command = [sys.executable, str(Path(__file__).with_name(program)), str(script), str(num_seqs)]
        self._child = subprocess.Popen(
            [*command, *([model] if model else [])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.address = self._address()

    def ask(self, command: str) -> dict[str, Any]:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(command + "\n")
        self._child.stdin.flush()
        return json.loads(self._child.stdout.readline())

    def close(self) -> None:
        self._child.terminate()
        self._child.wait(20)

    def _address(self) -> tuple[str, int]:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith("jaxllm ready on "):
                url = urlsplit(line.split()[-1])
                return str(url.hostname), int(url.port or 80)
        raise SystemExit(f"the server left with {self._child.wait()} before it was ready")


class Client:
    """Many connections in one thread; looks at no more of an answer than where it ends."""

    def __init__(self, address: tuple[str, int], count: int) -> None:
        self._sockets = [socket.create_connection(address) for _ in range(count)]
        for each in self._sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def run(self, bodies: Sequence[dict[str, Any]], path: str) -> int:
        """Send every body, as many at once as there are connections; the number of events that came."""
        waiting = [_request(path, body) for body in bodies]
        num_events = 0
        with selectors.DefaultSelector() as selector:
            for each in self._sockets[: len(waiting)]:
                each.sendall(waiting.pop())
                selector.register(each, selectors.EVENT_READ, bytearray())
            num_open = len(selector.get_map())
            while num_open:
                for key, _ in selector.select():
                    if not _read(key.fileobj, key.data):
                        continue
                    num_events += key.data.count(b"data: ")
                    key.data.clear()
                    if waiting:
                        key.fileobj.sendall(waiting.pop())  # pyright: ignore[reportAttributeAccessIssue]
                    else:
                        selector.unregister(key.fileobj)
                        num_open -= 1
        return num_events

    def close(self) -> None:
        for each in self._sockets:
            each.close()


def _request(path: str, body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: local\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    return head.encode() + b"\r\n" + data


def _read(source: Any, answer: bytearray) -> bool:
    """Whether the answer is complete."""
    data = source.recv(_RECV_BYTES)
    if not data:
        raise SystemExit(f"the server closed a connection after {bytes(answer[-500:])!r}")
    answer += data
    if not answer.startswith(b"HTTP/1.1 200"):
        raise SystemExit(f"the server refused: {bytes(answer[:500])!r}")
    head, found, rest = bytes(answer[:1000]).partition(b"\r\n\r\n")
    if not found:
        return False
    if b"chunked" in head:
        return answer.endswith(b"\r\n0\r\n\r\n")
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(answer) - len(head) - 4 >= int(length) if rest else False


@dataclass(frozen=True, slots=True)
class Load:
    """Work of two sizes. `unit` is what one costs more of than the other."""

    unit: str
    sizes: tuple[int, int]  # units of each
    bodies: tuple[list[dict[str, Any]], list[dict[str, Any]]]
    events_beside: int
    path: str = "/v1/chat/completions"


def stream_load(num_streams: int) -> Load:
    small, large = _STREAM_TOKENS
    bodies = tuple([_chat(i, stream=True, max_tokens=count) for i in range(num_streams)] for count in (small, large))
    return Load("streamed token", (small * num_streams, large * num_streams), (bodies[0], bodies[1]), _EVENTS_BESIDE)


def request_load() -> Load:
    small, large = _REQUESTS
    bodies = tuple([_chat(i, max_tokens=1) for i in range(count)] for count in (small, large))
    return Load("request", (small, large), (bodies[0], bodies[1]), 0)


def floor_load() -> Load:
    """The requests of `request_load`, to a server that only gives them back."""
    return replace(request_load(), unit="request that is only echoed by uvicorn and Starlette")


def _chat(number: int, **fields: Any) -> dict[str, Any]:
    messages = [
        {"role": "system", "content": "You answer in one sentence."},
        {"role": "user", "content": f"Tell me fact number {number} about the town by the river."},
    ]
    return {"messages": messages, "temperature": 0, **fields}


def measure(server: Server, client: Client, load: Load, repeats: int) -> Cost:
    slopes: list[float] = []
    cores: list[float] = []
    events = 0
    more = load.sizes[1] - load.sizes[0]
    client.run(load.bodies[0], load.path)  # what is compiled and cached on first use
    for _ in range(repeats):
        seconds: list[tuple[float, float]] = []
        for bodies in load.bodies:
            before = server.ask("cpu")
            num_events = client.run(bodies, load.path)
            after = server.ask("cpu")
            core = after["core"] - before["core"]
            seconds.append((after["process"] - before["process"] - core, core))
        events += num_events - load.events_beside * len(load.bodies[1])
        slopes.append((seconds[1][0] - seconds[0][0]) / more * 1e6)
        cores.append((seconds[1][1] - seconds[0][1]) / more * 1e6)
    return Cost(
        load.unit,
        statistics.median(slopes),
        min(slopes),
        max(slopes),
        statistics.median(cores),
        events / repeats / load.sizes[1] if load.events_beside else 1.0,
    )


def profile(server: Server, client: Client, load: Load) -> dict[str, Any]:
    """Samples of the event loop's thread under the larger load."""
    server.ask("profile")
    client.run(load.bodies[1], load.path)
    return server.ask("stop")


def _print_profile(load: Load, found: dict[str, Any]) -> None:
    busy = {name: count for name, count in found["phases"].items() if name != "idle"}
    total = sum(busy.values()) or 1
    print(f"\nwhere a {load.unit} goes: {total} samples of the event loop's thread while it ran Python")
    for name, count in sorted(busy.items(), key=lambda item: -item[1]):
        print(f"  {count / total:6.1%}  {name}")
    for title in ("functions", "inside"):
        print(f" {'itself' if title == 'functions' else 'with all it calls'}:")
        for name, count in found[title].items():
            print(f"  {count / total:6.1%}  {name}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="whose tokeniser and chat template; default: the default model")
    parser.add_argument("--streams", type=int, default=64, help="at once")
    parser.add_argument("--clients", type=int, default=64, help="requests at once, where they are not streamed")
    parser.add_argument("--step-s", type=float, default=0.04, help="seconds that the device takes a step of streams")
    parser.add_argument("--request-step-s", type=float, default=0.005, help="and of requests that are not streamed")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("stream", "request", "floor"), help="measure one of the three")
    parser.add_argument("--profile", action="store_true", help="sample the event loop's thread as well")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    costs: list[Cost] = []
    loads = {
        "stream": (stream_load(args.streams), args.streams, args.step_s),
        "request": (request_load(), args.clients, args.request_step_s),
        "floor": (floor_load(), args.clients, args.request_step_s),
    }
    for name in [name for name in loads if args.only in (None, name)]:
        load, count, step_s = loads[name]
        program = "front_end_floor.py" if name == "floor" else "front_end_server.py"
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "script.json"
            answer = {"default": {"text": _TEXT, "repeat": True}, "step_s": step_s, "max_model_len": 1024}
            script.write_text(json.dumps(answer))
            server = Server(program, script, count, args.model)
            client = Client(server.address, count)
            try:
                costs.append(measure(server, client, load, args.repeats))
                _print(costs[-1], args.repeats)
                if args.profile and name != "floor":
                    _print_profile(load, profile(server, client, load))
            finally:
                client.close()
                server.close()
    if args.json:
        args.json.write_text(json.dumps([asdict(cost) for cost in costs], indent=2) + "\n")
    return 0


def _print(cost: Cost, repeats: int) -> None:
    print(
        f"{cost.median_us:7.1f} µs a {cost.of} (least {cost.least_us:.1f}, most {cost.most_us:.1f}, {repeats} "
        f"repetitions; the core's thread {cost.core_us:.1f} more; {cost.events_per_unit:.2f} events each)",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
