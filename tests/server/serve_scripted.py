"""A server process for tests that send signals: `serve_scripted.py STEP_S '{config fields}' '[faults]' [stuck]`.

With `stuck` it loads for ever, inside a library that no signal interrupts, as a compiler is.
"""

from __future__ import annotations

import hashlib
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


def _stay_in_a_library() -> None:
    print("loading", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)


def main() -> int:
    step_s, config, faults = sys.argv[1:4]
    executor = scripted(
        default=script("word ", repeat=True), step_s=float(step_s), faults=msgspec.json.decode(faults, type=list[Fault])
    )
    settings = Settings(num_pages=513, max_num_seqs=3, max_model_len=512, watchdog_s=1.0)

    def load() -> Served:
        if sys.argv[4:] == ["stuck"]:
            _stay_in_a_library()
        return Served(AsyncEngine(make_parts(executor, settings)))

    return serve(load, ServerConfig(port=0, **json.loads(config)))


if __name__ == "__main__":
    sys.exit(main())
