"""A server that answers as it is told, byte by byte: `python raw_server.py PORT [SECONDS TO GET READY]`.

Standard library alone, so that it starts at once. Each completion is `max_tokens` chunks of " w"; a
prompt with "fail" gets HTTP 400, one with "cut" a stream that breaks off, one with "short" a token less.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    ready_s = 0.0
    delay_s = 0.01  # within each event

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def do_GET(self) -> None:
        self._answer(200 if time.monotonic() >= self.ready_s else 503, b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "fail" in body["prompt"] or not body["stream"] or self.path != "/v1/completions":
            self._answer(400, b'{"error": "told to fail"}')
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        num_tokens = body["max_tokens"] - ("short" in body["prompt"])
        for i in range(num_tokens):
            self._event({"choices": [{"text": " w", "finish_reason": "length" if i == num_tokens - 1 else None}]})
            if "cut" in body["prompt"]:
                self.close_connection = True
                return
        self._event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": num_tokens}})
        self._chunk(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _event(self, event: dict[str, Any]) -> None:
        data = f"data: {json.dumps(event)}\n\n".encode()
        self._chunk(data[:9])  # a chunk need not hold whole events
        time.sleep(self.delay_s)
        self._chunk(data[9:])

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _answer(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def serve_in_thread() -> ThreadingHTTPServer:
    """Serves until `shutdown`; its port is `server_port`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    return server


if __name__ == "__main__":
    Handler.delay_s = 0.0
    Handler.ready_s = time.monotonic() + float(sys.argv[2] if len(sys.argv) > 2 else 0)
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
