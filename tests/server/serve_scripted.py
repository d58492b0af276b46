"""A server process for tests that send signals: `serve_scripted.py PORT STEP_S '{config fields}' '[faults]'`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxllm.config.engine import ServerConfig
from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.server.run import Served, serve
from jaxllm.testing.faults import Fault
from tests.helpers.scripted_engine import Settings, make_parts, script, scripted


def main() -> int:
    port, step_s, config, faults = sys.argv[1:5]
    executor = scripted(
        default=script("word ", repeat=True), step_s=float(step_s), faults=msgspec.json.decode(faults, type=list[Fault])
    )
    settings = Settings(num_pages=513, max_num_seqs=3, max_model_len=512, watchdog_s=1.0)
    return serve(
        lambda: Served(AsyncEngine(make_parts(executor, settings))),
        ServerConfig(port=int(port), **json.loads(config)),
    )


if __name__ == "__main__":
    sys.exit(main())
