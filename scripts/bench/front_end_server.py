"""The server that `front_end.py` measures: the real one, on a scripted device that takes no processor time.

Commands come on standard input, one a line, and are answered by one line of JSON each:

    cpu        seconds of processor time since start, of the whole process and of the core's thread
    profile    start sampling the event loop's thread
    stop       stop sampling; the samples by phase and by function

    front_end_server.py SCRIPT.json NUM_SEQS [MODEL]
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from jaxllm.build import build_chat_template, build_parts
from jaxllm.config.engine import EngineArgs, ServerConfig
from jaxllm.engine.async_engine import AsyncEngine
from jaxllm.server.run import Served, serve

_SAMPLE_S = 0.0005
_SWITCH_S = 0.0001  # how soon the sampler gets the interpreter

# The first of these that a stack holds, searched from its top, is the sample's phase.
_PHASES = {
    "tokenise": ("inputs.py:InputProcessor.tokenize",),
    "template": ("templates.py:Templates.render", "messages.py:render_chat"),
    "parse": ("body.py:read_request",),
    "validate": ("params.py:chat_params", "inputs.py:InputProcessor.request", "messages.py:checked_messages"),
    "admit": ("front_end.py:FrontEnd.add",),
    "detokenise": ("open_request.py:OpenSequence.push",),
    "metrics": ("prometheus.py:PrometheusMetrics.inter_token", "prometheus.py:PrometheusMetrics.finished"),
    "send": ("httptools_impl.py:RequestResponseCycle.send",),
    "build chunk": ("sse.py:TextEvent.__call__", "call.py:_news", "call.py:_made", "body.py:json_response"),
    "guard": ("guard.py:Guard.__aenter__", "guard.py:Guard.__aexit__", "guard.py:Guard._watch_client"),
    "outputs": ("open_request.py:OpenRequest.show", "front_end.py:FrontEnd.pump"),
    "wake-ups": ("async_engine.py:_Stream.next", "async_engine.py:AsyncEngine.stream"),
    "layers": ("httptools_impl.py:RequestResponseCycle.run_asgi",),
    "idle": ("runners.py:Runner.run",),
}


def main() -> int:
    script, num_seqs, *model = sys.argv[1:]
    args = EngineArgs(
        model=model[0] if model else None, executor=f"scripted:{script}", max_num_seqs=int(num_seqs), page_size=16
    )
    sampler = _Sampler(threading.get_ident())
    threading.Thread(target=_answer, args=(sampler,), name="commands", daemon=True).start()

    def load() -> Served:
        return Served(AsyncEngine(build_parts(args)), build_chat_template(args))

    return serve(load, ServerConfig(port=0, uvicorn_log_level="warning"))


def _answer(sampler: _Sampler) -> None:
    for line in sys.stdin:
        command = line.strip()
        reply: dict[str, Any] = {}
        if command == "cpu":
            reply = _cpu_seconds()
        elif command == "profile":
            sampler.start()
        elif command == "stop":
            reply = sampler.stop()
        print(json.dumps(reply), flush=True)
    os._exit(0)  # whoever asked has gone


def _cpu_seconds() -> dict[str, float]:
    core = next(thread for thread in threading.enumerate() if thread.name == "jaxllm-core")
    assert core.ident is not None
    clock = time.pthread_getcpuclockid(core.ident)
    return {"process": time.process_time(), "core": time.clock_gettime(clock)}


class _Sampler:
    """Looks at one thread's stack again and again, from a thread of its own."""

    def __init__(self, ident: int) -> None:
        self._ident = ident
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None
        self._phases: Counter[str] = Counter()
        self._functions: Counter[str] = Counter()
        self._trees: Counter[str] = Counter()

    def start(self) -> None:
        self._ends.clear()
        for counter in (self._phases, self._functions, self._trees):
            counter.clear()
        sys.setswitchinterval(_SWITCH_S)
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, Any]:
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        return {
            "phases": dict(self._phases),
            "functions": dict(self._functions.most_common(40)),
            "inside": dict(self._trees.most_common(40)),
        }

    def _run(self) -> None:
        while not self._ends.wait(_SAMPLE_S):
            frame = sys._current_frames().get(self._ident)
            names = _names(frame)
            phase = next((p for name in names if (p := _PHASE_OF.get(name)) is not None), "other")
            self._phases[phase] += 1
            if phase != "idle" and names:
                self._functions[names[0]] += 1
                self._trees.update(set(names))


def _names(frame: FrameType | None) -> list[str]:
    """File and function of each level, innermost first."""
    names: list[str] = []
    while frame is not None:
        code = frame.f_code
        names.append(f"{os.path.basename(code.co_filename)}:{code.co_qualname}")
        frame = frame.f_back
    return names


_PHASE_OF = {name: phase for phase, names in _PHASES.items() for name in names}


if __name__ == "__main__":
    sys.exit(main())
