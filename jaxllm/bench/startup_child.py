"""One start: `python -m jaxllm.bench.startup_child '{"model": …}'` makes the model ready and says what it took.

The last line of stdout is one JSON object; moments are those of the system's monotonic clock,
which parent and child share.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from jaxllm.errors import JaxLLMError


def main(flags: dict[str, Any]) -> int:
    try:
        print(json.dumps(start(flags)), flush=True)
    except JaxLLMError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def start(flags: dict[str, Any]) -> dict[str, Any]:
    """Make an `LLM` of `flags` and let it say one token."""
    from jaxllm.llm import LLM
    from jaxllm.types.sampling import SamplingParams

    with LLM(**flags) as llm:
        ready_s, cpu_s = time.monotonic(), time.process_time()
        llm.generate([{"prompt_token_ids": [0]}], SamplingParams(max_tokens=1, ignore_eos=True))
        return {
            "ready_s": ready_s,
            "first_token_s": time.monotonic(),
            "cpu_s": cpu_s,
            "peak_bytes": peak_bytes(),
            "phases": [(phase.name, phase.wall_s, phase.cpu_s) for phase in llm.report.phases],
        }


def peak_bytes() -> int:
    """The most resident memory of this program.

    What getrusage says may be the parent's, from before this program was loaded; Linux's status
    file starts over with the program.
    """
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
