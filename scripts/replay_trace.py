"""Replay what `jaxllm serve --record-trace FILE` wrote: `python -m scripts.replay_trace FILE`.

Exit code 0 if each step is decided as it was, 1 if not, 2 if the file is no trace.
"""

from __future__ import annotations

import sys

from jaxllm.engine.replay import replay
from jaxllm.errors import ConfigError


def main(argv: list[str]) -> int:
    if len(argv) != 1:
        print("usage: python -m scripts.replay_trace FILE", file=sys.stderr)
        return 2
    try:
        found = replay(argv[0])
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    end = f"; the trace ends: {found.ended or 'cut off'}" if found.difference is None else ""
    print(
        f"{found.num_requests} requests, {found.num_steps} steps as recorded, {found.num_preemptions} preemptions, "
        f"plans {found.plan_hash}{end}"
    )
    if found.difference is not None:
        print(found.difference)
    return 0 if found.difference is None else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
