"""The floor under `front_end.py`: uvicorn and Starlette that give a body back, and nothing of jaxllm.

Takes the arguments and the command "cpu" of `front_end_server.py`, and listens in the same way.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route


async def echo(request: Request) -> Response:
    return Response(await request.body(), media_type="application/json")


def main() -> int:
    threading.Thread(target=_answer, name="commands", daemon=True).start()
    app = Starlette(routes=[Route("/v1/chat/completions", echo, methods=["POST"])])
    config = uvicorn.Config(
        app,
        loop="none",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
    )
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    print(f"jaxllm ready on http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    uvloop.run(uvicorn.Server(config).serve(sockets=[listener]))
    return 0


def _answer() -> None:
    for _ in sys.stdin:
        print(json.dumps({"process": time.process_time(), "core": 0.0}), flush=True)
    os._exit(0)  # whoever asked has gone


if __name__ == "__main__":
    sys.exit(main())
